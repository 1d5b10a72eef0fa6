"""Hugging Face folders made from golden models: the inverse of what `tandem convert` does, for a few families."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from tandem.gguf.file import GGUF
from tandem.gguf.formats import dequantise

GOLDENS = Path(__file__).parent.parent / "models/goldens"
Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "vocab_size": 266,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


def safetensors(tensors: Tensors) -> bytes:
    """A file. uint8 stays as it is, all others are float32; uint16 are the bits of bfloat16."""
    header, data = {}, b""
    for name, values in tensors.items():
        dtype = {"uint8": "U8", "uint16": "BF16", "float16": "F16"}.get(str(values.dtype), "F32")
        raw = (values.astype(np.float32) if dtype == "F32" else values).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    head = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    return struct.pack("<Q", len(head)) + head + data


def write_folder(
    folder: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1, **files: Any
) -> Path:
    """`files`: further JSON files, such as tokenizer."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors(tensors))
    else:
        of = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
        for file in set(of.values()):
            (folder / file).write_bytes(safetensors({n: tensors[n] for n in names if of[n] == file}))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))
    for name, content in ({"config": config, "tokenizer": tokenizer()} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def tokenizer() -> dict[str, Any]:
    """The vocabulary of the goldens with SentencePiece: special tokens, bytes, a few pieces."""
    special, pieces = ["<unk>", "<s>", "</s>"], ["\u2581", "e", "t", "a", "he", "\u2581t", "\u2581the"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    merges = [["h", "e"], ["\u2581", "t"], ["\u2581t", "he"]]
    model = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": merges}
    added = [{"id": i, "content": text, "special": True} for i, text in enumerate(special)]
    return {
        "model": model | {"vocab": {text: id for id, text in enumerate(tokens)}},
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}]},
    }


def stored(name: str) -> Tensors:
    with GGUF.open(GOLDENS / f"{name}.gguf") as gguf:
        return {
            tensor: dequantise(info.format, gguf.raw(tensor)).reshape(info.shape)
            for tensor, info in gguf.tensors.items()
        }


def halves(values: Array, heads: int) -> Array:
    """Neighbours to halves: the order of Hugging Face."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def llama_tensors(name: str, heads: int, kv_heads: int) -> Tensors:
    """The tensors of a golden of `llama`, with or without experts, under Hugging Face's names."""
    tensors: Tensors = {}
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for full, values in stored(name).items():
        stem, kind = full.rsplit(".", 1)
        if stem in outside:
            tensors[f"{outside[stem]}.{kind}"] = values
            continue
        _, layer, part = stem.split(".")
        prefix = f"model.layers.{layer}."
        if part in ("attn_q", "attn_k"):
            values = halves(values, heads if part == "attn_q" else kv_heads)
        if part.endswith("_exps"):
            which = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}[part]
            experts = f"{prefix}block_sparse_moe.experts"
            tensors |= {f"{experts}.{i}.{which}.{kind}": matrix for i, matrix in enumerate(values)}
        elif part == "ffn_gate_inp":
            tensors[f"{prefix}block_sparse_moe.gate.{kind}"] = values
        else:
            tensors[f"{prefix}{LAYER[part]}.{kind}"] = values
    return tensors
