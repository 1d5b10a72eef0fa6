"""Panels (panels.h): the weight layouts of the CPU and of Vulkan, with PANEL_ROWS rows interleaved."""

from __future__ import annotations

from tandem.kernels.abi import GLU_ROWS, PANEL_FORMATS, PANEL_ROWS
from tandem.kernels.layout import Layout

LAYOUTS = {
    name: Layout(name, panel.span, panel.bytes, "q8" if panel.quantised else "f32", PANEL_ROWS, GLU_ROWS)
    for name, panel in PANEL_FORMATS.items()
}
LAYOUT_NAMES = tuple(LAYOUTS)  # a kernel's scalar `format` is an index


def panel_layout(format: str, rows: int, columns: int) -> Layout:
    """The panels of a GGUF format. A format without panels is converted to q8_0 at load (model/weights.py)."""
    return LAYOUTS.get(format, LAYOUTS["q8_0"])
