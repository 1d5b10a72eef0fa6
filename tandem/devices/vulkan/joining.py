"""Two launches that follow each other and do part of each other's work, where a step has one token a sequence.

`rope`, then attention: attention does both (attention_rope.slang); in rope's place, beside the product before it,
`attention_prefetch` may fetch what attention will read. A product, then the norm of its result, for a single token: the
product leaves what the norm needs in scratch memory, with sums of squares, so that many workgroups can share the
norm, and none waits for what would come from memory that no launch has read lately.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tandem.devices.vulkan.binding import ffi
from tandem.devices.vulkan.capabilities import PUSH_BYTES, Capabilities
from tandem.devices.vulkan.grids import (
    GRIDS,
    Dispatch,
    attention_prefetch,
    attention_rope,
    rows_summed,
    spread_norm,
)
from tandem.kernels.kernel import Counts
from tandem.kernels.panels import LAYOUT_NAMES, LAYOUTS
from tandem.program.program import Launch, Program, Tensor, arena_in

if TYPE_CHECKING:
    from tandem.devices.vulkan.device import VulkanDevice

STEP_BUFFER = 7  # the last address of every launch is that of StepInputs
SCRATCH_BUFFER = 6  # and the one before it that of scratch memory, if the kernel does not bind it
SINGLE = "single"  # beside COUNTS, of a bucket: 1 if every sequence has one token


def push_constants(launch: Launch, device: VulkanDevice, step_slot: int = 0) -> bytes:
    addresses = [0] * 8
    for i, buffer in enumerate(launch.kernel.buffers):
        addresses[i] = _address(launch.buffers[buffer.name], device, step_slot)
    if len(launch.kernel.buffers) <= SCRATCH_BUFFER:
        addresses[SCRATCH_BUFFER] = device.scratch.address
    addresses[STEP_BUFFER] = device.arenas[arena_in(step_slot, "step")].address(0)
    scalars = [
        struct.pack(
            "<f" if kind == "f" else "<i", launch.scalars[name] if kind == "f" else int(launch.scalars[name])
        )
        for name, kind in launch.kernel.scalars
    ]
    return (struct.pack("<8Q", *addresses) + b"".join(scalars)).ljust(PUSH_BYTES, b"\0")


@dataclass(frozen=True)
class Joint:
    """What is recorded in the place of two launches."""

    first: Launch
    second: Launch
    constants: tuple[Any, Any]  # of either

    def dispatches(self, counts: Counts, device: Capabilities) -> tuple[Dispatch | None, Dispatch] | None:
        """Of either; the first may be None, for the second does it all. None: each as it is."""
        if not counts.get(SINGLE):
            return None
        if self.first.kernel.name == "rope":
            fused = attention_rope(self.first.scalars, self.second.scalars, counts, device)
            return (attention_prefetch(self.second.scalars, counts, device), fused) if fused else None
        product = GRIDS[self.first.kernel.name](self.first.scalars, counts, device)
        if counts["tokens"] > 1 or not product.shader.endswith("_t1"):
            return None
        constants = (*product.constants, rows_summed(device))
        leaving = replace(product, shader=f"{product.shader}_sums", constants=constants, scratch=True)
        return leaving, spread_norm(self.second.scalars, device)


def find_joints(program: Program, device: VulkanDevice, step_slot: int = 0) -> dict[int, Joint]:
    """By the number of the first launch."""
    found = {}
    reads = Counter(tensor.root for launch in program.launches for tensor in launch.touched("r"))
    for i, (first, second) in enumerate(pairwise(program.launches)):
        names = first.kernel.name.partition("_")[0], second.kernel.name
        made = None
        if names == ("rope", "attention"):
            made = _with_rope(first, second, device, step_slot)
        elif names == ("matmul", "norm") and _settled(program.launches, i, second.buffers["x"]):
            made = _leaving_sums(first, second, reads, device, step_slot)
        if made:
            found[i] = Joint(first, second, (ffi.from_buffer(made[0]), ffi.from_buffer(made[1])))
    return found


def _address(tensor: Tensor | None, device: VulkanDevice, step_slot: int) -> int:
    return device.address(tensor, step_slot) if tensor else 0


def _with_rope(
    rope: Launch, attention: Launch, device: VulkanDevice, step_slot: int
) -> tuple[bytes, bytes] | None:
    """Push constants of both, the same: attention's, as attention_rope.slang takes them."""
    q, k, v, cache = (rope.buffers[name] for name in ("q", "k", "v", "cache"))
    if q is not attention.buffers["q"] or cache is None or cache is not attention.buffers["cache"]:
        return None
    if (
        q is None
        or k is None
        or v is None
        or not q.root is k.root is v.root
        or not q.stride == k.stride == v.stride
    ):
        return None
    launch = push_constants(attention, device, step_slot)
    addresses, scalars = list(struct.unpack_from("<8Q", launch)), list(struct.unpack_from("<16i", launch, 64))
    addresses[5] = _address(rope.buffers["vectors"], device, step_slot)
    scalars[2], scalars[9] = ((_address(x, device, step_slot) - addresses[0]) // 4 for x in (k, v))
    scalars[11:13] = (
        *struct.unpack("<i", struct.pack("<f", rope.scalars["eps"])),
        int(rope.scalars["rot_dim"]),
    )
    table = _address(rope.buffers["table"], device, step_slot)
    scalars[13:15] = struct.unpack("<2i", struct.pack("<Q", table))
    constants = struct.pack("<8Q16i", *addresses, *scalars)
    return constants, constants


def _leaving_sums(
    product: Launch, norm: Launch, reads: Counter[Tensor], device: VulkanDevice, step_slot: int
) -> tuple[bytes, bytes] | None:
    """Push constants of both: the product's with the residual and the weights of the norm. It does not store its result
    itself, so none but the norm may read that."""
    s, n, out = product.scalars, norm.scalars, product.buffers["out"]
    if out is None or norm.buffers["add"] is not out or norm.buffers["weight"] is None or reads[out.root] > 1:
        return None
    plain = (
        not (n["use_rows"] or s["epilogue"] or s["count"])
        and LAYOUTS[LAYOUT_NAMES[int(s["format"])]].quantised
    )
    if not plain or s["rows"] != n["dim"] or n["dim"] % 32:
        return None
    launch = push_constants(product, device, step_slot)
    addresses = list(struct.unpack_from("<8Q", launch))
    addresses[3:6] = (
        _address(norm.buffers[name], device, step_slot) for name in ("weight", "x", "post_weight")
    )
    return struct.pack("<8Q", *addresses) + launch[64:], push_constants(norm, device, step_slot)


def _settled(launches: list[Launch], i: int, tensor: Tensor | None) -> bool:
    """Whether launch i may read a tensor too: there is a barrier since it was written."""
    for j in range(i, -1, -1):
        if any(tensor is not None and t.root is tensor.root for t in launches[j].touched("w")):
            return any(launch.barrier for launch in launches[j + 1 : i + 1])
    return True
