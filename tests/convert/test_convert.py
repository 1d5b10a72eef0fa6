"""`tandem convert`. The goldens, which it makes, show that it converts all families as transformers means them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import LLM
from tandem.cli import main
from tandem.convert import tensors as tensors_module
from tandem.convert.convert import FILE_TYPES, convert
from tandem.convert.families import FAMILIES
from tandem.errors import ConversionError, TandemError, UnsupportedModelError
from tandem.gguf.encode import bf16, mxfp4
from tandem.gguf.file import GGUF
from tandem.gguf.formats import by_name, dequantise
from tandem.model.architectures import ARCHITECTURES
from tests.convert.folders import (
    GOLDENS,
    LLAMA,
    MIXTRAL,
    Tensors,
    hybrid,
    llama_tensors,
    safetensors,
    stored,
    tokenizer,
    write_folder,
)
from tests.models.llama_cpp import LlamaCpp

pytestmark = pytest.mark.fast


def values(path: Path) -> Tensors:
    with GGUF.open(path) as gguf:
        return {
            name: dequantise(info.format, gguf.raw(name)).reshape(info.shape)
            for name, info in gguf.tensors.items()
        }


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


def llama(folder: Path, **options: Any) -> Path:
    return write_folder(folder, LLAMA, llama_tensors("llama", 4, 1), **options)


# Architectures whose tensors differ between layers, and one whose experts are stored by columns: a folder is refused as
# an unknown class.
NOT_CONVERTED = {
    "falcon-h1",
    "gemma4",
    "granitehybrid",
    "mamba2",
    "nemotron_h",
    "nemotron_h_moe",
    "qwen3vlmoe",
}


def test_every_family_is_converted() -> None:
    assert {family.architecture for family in FAMILIES.values()} == set(ARCHITECTURES) - NOT_CONVERTED


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_becomes_the_golden(tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_module, "CHUNK_BYTES", 300)  # two rows at a time
    out = tmp_path / "out.gguf"
    convert(llama(tmp_path / "model", shards=shards), out, "f32")
    same(values(out), stored("llama"))
    logits = np.load(GOLDENS / "llama.npz")
    with LLM(out, device="cpu", context=128, kv="f32") as llm:
        found = llm.logits(logits["ids_17"].tolist())
    assert np.abs(found - logits["logits_17"]).max() < 1e-4


def test_experts_are_stacked(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", MIXTRAL, llama_tensors("mixtral", 4, 2), shards=2)
    convert(folder, tmp_path / "out.gguf", "f32")
    same(values(tmp_path / "out.gguf"), stored("mixtral"))


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe"])
def test_hybrids_become_the_golden(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of values in another order, decays as logarithms, norms around 0; and the keys that say so."""
    monkeypatch.setattr(tensors_module, "CHUNK_BYTES", 300)
    config, tensors = hybrid(name)
    folder, out = write_folder(tmp_path / "model", config, tensors, shards=2), tmp_path / "out.gguf"
    convert(folder, out, "f32")
    wanted, found = stored(name), values(out)
    assert found.keys() == wanted.keys()
    for tensor, expected in wanted.items():
        assert np.allclose(found[tensor], expected, rtol=1e-6, atol=1e-6), tensor
    logits = np.load(GOLDENS / f"{name}.npz")
    with LLM(out, device="cpu", context=128, kv="f32") as llm:
        computed = llm.logits(logits["ids_17"].tolist())
    assert np.abs(computed - logits["logits_17"]).max() < 1e-4


