"""Writes the goldens of Gemma 4, which `tandem convert` does not know yet; see make_goldens.py.

Run by hand, in an environment with torch, transformers, gguf and Tandem: python -m tests.models.make_gemma4_goldens
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.models.make_goldens import GOLDENS, SPECIAL, Golden, rope, small, write_logits

# Tensors of a layer that the name map of `gguf` does not have.
RENAMED = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


FULL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
BASE = dict(
    head_dim=16,
    global_head_dim=32,
    sliding_window=8,
    final_logit_softcapping=6.0,
    rope_parameters={"full_attention": FULL, "sliding_attention": rope(1e4)},
)
DENSE = dict(
    num_hidden_layers=3, layer_types=KINDS, attention_k_eq_v=True, num_global_key_value_heads=1, **BASE
)


def goldens() -> Iterator[Golden]:
    """Dense with values that are keys; with experts; with embeddings of each layer and shared keys and values."""
    yield small("Gemma4Text", "gemma4", hidden_size_per_layer_input=0, **DENSE)
    experts = dict(enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=32)
    keys = {"expert_used_count": 3}
    yield small("Gemma4Text", "gemma4-moe", keys, hidden_size_per_layer_input=0, **DENSE, **experts)
    shared = dict(
        num_hidden_layers=4, layer_types=KINDS[1:] * 2, num_kv_shared_layers=2, use_double_wide_mlp=True
    )
    shared |= dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=267, num_key_value_heads=1)
    yield small("Gemma4Text", "gemma4-shared", **shared, **BASE)


def make_model(golden: Golden, generator: torch.Generator) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_config(golden.config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        value = value_of(name, torch.randn(parameter.shape, generator=generator))
        parameter.data = torch.round(value * 64) / 64
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.data = torch.round((0.7 + 0.2 * torch.randn(1, generator=generator)) * 64) / 64
    return model


def value_of(name: str, noise: torch.Tensor) -> torch.Tensor:
    """The values of a parameter."""
    if "norm" in name:
        value = 1.0 + 0.3 * noise
        return 0.3 * value if "q_norm" in name else value  # nothing else scales scores
    if name.endswith("router.scale") or "per_expert_scale" in name:
        return 1.0 + 0.3 * noise
    if "embed" in name:
        return 0.4 * noise
    gain = 2.0 if ("q_proj" in name or "k_proj" in name) else 1.0
    return gain * noise.shape[-1] ** -0.5 * noise


def converted_tensors(golden: Golden, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    config = golden.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        layer, rest = f"blk.{'.'.join(name.split('.')[2:3])}", ".".join(name.split(".")[3:])
        if name == "lm_head.weight":
            continue
        if rest in RENAMED:
            yield f"{layer}.{RENAMED[rest]}", tensor.numpy()
        else:
            yield names.get_name(name, (".weight",)), tensor.numpy()
    half = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
    rotated = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    yield "rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (half - rotated))  # these do not rotate


def metadata(golden: Golden) -> dict[str, Any]:
    c = golden.config
    layers = [c.per_layer_config[i] for i in range(c.num_hidden_layers)]
    sliding = [kind == "sliding_attention" for kind in c.layer_types]
    size, local = layers[sliding.index(False)].head_dim, layers[sliding.index(True)].head_dim
    first_shared = c.num_hidden_layers - c.num_kv_shared_layers
    wide = [2 if c.use_double_wide_mlp and i >= first_shared else 1 for i in range(len(layers))]
    keys = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": [c.intermediate_size * times for times in wide],
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in layers],
        "attention.layer_norm_rms_epsilon": 1e-3,
        "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": c.num_kv_shared_layers,
        "embedding_length_per_layer_input": getattr(c, "hidden_size_per_layer_input", 0),
        "final_logit_softcapping": c.final_logit_softcapping,
        "rope.freq_base": c.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": c.rope_parameters["sliding_attention"]["rope_theta"],
        "rope.dimension_count": size,
        "rope.dimension_count_swa": local,
        **{f"attention.{kind}_length": size for kind in ("key", "value")},
        **{f"attention.{kind}_length_swa": local for kind in ("key", "value")},
    }
    if getattr(c, "num_experts", None):
        keys |= {"expert_count": c.num_experts, "expert_feed_forward_length": c.moe_intermediate_size}
    return keys | golden.keys


def write_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Bytes, special tokens and a few merges, which are the scores of pieces."""
    special = SPECIAL["gemma"]
    tokens = (
        special + [f"<0x{byte:02X}>" for byte in range(256)] + [*"\u2581eth", "he", "\u2581t", "\u2581the"]
    )
    writer.add_tokenizer_model("gemma4")
    writer.add_token_merges(["\u2581 t", "h e", "\u2581t he"])
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_add_space_prefix(False)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    kinds = {"<unk>": gguf.TokenType.UNKNOWN}
    types = [kinds.get(token, gguf.TokenType.CONTROL) for token in special]
    writer.add_token_types([*types, *[gguf.TokenType.BYTE] * 256, *[gguf.TokenType.NORMAL] * 7])
    writer.add_bos_token_id(special.index("<bos>"))
    writer.add_eos_token_id(special.index("<eos>"))
    writer.add_add_bos_token(True)


def write_model(golden: Golden, model: torch.nn.Module) -> None:
    writer = gguf.GGUFWriter(GOLDENS / f"{golden.name}.gguf", "gemma4")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for key, value in metadata(golden).items():
        if isinstance(value, list):
            writer.add_array(f"gemma4.{key}", value)
        else:
            add = {int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(f"gemma4.{key}", value)
    write_tokenizer(writer)
    for name, tensor in converted_tensors(golden, model):
        writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def main() -> None:
    for golden in goldens():
        generator = torch.Generator().manual_seed(zlib.crc32(golden.name.encode()))
        model = make_model(golden, generator)
        write_model(golden, model)
        write_logits(golden, model, generator)
        print(golden.name)


if __name__ == "__main__":
    main()
