"""What Hugging Face's classes are called in GGUF files: one line per class, and the names of tensors and keys.

The names, keys and changes of weights are those that llama.cpp reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tandem.convert.family import MODEL, Experts, Family, Keys, Latent, Names, Order, Rearranged, Stacked
from tandem.convert.hf_config import HFConfig
from tandem.convert.text_encoders import TEXT_ENCODERS
from tandem.kernels.kernel import Array

# Norms after attention and feed-forward, before the residual stream is added.
POST_NORMS: Names = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GPT_OSS_NAMES: Names = {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.experts.gate_up_proj": Stacked(("ffn_gate_exps", "ffn_up_exps"), interleaved=True),
    "mlp.experts.down_proj": Stacked(("ffn_down_exps",), interleaved=True),
}
LATENT_NAMES: Names = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": Latent("attn_k_b", "attn_v_b"),
}
GLM4_NORMS: Names = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}


# ---- Gated DeltaNet


class _DeltaHeads(NamedTuple):
    """How many heads of keys and of values there are, and their sizes."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, c: HFConfig) -> _DeltaHeads:
        keys, values = (c.count(f"linear_num_{part}_heads", least=1, most=4096) for part in ("key", "value"))
        if values % keys:
            c.fail("linear_num_value_heads", f"{values} is not a multiple of {keys} heads of keys")
        dims = (c.count(f"linear_{part}_head_dim", least=1, most=4096) for part in ("key", "value"))
        return cls(keys, values, *dims)

    def check(self, c: HFConfig, count: int, expected: int) -> None:
        if count != expected:
            c.fail("linear_num_value_heads", f"a tensor has {count} rows or columns, not {expected}")


def _tiled(size: str) -> Order:
    """Heads of values that share a head of keys lie apart from each other in files, and beside each other in folders.
    `size`: "head", or "one" value for each."""

    def order(c: HFConfig, count: int) -> Array:
        heads = _DeltaHeads.of(c)
        heads.check(c, count, heads.values * (heads.value_dim if size == "head" else 1))
        rows = np.arange(count).reshape(heads.keys, heads.values // heads.keys, -1)
        return rows.swapaxes(0, 1).ravel()

    return order


def _tiled_values(c: HFConfig, count: int) -> Array:
    """Queries and keys as they are, then values."""
    heads = _DeltaHeads.of(c)
    first = 2 * heads.keys * heads.key_dim
    return np.concatenate([np.arange(first), first + _tiled("head")(c, count - first)])


def _of_each_key_head(*which: int) -> Order:
    """Qwen 3 Next: each head of keys has its query, its key, the values and the gates that share it."""

    def order(c: HFConfig, count: int) -> Array:
        heads = _DeltaHeads.of(c)
        shared = heads.values // heads.keys * heads.value_dim
        heads.check(c, count, heads.keys * 2 * (heads.key_dim + shared))
        rows = np.arange(count).reshape(heads.keys, -1)
        parts = np.split(rows, np.cumsum([heads.key_dim, heads.key_dim, shared]), axis=1)
        return np.concatenate([parts[i].ravel() for i in which])

    return order


def _decay(values: Array) -> Array:
    return -np.exp(values)


QWEN_NAMES: Names = {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.experts.gate_up_proj": Stacked(("ffn_gate_exps", "ffn_up_exps")),
    "mlp.experts.down_proj": Stacked(("ffn_down_exps",)),
    "linear_attn.norm": [Rearranged("ssm_norm.weight")],
}
QWEN35_NAMES: Names = QWEN_NAMES | {
    "linear_attn.in_proj_qkv": [Rearranged("attn_qkv.weight", _tiled_values)],
    "linear_attn.in_proj_z": [Rearranged("attn_gate.weight", _tiled("head"))],
    "linear_attn.in_proj_b": [Rearranged("ssm_beta.weight", _tiled("one"))],
    "linear_attn.in_proj_a": [Rearranged("ssm_alpha.weight", _tiled("one"))],
    "linear_attn.conv1d": [Rearranged("ssm_conv1d.weight", _tiled_values)],
    "linear_attn.A_log": [Rearranged("ssm_a", _tiled("one"), change=_decay)],
    "linear_attn.dt_bias": [Rearranged("ssm_dt.bias", _tiled("one"))],
    "linear_attn.out_proj": [Rearranged("ssm_out.weight", columns=_tiled("head"))],
}
QWEN3NEXT_NAMES: Names = QWEN_NAMES | {
    "linear_attn.in_proj_qkvz": [
        Rearranged("attn_qkv.weight", _of_each_key_head(0, 1, 2)),
        Rearranged("attn_gate.weight", _of_each_key_head(3)),
    ],
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": [Rearranged("ssm_conv1d.weight")],
    "linear_attn.A_log": [Rearranged("ssm_a", change=_decay)],
    "linear_attn.dt_bias": [Rearranged("ssm_dt.bias")],
    "linear_attn.out_proj": "ssm_out",
}
LFM2_NAMES: Names = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": [Rearranged("shortconv.conv.weight")],
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": [Rearranged("exp_probs_b.bias")],
    "feed_forward.experts.*.w1": Experts("ffn_gate_exps"),
    "feed_forward.experts.*.w3": Experts("ffn_up_exps"),
    "feed_forward.experts.*.w2": Experts("ffn_down_exps"),
    "feed_forward.experts.gate_up_proj": Stacked(("ffn_gate_exps", "ffn_up_exps")),
    "feed_forward.experts.down_proj": Stacked(("ffn_down_exps",)),
}


