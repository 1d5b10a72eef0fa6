"""From the file into the device's layout: matrices are repacked as they are read, and read pages given back.

A format with panels of its own keeps every bit. The others become 8 bits with a scale per 32 (q8_0), which
loses less than a hundredth of what their own quantisation did; `tandem inspect` shows which tensor takes which path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from tandem.devices.device import Device
from tandem.kernels import formats
from tandem.kernels.kernel import Array
from tandem.kernels.panels import LANES, LAYOUTS
from tandem.model.gguf import GGUF
from tandem.program.graph import Vector
from tandem.program.weight_plan import PackedMatrix, PackedVector, WeightPlan

READ_BYTES = 32 << 20  # of the file in memory at a time
CONVERT_ROWS = 64 * LANES  # rows converted at a time: bounds the float32 copy


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
    for matrix in plan.matrices.values():
        _load_matrix(gguf, matrix, device)
    for vector in plan.vectors.values():
        _load_vector(gguf, vector, device, tables)


def _load_matrix(gguf: GGUF, packed: PackedMatrix, device: Device) -> None:
    layout = packed.tensor.dtype
    for index, part in enumerate(packed.parts):
        first, run, period = packed.placement(index)
        begin = first * LAYOUTS[layout].matrix_bytes(LANES, part.columns)
        for row, rows in _rows_in(layout, gguf, part.name):
            device.repack(packed.tensor, begin, rows, part.columns, row // LANES, run, period)
            gguf.forget(part.name)  # as we go: the largest matrix would be in memory twice


def _rows_in(layout: str, gguf: GGUF, name: str) -> Iterator[tuple[int, Array]]:
    """(first row, rows) of a matrix, some at a time, in the blocks of `layout`."""
    info, raw = gguf.tensor(name), gguf.raw(name)
    same = info.format.name.lower() == layout
    step = max(1, READ_BYTES // raw.strides[0] // LANES) * LANES if same else CONVERT_ROWS
    for row in range(0, len(raw), step):
        rows = raw[row : row + step]
        yield row, rows if same else _converted(rows, info.format, layout)


def _converted(rows: Array, format: formats.Format, layout: str) -> Array:
    return formats.quantise(formats.by_name(layout.upper()), formats.dequantise(format, rows))


def _load_vector(gguf: GGUF, packed: PackedVector, device: Device, tables: Mapping[str, Array]) -> None:
    out, at = np.zeros(packed.tensor.nbytes // 4, np.float32), 0
    for part in packed.parts:
        if isinstance(part, Vector):
            values = tables[part.name].ravel() if part.name in tables else _vector(gguf, part.name)
            out[at : at + part.size] = values
            at += part.size
        else:
            at += part
    device.write(packed.tensor, out.view(np.uint8))


def _vector(gguf: GGUF, name: str) -> Array:
    return formats.dequantise(gguf.tensor(name).format, gguf.raw(name)).ravel()
