"""Cuts a Program between layers into one for each device.

The launches stay as they are. A device holds the weights and KV caches of its own layers, packed from offset 0 of its
arenas; activations keep their offsets. Activations that are alive at a cut (the residual stream, and a norm that the
last launch before it has computed already) cross from device to device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.errors import DeviceError
from tandem.program.plan_memory import lifetimes
from tandem.program.program import Program, Tensor
from tandem.program.weight_plan import align

OWN = ("weights", "kv")  # arenas of which a part holds only the tensors that it uses


@dataclass(frozen=True)
class ProgramPart:
    """Launches [begin, end) of a Program, as a Program of their own."""

    program: Program
    begin: int
    end: int
    layers: range
    entering: list[Tensor]  # activations from the part before
    leaving: list[Tensor]
    tensor_map: dict[Tensor, Tensor]  # weights and KV caches of the whole Program -> tensors of this part

    @property
    def nbytes(self) -> int:
        return sum(self.program.arena_bytes.values())

    def mapped(self, tensor: Tensor) -> Tensor:
        """Returns the tensor of this part for a tensor of the whole Program."""
        root = self.tensor_map.get(tensor.root)
        if root is None or tensor is tensor.root:
            return root or tensor
        return replace(tensor, offset=tensor.start - tensor.root.start, base=root)


def layer_starts(program: Program) -> list[int]:
    """Returns the first launch of each layer: the one after the previous layer's output. A norm fused with that output
    has run by then, so its rows cross the cut too."""
    starts = [0]
    while end := program.values.get(f"blk.{len(starts) - 1}.out"):
        starts.append(end[0] + 1)
    return starts[:-1]


def alive(lives: dict[Tensor, tuple[int, int]], at: int) -> list[Tensor]:
    """Returns the activations that are written before launch `at` and read by it or a later one."""
    return [tensor for tensor, (first, last) in lives.items() if first < at <= last]


def cut(program: Program, starts: Sequence[int], counts: Sequence[int]) -> list[ProgramPart]:
    """Cuts a Program into one part for each count of layers."""
    lives, parts, layer = lifetimes(program.launches), [], 0
    for count in counts:
        layers, layer = range(layer, layer + count), layer + count
        begin, end = starts[layers[0]], starts[layer] if layer < len(starts) else len(program.launches)
        parts.append(_part(program, begin, end, layers, alive(lives, begin), alive(lives, end)))
    caches = [tensor for part in parts for tensor in part.tensor_map if tensor.arena == "kv"]
    if len(set(caches)) < len(caches):
        raise DeviceError(
            "layers of this model read keys and values of earlier ones, so its layers cannot be divided among devices: "
            "name one device, or use --placement columns"
        )
    return parts


def _part(
    program: Program, begin: int, end: int, layers: range, entering: list[Tensor], leaving: list[Tensor]
) -> ProgramPart:
    sizes: dict[str, int] = {}
    tensor_map: dict[Tensor, Tensor] = {}
    launches = program.launches[begin:end]
    for launch in launches:
        for root in (tensor.root for tensor in launch.buffers.values() if tensor is not None):
            size, arena = sizes.get(root.arena, 0), root.arena
            if arena not in OWN:
                sizes[arena] = max(size, root.start + align(root.nbytes))
            elif root not in tensor_map:
                tensor_map[root] = replace(root, offset=size)
                sizes[arena] = size + align(root.nbytes)
    part = ProgramPart(
        Program([], program.max_counts, sizes), begin, end, layers, entering, leaving, tensor_map
    )
    part.program.launches += [
        replace(launch, buffers={name: t and part.mapped(t) for name, t in launch.buffers.items()})
        for launch in launches
    ]
    return part
