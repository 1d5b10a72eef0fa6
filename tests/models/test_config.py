"""How a file's keys are read where files differ; what the keys do to the logits is in test_goldens.py."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import LLM, TandemError
from tandem.errors import ModelFileError
from tandem.gguf.file import GGUF
from tandem.model.config import Metadata
from tests.cli.tiny_model import write_tiny_model
from tests.gguf_files import Key, Tensor, write

pytestmark = pytest.mark.fast


def metadata(path: Path, keys: dict[str, tuple[str, Any]], *tensors: Tensor) -> Metadata:
    listed: list[Key] = [
        ("general.architecture", "str", "a"),
        *((f"a.{key}", *value) for key, value in keys.items()),
    ]
    return Metadata(GGUF.open(write(path / "a.gguf", listed, list(tensors))))


@pytest.mark.parametrize(
    ("keys", "linear", "yarn"),
    [
        ({}, 1.0, None),
        ({"rope.scaling.factor": ("f32", 4.0)}, 4.0, None),
        ({"rope.scale_linear": ("f32", 4.0)}, 4.0, None),
        ({"rope.scaling.factor": ("f32", 0.0)}, 1.0, None),
        ({"rope.scaling.type": ("str", "none"), "rope.scaling.factor": ("f32", 4.0)}, 1.0, None),
        ({"rope.scaling.type": ("str", "linear"), "rope.scaling.factor": ("f32", 4.0)}, 4.0, None),
        (
            {
                "rope.scaling.type": ("str", "yarn"),
                "rope.scaling.factor": ("f32", 4.0),
                "context_length": ("u32", 99),
            },
            1.0,
            (4.0, 99.0, 32.0, 1.0, 1.0),
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, keys: dict[str, tuple[str, Any]], linear: float, yarn: Any) -> None:
    """As llama.cpp: a factor without a type is linear, and the type "none" is none whatever the factor."""
    rope = metadata(tmp_path, keys).rope(64)
    assert (rope.linear, rope.yarn, rope.rot_dim, rope.base) == (linear, yarn, 64, 10000.0)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"rope.scaling.type": ("str", "longrope")}, "'longrope' is unknown"),
        ({"rope.scaling.type": ("str", "long\n" * 99)}, r"^\S*: a.rope.scaling.type at byte \d+: .{,300}$"),
        (
            {
                "rope.scaling.type": ("str", "yarn"),
                "rope.scaling.factor": ("f32", 1e-6),
                "rope.scaling.yarn_log_multiplier": ("f32", 1.0),
                "context_length": ("u32", 99),
            },
            "the magnitude of YaRN is divided by -",
        ),
        ({"rope.dimension_count": ("u32", 65)}, "65 is not an even number up to the head size, 64"),
        ({"rope.dimension_count": ("u32", 63)}, "63 is not an even number"),
        ({"rope.freq_base": ("f32", float("nan"))}, "not a finite number"),
        ({"rope.freq_base": ("f32", 1.0)}, "1 is not more than 1"),
        ({"rope.freq_base": ("f32", -5.0)}, "-5 is not from 1e-12 to 1e"),
        ({"rope.scaling.factor": ("f32", -1.0)}, "-1 is not from"),
        *(
            (
                {
                    "context_length": ("u32", 99),
                    "rope.scaling.type": ("str", "yarn"),
                    f"rope.scaling.{name}": ("f32", value),
                },
                "is not from 1e-12 to 1e",
            )
            for name in ("yarn_beta_fast", "yarn_beta_slow", "original_context_length", "attn_factor")
            for value in (0.0, -1.0, 1e30)
        ),
    ],
)
def test_rope_that_makes_no_sense(tmp_path: Path, keys: dict[str, tuple[str, Any]], problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        metadata(tmp_path, keys).rope(64)


@pytest.mark.parametrize(
    "value",
    [("[u32]", []), ("[u32]", [0, 1]), ("[u32]", list(range(999))), ("[[u32]]", [[1, 2], [3]]),
     ("[str]", ["a\n"] * 99), ("str", "a\n" * 999), ("f32", float("nan")), ("i32", -1)],
)  # fmt: skip
@pytest.mark.parametrize("zero", [False, True])
def test_a_size_that_is_none(tmp_path: Path, value: tuple[str, Any], zero: bool) -> None:
    with pytest.raises(ModelFileError, match="is not a size from 1 to") as raised:
        metadata(tmp_path, {"count": value}).count("count", 1, zero=zero)
    assert raised.value.problem.isprintable() and len(raised.value.problem) < 300


def test_a_pattern_of_arrays_is_none(tmp_path: Path) -> None:
    keys = {"attention.sliding_window_pattern": ("[[bool]]", [[True, False], [True, True]])}
    with pytest.raises(ModelFileError, match="these are arrays, not flags"):
        metadata(tmp_path, keys).sliding_layers(2, 2)


def test_too_many_rope_factors_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GGUF, "raw", lambda *_: pytest.fail("they take eight times their size"))
    with pytest.raises(ModelFileError, match="must be 32 positive numbers"):
        metadata(tmp_path, {}, ("rope_freqs.weight", "F16", np.ones(4096, np.float32))).rope(64)


@pytest.mark.parametrize("format", ["F32", "F16"])
def test_rope_factors_in_any_format(tmp_path: Path, format: str) -> None:
    factors = np.arange(1, 33, dtype=np.float32)
    rope = metadata(tmp_path, {}, ("rope_freqs.weight", format, factors)).rope(64)
    assert rope.factors == tuple(range(1, 33))


@pytest.mark.parametrize(
    "wrong", [np.ones(31), np.zeros(32), np.full(32, np.nan)], ids=("few", "zero", "nan")
)
def test_rope_factors_that_make_no_sense(tmp_path: Path, wrong: Any) -> None:
    tensor = ("rope_freqs.weight", "F32", wrong.astype(np.float32))
    with pytest.raises(ModelFileError, match="must be 32 positive numbers"):
        metadata(tmp_path, {}, tensor).rope(64)


@pytest.mark.parametrize(
    ("pattern", "sliding"),
    [
        (None, [True, False, True, False]),
        (("u32", 3), [True, True, False, True]),
        (("u32", 1), [False] * 4),
        (("[bool]", [False, True, True, False]), [False, True, True, False]),
    ],
)
def test_sliding_layers(tmp_path: Path, pattern: Any, sliding: list[bool]) -> None:
    keys = {"attention.sliding_window_pattern": pattern} if pattern else {}
    assert metadata(tmp_path, keys).sliding_layers(4, every=2) == sliding


def test_a_pattern_of_another_length(tmp_path: Path) -> None:
    keys = {"attention.sliding_window_pattern": ("[bool]", [True])}
    with pytest.raises(ModelFileError, match="1 flags for 4 layers"):
        metadata(tmp_path, keys).sliding_layers(4, every=2)


def test_more_heads_than_columns(tmp_path: Path) -> None:
    keys = {"embedding_length": ("u32", 64), "attention.head_count": ("u32", 65)}
    with pytest.raises(ModelFileError, match="more heads than columns"):
        metadata(tmp_path, keys).head_dim()


def test_mutated_models_run_or_are_refused(tmp_path: Path) -> None:
    """Whatever a header says, from its keys to its last token: an answer, or an error that says what is wrong."""
    path = write_tiny_model(tmp_path / "tiny.gguf", context=512)
    with GGUF.open(path) as gguf:
        header = min(tensor.offset for tensor in gguf.tensors.values())
    sound, rng, answers = path.read_bytes(), random.Random(4), 0
    for _ in range(1000):
        broken = bytearray(sound)
        for _ in range(rng.choice((1, 1, 2, 5))):
            number = rng.choice(
                (rng.randrange(256), 0, 1, 65536, 2**31, 2**32 - 1, 2**60, 2**64 - 1, 0x7FC00000)
            )
            size = rng.choice((1, 4, 8))
            at = rng.randrange(header - size)
            broken[at : at + size] = (number % 256**size).to_bytes(size, "little")
        path.unlink()
        path.write_bytes(broken)
        try:
            with LLM(path, threads=1, context=64, batch=1) as llm:
                answers += len(llm.generate("Hello", max_tokens=2).token_ids) > 0
        except TandemError as error:
            assert str(error)
    assert answers > 50
