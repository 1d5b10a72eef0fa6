"""From the file into the device's layout: matrices are repacked as they are read, and read pages given back.

A format with panels of its own keeps every bit. The others become 8 bits with a scale per 32 (q8_0), which
loses less than a hundredth of what their own quantisation did; `tandem inspect` shows which tensor takes which path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from tandem.devices.device import Device, Piece
from tandem.gguf import formats
from tandem.gguf.file import GGUF, TensorInfo
from tandem.kernels.abi import PANEL_ROWS
from tandem.kernels.kernel import Array
from tandem.kernels.panels import LAYOUTS
from tandem.program.graph import Vector
from tandem.program.weight_plan import PackedMatrix, PackedVector, WeightPlan
from tandem.threads import each

READ_BYTES = 8 << 20  # of the file in work at a time, by all loaders together
FLOATS = 8  # times the bytes of the file that a conversion takes on its way, at least
Rows = tuple[PackedMatrix, int, int, int]  # of one of its parts: the first row and the one after the last


def layout_of(format: formats.Format) -> str:
    """The layout a format of the file becomes on the CPU."""
    name = format.name.lower()
    return name if name in LAYOUTS else "q8_0"


def matrix_layouts(gguf: GGUF) -> dict[str, str]:
    return {name: layout_of(info.format) for name, info in gguf.tensors.items() if len(info.shape) == 2}


def device_bytes(gguf: GGUF) -> int:
    """What the file's tensors take on a device."""
    matrices = matrix_layouts(gguf)
    return sum(
        LAYOUTS[matrices[name]].matrix_bytes(info.shape[0], info.shape[1])
        if name in matrices
        else 4 * math.prod(info.shape)
        for name, info in gguf.tensors.items()
    )


def load_weights(gguf: GGUF, plan: WeightPlan, device: Device, tables: Mapping[str, Array]) -> None:
    """Fills the device's "weights" arena; `tables` are the constants that are not in the file."""
    groups = _groups(gguf, plan, READ_BYTES // device.loaders)
    each(lambda group: _load(gguf, device, group), groups, device.loaders)
    for packed in plan.vectors.values():
        _load_vector(gguf, packed, device, tables)
    gguf.forget()


def _groups(gguf: GGUF, plan: WeightPlan, most: int) -> Iterator[list[Rows]]:
    """All matrices: large ones cut, small ones gathered, to about `most` bytes at a time."""
    group: list[Rows] = []
    nbytes = 0
    for packed in plan.matrices.values():
        for index, part in enumerate(packed.parts):
            info = gguf.tensor(part.name)
            row_bytes = info.row_bytes * (1 if _same(packed, info) else FLOATS)
            step = max(1, most // (row_bytes * PANEL_ROWS)) * PANEL_ROWS
            for row in range(0, part.rows, step):
                end = min(row + step, part.rows)
                group.append((packed, index, row, end))
                nbytes += (end - row) * row_bytes
                if nbytes >= most:
                    yield group
                    group, nbytes = [], 0
    yield group


def _load(gguf: GGUF, device: Device, group: list[Rows]) -> None:
    pieces = [_piece(gguf, *rows) for rows in group]
    device.repack(pieces)
    gguf.done_with(sum(piece.rows.nbytes for piece in pieces))  # else the file would be in memory too


def _piece(gguf: GGUF, packed: PackedMatrix, index: int, row: int, end: int) -> Piece:
    part, layout = packed.parts[index], packed.tensor.dtype
    info, rows = gguf.tensor(part.name), gguf.raw(part.name)[row:end]
    first, run, period = packed.placement(index)
    begin = first * LAYOUTS[layout].matrix_bytes(PANEL_ROWS, part.columns)
    converted = rows if _same(packed, info) else _converted(rows, info.format, layout)
    return Piece(packed.tensor, begin, converted, part.columns, row // PANEL_ROWS, run, period)


def _same(packed: PackedMatrix, info: TensorInfo) -> bool:
    """Whether the file has the blocks of the layout."""
    return info.format.name.lower() == packed.tensor.dtype


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
