"""The NPU's arithmetic on the host: int8 weights and activations, exact int32 sums, float32 scales.

Phoenix has no kernels for GGUF's blocks: its partition of a matmul is int8 with one scale per weight row and per token
(`block=None`), or one per `block` columns, with sums scaled and added between blocks. benchmarks/npu_numerics.py
measures the loss of quality with it, and tests use it in place of the NPU; it is not fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tandem.devices.device import Bytes
from tandem.devices.tensor_parallel.accelerator import AcceleratorThread, Partition, check_gemm
from tandem.devices.tensor_parallel.cut import Gemm, Work, padded
from tandem.kernels.abi import EPILOGUE_SILU_GLU, GLU_ROWS, PANEL_ROWS, Q8_BLOCK
from tandem.kernels.kernel import Array
from tandem.kernels.matmul import unpack_panels
from tandem.kernels.panels import LAYOUTS
from tandem.kernels.q8_tiles import q8_pack, q8_unpack
from tandem.program.program import Program

LARGEST = 127
EXACT = 1024  # columns that a float32 sums exactly: 1024 x 127 x 127 < 2^24


def blocks(columns: int, block: int | None) -> Iterator[slice]:
    step = block or columns
    return (slice(begin, min(begin + step, columns)) for begin in range(0, columns, step))


def quantise(x: Array, block: int | None) -> tuple[Array, Array]:
    """x [rows, columns] as int8, and a scale for each row and block of columns."""
    q = np.empty(x.shape, np.int8)
    scales = []
    for part in blocks(x.shape[1], block):
        scale = np.abs(x[:, part]).max(axis=1) / np.float32(LARGEST)
        inverse = np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0).astype(np.float32)
        q[:, part] = np.rint(np.clip(x[:, part] * inverse[:, None], -LARGEST, LARGEST))
        scales.append(scale.astype(np.float32))
    return q, np.stack(scales, axis=1)


def dot(x: Array, w: Array) -> Array:
    """int32 dot products of int8 rows, [x rows, w rows]: exact, through float32 matmuls of EXACT columns at a time."""
    total = np.zeros((len(x), len(w)), np.int32)
    for part in blocks(x.shape[1], EXACT):
        total += (x[:, part].astype(np.float32) @ w[:, part].astype(np.float32).T).astype(np.int32)
    return total


def matmul(x: tuple[Array, Array], w: tuple[Array, Array], block: int | None) -> Array:
    """Returns x times w transposed: float32 [x rows, w rows]."""
    (x_quants, x_scales), (w_quants, w_scales) = x, w
    y = np.zeros((len(x_quants), len(w_quants)), np.float32)
    for i, part in enumerate(blocks(x_quants.shape[1], block)):
        sums = dot(x_quants[:, part], w_quants[:, part])
        y += sums * (x_scales[:, i : i + 1] * w_scales[:, i])
    return y


class Int8Accelerator(AcceleratorThread):
    name = "int8"

    def __init__(self, block: int | None = None) -> None:
        super().__init__(self.name)
        self.block = block
        self._works: list[Gemm] = []
        self._weights: dict[int, tuple[Array, Array]] = {}
        self._bias: dict[int, Array] = {}

    def describe(self) -> str:
        scales = f"each {self.block} columns" if self.block else "a row"
        return f"the NPU's arithmetic on the CPU (int8, a scale for {scales})"

    def allocate(self, works: Sequence[Work], program: Program, *, copies: bool) -> None:
        self._works = [check_gemm(work, self.name) for work in works]

    def load(self, work: int, operands: Mapping[str, Bytes]) -> None:
        gemm = self._works[work]
        layout, columns = gemm.weights.dtype, int(gemm.launch.scalars["columns"])
        panel = LAYOUTS[layout].matrix_bytes(PANEL_ROWS, columns)
        parts = []
        # In parts, since the whole matrix would be large as float32.
        for row in range(0, gemm.rows, 64 * PANEL_ROWS):
            rows = min(64 * PANEL_ROWS, gemm.rows - row)
            some = operands["weights"][row // PANEL_ROWS * panel : (row // PANEL_ROWS + 64) * panel]
            parts.append(quantise(unpack_panels(layout, some, rows, columns), self.block))
        q, scales = zip(*parts, strict=True)
        self._weights[work] = np.concatenate(q), np.concatenate(scales)
        if "bias" in operands:
            self._bias[work] = operands["bias"].view(np.float32).copy()

    def run(self, partition: Partition) -> Sequence[Bytes]:
        gemm = self._works[partition.work]
        first = partition.first * gemm.unit_panels * PANEL_ROWS
        rows = slice(first, min(first + partition.units * gemm.unit_panels * PANEL_ROWS, gemm.rows))
        x = self._activations(gemm, partition.inputs[0], partition.tokens)
        y = self.matmul(partition.work, quantise(x, self.block), rows)
        if partition.work in self._bias:
            y += self._bias[partition.work][rows]
        return [_stored(gemm, y)]

    def matmul(self, work: int, x: tuple[Array, Array], rows: slice) -> Array:
        """Computes the matmul with some rows of a Work's weights; the NPU overrides it."""
        quants, scales = self._weights[work]
        return matmul(x, (quants[rows], scales[rows]), self.block)

    def _activations(self, gemm: Gemm, data: Bytes, tokens: int) -> Array:
        columns = int(gemm.launch.scalars["columns"])
        if gemm.entering[0].dtype == "q8":
            with np.errstate(all="ignore"):  # rows of a tile past the last token are garbage
                return q8_unpack(data.view(Q8_BLOCK).reshape(-1, columns // 32), tokens)
        stride = int(gemm.launch.scalars["x_stride"])
        return np.ndarray((tokens, columns), np.float32, data, 0, (4 * stride, 4))


def _stored(gemm: Gemm, y: Array) -> Bytes:
    """Computes the epilogue of a matmul on the host, for the NPU: GLU, and int8 tiles for the next matmul."""
    if gemm.glu:
        pairs = y.reshape(len(y), -1, 2, GLU_ROWS)
        gate, up = pairs[:, :, 0].reshape(len(y), -1), pairs[:, :, 1].reshape(len(y), -1)
        if gemm.launch.scalars["epilogue"] == EPILOGUE_SILU_GLU:
            y = gate / (1 + np.exp(-gate)) * up
        else:
            y = 0.5 * gate * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (gate + 0.044715 * gate**3))) * up
    y = y.astype(np.float32)
    if gemm.out.dtype != "q8":
        y = np.pad(y, [(0, 0), (0, padded(y.shape[1]) - y.shape[1])])
    stored = q8_pack(y) if gemm.out.dtype == "q8" else y
    return np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
