"""Writes abi.h and abi.slang from abi.py: `python -m tandem.kernels.generate_abi`, or `make abi`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tandem.kernels import abi

FOLDER = Path(__file__).parent
HEAD = "// Generated from abi.py by `make abi`: do not edit.\n"
C_TYPES = {"int8": "int8_t", "int32": "int32_t", "uint32": "uint32_t", "float32": "float"}


class Struct(NamedTuple):
    dtype: np.dtype[np.void]
    prefix: str  # prefix of the field offsets in Slang
    unit: int  # offsets count bytes (1) or 32-bit words (4)


STRUCTS = {
    "q8_block": Struct(abi.Q8_BLOCK, "Q8_", 1),
    "sampling_parameters": Struct(abi.SAMPLING_PARAMETERS, "SAMPLING_", 4),
    "logit_adjustment": Struct(abi.LOGIT_ADJUSTMENT, "ADJUSTMENT_", 4),
    "sampling_result": Struct(abi.SAMPLING_RESULT, "RESULT_", 4),
}


def constants_of(name: str) -> dict[str, int]:
    """The C and Slang constants for an integer or a panel format of abi.py; none for other names."""
    value = getattr(abi, name, None)
    if isinstance(value, int):
        return {name: value}
    if panel := abi.PANEL_FORMATS.get(name):
        return {f"{name}_BYTES": panel.bytes, f"{name}_SPAN": panel.span, f"{name}_FINE": panel.fine}
    return {}


def constants() -> dict[str, int]:
    """Every constant of C and Slang."""
    by_name: dict[str, int] = {}
    for name in (*vars(abi), *abi.PANEL_FORMATS):
        by_name |= constants_of(name)
    return by_name


def lines(pattern: str) -> list[str]:
    """The constants in the order of abi.py, with its headings and the comments on their lines.

    `pattern`: the declaration of a constant.
    """
    out: list[str] = []
    for line in Path(abi.__file__).read_text().splitlines():
        code, _, comment = line.partition("#")
        if line.startswith("# ----"):
            out += ["", line.replace("#", "//", 1)]
        elif declared := re.match(r' *"?(\w+)"?(?: =|:) ', code):
            for name, value in constants_of(declared[1]).items():
                out.append(pattern.format(name=name, value=value) + ("  //" + comment if comment else ""))
                comment = ""
    return out


def offsets(struct: Struct) -> dict[str, int]:
    """Offsets of the fields of a struct, by their names in Slang."""
    fields = (struct.dtype.fields or {}).items()
    return {struct.prefix + name.upper(): at // struct.unit for name, (_, at, *_) in fields}


def c_text() -> str:
    out = [HEAD + "#pragma once\n#include <stdint.h>\n\nenum {", *lines("    {name} = {value},"), "};\n"]
    for struct_name, struct in STRUCTS.items():
        out.append("typedef struct {")
        for name, (field, *_) in (struct.dtype.fields or {}).items():
            shape = "".join(f"[{n}]" for n in field.shape)
            out.append(f"    {C_TYPES[field.base.name]} {name}{shape};")
        out.append(f"}} {struct_name};\n")
    return "\n".join(out)


def slang_text() -> str:
    pattern = "public static const uint {name} = {value};"
    out = [HEAD + "module abi;", *lines(pattern)]
    for struct_name, struct in STRUCTS.items():
        unit = "bytes" if struct.unit == 1 else "32-bit words"
        out.append(f"\n// ---- Offsets of the fields of {struct_name}, in {unit}")
        out += [pattern.format(name=name, value=value) for name, value in offsets(struct).items()]
    return "\n".join(out) + "\n"


FILES = {"abi.h": c_text, "abi.slang": slang_text}

if __name__ == "__main__":
    for file, text in FILES.items():
        (FOLDER / file).write_text(text())
