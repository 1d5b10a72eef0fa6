"""Mixtures of experts and of formats in odd files: a typed error before anything is computed, or the right numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem import LLM
from tandem.errors import ModelFileError
from tandem.gguf.formats import by_name, dequantise, quantise
from tandem.model.model import Model
from tests.gguf_files import Key, write
from tests.models.test_reference import GOLDENS

DIM, VOCAB = 256, 48
Array = np.ndarray


def write_model(
    path: Path, hidden: int, experts: int, used: int = 2, extra: str = "", **formats: str
) -> Path:
    """A llama of one layer. `formats`: of gate, up and down; those of the form "Q2_K as F32" have the values that Q2_K
    has, in F32."""
    rng = np.random.default_rng(0)
    stack = (experts,) if experts else ()
    suffix = "_exps" if experts else ""
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, DIM), "output_norm": (DIM,)}
    shapes |= {f"blk.0.attn_{part}": (DIM, DIM) for part in ("q", "k", "v", "output")}
    shapes |= {"blk.0.attn_norm": (DIM,), "blk.0.ffn_norm": (DIM,)}
    shapes |= {f"blk.0.ffn_{part}{suffix}": (*stack, hidden, DIM) for part in ("gate", "up")}
    shapes[f"blk.0.ffn_down{suffix}"] = (*stack, DIM, hidden)
    if experts:
        shapes["blk.0.ffn_gate_inp"] = (experts, DIM)
    if extra:
        shapes[extra] = (DIM,)
    tensors = []
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        part = name.removeprefix("blk.0.ffn_").removesuffix("_exps")
        first, _, then = formats.get(part, "F32").partition(" as ")
        if then:
            values = dequantise(by_name(first), quantise(by_name(first), values))
        tensors.append((f"{name}.weight", then or first, values))
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": DIM, "feed_forward_length": hidden,
             "attention.head_count": 2}  # fmt: skip
    if experts:
        sizes |= {"expert_count": experts, "expert_used_count": used}
    keys: list[Key] = [("general.architecture", "str", "llama")]
    keys += [(f"llama.{key}", "u32", size) for key, size in sizes.items()]
    keys += [
        ("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5),
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.tokens", "[str]", [chr(33 + id) for id in range(VOCAB)]),
        ("tokenizer.ggml.merges", "[str]", []),
    ]
    return write(path, keys, tensors)


def logits(path: Path) -> Array:
    with LLM(path, device="cpu", threads=1, context=16, batch=1) as llm:
        return llm.logits([1, 2, 3, 4])


@pytest.mark.parametrize("hidden", [16, 48, 100])
@pytest.mark.parametrize("format", ["F32", "F16"])
def test_experts_of_no_whole_panels_are_refused(hidden: int, format: str, tmp_path: Path) -> None:
    """The kernels would read behind the last expert."""
    path = write_model(tmp_path / "m.gguf", hidden, 3, gate=format, up=format, down=format)
    with pytest.raises(ModelFileError, match="no multiple of 32"):
        LLM(path, device="cpu")


def test_a_gate_without_a_shared_expert_is_not_used(tmp_path: Path) -> None:
    gate = write_model(tmp_path / "gate.gguf", 64, 3, extra="blk.0.ffn_gate_inp_shexp")
    assert (logits(gate) == logits(write_model(tmp_path / "none.gguf", 64, 3))).all()


@pytest.mark.parametrize(("gate", "up"), [("Q2_K", "F32"), ("F32", "Q2_K"), ("Q4_0", "F16")])
def test_gate_and_up_of_different_formats_keep_their_precision(gate: str, up: str, tmp_path: Path) -> None:
    mixed = logits(write_model(tmp_path / "mixed.gguf", 64, 3, gate=gate, up=up))
    exact = logits(write_model(tmp_path / "exact.gguf", 64, 3, gate=f"{gate} as F32", up=f"{up} as F32"))
    assert np.abs(mixed - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("format", ["I16", "F64"])
def test_a_row_that_is_no_whole_number_of_blocks(format: str, tmp_path: Path) -> None:
    """A format without panels of its own is converted, to one that has no blocks."""
    odd = logits(write_model(tmp_path / "odd.gguf", 48, 0, down=format))
    same = logits(write_model(tmp_path / "same.gguf", 48, 0, down=f"{format} as F32"))
    assert np.abs(odd - same).max() <= 1e-4 * np.abs(same).max()


@pytest.mark.parametrize("parts", ["kv", "qv", "qk"])
def test_any_two_of_query_key_and_value_may_share_a_format(
    parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each family: two of one format are one matmul, whichever they are."""
    paths = sorted(GOLDENS.glob("*.gguf"))
    same = {path: logits(path) for path in paths}
    matrices = Model.matrices
    names = tuple(f"attn_{part}.weight" for part in parts)

    def mixed(model: Model) -> dict[str, tuple[str, int, int]]:
        found = matrices(model)
        return {name: ("f16", *found[name][1:]) if name.endswith(names) else found[name] for name in found}

    monkeypatch.setattr(Model, "matrices", mixed)
    for path in paths:
        assert np.abs(logits(path) - same[path]).max() < 0.02 * np.abs(same[path]).max(), path.name
