"""A report from an APU: each kernel's time beside the predicted one, and the five that differ most."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.bench.profile import value_name
from tandem.cli.report import _summary
from tandem.model.synthetic import SyntheticModel
from tandem.plan.predict import Planned
from tandem.plan.rdna3 import FITTED, RDNA3Gpu, launch_time
from tandem.plan.rdna3_step import launches
from tandem.report.predictions import known_gpu, predictions

pytestmark = pytest.mark.fast

MODEL, READ = "gemma-3-1b:q4_0", 80.0
RADEON = "AMD Radeon 780M Graphics (RADV PHOENIX)"


def report(name: str = RADEON, slow: str = "attention") -> dict[str, Any]:
    """As of a machine where every kernel takes what is predicted, but `slow` takes twice that."""
    planned, gpu = (
        Planned(SyntheticModel(MODEL), 8192),
        RDNA3Gpu(12, 2.7, 1024, READ / FITTED.memory, 2 << 20),
    )
    rows, profiles = [], {}
    for batch in (1, 16):
        label = f"decode 32, batch {batch} at 128"
        rows.append({"label": label, "kind": "decode", "tokens": 32, "batch": batch, "depth": 128})
        groups: dict[tuple[str, str], dict[str, Any]] = {}
        for launch, _, work in launches(planned.program, [(128, 1)] * batch):
            key = launch.kernel.name, value_name(launch)
            kernel = groups.setdefault(key, {"kernel": key[0], "name": key[1], "launches": 0, "seconds": 0.0})
            kernel["launches"] += 1
            kernel["seconds"] += launch_time(work, gpu).total * (2 if key[0] == slow else 1)
        profiles[label] = list(groups.values())
    return {
        "asked_for": "vulkan", "problems": [], "device": {"capabilities": {"name": name}},
        "rates": {"read_bytes_per_s": READ * 1e9},
        "bench": [{"model": MODEL, "kv": "f16", "rows": rows, "profiles": profiles}],
    }  # fmt: skip


def test_a_slow_kernel_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    made = report()
    found = predictions(made)
    assert found and found["status"] == "predicted" and found["hardware"] == "phoenix-780m"
    ratios = {k["kernel"]: k["measured_us"] / k["predicted_us"] for k in found["kernels"]}
    assert ratios.pop("attention") == pytest.approx(2, rel=0.2)  # its layers differ: some see a window
    assert len(ratios) > 5 and all(ratio == pytest.approx(1, rel=0.1) for ratio in ratios.values())
    assert len(found["worst"]) == 5 and found["worst"][0]["kernel"] == "attention"
    _summary({**made, "bench": [], "predictions": found})
    assert capsys.readouterr().out.count(" predicted: ") == 5


@pytest.mark.parametrize(
    ("name", "known"),
    [
        (RADEON, "phoenix-780m"),
        ("AMD Radeon 890M Graphics (RADV STRIX1)", "strix-point-890m"),
        ("Radeon 8060S Graphics (RADV GFX1151)", "strix-halo-8060s"),
        ("AMD Radeon RX 7900 XTX (RADV NAVI31)", "rx-7900-xtx"),
        ("NVIDIA H200", None),
        ("llvmpipe (LLVM 15.0.6, 256 bits)", None),
        ("", None),
    ],
)
def test_gpus_are_known_by_their_names(name: str, known: str | None) -> None:
    found = known_gpu(name)
    assert (found and found[0]) == known
    if known is None:
        assert predictions(report(name)) is None
