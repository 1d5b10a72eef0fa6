"""The keys of a GGUF file that config.json has under other names, and the tensors with factors of RoPE."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from tandem.convert.family import CLS, LAST, MEAN, RANK, Family, Keys
from tandem.convert.hf_config import HFConfig
from tandem.convert.safetensors import read_json
from tandem.errors import UnsupportedModelError
from tandem.kernels.kernel import Array

BETA_FAST, BETA_SLOW = 32.0, 1.0  # of YaRN, where a file does not say


def model_keys(c: HFConfig, family: Family) -> Keys:
    """Returns the keys after "{architecture}."."""
    for name, value in family.required.items():
        if (found := c.get(name, default=value)) != value:
            c.fail(name, f"{found} is not what a {family.architecture} file implies, {value}")
    kind = "layer_norm" if family.layer_norm else "layer_norm_rms"
    keys: Keys = {
        "context_length": c.count("max_position_embeddings"),
        "embedding_length": c.count("hidden_size"),
        "block_count": c.layers,
        "feed_forward_length": c.count("intermediate_size", "block_ff_dim"),
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        f"attention.{kind}_epsilon": c.number("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    }
    if c.get("head_dim"):
        keys |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    if family.pooling:
        return keys | family.keys(c)
    return keys | _expert_keys(c) | rope_keys(c, family) | family.keys(c)


def _expert_keys(c: HFConfig) -> Keys:
    experts = c.get("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if not experts:
        return {}
    return {
        "expert_count": c.count("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "expert_used_count": c.count("num_experts_per_tok", "moe_k", "moe_topk"),
        "expert_feed_forward_length": c.count("moe_intermediate_size", "intermediate_size"),
    }


def encoder_keys(folder: Path, c: HFConfig, family: Family) -> Keys:
    """Of a model that embeds or ranks texts: how a text's vector is computed from its tokens, as a file of
    sentence-transformers says, and how many types of tokens there are."""
    path, kind = folder / "1_Pooling" / "config.json", family.pooling
    if path.exists() and kind != RANK:
        modes = read_json(path)
        kinds = {"mean_tokens": MEAN, "cls_token": CLS, "lasttoken": LAST}
        chosen = [number for name, number in kinds.items() if modes.get(f"pooling_mode_{name}") is True]
        if len(chosen) != 1:
            raise UnsupportedModelError(
                f"{path} pools in a way that this version does not: use another model"
            )
        kind = chosen[0]
    keys: Keys = {f"{family.architecture}.pooling_type": kind} if kind else {}
    if family.architecture == "modern-bert":  # its tokenizer.json says so, in a template
        keys |= {f"tokenizer.ggml.add_{end}_token": True for end in ("bos", "eos")}
    if types := c.count("type_vocab_size", default=0):
        keys["tokenizer.ggml.token_type_count"] = types
    return keys


def rope_keys(c: HFConfig, family: Family) -> Keys:
    rope, local = c.rope(), c.rope("sliding_attention")
    kind, base = rope["rope_type"], _number(c, rope, "rope_theta")
    keys: Keys = {} if family.architecture == "gemma2" else {"rope.freq_base": base}
    partial = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", "rotary_pct", default=1.0))
    partial = _number(c, {"partial_rotary_factor": partial}, "partial_rotary_factor")
    if family.reordered:
        keys["vocab_size"] = c.count("vocab_size")
    if family.reordered or partial != 1.0:
        keys["rope.dimension_count"] = int(c.head_dim * partial)
    if local:
        keys["rope.freq_base_swa"] = _number(c, local, "rope_theta")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": _number(c, rope, "factor")}
    if kind == "yarn":
        keys |= _yarn_keys(c, rope)
    elif kind in ("longrope", "su"):
        trained = _trained_context(c, rope)
        scale = max(c.count("max_position_embeddings") / trained, 1.0)
        magnitude = math.sqrt(1 + math.log(scale) / math.log(trained))
        keys |= {"rope.scaling.original_context_length": trained, "rope.scaling.attn_factor": magnitude}
    elif kind == "dynamic" and "alpha" in rope:  # HunYuan: the same as a larger base
        alpha, width = _number(c, rope, "alpha"), c.head_dim
        if width <= 2:
            c.fail("head_dim", f"{width} is too small")
        keys["rope.freq_base"] = base * alpha ** (width / (width - 2))
    elif kind not in ("default", "linear", "llama3", "mrope"):
        raise UnsupportedModelError(
            f"the model's RoPE is scaled in the way {kind!r}: use one with linear, llama3, longrope or yarn"
        )
    return keys


def _yarn_keys(c: HFConfig, rope: dict[str, Any]) -> Keys:
    factor = _number(c, rope, "factor")
    keys: Keys = {"rope.scaling.original_context_length": _trained_context(c, rope)}
    for name, usual in (("beta_fast", BETA_FAST), ("beta_slow", BETA_SLOW)):
        if rope.get(name) is not None and (beta := _number(c, rope, name)) != usual:
            keys[f"rope.scaling.yarn_{name}"] = beta
    # GGUF files imply the magnitude 0.1 ln(factor) + 1, divided by that with `yarn_log_multiplier`.
    usual, magnitude = 0.1 * math.log(factor) + 1, 0.0
    if rope.get("mscale_all_dim"):
        keys["rope.scaling.yarn_log_multiplier"] = _number(c, rope, "mscale_all_dim")
        scale = _number(c, rope, "mscale") if rope.get("mscale") else 1.0
        magnitude = 0.1 * scale * math.log(factor) + 1
    elif rope.get("attention_factor"):
        magnitude = _number(c, rope, "attention_factor")
    if magnitude and not math.isclose(magnitude, usual):
        keys["rope.scaling.attn_factor"] = magnitude / usual
    return keys


def rope_tensors(c: HFConfig) -> dict[str, Array]:
    """Returns divisors of frequencies: those of Llama 3, or of Phi 3 for short and long contexts."""
    rope, head_dim = c.rope(), c.head_dim
    if rope["rope_type"] in ("longrope", "su"):
        return {
            f"rope_factors_{kind}.weight": np.array(
                c.numbers(f"{kind}_factor", rope.get(f"{kind}_factor")), np.float32
            )
            for kind in ("long", "short")
        }
    if rope["rope_type"] != "llama3":
        return {}
    factor, low, high = (_number(c, rope, n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = _trained_context(c, rope) * _number(c, rope, "rope_theta") ** -(
        np.arange(0, head_dim, 2) / head_dim
    )
    blend = np.clip((turns / (2 * np.pi) - low) / (high - low), 0.0, 1.0)  # 1: fast, not divided
    return {"rope_freqs.weight": (1 / ((1 - blend) / factor + blend)).astype(np.float32)}


def _trained_context(c: HFConfig, rope: dict[str, Any]) -> int:
    own = rope.get("original_max_position_embeddings")
    if type(own) is int and own > 1:
        return own
    return c.count("original_max_position_embeddings", "max_position_embeddings", least=2)


def _number(c: HFConfig, rope: dict[str, Any], name: str) -> float:
    value = rope.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
        c.fail(f"rope_parameters.{name}", f"{value} is no positive number")
    return float(value)