def window(c: HFConfig) -> Keys:
    return {"attention.sliding_window": size} if (size := c.get("sliding_window")) else {}


def window_and_pattern(c: HFConfig) -> Keys:
    sliding = c.sliding()
    if sliding is None or not any(sliding):
        return {}
    return window(c) | {"attention.sliding_window_pattern": sliding}


def gemma2(c: HFConfig) -> Keys:
    return window(c) | {
        "attn_logit_softcapping": c.number("attn_logit_softcapping"),
        "final_logit_softcapping": c.number("final_logit_softcapping"),
    }


def gemma3(c: HFConfig) -> Keys:
    period = c.count("sliding_window_pattern", default=6, least=1)
    sliding = c.sliding() or [(i + 1) % period != 0 for i in range(c.layers)]
    keys = window(c) if any(sliding) else {}
    if any(sliding) and sliding != [(i + 1) % 6 != 0 for i in range(c.layers)]:
        keys |= {"attention.sliding_window_pattern": sliding}
    cap = c.get("final_logit_softcapping")
    return keys | ({"final_logit_softcapping": c.number("final_logit_softcapping")} if cap else {})


def granite(c: HFConfig) -> Keys:
    return {
        "embedding_scale": c.number("embedding_multiplier"),
        "residual_scale": c.number("residual_multiplier"),
        "attention.scale": c.number("attention_multiplier"),
        "logit_scale": c.number("logits_scaling"),
    }


def cohere2(c: HFConfig) -> Keys:
    keys: Keys = {"logit_scale": c.number("logit_scale"), "rope.scaling.type": "none"}
    return window(c) | window_and_pattern(c) | keys


def mistral3(c: HFConfig) -> Keys:
    growth = c.rope().get("llama_4_scaling_beta")
    return {"attention.temperature_scale": float(growth)} if growth else {}


def phi3(c: HFConfig) -> Keys:
    return {"attention.sliding_window": c.count("sliding_window", default=0)}


def smollm3(c: HFConfig) -> Keys:
    rotates = c.get("no_rope_layers")
    usual = [(i + 1) % 4 != 0 for i in range(c.layers)]
    if rotates and (not isinstance(rotates, list) or list(map(bool, rotates)) != usual):
        c.fail("no_rope_layers", "files of this architecture do not rotate every fourth layer")
    return {}


def qwen2moe(c: HFConfig) -> Keys:
    return {"expert_shared_feed_forward_length": c.count("shared_expert_intermediate_size")}


def glm4moe(c: HFConfig) -> Keys:
    return {
        "leading_dense_block_count": c.count("first_k_dense_replace"),
        "expert_shared_count": c.count("n_shared_experts"),
        "expert_gating_func": 2,  # sigmoid
        "expert_weights_scale": c.number("routed_scaling_factor"),
        "expert_weights_norm": bool(c.get("norm_topk_prob", default=True)),
    }


