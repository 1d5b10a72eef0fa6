"""Writes the goldens of hybrid models, not with `tandem convert`, which is tested with them; see make_goldens.py.

    python -m tests.models.make_hybrid_goldens [NAME ...]

It needs the package `gguf` too. Tensor names, keys and weight transformations are those of llama.cpp's converter.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.models.make_goldens import GOLDENS, SPECIAL, Golden, byte_alphabet, rope, small, write_logits


def hybrid_goldens() -> Iterator[Golden]:
    """Gated DeltaNet and, in every second layer, attention."""
    keys = {"tokenizer.ggml.pre": "qwen35", "rope.dimension_count": 8, "full_attention_interval": 2}
    keys |= {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4}
    keys |= {"ssm.inner_size": 64}
    delta = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16)
    delta |= dict(linear_value_head_dim=16, linear_conv_kernel_dim=4, head_dim=16, num_hidden_layers=4)
    delta |= dict(layer_types=["linear_attention", "full_attention"] * 2)
    half = rope(1e6, partial_rotary_factor=0.5)
    sections = {"rope.dimension_sections": [2, 1, 1, 0]}
    images = half | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    yield small("Qwen3_5Text", "qwen35", keys | sections, rope_parameters=images, **delta)
    delta |= dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
    delta |= dict(shared_expert_intermediate_size=64, norm_topk_prob=True)
    yield small("Qwen3_5MoeText", "qwen35moe", keys | sections, rope_parameters=images, **delta)
    keys |= {"tokenizer.ggml.pre": "qwen2"}
    yield small("Qwen3Next", "qwen3next", keys, rope_parameters=half, **delta)


def make_model(golden: Golden, generator: torch.Generator) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_config(golden.config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        value = value_of(name, torch.randn(parameter.shape, generator=generator))
        parameter.data = torch.round(value * 64) / 64
    return model


def value_of(name: str, noise: torch.Tensor) -> torch.Tensor:
    """The values of a parameter."""
    if "norm" in name:
        return (1.0 if "linear_attn" in name else 0.0) + 0.3 * noise
    if name.endswith(("A_log", "dt_bias")):  # states that decay within some tokens
        return 0.5 * noise - 1
    if "conv1d" in name:
        return 0.5 * noise
    if "embed" in name:
        return 0.4 * noise
    gain = 2.0 if ("q_proj" in name or "k_proj" in name) else 1.0
    return gain * noise.shape[-1] ** -0.5 * noise


def converted_tensors(golden: Golden, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == golden.name)
    names = gguf.get_tensor_name_map(arch, golden.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        layer = ".".join(["blk", *name.split(".")[2:3]])
        if ".linear_attn." in name:
            yield from linear_attention_tensors(golden, name, tensor)
        elif "experts." in name and "shared" not in name:
            halves = tensor.chunk(2, dim=1)
            parts = {"gate": halves[0], "up": halves[1]} if "gate_up" in name else {"down": tensor}
            for part, values in parts.items():
                yield f"{layer}.ffn_{part}_exps.weight", values.contiguous().numpy()
        else:
            tensor = tensor.squeeze(0) if "shared_expert_gate" in name else tensor
            tensor = tensor + 1 if name.endswith("norm.weight") else tensor
            yield names.get_name(name, (".weight", ".bias")), tensor.contiguous().numpy()


def linear_attention_tensors(golden: Golden, name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of Gated DeltaNet. Qwen 3.5 has value heads that share a key head apart from each other."""
    c, (layer, rest) = golden.config, (name.split(".")[2], name.split(".linear_attn.")[1])
    keys, heads, key_dim, dim = (
        c.linear_num_key_heads,
        c.linear_num_value_heads,
        c.linear_key_head_dim,
        c.linear_value_head_dim,
    )
    blk, shared = f"blk.{layer}.", heads // keys

    def tiled(values: Any, size: int) -> Any:
        if golden.name == "qwen3next":
            return values
        return values.reshape(keys, shared, size, -1).swapaxes(0, 1).reshape(values.shape)

    if rest == "in_proj_qkvz.weight":  # q, k, v and z of each key head
        parts = tensor.reshape(keys, -1, tensor.shape[1]).split(
            [key_dim, key_dim, shared * dim, shared * dim], 1
        )
        q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
        yield f"{blk}attn_qkv.weight", torch.cat([q, k, v]).numpy()
        yield f"{blk}attn_gate.weight", z.numpy()
    elif rest in ("in_proj_qkv.weight", "conv1d.weight"):
        tensor = tensor.squeeze(1) if "conv" in rest else tensor
        qk, v = tensor.split([2 * keys * key_dim, heads * dim])
        gguf_name = "ssm_conv1d" if "conv" in rest else "attn_qkv"
        yield f"{blk}{gguf_name}.weight", torch.cat([qk, tiled(v, dim)]).numpy()
    elif rest == "out_proj.weight":
        yield f"{blk}ssm_out.weight", tiled(tensor.T.contiguous(), dim).T.contiguous().numpy()
    elif rest == "A_log":
        yield f"{blk}ssm_a", tiled(-torch.exp(tensor), 1).numpy()
    else:
        named = {
            "dt_bias": "ssm_dt.bias",
            "norm.weight": "ssm_norm.weight",
            "in_proj_z.weight": "attn_gate.weight",
        }
        named |= {"in_proj_b.weight": "ssm_beta.weight", "in_proj_a.weight": "ssm_alpha.weight"}
        named |= {"in_proj_ba.weight": "ssm_ba.weight"}
        sizes = {"in_proj_z.weight": dim, "in_proj_b.weight": 1, "in_proj_a.weight": 1, "dt_bias": 1}
        yield f"{blk}{named[rest]}", (tiled(tensor, sizes[rest]) if rest in sizes else tensor).numpy()


