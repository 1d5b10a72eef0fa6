"""The layout of a weight matrix in a device's memory. A device chooses it (Device.weight_layout)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Layout:
    """Chunks of `group_rows` rows by `span` columns.

    A layout also fixes the input of its matmul: the kernels matmul_<name> and embed_<name> read it (kernels/matmul.py).
    """

    name: str
    span: int  # columns of a chunk
    chunk_bytes: int
    # Data type of the activations that the matmul multiplies: float32, or int8 tiles (q8_tiles.py).
    activations: Literal["f32", "q8"]
    group_rows: int  # rows that are interleaved: matrices are stacked and cut by whole groups
    glu_rows: int  # in a GLU matmul, gate and up alternate by this many rows

    @property
    def quantised(self) -> bool:
        return self.activations == "q8"

    def matrix_bytes(self, rows: int, columns: int) -> int:
        return -(-rows // self.group_rows) * (columns // self.span) * self.chunk_bytes


# (GGUF format in lower case, rows, columns) -> the layout that a device stores the matrix in
ChooseLayout = Callable[[str, int, int], Layout]
