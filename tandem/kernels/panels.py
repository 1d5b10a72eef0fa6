"""Panels (panels.h): the weight layouts of the CPU and of Vulkan, with PANEL_ROWS rows interleaved."""

from __future__ import annotations

from tandem.kernels.abi import GLU_ROWS, PANEL_FORMATS, PANEL_ROWS
from tandem.kernels.layout import Layout

LAYOUTS = {
    name: Layout(name, panel.span, panel.bytes, "q8" if panel.quantised else "f32", PANEL_ROWS, GLU_ROWS)
    for name, panel in PANEL_FORMATS.items()
}
LAYOUT_NAMES = tuple(LAYOUTS)  # a kernel's scalar `format` is an index
# Formats that share their shaders on a GPU; a specialisation constant is an index (chosen_panels.slang).
CHOSEN = ("q5_0", "q5_1", "q3_k", "q2_k", "iq4_nl", "iq4_xs", "mxfp4")

# Formats whose nibbles are indices into a table.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Floats of 4 bits (2 of exponent, 1 of mantissa), doubled: scales are halved. Minus zero is zero.
FLOAT4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
VALUES = {"iq4_nl": IQ4_VALUES, "iq4_xs": IQ4_VALUES, "mxfp4": FLOAT4_VALUES}


def panel_layout(format: str, rows: int, columns: int) -> Layout:
    """The panels of a GGUF format. A format without panels is converted at load (model/weights.py): to q8_0, or to f32
    if a row is not a whole number of blocks."""
    return LAYOUTS.get(format) or LAYOUTS["f32" if columns % LAYOUTS["q8_0"].span else "q8_0"]
