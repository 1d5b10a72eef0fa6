"""Each fusion pass changes the launches and no bit of the results, because a fused kernel rounds where its parts do;
and launches between two barriers run in any order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem.kernels.kernel import Array
from tandem.program.fuse import PASSES
from tandem.program.program import Launch
from tests.engine.tiny_models import opened, write_model
from tests.packages import model_path
from tests.program.programs import GOLDENS, PASS_SETS
from tests.program.test_real_programs import sections

IDS = np.random.default_rng(2).integers(0, 250, 40).tolist()
OTHER_SETS = {name: passes for name, passes in PASS_SETS.items() if passes != PASSES}


def logits(path: Path, passes: tuple[str, ...], ids: list[int] = IDS, **options: str) -> tuple[int, Array]:
    """How many launches a step has, and what comes out."""
    with opened(path, passes=passes, context=128, batch=16, **options) as engine:
        return len(engine.program.launches), engine.logits(ids)


def check(path: Path, **options: str) -> None:
    launches, fused = logits(path, PASSES, **options)
    for label, passes in OTHER_SETS.items():
        count, plain = logits(path, passes, **options)
        assert count >= launches
        assert (fused == plain).all(), f"{label} logits differ by {np.abs(fused - plain).max()}"


@pytest.mark.fast
@pytest.mark.parametrize("name", [name for name in GOLDENS if "27b" not in name])
def test_golden_models_in_float32(name: str) -> None:
    check(GOLDENS[name], kv="f32")


@pytest.mark.fast
@pytest.mark.parametrize("name", ["qwen2", "gemma3-pattern3"])
def test_keys_and_values_in_int8(name: str) -> None:
    check(GOLDENS[name], kv="q8")


@pytest.mark.fast
@pytest.mark.parametrize("format", ["Q4_0", "Q6_K", "F16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_quantised_models(format: str, architecture: str, tmp_path: Path) -> None:
    check(write_model(tmp_path / "tiny.gguf", format, architecture))


def test_a_real_model() -> None:
    path = model_path("smollm2")
    assert (logits(path, PASSES)[1] == logits(path, ())[1]).all()


@pytest.mark.fast
def test_each_pass_saves_launches(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "Q4_0", "gemma3")
    launches, _ = logits(path, PASSES)
    assert all(logits(path, passes)[0] > launches for passes in OTHER_SETS.values())


@pytest.mark.fast
def test_launches_between_barriers_run_in_any_order() -> None:
    for name in ("llama", "gemma3-pattern3", "qwen3"):
        with opened(GOLDENS[name], passes=(), context=128, batch=16, threads=1) as engine:
            expected = engine.logits(IDS)
            turned: list[Launch] = []
            for section in sections(engine.program.launches):
                barrier, section[0].barrier = section[0].barrier, False
                section[-1].barrier = barrier
                turned += reversed(section)
            assert turned != engine.program.launches
            engine.program.launches[:] = turned
            engine.step_slots[0].recording = engine.device.record(engine.program)
            assert (engine.logits(IDS) == expected).all()
