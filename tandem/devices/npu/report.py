"""What `tandem report --npu` says of the NPU itself: what is there, exact results, rates. Never raises.

Emulated; not yet run on a Phoenix.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.devices.npu.compile import find_tools, lower
from tandem.devices.npu.detect import detect
from tandem.devices.npu.emit import VERSION, emit
from tandem.devices.npu.plan import plan_gemm
from tandem.errors import TandemError
from tandem.settings import read_settings

Data = dict[str, Any]
# M, N, K: a small one, then a square of the best published tiles, a chunk of Gemma 3 27B's gate, and one whose time is
# that of its bytes.
SHAPES = ((256, 256, 256), (1792, 1792, 1792), (512, 2048, 5376), (64, 8192, 2048))
ROUNDS = 9


def collect(
    root: Path = Path("/"), shapes: Sequence[tuple[int, int, int]] = SHAPES, rounds: int = ROUNDS
) -> Data:
    """Sections as far as they can be made; `missing` says in a sentence why there are no more."""
    found = detect(root)
    data: Data = {
        "mlir_aie": VERSION,
        "checks": [asdict(check) for check in found.checks],
        "lowering": _lowering(),
        "missing": found.missing,
    }
    if found.missing:
        return data
    try:
        tools = find_tools()
    except TandemError as error:
        return {**data, "missing": str(error)}
    from tandem.devices.npu.trials import attempts  # needs pyxrt

    return {
        **data,
        "tools": tools.versions,
        **attempts(tools, read_settings().pipelines / "npu", shapes, rounds),
    }


def _lowering() -> str:
    """Reports whether a compiler accepts our MLIR. This needs no NPU."""
    aie_opt = shutil.which("aie-opt")
    if aie_opt is None:
        return "no aie-opt on the PATH"
    try:
        for weights in ("int8", "int4"):
            lower(emit(plan_gemm(512, 512, 512, weights=weights)), aie_opt)
    except TandemError as error:
        return str(error)
    return "passed"
