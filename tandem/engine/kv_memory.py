"""Reads and writes KV blocks and state slots on a device, for the prefix cache on disk and for saved prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tandem.devices.device import Bytes, Device
from tandem.kernels.abi import TOKEN_SLOT
from tandem.program.program import Program, Tensor

STATES = -1  # the group of recurrent states


class LayerKV(NamedTuple):
    """The part of the KV cache, or of the recurrent states, that one layer has."""

    tensor: Tensor
    group: int
    nbytes: int  # of a block, or of a state

    def blocks(self, first: int, count: int = 1) -> Tensor:
        """The memory of some blocks, or state slots, that follow each other."""
        tensor, offset = self.tensor, first * self.nbytes
        return Tensor(
            tensor.name, tensor.arena, tensor.dtype, count * self.nbytes, offset=offset, base=tensor
        )


def kv_layers(program: Program) -> Iterator[LayerKV]:
    """Yields the KV cache of each layer, from the launch that stores its keys and values, or latents."""
    for launch in program.launches:
        tensor = launch.buffers.get("cache")
        if tensor is not None and tensor in launch.touched("w"):
            group = int(launch.scalars["slot_field"]) - TOKEN_SLOT
            yield LayerKV(tensor, group, tensor.nbytes // int(launch.scalars["blocks"]))
    if program.beside:
        yield from kv_layers(program.beside)


def state_layers(program: Program) -> Iterator[LayerKV]:
    """Yields the states of each recurrent layer."""
    for launch in program.launches:
        tensor = launch.buffers.get("state")
        if tensor is not None:
            yield LayerKV(tensor, STATES, tensor.nbytes // int(launch.scalars["slots"]))


class KVMemory:
    """Reads and writes whole blocks: the bytes of all layers of a group, one after the other. State slots are the
    blocks of the last group."""

    def __init__(self, program: Program, device: Device) -> None:
        self._device, layers = device, [*kv_layers(program)]
        groups = 1 + max((layer.group for layer in layers), default=0)
        self._groups = [[layer for layer in layers if layer.group == group] for group in range(groups)]
        if states := [*state_layers(program)]:
            self._groups.append(states)
        # Bytes of a block of each group.
        self.nbytes = [sum(layer.nbytes for layer in group) for group in self._groups]

    def read(self, group: int, blocks: Sequence[int]) -> Bytes:
        """Copies blocks of a group: [blocks, bytes]."""
        out = np.empty((len(blocks), self.nbytes[group]), np.uint8)
        for layer, columns in self._columns(group):
            for rows, memory in _runs(layer, blocks):
                out[rows, columns] = self._device.read(memory).reshape(len(rows), -1)
        return out

    def write(self, group: int, blocks: Sequence[int], data: Bytes) -> None:
        """Writes blocks of a group. `data`: [blocks, bytes]."""
        for layer, columns in self._columns(group):
            for rows, memory in _runs(layer, blocks):
                self._device.write(memory, data[rows, columns].reshape(-1))

    def _columns(self, group: int) -> Iterator[tuple[LayerKV, slice]]:
        begin = 0
        for layer in self._groups[group]:
            yield layer, slice(begin, begin + layer.nbytes)
            begin += layer.nbytes


def _runs(layer: LayerKV, blocks: Sequence[int]) -> Iterator[tuple[list[int], Tensor]]:
    """Yields rows of `blocks` whose blocks follow each other in memory, and that memory: it is copied at once."""
    rows: list[int] = []
    for row in sorted(range(len(blocks)), key=blocks.__getitem__):
        if rows and blocks[row] != blocks[rows[-1]] + 1:
            yield rows, layer.blocks(blocks[rows[0]], len(rows))
            rows = []
        rows.append(row)
    if rows:
        yield rows, layer.blocks(blocks[rows[0]], len(rows))