def test_a_hybrid_with_other_heads_than_its_tensors(tmp_path: Path) -> None:
    config, tensors = hybrid("qwen35")
    for change in (
        {"linear_num_value_heads": 3}, {"linear_num_value_heads": 8}, {"linear_num_key_heads": 0},
        {"linear_value_head_dim": 10**6}, {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        {"layer_types": ["full_attention", "linear_attention"] * 2},
    ):  # fmt: skip
        folder = write_folder(tmp_path / "model", config | change, tensors)
        with pytest.raises(ConversionError, match=r"linear_|layer_types|full_attention|blk\.[01]\."):
            convert(folder, tmp_path / "out.gguf", "f32")


def test_mxfp4_experts_stay_as_they_are(tmp_path: Path) -> None:
    """gpt-oss: blocks with elements 2i and 2i + 1 in a byte, rows of gate and up in turn."""
    rng = np.random.default_rng(1)
    gate, up, down = (rng.standard_normal((4, 32, 32)).astype(np.float32) for _ in range(3))
    both = np.stack([gate, up], axis=2).reshape(4, 64, 32)
    tensors = {}
    for name, matrices in (("gate_up", both), ("down", down)):
        raw = mxfp4(matrices.reshape(-1, 32))  # [blocks, 17]
        nibbles = np.concatenate([raw[:, 1:] & 15, raw[:, 1:] >> 4], axis=1)
        pairs = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        stem = f"model.layers.0.mlp.experts.{name}_proj_"
        tensors[f"{stem}blocks"] = pairs.reshape(4, -1, 1, 16)
        tensors[f"{stem}scales"] = raw[:, 0].reshape(4, -1, 1)
        tensors[f"{stem}bias"] = rng.standard_normal((4, matrices.shape[1])).astype(np.float32)
    old = {
        name: array for name, array in stored("gpt-oss").items() if name.startswith(("blk.0", "out", "tok"))
    }
    names = {"attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}
    names |= {
        f"attn_{x}.": f"self_attn.{y}_proj." for x, y in zip(("q", "k", "v", "output"), "qkvo", strict=True)
    }
    names |= {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    names |= {"blk.": "model.layers.", "token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for name, array in old.items():
        if "_exps" not in name:
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            tensors["lm_head.weight" if name == "output.weight" else name] = array
    config = LLAMA | {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "head_dim": 16,
        "sliding_window": 8,
        "tie_word_embeddings": False,
    }
    folder, out = write_folder(tmp_path / "model", config, tensors), tmp_path / "out.gguf"
    convert(folder, out, "q8_0")
    found = values(out)
    for name, matrix in (("gate", gate), ("up", up), ("down", down)):
        rounded = dequantise(by_name("MXFP4"), mxfp4(matrix.reshape(-1, 32))).reshape(matrix.shape)
        assert np.array_equal(found[f"blk.0.ffn_{name}_exps.weight"], rounded)
    bias = tensors["model.layers.0.mlp.experts.gate_up_proj_bias"]
    assert np.array_equal(found["blk.0.ffn_up_exps.bias"], bias[:, 1::2])


@pytest.mark.parametrize("type", FILE_TYPES)
def test_types_load_here_and_in_llama_cpp(type: str, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert main(["convert", str(llama(tmp_path / "model")), "-o", str(out), "--type", type]) == 0
    ids = np.load(GOLDENS / "llama.npz")["ids_17"].tolist()
    with GGUF.open(out) as gguf:
        formats = {info.format.name for info in gguf.tensors.values()}
    assert formats <= {"F32", type.upper(), "Q8_0" if type == "q4_0" else type.upper()}
    with LLM(out, device="cpu", context=128) as llm:
        ours = llm.logits(ids)
        assert llm.generate("the", max_tokens=4).text is not None
    theirs = LlamaCpp(out, 128)
    [logits] = theirs.logits(ids)
    assert theirs.tokenize("the") == [1, 265]
    # Both round activations, to int8 or float16, each in its own way.
    error = np.sqrt(np.mean((ours - logits) ** 2)) / logits.std()
    assert error < (0.03 if type.startswith("q") else 0.01)


def test_the_tokenizer_of_a_sentencepiece_json(tmp_path: Path) -> None:
    convert(llama(tmp_path / "model"), tmp_path / "out.gguf")
    with LLM(tmp_path / "out.gguf", device="cpu", context=64) as llm:
        ids = llm.tokenize("the")
    assert ids[-1] == 265  # ▁the, by the order of merges


def test_bfloat16_and_float16_are_read(tmp_path: Path) -> None:
    exact = llama_tensors("llama", 4, 1)  # multiples of 1/64: few bits
    low = {
        name: (bf16(array.reshape(-1, 1)).view(np.uint16) if i % 2 else array.astype(np.float16)).reshape(
            array.shape
        )
        for i, (name, array) in enumerate(exact.items())
    }
    convert(write_folder(tmp_path / "model", LLAMA, low), tmp_path / "out.gguf", "f32")
    same(values(tmp_path / "out.gguf"), stored("llama"))


Break = Callable[[Path], object]


def edit(name: str, **changes: Any) -> Break:
    def change(folder: Path) -> None:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def with_tensors(change: Callable[[Tensors], object]) -> Break:
    def write(folder: Path) -> None:
        tensors = llama_tensors("llama", 4, 1)
        change(tensors)
        (folder / "model.safetensors").write_bytes(safetensors(tensors))

    return write


def with_bytes(data: bytes) -> Break:
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


def header(entry: dict[str, Any]) -> bytes:
    raw = json.dumps({"x": entry}).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(64)


GATE, INDEX = "model.layers.0.mlp.gate_proj.weight", "model.safetensors.index.json"
BROKEN: dict[str, tuple[Break, str]] = {
    "unknown class": (edit("config", architectures=["NoSuchForCausalLM"]), "NoSuchForCausalLM, which"),
    "no class": (edit("config", architectures=None), "None, which"),
    "not JSON": (lambda f: (f / "config.json").write_bytes(b"{"), "not JSON"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "neither tokenizer.json"),
    "missing shard": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"x": "a.safetensors"}}'),
        "a.safetensors is missing",
    ),
    "shard elsewhere": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"x": "../a.safetensors"}}'),
        "no file beside it",
    ),
    "wrong shape": (with_tensors(lambda t: t.update({GATE: np.zeros((63, 32))})), "shape is (63, 32)"),
    "missing tensor": (with_tensors(lambda t: t.pop(GATE)), "the tensor is missing"),
    "unknown tensor": (with_tensors(lambda t: t.update({"model.x": np.zeros(3)})), "model.x is not a tensor"),
    "wrong heads": (edit("config", num_attention_heads=7), "not 7 heads"),
    "a size of text": (edit("config", hidden_size="32"), "hidden_size: 32 is no size"),
    "huge layers": (edit("config", num_hidden_layers=1 << 40), "is no size"),
    "unknown RoPE": (edit("config", rope_scaling={"type": "spiral", "factor": 2.0}), "'spiral'"),
    "unigrams": (edit("tokenizer", model={"type": "Unigram"}), "Unigram"),
    "large vocabulary": (edit("tokenizer", added_tokens=[{"id": 900, "content": "x"}]), "901 tokens"),
    "no pre-tokenizer": (
        edit("tokenizer", model={"type": "BPE", "vocab": {}, "merges": []}),
        "pre-tokenizer",
    ),
    "endless pattern": (
        edit(
            "tokenizer",
            model={"type": "BPE", "vocab": {}, "merges": []},
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated"},
        ),
        "pattern of the pre-tokenizer is wrong",
    ),
    "empty file": (with_bytes(b""), "no safetensors"),
    "long header": (with_bytes(struct.pack("<Q", 1 << 63) + b"{}"), "too long"),
    "nested header": (with_bytes(struct.pack("<Q", 100000) + b"[" * 100000), "not JSON"),
    "cut short": (with_bytes(header({"dtype": "F32", "shape": [64], "data_offsets": [0, 256]})), "cut short"),
    "lying shape": (with_bytes(header({"dtype": "F32", "shape": [3], "data_offsets": [0, 64]})), "cut short"),
    "negative": (with_bytes(header({"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]})), "no dtype"),
    "nothing": (with_bytes(header({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})), "shape [0]"),
    "float8": (with_bytes(header({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]})), "F8_E4M3"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_one_sentence(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it, expected = BROKEN[kind]
    break_it(folder := llama(tmp_path / "model"))
    out = tmp_path / "out" / "x.gguf"
    out.parent.mkdir()
    with pytest.raises((ConversionError, UnsupportedModelError)) as raised:
        convert(folder, out)
    assert expected in str(raised.value) and "\n" not in str(raised.value)
    assert main(["convert", str(folder), "-o", str(out)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(out.parent.iterdir())  # neither a file nor a part of one


def test_a_former_file_stays_if_the_folder_is_broken(tmp_path: Path) -> None:
    folder, out = llama(tmp_path / "model"), tmp_path / "out.gguf"
    out.write_bytes(b"former")
    BROKEN["wrong shape"][0](folder)
    with pytest.raises(TandemError):
        convert(folder, out)
    assert out.read_bytes() == b"former"
    llama(folder)
    convert(folder, out)
    assert out.read_bytes()[:4] == b"GGUF"


def test_options_of_the_tokenizer(tmp_path: Path) -> None:
    options = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "add_bos_token": False,
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    }
    generation = {"eos_token_id": [2, 1]}
    folder = llama(tmp_path / "model", tokenizer_config=options, generation_config=generation)
    convert(folder, tmp_path / "out.gguf")
    with GGUF.open(tmp_path / "out.gguf") as gguf:
        keys = {key.removeprefix("tokenizer.ggml."): value for key, value in gguf.metadata.items()}
    assert (keys["bos_token_id"], keys["eos_token_id"], keys["eot_token_id"]) == (1, 2, 1)
    assert keys["add_bos_token"] is False and keys["add_space_prefix"] is True
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    assert len(tokenizer()["model"]["vocab"]) == len(keys["tokens"])