def deepseek2(c: HFConfig) -> Keys:
    own, rotated, latent = (
        c.count(n, least=1) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
    )
    kinds = c.get("mlp_layer_types")
    dense = kinds.count("dense") if isinstance(kinds, list) else c.count("first_k_dense_replace", default=0)
    if isinstance(kinds, list) and kinds != ["dense"] * dense + ["sparse"] * (c.layers - dense):
        c.fail("mlp_layer_types", "dense layers are not the first ones")
    sigmoid = "DeepseekV2ForCausalLM" not in (c.get("architectures") or ())
    keys: Keys = {
        "vocab_size": c.count("vocab_size"),
        "leading_dense_block_count": dense,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": own + rotated,
        "attention.value_length_mla": c.count("v_head_dim", least=1),
        "rope.dimension_count": rotated,
        "expert_shared_count": c.count("n_shared_experts", default=0),
        "expert_gating_func": 2 if sigmoid else 1,
        "expert_weights_scale": c.number("routed_scaling_factor", default=1.0),
        "expert_weights_norm": sigmoid and bool(c.get("norm_topk_prob", default=True)),
    }
    if size := c.get("q_lora_rank"):
        keys["attention.q_lora_rank"] = size
    if (c.get("n_group") or 1) > 1 and c.get("topk_method") != "greedy":
        keys |= {"expert_group_count": c.count("n_group"), "expert_group_used_count": c.count("topk_group")}
    rope = c.rope()
    if rope["rope_type"] == "yarn" and (all_dim := rope.get("mscale_all_dim")):
        if rope.get("mscale", all_dim) != all_dim:
            c.fail("rope_parameters.mscale", "it differs from mscale_all_dim")
        # A tenth, as files of this architecture have it; and YaRN's magnitude is in the scale of scores.
        keys |= {"rope.scaling.yarn_log_multiplier": 0.1 * float(all_dim), "rope.scaling.attn_factor": 1.0}
    return keys


def ernie4_5_moe(c: HFConfig) -> Keys:
    keys: Keys = {
        "leading_dense_block_count": c.count("moe_layer_start_index", default=0),
        "interleave_moe_layer_step": c.count("moe_layer_interval", default=1),
    }
    if shared := c.count("moe_num_shared_experts", default=0):
        keys["expert_shared_feed_forward_length"] = shared * c.count("moe_intermediate_size")
    return keys


def hunyuan_moe(c: HFConfig) -> Keys:
    return {
        "expert_shared_count": c.count("num_shared_expert", default=1),
        "expert_shared_feed_forward_length": c.count("intermediate_size"),
    }


def qwen3vl(c: HFConfig) -> Keys:
    """Positions of images have sections; `deepstack_visual_indexes` are of the vision encoder."""
    vision = c.get("vision_config")
    layers = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    return sections(c) | {"n_deepstack_layers": len(layers) if isinstance(layers, list) else 0}


def sections(c: HFConfig) -> Keys:
    found = c.rope().get("mrope_section")
    if (
        not isinstance(found, list)
        or len(found) != 3
        or not all(type(n) is int and 0 <= n < 1024 for n in found)
    ):
        c.fail("rope_parameters.mrope_section", "these are not three sizes")
    return {"rope.dimension_sections": [*found, 0]}


def qwen3next(c: HFConfig) -> Keys:
    heads, kinds = _DeltaHeads.of(c), c.get("layer_types")
    attention = [kind == "full_attention" for kind in kinds] if isinstance(kinds, list) else []
    interval = attention.index(True) + 1 if True in attention else 4
    interval = c.count("full_attention_interval", default=interval, least=2)
    if attention and attention != [(i + 1) % interval == 0 for i in range(c.layers)]:
        c.fail("layer_types", "files of this architecture have attention in layers at equal distances")
    keys: Keys = {
        "ssm.conv_kernel": c.count("linear_conv_kernel_dim"),
        "ssm.state_size": heads.key_dim,
        "ssm.group_count": heads.keys,
        "ssm.time_step_rank": heads.values,
        "ssm.inner_size": heads.values * heads.value_dim,
        "full_attention_interval": interval,
    }
    if c.get("num_experts"):
        keys["expert_shared_feed_forward_length"] = c.count("shared_expert_intermediate_size")
    return keys


def qwen35(c: HFConfig) -> Keys:
    return qwen3next(c) | sections(c)


