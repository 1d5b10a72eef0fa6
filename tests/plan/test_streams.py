"""Products in a row without barriers, as `python -m benchmarks.gpu --steady` times them: here on lavapipe."""

from __future__ import annotations

import pytest

from benchmarks import plan_profile, streams
from tandem.bench.profile import left_to_next
from tandem.bench.runs import Bench
from tandem.devices.opening import open_device
from tandem.engine.engine import Engine
from tandem.errors import DeviceError
from tandem.model.synthetic import SyntheticModel


def test_every_product_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LEAST_BYTES", 1.0), ("REPEATS", 1), ("WARM_UP", 0.0)):
        monkeypatch.setattr(streams, name, value)
    try:
        device = open_device("vulkan:lavapipe")
    except DeviceError:
        pytest.skip("there is no lavapipe")
    engine = Engine(SyntheticModel("smollm2-135m:q8_0", 1), device, context=256, batch=1, share=False)
    rows = streams.streams(Bench.on(engine))
    assert [row["name"] for row in rows] == ["q+k+v", "attn_out", "ffn_act", "ffn_out", "logits"]
    assert all(row["us"] > 0 for row in rows)
    monkeypatch.setattr("tandem.devices.vulkan.joining.turning_attention", lambda *_: "done by attention")
    ropes = [i for i, launch in enumerate(engine.program.launches) if launch.kernel.name == "rope"]
    assert left_to_next(engine.program, device, [(100, 1)]) == set(ropes), "what a GPU does not run by itself"
    assert left_to_next(engine.program, device, [(100, 2)]) == set()
    device.close()


def test_they_come_into_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that has them; one that read what is counted, at the bandwidth of reads, is within the aim."""
    run, best = plan_profile.figures.read("h200"), plan_profile.gpu_read_gb_s()
    made = [{"name": p.name, "us": 1.05 * p.nbytes / best / 1e3} for p in plan_profile.products()]
    monkeypatch.setattr(plan_profile.figures, "read", lambda name: {**run, "streams": made})
    assert all(p.row_us and p.is_read_in(p.row_us, best) for p in plan_profile.products())
    text = plan_profile.counted_table()
    assert "5 of 5 in a row" in text and text.count(", +5% |") == 5
    made[0]["us"] *= 1.2
    assert "4 of 5 in a row" in plan_profile.counted_table() and "**+26%**" in plan_profile.counted_table()
