"""Loads weights: reads matrices from the file, repacks them into the device's layouts, and frees the pages it has read.

A format with a layout of its own keeps every bit. Other formats are converted, in panels to 8 bits with a scale per 32
(q8_0), which adds less than a hundredth of their own quantisation error; `tandem inspect` shows each tensor's path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from tandem.devices.device import Device, WeightRows
from tandem.gguf import formats
from tandem.gguf.file import GGUF, TensorInfo
from tandem.kernels.kernel import Array
from tandem.program.graph import Vector
from tandem.program.weight_plan import PackedMatrix, PackedVector, WeightPlan
from tandem.threads import each

READ_BYTES = 8 << 20  # bytes of the file that all loader threads together work on at a time
CONVERSION_FACTOR = 8  # minimum memory of a conversion, as a multiple of the bytes in the file


class _Rows(NamedTuple):
    """Rows [row, end) of one part of a matrix."""

    packed: PackedMatrix
    part: int
    row: int
    end: int


def load_weights(gguf: GGUF, plan: WeightPlan, device: Device, tables: Mapping[str, Array]) -> None:
    """Fills the device's "weights" arena. `tables`: the constants that are not in the file."""
    groups = _groups(gguf, plan, READ_BYTES // device.loaders)
    each(lambda group: _load(gguf, device, group), groups, device.loaders)
    for packed in plan.vectors.values():
        _load_vector(gguf, packed, device, tables)
    gguf.forget()


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


def _load(gguf: GGUF, device: Device, group: list[_Rows]) -> None:
    read = [_read(gguf, rows) for rows in group]
    device.repack(read)
    gguf.done_with(sum(each.rows.nbytes for each in read))  # otherwise the file's pages would stay in memory


def _read(gguf: GGUF, wanted: _Rows) -> WeightRows:
    packed, part, layout = wanted.packed, wanted.packed.parts[wanted.part], wanted.packed.layout
    info, rows = gguf.tensor(part.name), gguf.raw(part.name)[wanted.row : wanted.end]
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
