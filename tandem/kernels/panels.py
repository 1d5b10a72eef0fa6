"""Weight layouts of panels (panels.h): PANEL_ROWS rows interleaved, with exactly the bytes of the GGUF file."""

from __future__ import annotations

from typing import NamedTuple

from tandem.kernels.abi import PANEL_FORMATS, PANEL_ROWS


class Layout(NamedTuple):
    name: str
    span: int  # columns of a chunk
    chunk_bytes: int  # bytes of a chunk of PANEL_ROWS rows
    quantised: bool  # multiplied by int8 activations, otherwise by float32

    def matrix_bytes(self, rows: int, columns: int) -> int:
        return -(-rows // PANEL_ROWS) * (columns // self.span) * self.chunk_bytes


LAYOUTS = {
    name: Layout(name, panel.span, panel.bytes, bool(panel.quantised))
    for name, panel in PANEL_FORMATS.items()
}
LAYOUT_NAMES = tuple(LAYOUTS)  # a kernel's scalar `format` is an index
