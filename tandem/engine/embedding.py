"""What a model makes of a text, as one vector of length 1."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np

from tandem.kernels.kernel import Array


def pooled(parts: Iterator[dict[str, Array]], pooling: str) -> Generator[Array | None]:
    """Of the rows before the head, which come a part at a time: their mean, the last or the first; None before it."""
    rows = next(parts)["result_norm"]
    first, total = rows[0], rows.sum(axis=0)
    for part in parts:
        yield None
        rows = part["result_norm"]
        total += rows.sum(axis=0)
    found = {"mean": total, "last": rows[-1], "cls": first}[pooling]
    yield found / max(float(np.linalg.norm(found)), 1e-12)
