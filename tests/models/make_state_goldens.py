"""Writes the goldens of models with short convolutions or Mamba-2; see make_hybrid_goldens.py.

python -m tests.models.make_state_goldens [NAME ...]
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from tests.models.make_goldens import Golden, rope, small, write_logits
from tests.models.make_hybrid_goldens import write_model


def state_goldens() -> Iterator[Golden]:
    keys = {"tokenizer.ggml.pre": "lfm2"}
    lfm2 = dict(norm_eps=1e-3, rope_parameters=rope(1e6), block_auto_adjust_ff_dim=False)
    lfm2 |= dict(layer_types=["conv", "full_attention", "conv", "conv"], num_hidden_layers=4)
    yield small("Lfm2", "lfm2", keys, **lfm2)
    experts = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, num_dense_layers=1)
    yield small("Lfm2Moe", "lfm2moe", keys, **lfm2, **experts)
    yield from scan_goldens()


def scan_goldens() -> Iterator[Golden]:
    """Chunks of 16 tokens in transformers: prompts cross their borders."""
    keys: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.time_step_rank": 4}
    keys |= {"ssm.state_size": 16, "tokenizer.ggml.pre": "gpt-2"}
    mamba2 = dict(num_heads=4, head_dim=16, n_groups=2, state_size=16, chunk_size=16)
    yield small("Mamba2", "mamba2", keys | {"ssm.group_count": 2}, layer_norm_epsilon=1e-3, **mamba2)
    mamba = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16)
    keys |= {"tokenizer.ggml.pre": "dbrx", "rope.scaling.finetuned": False, "ssm.group_count": 1}
    granite = dict(
        embedding_multiplier=6.0, residual_multiplier=0.3, attention_multiplier=0.2, logits_scaling=4.0
    )
    keys |= {"embedding_scale": 6.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 4.0}
    granite |= dict(layer_types=["linear_attention", "full_attention"] * 2, num_hidden_layers=4)
    granite |= dict(shared_intermediate_size=64, num_local_experts=0, tie_word_embeddings=True)
    yield small("GraniteMoeHybrid", "granitehybrid", keys, **mamba, **granite)
    granite |= dict(num_local_experts=6, num_experts_per_tok=2, intermediate_size=32)
    yield small("GraniteMoeHybrid", "granitehybrid-moe", keys, **mamba, **granite)
    keys = {key: value for key, value in keys.items() if key.startswith("ssm")}
    keys |= {"tokenizer.ggml.pre": "pixtral", "ssm.group_count": 2, "attention.key_length": 16}
    nemotron = dict(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, chunk_size=16, head_dim=16)
    nemotron |= dict(layer_norm_epsilon=1e-3, n_groups=2, time_step_min=1e-9)
    kinds = ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
    yield small("NemotronH", "nemotron_h", keys, layer_types=kinds, num_hidden_layers=5, **nemotron)
    experts = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=1)
    experts |= dict(moe_shared_expert_intermediate_size=64, routed_scaling_factor=1.5, num_hidden_layers=4)
    kinds = ["linear_attention", "moe", "full_attention", "moe"]
    yield small("NemotronH", "nemotron_h_moe", keys, layer_types=kinds, **nemotron, **experts)
    latent = dict(moe_latent_size=64)
    yield small(
        "NemotronH", "nemotron_h_moe-latent", keys, layer_types=kinds, **nemotron, **experts, **latent
    )
    keys |= {"tokenizer.ggml.pre": "falcon-h1"}
    falcon = dict(head_dim=16, mamba_d_ssm=64, mamba_n_groups=2, rope_parameters=rope(1e6), **mamba)
    falcon |= dict(lm_head_multiplier=0.5, embedding_multiplier=3.0, mlp_multipliers=[0.7, 0.8])
    falcon |= dict(key_multiplier=0.6, attention_out_multiplier=0.9, attention_in_multiplier=1.2)
    falcon |= dict(ssm_multipliers=[0.8, 1.1, 0.9, 0.7, 1.3], ssm_in_multiplier=1.3, ssm_out_multiplier=0.4)
    yield small("FalconH1", "falcon-h1", keys, **falcon)
    normed = dict(mamba_rms_norm=True, mamba_norm_before_gate=False)
    yield small("FalconH1", "falcon-h1-normed", keys, **falcon, **normed)


def make_model(golden: Golden, generator: torch.Generator) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_config(golden.config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            value = 1.0 + 0.3 * noise
        elif name.endswith(("A_log", "dt_bias")):  # states that decay within some tokens
            value = 0.5 * noise - 1
        elif "conv.conv" in name or "conv1d" in name or name.endswith(".D"):
            value = 0.5 * noise
        elif "embed" in name:
            value = 0.4 * noise
        else:
            gain = 2.0 if ("q_proj" in name or "k_proj" in name) else 1.0
            value = gain * parameter.shape[-1] ** -0.5 * noise
        parameter.data = torch.round(value * 64) / 64
    for name, buffer in model.named_buffers():
        if "expert_bias" in name or "correction_bias" in name:
            buffer.data = torch.round(0.2 * torch.randn(buffer.shape, generator=generator) * 64) / 64
    return model


ENDS = {
    "embed_tokens": "token_embd",
    "embeddings": "token_embd",
    "norm": "output_norm",
    "norm_f": "output_norm",
    "final_layernorm": "output_norm",
    "embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
LAYER = {
    "norm": "attn_norm",
    "operator_norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "ffn_norm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "mixer.gate": "ffn_gate_inp",
    "shared_experts.up_proj": "ffn_up_shexp",
    "shared_experts.down_proj": "ffn_down_shexp",
    "fc1_latent_proj": "ffn_latent_down",
    "fc2_latent_proj": "ffn_latent_up",
    "conv1d": "ssm_conv1d",
    "in_proj": "ssm_in",
    "out_proj": "ssm_out",
}


def converted_tensors(golden: Golden, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    c = golden.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        if golden.name.startswith("falcon-h1"):
            tensor = multiplied(c, name, tensor.clone())
        if ".layers." in name:
            _, _, layer, rest = name.split(".", 3)
            for part, values in layer_tensors(c, rest, tensor):
                yield f"blk.{layer}.{part}", values.contiguous().numpy()
        else:
            *_, stem, kind = name.split(".")
            yield f"{ENDS[stem]}.{kind}", tensor.numpy()


def layer_tensors(c: Any, name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    stem, _, kind = name.rpartition(".")
    if ".experts." in name:
        halves = tensor.chunk(2, dim=1)
        parts = {"gate": halves[0], "up": halves[1]} if "gate_up" in name else {kind[:-5]: tensor}
        for part, values in parts.items():
            yield f"ffn_{part}_exps.weight", values
    elif stem == "shared_mlp.input_linear":
        for part, values in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"ffn_{part}{'_shexp' * bool(c.num_local_experts)}.weight", values
    elif stem == "shared_mlp.output_linear":
        yield f"ffn_down{'_shexp' * bool(c.num_local_experts)}.weight", tensor
    elif kind in ("expert_bias", "e_score_correction_bias"):
        yield "exp_probs_b.bias", tensor
    elif kind == "A_log":
        yield "ssm_a", -torch.exp(tensor).reshape(-1, 1)
    elif kind == "D":
        yield "ssm_d", tensor.reshape(-1, 1)
    elif kind == "dt_bias":
        yield "ssm_dt.bias", tensor
    elif stem in ("mixer.norm", "mamba.norm"):
        groups = getattr(c, "n_groups", None) or c.mamba_n_groups
        yield "ssm_norm.weight", tensor.reshape(groups, -1)
    elif stem == "pre_ff_layernorm":
        yield "ffn_norm", tensor
    else:
        stems = (stem, ".".join(stem.split(".")[-2:]), stem.rpartition(".")[2])
        found = next(LAYER[part] for part in stems if part in LAYER)
        yield f"{found}.{kind}", tensor.squeeze(1) if tensor.ndim == 3 else tensor


def multiplied(c: Any, name: str, tensor: Any) -> Any:
    """A weight of Falcon H1 times its multipliers."""
    factors = {
        "gate_proj": c.mlp_multipliers[0],
        "down_proj": c.mlp_multipliers[1],
        "k_proj": c.key_multiplier * c.attention_in_multiplier,
        "q_proj": c.attention_in_multiplier,
        "v_proj": c.attention_in_multiplier,
        "o_proj": c.attention_out_multiplier,
        "out_proj": c.ssm_out_multiplier,
        "in_proj": c.ssm_in_multiplier,
        "lm_head": c.lm_head_multiplier,
        "embed_tokens": c.embedding_multiplier,
    }
    part = name.split(".")[-2]
    if part == "in_proj":
        inner, shared = c.mamba_d_ssm, c.mamba_n_groups * c.mamba_d_state
        sizes = [inner, inner, shared, shared, c.mamba_n_heads]
        for rows, factor in zip(tensor.split(sizes), c.ssm_multipliers, strict=True):
            rows *= factor
    return tensor * factors.get(part, 1.0)


def metadata(golden: Golden) -> dict[str, Any]:
    c = golden.config
    keys = {
        "context_length": getattr(c, "max_position_embeddings", 256),
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "attention.layer_norm_rms_epsilon": 1e-3,
    }
    if golden.name == "mamba2":
        keys |= {"feed_forward_length": 0, "attention.head_count": 0}
    else:
        keys |= {"feed_forward_length": c.intermediate_size, "attention.head_count": c.num_attention_heads}
        keys["attention.head_count_kv"] = [
            c.num_key_value_heads if kind == "full_attention" else 0 for kind in c.layer_types
        ]
    if golden.name.startswith("falcon-h1"):
        keys |= {"attention.head_count_kv": c.num_key_value_heads, "attention.value_length": c.head_dim}
    if golden.name.startswith(("lfm2", "falcon-h1")):
        keys |= {"rope.freq_base": c.rope_parameters["rope_theta"]}
    if golden.name.startswith("lfm2"):
        keys |= {"shortconv.l_cache": c.conv_L_cache, "vocab_size": c.vocab_size}
    if golden.name == "lfm2moe":
        keys |= {"expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok}
        keys |= {"expert_feed_forward_length": c.moe_intermediate_size, "expert_gating_func": 2}
        keys |= {"leading_dense_block_count": c.num_dense_layers}
    if golden.name == "granitehybrid-moe":
        keys |= {"expert_count": c.num_local_experts, "expert_used_count": c.num_experts_per_tok}
        keys |= {"expert_shared_feed_forward_length": c.shared_intermediate_size}
    if golden.name.startswith("nemotron_h"):
        sizes = {"mlp": c.intermediate_size, "moe": c.moe_intermediate_size}
        lengths = [sizes.get(kind, 0) for kind in c.layer_types]
        keys |= {"feed_forward_length": lengths, "attention.value_length": c.head_dim}
        keys |= {"attention.layer_norm_epsilon": 1e-3}  # unused, but llama.cpp reads it
    if golden.name.startswith("nemotron_h_moe"):
        keys |= {"expert_count": c.n_routed_experts, "expert_used_count": c.num_experts_per_tok}
        keys |= {"expert_feed_forward_length": c.moe_intermediate_size, "expert_shared_count": 1}
        keys |= {"expert_shared_feed_forward_length": c.moe_shared_expert_intermediate_size}
        keys |= {"expert_weights_norm": True, "expert_weights_scale": c.routed_scaling_factor}
        keys |= {"expert_group_count": c.n_group, "moe_latent_size": c.moe_latent_size}
    return keys | {key: value for key, value in golden.keys.items() if not key.startswith("tokenizer.")}


@torch.no_grad()
def main() -> None:
    for golden in state_goldens():
        if sys.argv[1:] and golden.name not in sys.argv[1:]:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(golden.name.encode()))
        model = make_model(golden, generator)
        write_model(golden, metadata(golden), converted_tensors(golden, model))
        write_logits(golden, model, generator)
        print(golden.name)


if __name__ == "__main__":
    main()
