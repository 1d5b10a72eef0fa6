"""Matmuls in a row without barriers, as `python -m benchmarks.gpu --steady` times them."""

from __future__ import annotations

import pytest

from benchmarks import streams
from tandem.bench.profile import program_of
from tandem.bench.rounds import Bench
from tandem.devices.backends import open_device
from tandem.engine.engine import Engine
from tandem.model.synthetic import SyntheticModel


def test_every_product_is_timed(lavapipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MIN_BYTES", 1.0), ("ROUNDS", 2), ("SECONDS", 0.0)):
        monkeypatch.setattr(streams, name, value)
    device = open_device(lavapipe)
    engine = Engine.load(
        SyntheticModel("smollm2-135m:q8_0", 1), device, context=256, batch=1, prefix_caching=False
    )
    rows = streams.streams(Bench.on(engine))
    assert [row["name"] for row in rows] == ["q+k+v", "attn_out", "ffn_act", "ffn_out", "logits"]
    assert all(row["us"] > 0 for row in rows)
    names = [[launch.kernel.name for launch in program_of(engine, [(100, n)]).launches] for n in (1, 2)]
    assert "norm_finish" in names[0] and "norm_finish" not in names[1], (
        "a profile has the launches of the step"
    )
    device.close()
