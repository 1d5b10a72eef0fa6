"""Loads weights: reads matrices from the file and repacks them into the device's layouts.

A format with a layout of its own keeps every bit. Other formats are converted, in panels to 8 bits with a scale per 32
(q8_0), which adds less than a hundredth of their own quantisation error; `tandem inspect` shows each tensor's path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Semaphore, local
from typing import NamedTuple

import numpy as np

from tandem.devices.device import Device, WeightRows
from tandem.gguf import formats
from tandem.gguf.disk_file import allocate
from tandem.gguf.file import GGUF, TensorInfo
from tandem.kernels.kernel import Array
from tandem.program.graph import Vector
from tandem.program.weight_plan import PackedMatrix, PackedVector, WeightPlan
from tandem.threads import each

# Bytes of the file that a thread reads before it repacks them. Few: they stay in its cache meanwhile. A device with one
# loader divides them among threads of its own.
READ_BYTES, READ_BYTES_OF_ONE = 1 << 19, 8 << 20
CONVERSION_FACTOR = 8  # minimum memory of a conversion, as a multiple of the bytes in the file


class _Rows(NamedTuple):
    """Rows [row, end) of one part of a matrix."""

    packed: PackedMatrix
    part: int
    row: int
    end: int

    @property
    def name(self) -> str:
        return self.packed.parts[self.part].name


class _Scratch(local):
    """Memory of a thread for the rows it reads, used again and again."""

    memory: Array = np.empty(0, np.uint8)
    used = 0

    def reserve(self, nbytes: int) -> None:
        self.used = 0
        if nbytes > len(self.memory):
            self.memory = np.frombuffer(allocate(nbytes), np.uint8)

    def take(self, rows: int, row_bytes: int) -> Array:
        begin, self.used = self.used, self.used + rows * row_bytes
        return self.memory[begin : self.used].reshape(rows, row_bytes)


def load_weights(gguf: GGUF, plan: WeightPlan, device: Device, tables: Mapping[str, Array]) -> None:
    """Fills the device's "weights" arena. `tables`: the constants that are not in the file."""
    may_repack, memory = Semaphore(device.loaders), _Scratch()

    def load(group: list[_Rows]) -> None:
        memory.reserve(sum((rows.end - rows.row) * gguf.tensor(rows.name).row_bytes for rows in group))
        read = [_read(gguf, rows, memory) for rows in group]
        with may_repack:
            device.repack(read)

    one = device.loaders == 1
    groups = _groups(gguf, plan, READ_BYTES_OF_ONE if one else READ_BYTES)
    # With one loader, a thread reads while the other repacks.
    each(load, groups, 2 if one else device.loaders)
    for packed in plan.vectors.values():
        _load_vector(gguf, packed, device, tables)
    gguf.check_unchanged()


def _groups(gguf: GGUF, plan: WeightPlan, max_bytes: int) -> Iterator[list[_Rows]]:
    """Yields the rows of all matrices, in lists of about `max_bytes`: splits large matrices, collects small ones."""
    group: list[_Rows] = []
    nbytes = 0
    for packed in plan.matrices.values():
        for index, part in enumerate(packed.parts):
            info = gguf.tensor(part.name)
            row_bytes = info.row_bytes * (1 if _same(packed, info) else CONVERSION_FACTOR)
            group_rows = packed.layout.group_rows
            step = max(1, max_bytes // (row_bytes * group_rows)) * group_rows
            for row in range(0, part.rows, step):
                end = min(row + step, part.rows)
                group.append(_Rows(packed, index, row, end))
                nbytes += (end - row) * row_bytes
                if nbytes >= max_bytes:
                    yield group
                    group, nbytes = [], 0
    yield group


def _read(gguf: GGUF, wanted: _Rows, memory: _Scratch) -> WeightRows:
    packed, part, layout = wanted.packed, wanted.packed.parts[wanted.part], wanted.packed.layout
    info = gguf.tensor(part.name)
    rows = memory.take(wanted.end - wanted.row, info.row_bytes)
    gguf.read_rows(part.name, wanted.row, rows)
    first, run, period = packed.row_groups(wanted.part)
    begin = first * layout.matrix_bytes(layout.group_rows, part.columns)
    converted = rows if _same(packed, info) else _converted(rows, info.format, layout.name)
    return WeightRows(
        packed.tensor, begin, converted, part.columns, wanted.row // layout.group_rows, run, period
    )


def _same(packed: PackedMatrix, info: TensorInfo) -> bool:
    """Whether the layout has the file's own blocks, so that nothing is converted."""
    return info.format.name.lower() == packed.layout.name


def _converted(rows: Array, format: formats.Format, layout: str) -> Array:
    return formats.quantise(formats.by_name(layout.upper()), formats.dequantise(format, rows))


def _load_vector(gguf: GGUF, packed: PackedVector, device: Device, tables: Mapping[str, Array]) -> None:
    out, at = np.zeros(packed.tensor.nbytes // 4, np.float32), 0
    for part in packed.parts:
        if isinstance(part, Vector):
            values = tables[part.name].ravel() if part.name in tables else vector(gguf, part.name)
            out[at : at + part.size] = values
            at += part.size
        else:
            at += part
    device.write(packed.tensor, out.view(np.uint8))


def vector(gguf: GGUF, name: str) -> Array:
    return formats.dequantise(gguf.tensor(name).format, gguf.raw(name)).ravel()


def rows(gguf: GGUF, name: str, width: int) -> Array:
    """A small matrix: float32 [rows, width]."""
    values, shape = vector(gguf, name), gguf.tensor(name).shape
    if not values.size or shape[-1] != width:
        gguf.fail(
            name, f"its rows do not have the {width} numbers of those before: fetch or convert the file again"
        )
    return values.reshape(-1, width)
