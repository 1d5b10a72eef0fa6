"""Runs a Slang kernel on one of its cases and compares it with its NumPy reference.

`python -m tests.vulkan.harness KERNEL [DEVICE]` compiles the kernel's shader if it is stale, checks every case and
prints its time on the device (lavapipe unless another is named, here or in TANDEM_TEST_DEVICE); KERNEL may be a
prefix, such as `matmul_`.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tandem.devices.vulkan import compile_shaders
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.grids import GRIDS
from tandem.devices.vulkan.recording import Recording
from tandem.kernels import all_kernels
from tandem.kernels.kernel import COUNTS, Array, Case, Kernel
from tandem.kernels.layouts import Q8_BLOCK, q8_unpack
from tandem.program.program import Launch, Program, Tensor
from tests.ops.harness import INPUT_GUARD, OUTPUT_GUARD, assert_array_matches

DEVICE = os.environ.get("TANDEM_TEST_DEVICE", "vulkan:lavapipe")
ARENA = "activations"
ARENA_BYTES = 256 << 20
GUARD = 256
STEP_BYTES = 64
# GPUs divide and take roots to a few units in the last place, and may take numbers below 1e-38 for 0.
MORE_RTOL, MORE_ATOL = 2e-6, 1.2e-38
LARGEST_COUNT = 512
# On matrix units attention has queries and weights in float16: its error to that in float32, about.
HALF_RATIO = 500.0
MATRIX_ERROR = 1e-2  # the largest of float16 products: of the result's own size


def open_device(name: str = DEVICE) -> VulkanDevice:
    device = VulkanDevice(name)
    device.allocate("step", STEP_BYTES)
    device.allocate(ARENA, ARENA_BYTES)
    return device


def tensors_of(case: Case) -> dict[str, Tensor]:
    """Aligned places for a case's arrays, with a guard zone on either side of each."""
    found, at = {}, GUARD
    for name, array in case.arrays.items():
        found[name] = Tensor(name, ARENA, str(array.dtype), array.nbytes, offset=at)
        at += -(-array.nbytes // GUARD) * GUARD + GUARD
    assert at <= ARENA_BYTES, f"{case.label}: {at} bytes are more than the test's arena"
    return found


def upload(device: VulkanDevice, kernel: Kernel, case: Case, tensors: Mapping[str, Tensor]) -> Array:
    """Writes the case's arrays, guards and counts; returns the bytes as they lie in the arena."""
    end = max(t.offset + -(-t.nbytes // GUARD) * GUARD for t in tensors.values()) + GUARD
    memory = np.empty(end, np.uint8)
    for buffer in kernel.buffers:
        if buffer.name in tensors:
            tensor, guard = tensors[buffer.name], INPUT_GUARD if buffer.access == "r" else OUTPUT_GUARD
            memory[tensor.offset - GUARD : tensor.offset + -(-tensor.nbytes // GUARD) * GUARD + GUARD] = guard
    for name, tensor in tensors.items():
        memory[tensor.offset : tensor.offset + tensor.nbytes] = case.arrays[name].reshape(-1).view(np.uint8)
    device.write(Tensor("all", ARENA, "u8", end, offset=0), memory)
    set_counts(device, case)
    return memory


def set_counts(device: VulkanDevice, case: Case) -> None:
    device.memory("step").view(np.int32)[: len(COUNTS)] = [case.counts[name] for name in COUNTS]


def record(
    device: VulkanDevice, kernel: Kernel, case: Case, tensors: Mapping[str, Tensor], times: int = 1
) -> Recording:
    bound = {b.name: tensors.get(b.name) for b in kernel.buffers}
    launches = [Launch(kernel, bound, case.scalars, kernel.name, barrier=True) for _ in range(times)]
    return device.record(Program(launches, dict.fromkeys(COUNTS, LARGEST_COUNT), {ARENA: ARENA_BYTES}))


def run_kernel(device: VulkanDevice, kernel: Kernel, case: Case) -> dict[str, Array]:
    """The outputs by name, after a check that nothing else was written."""
    tensors = tensors_of(case)
    before = upload(device, kernel, case, tensors)
    record(device, kernel, case, tensors).replay()
    after = device.read(Tensor("all", ARENA, "u8", len(before), offset=0))
    outside = np.ones(len(before), bool)
    outputs = {}
    extents = kernel.extents(case.scalars, case.counts) if kernel.extents else {}
    for buffer in kernel.buffers:
        if buffer.name in tensors and "w" in buffer.access:
            tensor, array = tensors[buffer.name], case.arrays[buffer.name]
            size = min(extents.get(buffer.name, tensor.nbytes), tensor.nbytes)
            outside[tensor.offset : tensor.offset + size] = False
            written = after[tensor.offset : tensor.offset + tensor.nbytes].copy()
            outputs[buffer.name] = written.view(array.dtype).reshape(array.shape)
    changed = np.flatnonzero(outside & (before != after))
    assert not len(changed), f"{kernel.name} writes outside of its outputs: {where(int(changed[0]), tensors)}"
    return outputs


def where(at: int, tensors: Mapping[str, Tensor]) -> str:
    name, tensor = max(
        ((n, t) for n, t in tensors.items() if t.offset - GUARD <= at), key=lambda item: item[1].offset
    )
    return f"byte {at - tensor.offset} of {name}, which has {tensor.nbytes}"


def assert_matches(case: Case, got: dict[str, Array], expected: dict[str, Array]) -> None:
    """As on the CPU, with room for the arithmetic of GPUs."""
    assert set(got) == set(expected), "the reference returns every output that is present, and no other"
    atol, rtol = case.atol + MORE_ATOL, case.rtol + MORE_RTOL
    for name, want in expected.items():
        if want.dtype == Q8_BLOCK:
            assert_q8_matches(name, got[name], want, atol, rtol)
        else:
            assert_array_matches(name, got[name], want, atol, rtol)


def assert_q8_matches(name: str, got: Array, want: Array, atol: float, rtol: float) -> None:
    """Scales within the bound; quants equal or, in a few, 1 off; sums those of the quants."""
    np.testing.assert_allclose(got["scale"], want["scale"], rtol, atol, err_msg=f"{name}.scale")
    off = np.abs(got["q"].astype(int) - want["q"])
    assert off.max(initial=0) <= 1, f"{name}: a quant is off by {off.max()}"
    few = max(0.002, 254 * rtol, 2 / off.size)
    assert off.mean() <= few, f"{name}: {off.sum()} of {off.size} quants differ"
    for field, columns in {"sum": slice(None), "low": slice(16), "high": slice(16, None)}.items():
        total = got["q"][..., columns].sum(axis=-1, dtype=np.int32).astype(np.float32)
        np.testing.assert_allclose(
            got[field], got["scale"] * total, MORE_RTOL, MORE_ATOL, err_msg=f"{name}.{field}"
        )


def check_case(device: VulkanDevice, kernel: Kernel, case: Case) -> None:
    expected = kernel.reference(case.arrays, case.scalars, case.counts)
    if kernel.name == "attention" and device.capabilities.fragments:
        case = replace(case, atol=HALF_RATIO * case.atol, rtol=HALF_RATIO * case.rtol)
    assert_matches(case, run_kernel(device, kernel, case), expected)


def check_product(device: VulkanDevice, kernel: Kernel, case: Case) -> None:
    """A product on matrix units: held to float16's error."""
    expected = kernel.reference(case.arrays, case.scalars, case.counts)["out"]
    found = run_kernel(device, kernel, case)["out"]
    step = np.float32(0)  # a value may round to the neighbouring quant
    if case.scalars["out_q8"]:
        expected, found = (q8_unpack(a, case.counts["tokens"]) for a in (expected, found))
        blocks = np.abs(expected).reshape(len(expected), -1, 32).max(axis=2, keepdims=True)
        step = np.broadcast_to(blocks * np.float32(1.5 / 127), (*blocks.shape[:2], 32)).reshape(
            expected.shape
        )
    size = max(float(np.sqrt(np.mean(expected**2))), 1e-9)
    error = (np.maximum(np.abs(expected - found) - step, 0) / size).max()
    assert error < MATRIX_ERROR, f"error {error:.2e} of the result's size"


def cases_of(kernel: Kernel) -> list[Case]:
    return list(kernel.cases(np.random.default_rng(zlib.crc32(kernel.name.encode()))))


def time_case(device: VulkanDevice, kernel: Kernel, case: Case, repeats: int = 20) -> float:
    """The best time of a launch in seconds: with timestamps where there are any, else by the clock."""
    tensors = tensors_of(case)
    upload(device, kernel, case, tensors)
    recording = record(device, kernel, case, tensors, repeats)
    recording.replay()
    if device.capabilities.timestamp_ns:
        return min(recording.replay_timed())
    begin = time.perf_counter()
    recording.replay()
    return (time.perf_counter() - begin) / repeats


def module_of(kernel: str) -> str:
    """The Slang file of a kernel: the longest name that begins the kernel's."""
    return max((m for m in compile_shaders.modules() if kernel.startswith(m)), key=len, default="")


def main() -> None:
    kernels = {name: kernel for name, kernel in all_kernels().items() if name in GRIDS}
    wanted = [k for name, k in kernels.items() if len(sys.argv) > 1 and name.startswith(sys.argv[1])]
    if not wanted:
        sys.exit(
            f"usage: python -m tests.vulkan.harness KERNEL [DEVICE], one of {', '.join(kernels)} (see grids.py)"
        )
    compile_shaders.refresh([module_of(kernel.name) for kernel in wanted])
    device = open_device(sys.argv[2] if len(sys.argv) > 2 else DEVICE)
    print(device.capabilities.describe())
    failed = 0
    for kernel in wanted:
        for case in cases_of(kernel):
            try:
                check_case(device, kernel, case)
                verdict = "ok"
            except AssertionError as error:
                failed += 1
                verdict = "FAILS: " + " ".join(str(error).split())[:300]
            cost, best = kernel.cost(case.scalars, case.counts), time_case(device, kernel, case)
            rates = f"{cost.bytes / best / 1e9:8.2f} GB/s {cost.ops / best / 1e9:8.2f} GOP/s"
            print(f"{best * 1e6:10.2f} us {rates}  {kernel.name}: {case.label}: {verdict}")
    device.close()
    sys.exit(f"{failed} cases fail" if failed else 0)


if __name__ == "__main__":
    main()
