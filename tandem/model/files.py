"""GGUF files by their names: which belong together, and which a quantisation stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tandem.errors import ModelNotFoundError

PREFERRED_QUANTS = ("Q4_K_M", "Q4_0", "Q4_1", "Q8_0")  # of a repository named without one
SPLIT = r"-(\d{5})-of-(\d{5})(?=\.gguf$)"
QUANT = r"(?i)(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|FP?16|FP?32)(?=$|[-./])"


class CachedModel(NamedTuple):
    name: str  # what to call it on the command line
    repo: str
    base: str  # its file's name, without the part number of a split one
    files: tuple[Path, ...]  # the parts of a split file in order; none if a pull was given up
    size: int
    modified: float  # seconds since 1970


def base_of(name: str) -> str:
    return re.sub(SPLIT, "", name)


def quant_of(base: str) -> str:
    """The quantisation a file is named after, or the file's name."""
    found = re.findall(QUANT, base.removesuffix(".gguf"))
    return found[-1].upper() if found else base


def whole_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Files grouped into models by name: a single file, or all the parts of a split one."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not Path(name).name.startswith("mmproj"):  # an image encoder
            groups.setdefault(base_of(name), []).append(name)
    models = {}
    for base, parts in groups.items():
        split = re.search(SPLIT, parts[0])
        if base in parts:
            models[base] = [base]
        elif split and len(parts) == int(split[2]):
            models[base] = parts
    return models


def choose(models: Iterable[str], quant: str, repo: str) -> str | None:
    """The model a quant (or a file's name) stands for."""
    names = {base: Path(base).name for base in models}
    for wanted in [quant] if quant else PREFERRED_QUANTS:
        exact = [base for base, name in names.items() if wanted in (base, name, name.removesuffix(".gguf"))]
        fitting = exact or [base for base, name in names.items() if quant_of(name) == wanted.upper()]
        if len(fitting) > 1:
            raise ModelNotFoundError(
                f"{repo} has several {wanted} files: name one of {', '.join(fitting)} after the colon"
            )
        if fitting:
            return fitting[0]
    return next(iter(names)) if len(names) == 1 and not quant else None