def lfm2(c: HFConfig) -> Keys:
    kinds, width = c.get("layer_types"), c.count("intermediate_size", "block_ff_dim")
    if not isinstance(kinds, list) or len(kinds) != c.layers:
        c.fail("layer_types", "this is no list of a kind for each layer")
    if c.get("block_auto_adjust_ff_dim", default=True):
        unit = c.count("block_multiple_of", default=256, least=1)
        width = int(c.number("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
        width = -(-width // unit) * unit
    keys: Keys = {
        "attention.head_count_kv": [c.kv_heads if kind == "full_attention" else 0 for kind in kinds],
        "feed_forward_length": width,
        "shortconv.l_cache": c.count("conv_L_cache", least=2),
        "vocab_size": c.count("vocab_size"),
    }
    if c.get("num_experts"):
        keys |= {"leading_dense_block_count": c.count("num_dense_layers"), "expert_gating_func": 2}
    return keys


LLAMA = Family("llama", window, reordered=True)
QWEN35 = Family("qwen35", qwen35, QWEN35_NAMES, norm_offset=1.0)
QWEN35MOE = replace(QWEN35, architecture="qwen35moe", defaults={"intermediate_size": 0})
LFM2 = Family(
    "lfm2",
    lfm2,
    LFM2_NAMES,
    defaults={"tie_word_embeddings": True},
    required={"conv_bias": False},
    model=MODEL | {"model.embedding_norm": "token_embd_norm"},
)
GEMMA3 = Family(
    "gemma3",
    gemma3,
    POST_NORMS,
    norm_offset=1.0,
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
)
GEMMA2 = Family(
    "gemma2", gemma2, POST_NORMS, norm_offset=1.0, defaults={"head_dim": 256, "tie_word_embeddings": True}
)
DEEPSEEK2 = Family(
    "deepseek2", deepseek2, LATENT_NAMES, required={"attention_bias": False, "rope_interleave": True}
)
MISTRAL3 = Family("mistral3", mistral3, reordered=True)

# By the first of `architectures` in config.json.
FAMILIES: dict[str, Family] = TEXT_ENCODERS | {
    "Cohere2ForCausalLM": Family("cohere2", cohere2, layer_norm=True, defaults={"tie_word_embeddings": True}),
    "DeepseekV2ForCausalLM": DEEPSEEK2,
    "DeepseekV3ForCausalLM": DEEPSEEK2,
    "Ernie4_5ForCausalLM": Family("ernie4_5"),
    "Ernie4_5_MoeForCausalLM": Family("ernie4_5-moe", ernie4_5_moe),
    "Exaone4ForCausalLM": Family("exaone4", window_and_pattern, POST_NORMS),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Glm4ForCausalLM": Family("glm4", names=GLM4_NORMS),
    "Glm4MoeForCausalLM": Family(
        "glm4moe", glm4moe, {"post_attention_layernorm": "post_attention_norm"}, required={"n_group": 1}
    ),
    "Glm4MoeLiteForCausalLM": DEEPSEEK2,
    "GptOssForCausalLM": Family("gpt-oss", window, GPT_OSS_NAMES),
    "GraniteForCausalLM": Family("granite", granite, reordered=True),
    "GraniteMoeForCausalLM": Family("granitemoe", granite, reordered=True),
    "HunYuanDenseV1ForCausalLM": Family("hunyuan-dense"),
    "HunYuanMoEV1ForCausalLM": Family("hunyuan-moe", hunyuan_moe),
    "Idefics3ForConditionalGeneration": LLAMA,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": replace(
        LFM2, architecture="lfm2moe", required={"conv_bias": False, "norm_topk_prob": True}
    ),
    "LlamaForCausalLM": LLAMA,
    "Ministral3ForCausalLM": MISTRAL3,
    "Mistral3ForConditionalGeneration": MISTRAL3,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": LLAMA,
    "Olmo2ForCausalLM": Family("olmo2", names=POST_NORMS),
    "Olmo3ForCausalLM": Family("olmo2", window_and_pattern, POST_NORMS),
    "OlmoeForCausalLM": Family("olmoe", required={"norm_topk_prob": False}),
    "Phi3ForCausalLM": Family("phi3", phi3),
    "Qwen2ForCausalLM": Family("qwen2", required={"use_sliding_window": False}),
    "Qwen2_5_VLForConditionalGeneration": Family("qwen2vl", sections),
    "Qwen2MoeForCausalLM": Family(
        "qwen2moe", qwen2moe, required={"norm_topk_prob": False, "use_sliding_window": False}
    ),
    "Qwen3ForCausalLM": Family("qwen3", required={"use_sliding_window": False}),
    "Qwen3MoeForCausalLM": Family(
        "qwen3moe", required={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3next",
        qwen3next,
        QWEN3NEXT_NAMES,
        norm_offset=1.0,
        required={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5ForConditionalGeneration": QWEN35,
    "Qwen3_5MoeForCausalLM": QWEN35MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN35MOE,
    "Qwen3VLForConditionalGeneration": Family("qwen3vl", qwen3vl),
    "SeedOssForCausalLM": Family("seed_oss", names={"post_attention_layernorm": "post_attention_norm"}),
    "SmolLM3ForCausalLM": Family("smollm3", smollm3, reordered=True, defaults={"tie_word_embeddings": True}),
    "SmolVLMForConditionalGeneration": LLAMA,
    "StableLmForCausalLM": Family(
        "stablelm", layer_norm=True, required={"qk_layernorm": False, "use_parallel_residual": False}
    ),
    "Starcoder2ForCausalLM": Family("starcoder2", layer_norm=True, defaults={"tie_word_embeddings": True}),
}
