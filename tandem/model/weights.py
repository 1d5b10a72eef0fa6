"""From the file into the device's layout: matrices are repacked as they are read, and read pages given back.

A format with panels of its own keeps every bit. The others become 8 bits with a scale per 32 (q8_0), which
loses less than a hundredth of what their own quantisation did; `tandem inspect` shows which tensor takes which path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tandem.devices.device import Device
from tandem.kernels import formats
from tandem.kernels.kernel import Array
from tandem.kernels.panels import LANES, LAYOUTS
from tandem.model.gguf import GGUF, TensorInfo
from tandem.program.graph import Vector
from tandem.program.weight_plan import PackedMatrix, PackedVector, WeightPlan

READ_BYTES = 16 << 20  # of the file in memory at a time, by all loaders together
CONVERT_PANELS = 64  # converted at a time by all loaders: bounds the float32 copies


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
    with ThreadPoolExecutor(device.loaders) as pool:
        loaded = pool.map(
            lambda piece: _load_piece(gguf, device, *piece), _pieces(gguf, plan, device.loaders)
        )
        list(loaded)  # waits, and raises what one of them raised
    for vector in plan.vectors.values():
        _load_vector(gguf, vector, device, tables)
    gguf.forget()


def _pieces(gguf: GGUF, plan: WeightPlan, loaders: int) -> Iterator[tuple[PackedMatrix, int, int, int]]:
    """All matrices, a moderate number of rows at a time: (matrix, part of it, first row, row after the last)."""
    for packed in plan.matrices.values():
        for index, part in enumerate(packed.parts):
            info = gguf.tensor(part.name)
            panels = READ_BYTES // (info.row_bytes * LANES) if _same(packed, info) else CONVERT_PANELS
            step = max(1, panels // loaders) * LANES
            for row in range(0, part.rows, step):
                yield packed, index, row, min(row + step, part.rows)


def _load_piece(gguf: GGUF, device: Device, packed: PackedMatrix, index: int, row: int, end: int) -> None:
    part, layout = packed.parts[index], packed.tensor.dtype
    info, rows = gguf.tensor(part.name), gguf.raw(part.name)[row:end]
    first, run, period = packed.placement(index)
    begin = first * LAYOUTS[layout].matrix_bytes(LANES, part.columns)
    converted = rows if _same(packed, info) else _converted(rows, info.format, layout)
    device.repack(packed.tensor, begin, converted, part.columns, row // LANES, run, period)
    gguf.done_with(rows.nbytes)  # as we go: the file would be in memory beside the weights


def _same(packed: PackedMatrix, info: TensorInfo) -> bool:
    """Whether the file has the blocks of the layout."""
    return info.format.name.lower() == packed.tensor.dtype


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
