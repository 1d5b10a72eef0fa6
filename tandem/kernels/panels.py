"""The layouts the CPU keeps weights in (kernels/panels.h): 16 rows interleaved, the bytes of the file."""

from __future__ import annotations

from typing import NamedTuple

LANES = 16  # rows a panel
TILE = 16  # tokens a tile of quantised activations
Q8_COLUMNS = 32
Q8_BLOCK_BYTES = 768  # 16 tokens x 32 int8, and a scale and three sums for each token


class Layout(NamedTuple):
    name: str
    span: int  # columns a chunk
    chunk_bytes: int  # bytes of a chunk of 16 rows
    quantised: bool  # multiplies int8 activations; otherwise float32 ones

    def matrix_bytes(self, rows: int, columns: int) -> int:
        return -(-rows // LANES) * (columns // self.span) * self.chunk_bytes


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("q4_0", 32, 288, True),
        Layout("q4_1", 32, 320, True),
        Layout("q5_0", 32, 352, True),
        Layout("q5_1", 32, 384, True),
        Layout("q8_0", 32, 544, True),
        Layout("q4_k", 256, 2304, True),
        Layout("q5_k", 256, 2816, True),
        Layout("q6_k", 256, 3360, True),
        Layout("f16", 1, 32, False),
        Layout("bf16", 1, 32, False),
        Layout("f32", 1, 64, False),
    )
}
LAYOUT_NAMES = tuple(LAYOUTS)  # a kernel's `format` scalar indexes this


def q8_bytes(tokens: int, columns: int) -> int:
    return -(-tokens // TILE) * (columns // Q8_COLUMNS) * Q8_BLOCK_BYTES
