"""Groups the GGUF files of a folder into models (split files are one model), and finds a quantisation by file name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tandem.errors import ModelNotFoundError

PREFERRED_QUANTS = ("Q4_K_M", "Q4_0", "Q4_1", "Q8_0")  # in this order, if the name has none
PREFERRED_MMPROJ = ("F16", "BF16", "Q8_0", "F32")  # of a vision encoder, in this order
SPLIT = r"-(\d{5})-of-(\d{5})(?=\.gguf$)"
MAX_FILE_NAME = 255  # bytes
MAX_SHOWN = 20  # names in an error message
QUANT = r"(?i)(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d\w*+|TQ\d_\d|MXFP4\w*+|BF16|FP?16|FP?32)(?=$|[-./])"


class CachedModel(NamedTuple):
    name: str  # its name on the command line
    repo: str
    base: str  # file name, without the part number of a split file
    files: tuple[Path, ...]  # parts of a split file in order; empty: the download is incomplete
    size: int
    modified: float  # seconds since 1970


def is_plain(part: str) -> bool:
    """Whether a part of a name, joined to a folder, is a file in this folder."""
    return (
        part not in ("", ".", "..")
        and part.isprintable()
        and not set(part) & {"/", "\\"}
        and len(part.encode()) <= MAX_FILE_NAME
    )


def base_of(name: str) -> str:
    return re.sub(SPLIT, "", name)


def some(names: Iterable[str]) -> str:
    """Returns the first names for an error message."""
    first = sorted(names)
    return ", ".join(first[:MAX_SHOWN] + ["..."] * (len(first) > MAX_SHOWN))


@lru_cache(maxsize=4096)
def quant_of(base: str) -> str:
    """Returns the quantisation in a file name; the file name if there is none."""
    quants = re.findall(QUANT, base.removesuffix(".gguf"))
    return quants[-1].upper() if quants else base


def is_mmproj(name: str) -> bool:
    """Whether a file is the vision encoder of a model, by its name."""
    return "mmproj" in Path(name).name.lower() and name.endswith(".gguf")


def mmproj_files(names: Iterable[str]) -> list[str]:
    """Returns the vision encoders among files, the preferred one first."""

    def order(name: str) -> tuple[int, str]:
        quant = quant_of(Path(name).name).replace("FP", "F")
        return (PREFERRED_MMPROJ.index(quant) if quant in PREFERRED_MMPROJ else len(PREFERRED_MMPROJ)), name

    return sorted(filter(is_mmproj, names), key=order)


def whole_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups files into complete models by name: a single file, or all parts of a split file."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not is_mmproj(name):
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
    """Returns the model with this quantisation or file name; None: there is none."""
    names = {base: Path(base).name for base in models}
    for wanted in [quant] if quant else PREFERRED_QUANTS:
        exact = [base for base, name in names.items() if wanted in (base, name, name.removesuffix(".gguf"))]
        fitting = exact or [base for base, name in names.items() if quant_of(name) == wanted.upper()]
        if len(fitting) > 1:
            raise ModelNotFoundError(
                f"{repo} has several {wanted} files: name one of {some(fitting)} after the colon"
            )
        if fitting:
            return fitting[0]
    return next(iter(names)) if len(names) == 1 and not quant else None


def find_mmproj(model: Path) -> list[Path]:
    """Returns the mmproj files beside a model, or in the same version of a repository: the preferred one first."""
    folders = [model.parent, *(folder for folder in model.parents[1:] if folder.parent.name == "snapshots")]
    found: list[Path] = []
    for folder in folders:
        with suppress(OSError):
            found += [folder / name for name in mmproj_files(path.name for path in folder.iterdir())]
    return found
