"""Which matmuls of a model the NPU may compute in int8: those measured to cost at most half a percent of perplexity.

`int8_matmuls.json` has them by the model's shape, from benchmarks/npu_numerics.py; an owner may add more in the cache.
A model that was not measured stays off the NPU. Emulated; not yet run on a Phoenix.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from tandem.devices.tensor_parallel.cut import Gemm
from tandem.devices.tensor_parallel.int8_selection import groups
from tandem.devices.tuned_choices import MAX_BYTES
from tandem.errors import DeviceError
from tandem.files import read_regular

NAME = "int8_matmuls.json"


class Int8Matmuls(NamedTuple):
    """`block`: number of columns that share a scale. `groups`: groups of matmuls (tensor_parallel/int8_selection.py);
    None: all."""

    block: int | None = None
    groups: frozenset[str] | None = None

    def includes(self, gemm: Gemm) -> bool:
        return self.groups is None or any(group in self.groups for group in groups(gemm))


ALL = Int8Matmuls()  # for random weights, of which only the time matters
NOTHING = Int8Matmuls(None, frozenset())


def int8_matmuls(shape: str, cache: Path) -> Int8Matmuls:
    """For a model of this shape."""
    found: dict[str, Any] = json.loads(files("tandem.devices.npu").joinpath(NAME).read_text())
    own = cache / NAME
    try:
        found |= json.loads(read_regular(own, MAX_BYTES)) if own.exists() else {}
        allowed = (
            Int8Matmuls(found[shape]["block"], frozenset(found[shape]["groups"])) if shape in found else None
        )
    except (ValueError, TypeError, KeyError, OSError, RecursionError):
        raise DeviceError(f"{own} cannot be read: delete it, or measure again") from None
    if allowed is None:
        raise DeviceError(
            f"what int8 costs a model of this shape ({shape}) was not measured, so the NPU has no part in it: run "
            "`python -m benchmarks.npu_numerics` of the source tree (docs/NPU.md)"
        )
    if not allowed.groups:
        raise DeviceError(
            f"in int8 every matmul of a model of this shape ({shape}) costs too much: use --npu off"
        )
    return allowed
