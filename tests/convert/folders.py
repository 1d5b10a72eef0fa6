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


# ---- hybrids: config.json and tensors of goldens that transformers made (tests/models/make_*_goldens.py)

HYBRID = {
    "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 266,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-3, "tie_word_embeddings": False,
}  # fmt: skip
DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
HYBRID_LAYER = LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_gate": "linear_attn.in_proj_z",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
LFM2_LAYER = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
}


def hybrid(name: str) -> tuple[dict[str, Any], Tensors]:
    """The inverse of what a conversion does to a golden with recurrent layers."""
    if name.startswith("lfm2"):
        return _lfm2(name)
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    class_ = {"qwen35": "Qwen3_5ForCausalLM", "qwen35moe": "Qwen3_5MoeForConditionalGeneration"}
    config = HYBRID | DELTA | {"architectures": [class_.get(name, "Qwen3NextForCausalLM")]}
    config |= {"rope_parameters": rope if name == "qwen3next" else rope | {"mrope_section": [2, 1, 1]}}
    if name != "qwen35":
        config |= EXPERTS | {"shared_expert_intermediate_size": 64}
    nested = name == "qwen35moe"  # as models that see images have it
    if nested:
        config = {"architectures": config.pop("architectures"), "text_config": config}
    found: Tensors = {}
    for full, values in stored(name).items():
        stem, values = _delta_name(name, full, values)
        found[stem.replace("model.", "model.language_model.") if nested else stem] = values
    for gate in [name for name in found if name.endswith("experts.gate_proj")]:
        up = found.pop(gate.replace("gate_proj", "up_proj"))
        found[gate.replace("gate_proj", "gate_up_proj")] = np.concatenate([found.pop(gate), up], axis=1)
    if name == "qwen3next":
        _join(found)
    return config, found


def _beside(values: Array, size: int) -> Array:
    """Two heads of keys, each with two heads of values of `size` rows: from apart to beside each other."""
    return values.reshape(2, 2, size, -1).swapaxes(0, 1).reshape(values.shape)


def _delta_name(name: str, full: str, values: Array) -> tuple[str, Array]:
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    stem, _, kind = full.rpartition(".")
    if full.startswith("blk."):
        layer, part = stem.split(".")[1:] if stem.count(".") == 2 else (stem.split(".")[1], kind)
        prefix = f"model.layers.{layer}."
    if full.endswith("norm.weight") and "ssm" not in full:
        values = values - 1
    if stem in outside:
        return f"{outside[stem]}.weight", values
    if part == "ssm_a":
        logs = np.log(-values)
        return f"{prefix}linear_attn.A_log", logs if name == "qwen3next" else _beside(logs, 1)
    if part == "ssm_dt":
        return f"{prefix}linear_attn.dt_bias", values if name == "qwen3next" else _beside(values, 1)
    if part.endswith("_exps"):
        return f"{prefix}mlp.experts.{part[4:-5]}_proj", values
    if part == "ffn_gate_inp_shexp":
        values = values[None]
    if name != "qwen3next":
        if part in ("attn_qkv", "ssm_conv1d"):
            values = np.concatenate([values[:64], _beside(values[64:], 16)])
        elif part in ("attn_gate", "ssm_beta", "ssm_alpha"):
            values = _beside(values, 16 if part == "attn_gate" else 1)
        elif part == "ssm_out":
            values = np.ascontiguousarray(_beside(np.ascontiguousarray(values.T), 16).T)
    return f"{prefix}{HYBRID_LAYER[part]}.weight", values[:, None] if part == "ssm_conv1d" else values


def _join(tensors: Tensors) -> None:
    """Qwen 3 Next: a head of keys has its query, key, values and gates in one run of rows."""
    for name in [name for name in tensors if name.endswith("in_proj_qkv.weight")]:
        qkv, z = tensors.pop(name), tensors.pop(name.replace("qkv", "z"))
        parts = [qkv[:32], qkv[32:64], qkv[64:], z]
        joined = np.concatenate([part.reshape(2, -1, part.shape[1]) for part in parts], axis=1)
        tensors[name.replace("qkv", "qkvz")] = joined.reshape(-1, qkv.shape[1])


def _lfm2(name: str) -> tuple[dict[str, Any], Tensors]:
    kinds = ["conv", "full_attention", "conv", "conv"]
    config = {key: value for key, value in HYBRID.items() if key != "rms_norm_eps"} | {
        "architectures": ["Lfm2ForCausalLM"], "norm_eps": 1e-3, "layer_types": kinds, "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    if name == "lfm2moe":
        config |= EXPERTS | {"architectures": ["Lfm2MoeForCausalLM"], "num_dense_layers": 1}
    found: Tensors = {}
    outside = {
        "token_embd": "model.embed_tokens",
        "token_embd_norm": "model.embedding_norm",
        "output": "lm_head",
    }
    for full, values in stored(name).items():
        stem, _, kind = full.rpartition(".")
        if stem in outside:
            found[f"{outside[stem]}.weight"] = values
            continue
        _, layer, part = stem.split(".", 2)
        prefix = f"model.layers.{layer}."
        if part.endswith("_exps"):
            which = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}[part]
            found |= {f"{prefix}feed_forward.experts.{i}.{which}.weight": one for i, one in enumerate(values)}
        elif part == "exp_probs_b":
            found[f"{prefix}feed_forward.expert_bias"] = values
        else:
            found[f"{prefix}{LFM2_LAYER[part]}.{kind}"] = (
                values[:, None] if part == "shortconv.conv" else values
            )
    return config, found