def metadata(golden: Golden) -> dict[str, Any]:
    c = golden.config
    keys = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": getattr(c, "intermediate_size", None),
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": 1e-3,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "rope.freq_base": c.rope_parameters["rope_theta"],
    }
    if golden.name != "qwen35":
        keys |= {"expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok}
        keys |= {"expert_feed_forward_length": c.moe_intermediate_size}
        keys |= {"expert_shared_feed_forward_length": c.shared_expert_intermediate_size}
    return keys | {key: value for key, value in golden.keys.items() if not key.startswith("tokenizer.")}


def write_tokenizer(writer: gguf.GGUFWriter, golden: Golden) -> None:
    special = SPECIAL["llama"]
    merges = ["t h", "th e", "Ġ t", "Ġ a", "i n", "e r", "o n"]
    tokens = special + byte_alphabet() + [merge.replace(" ", "") for merge in merges]
    kinds = {"<unk>": gguf.TokenType.UNKNOWN} | dict.fromkeys(special, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_merges(merges)
    writer.add_tokenizer_pre(golden.keys["tokenizer.ggml.pre"])
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_bos_token_id(special.index("<s>"))
    writer.add_eos_token_id(special.index("</s>"))
    writer.add_add_bos_token(False)


def write_model(golden: Golden, keys: dict[str, Any], tensors: Iterable[tuple[str, Any]]) -> None:
    """Writes a file; a key whose value is None is left out."""
    architecture = golden.name
    if architecture not in gguf.MODEL_ARCH_NAMES.values():  # a variant
        architecture = architecture.rpartition("-")[0]
    writer = gguf.GGUFWriter(GOLDENS / f"{golden.name}.gguf", architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(f"{architecture}.{key}", value)
    write_tokenizer(writer, golden)
    for name, tensor in tensors:
        writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def main() -> None:
    for golden in hybrid_goldens():
        if sys.argv[1:] and golden.name not in sys.argv[1:]:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(golden.name.encode()))
        model = make_model(golden, generator)
        write_model(golden, metadata(golden), converted_tensors(golden, model))
        write_logits(golden, model, generator)
        print(golden.name)


if __name__ == "__main__":
    main()
