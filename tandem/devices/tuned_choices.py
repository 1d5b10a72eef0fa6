"""Tuned parameters: the fastest settings of a kernel and shape on one device, and the file that stores them.

A choice is a few named numbers, such as {"threads": 256}. A device's dispatch rules look up the choice of a launch and
use their defaults for missing numbers. `tandem tune` (docs/TUNING.md) writes the file; without it, all are defaults.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tandem.files import read_regular, write_whole

Choice = Mapping[str, int]
NOTHING: Choice = {}
MAX_BYTES = 1 << 24  # of a file; one has a few KB
# Scalars that do not influence the speed of a launch, or that depend on the context.
IRRELEVANT = frozenset(
    {"blocks", "sequences", "positions", "slot_field", "panels_per_item", "adjustments", "mask_words"}
)


def shape_of(kernel: str, scalars: Mapping[str, float], *sizes: int) -> str:
    """Returns the name of a kernel's shape: its relevant integer scalars, and each size rounded up to a power of
    two."""
    shape = " ".join(
        f"{name}={int(value)}"
        for name, value in scalars.items()
        if name not in IRRELEVANT and not name.endswith("_stride") and value == int(value)
    )
    buckets = "x".join(str(1 << max(0, size - 1).bit_length()) for size in sizes)
    return f"{kernel} {shape}" + (f" @{buckets}" if sizes else "")


class Choices:
    """Choices by the name of their shape (`shape_of`)."""

    def __init__(self, by_shape: Mapping[str, Choice] | None = None) -> None:
        self.by_shape = dict(by_shape or {})
        self._trial: Choice | None = None

    def of(self, kernel: str, scalars: Mapping[str, float], *sizes: int) -> Choice:
        if self._trial is not None:
            return self._trial
        return self.by_shape.get(shape_of(kernel, scalars, *sizes), NOTHING) if self.by_shape else NOTHING

    @contextmanager
    def trying(self, choice: Choice) -> Iterator[None]:
        """Uses this choice for every launch that is recorded inside the context."""
        self._trial = choice
        try:
            yield
        finally:
            self._trial = None


def read_choices(file: Path) -> Choices:
    """Reads a file that `write_choices` wrote; returns no choices, with a warning, if it is damaged."""
    try:
        text = read_regular(file, MAX_BYTES).decode()
    except FileNotFoundError:
        return Choices()
    except (OSError, ValueError):
        text = ""
    try:
        data = json.loads(text)
        if data["sum"] != _sum(data["choices"]):
            raise ValueError
        return Choices(data["choices"])
    except (ValueError, TypeError, KeyError, RecursionError):
        warnings.warn(f"{file} is damaged and not used: run `tandem tune` again, or delete it", stacklevel=1)
        return Choices()


def write_choices(file: Path, choices: Choices, about: Mapping[str, str]) -> None:
    """Writes the file atomically. `about`: further fields for people who read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    by_shape = {shape: dict(choice) for shape, choice in sorted(choices.by_shape.items())}
    write_whole(file, json.dumps({**about, "sum": _sum(by_shape), "choices": by_shape}, indent=1).encode())


def _sum(choices: object) -> str:
    return hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()
