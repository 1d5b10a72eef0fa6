"""Writes goldens/: tiny random models as GGUF files, and the logits `transformers` gives for them.

Run by hand, only to add or change a model, in an environment with torch, transformers and gguf:
    python tests/models/make_goldens.py [NAME ...]
The files carry the tensor names, keys and weight transformations of llama.cpp's converter, in float32.
Weights are multiples of 1/64, so that the files compress well; they are large enough for each feature of a
model (window, RoPE scaling, soft cap, ...) to move the logits by far more than the tests' tolerance.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

GOLDENS = Path(__file__).parent / "goldens"
PROMPT_LENGTHS = (1, 17, 64)  # a single token; an odd length past two windows; several blocks of KV


@dataclass(frozen=True)
class Golden:
    name: str
    config: transformers.PretrainedConfig
    keys: dict[str, Any]  # metadata on top of what the converter always writes; None takes a key away


def small(kind: str, name: str, keys: dict[str, Any] | None = None, **changes: Any) -> Golden:
    """A model of `kind` that is as small as its features allow."""
    vocabulary = 256 + len(SPECIAL["gemma" if kind.startswith("Gemma") else "llama"]) + len(PIECES)
    base = dict(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-3,
        attn_implementation="eager",
        pad_token_id=0,
    )
    return Golden(name, getattr(transformers, f"{kind}Config")(**(base | changes)), keys or {})


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": "default"} | scaling


def goldens() -> Iterator[Golden]:
    def gemma3(name: str, keys: dict[str, Any] | None = None, **changes: Any) -> Golden:
        base = dict(
            head_dim=16,
            query_pre_attn_scalar=16,
            rope_parameters={"full_attention": rope(1e6), "sliding_attention": rope(1e4)},
        )
        return small("Gemma3Text", name, keys, **(base | changes))

    def pattern(period: int, layers: int) -> list[str]:
        return ["full_attention" if i % period == period - 1 else "sliding_attention" for i in range(layers)]

    # As the 4B to 12B models: 5 sliding layers, 1 global one with its positions divided by 8.
    yield gemma3(
        "gemma3-pattern6",
        {"rope.freq_base_swa": None},
        num_hidden_layers=12,
        num_key_value_heads=1,
        intermediate_size=32,
        sliding_window=8,
        rope_parameters={
            "full_attention": rope(1e6, rope_type="linear", factor=8.0),
            "sliding_attention": rope(1e4),
        },
    )
    yield gemma3(
        "gemma3-pattern3",
        {"attention.sliding_window_pattern": 3},
        num_hidden_layers=4,
        num_key_value_heads=4,
        sliding_window=5,
        layer_types=pattern(3, 4),
        final_logit_softcapping=6.0,
        rope_parameters={"full_attention": rope(1e6), "sliding_attention": rope(500.0)},
    )
    sliding = [False, True, True, False, True]
    yield gemma3(
        "gemma3-pattern-array",
        {"attention.sliding_window_pattern": sliding},
        num_hidden_layers=5,
        head_dim=32,
        query_pre_attn_scalar=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
        layer_types=["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding],
    )
    yield gemma3("gemma3-global", {"attention.sliding_window": None}, layer_types=["full_attention"] * 2)
    # The 27B is known by its 62 layers: its scores are scaled by hidden size / heads, not by head size.
    yield gemma3(
        "gemma3-27b",
        {"rope.freq_base_swa": None},
        num_hidden_layers=62,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=32,
        sliding_window=8,
        query_pre_attn_scalar=32,
    )
    gemma2 = dict(head_dim=16, sliding_window=8, attn_logit_softcapping=2.0, final_logit_softcapping=6.0)
    yield small("Gemma2", "gemma2", num_hidden_layers=4, query_pre_attn_scalar=16, **gemma2)
    tiny = dict(num_attention_heads=1, num_key_value_heads=1, intermediate_size=32)
    yield small("Gemma2", "gemma2-27b", num_hidden_layers=46, query_pre_attn_scalar=32, **tiny, **gemma2)

    yield small(
        "Llama",
        "llama",
        {"attention.key_length": None, "attention.value_length": None},
        rope_parameters=rope(1e4),
        tie_word_embeddings=True,
        num_key_value_heads=1,
    )
    yield small(
        "Llama",
        "llama-linear-biased",
        rope_parameters=rope(1e4, rope_type="linear", factor=4.0),
        attention_bias=True,
        mlp_bias=True,
    )
    llama3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    yield small(
        "Llama",
        "llama-llama3",
        {"tokenizer.ggml.pre": "llama-bpe"},
        head_dim=16,
        num_key_value_heads=4,
        rope_parameters=rope(5e5, rope_type="llama3", **llama3),
    )
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    yield small("Llama", "llama-yarn", head_dim=16, rope_parameters=rope(1e4, **yarn))
    # llama.cpp's converter leaves Mistral's window out; we honour it in files that have it.
    window = {"attention.sliding_window": 8}
    yield small("Mistral", "mistral-window", window, head_dim=16, sliding_window=8, rope_parameters=rope(1e4))
    qwen = {"tokenizer.ggml.pre": "qwen2"}
    yield small("Qwen2", "qwen2", qwen, rope_parameters=rope(1e6))
    yield small("Qwen3", "qwen3", qwen, head_dim=16, rope_parameters=rope(1e6), tie_word_embeddings=True)
    yield small("Qwen3", "qwen3-yarn", qwen, head_dim=32, rope_parameters=rope(1e6, **yarn))
    experts = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, rope_parameters=rope(1e6))
    yield small("Qwen3Moe", "qwen3moe", qwen, head_dim=16, norm_topk_prob=True, **experts)
    yield small("Qwen2Moe", "qwen2moe", qwen, shared_expert_intermediate_size=64, **experts)
    olmo = {"tokenizer.ggml.pre": "dbrx"}
    experts = dict(num_experts=8, num_experts_per_tok=3, num_key_value_heads=4, rope_parameters=rope(1e4))
    yield small("Olmoe", "olmoe", olmo, **experts)
    yield from dense_goldens(yarn)
    yield from mixture_goldens(yarn)
    yield small("Mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2, rope_parameters=rope(1e4))


def dense_goldens(yarn: dict[str, Any]) -> Iterator[Golden]:
    """Families that differ from Llama in a few places."""
    bpe = {"tokenizer.ggml.pre": "llama-bpe"}
    plain, layered = rope(1e4), {"layer_norm_eps": 1e-3}
    keys = {"tokenizer.ggml.pre": "tekken", "attention.temperature_scale": 0.1}
    keys |= {"rope.scaling.yarn_log_multiplier": 1.0}
    long = rope(1e6, **(yarn | {"original_max_position_embeddings": 16}))
    long |= {
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    yield small("Ministral3", "mistral3", keys, head_dim=16, rope_parameters=long)
    yield small(
        "SmolLM3", "smollm3", bpe, num_hidden_layers=4, tie_word_embeddings=False, rope_parameters=rope(5e6)
    )
    yield small("Olmo2", "olmo2", {"tokenizer.ggml.pre": "dbrx"}, rope_parameters=rope(5e5))
    olmo3 = {"attention.sliding_window_pattern": [True, True, False]}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    yield small(
        "Olmo3",
        "olmo3",
        {"tokenizer.ggml.pre": "dbrx"} | olmo3,
        num_hidden_layers=3,
        sliding_window=8,
        layer_types=kinds,
        rope_parameters={"full_attention": rope(5e5, **yarn), "sliding_attention": rope(5e5)},
    )
    short, long_factors = [1.0, 1.1, 1.2], [1.0, 2.0, 4.0]
    for name, trained in (("phi3", 256), ("phi3-long", 16)):
        factors = dict(short_factor=short, long_factor=long_factors)
        scaled = rope(1e4, rope_type="longrope", partial_rotary_factor=0.75, factor=256 / trained, **factors)
        scaled |= {"original_max_position_embeddings": trained}
        keys = {"rope.dimension_count": 6, "rope.scaling.original_context_length": trained}
        keys |= {"rope.scaling.attn_factor": longrope_magnitude(256, trained)}
        # A window as in Phi 3 mini, which llama.cpp does not look at, and none, as in Phi 4.
        window = {} if trained == 256 else {"sliding_window": 8}
        keys |= {"attention.sliding_window": window.get("sliding_window", 0)}
        more = dict(rope_parameters=scaled, original_max_position_embeddings=trained)
        yield small("Phi3", name, keys | {"tokenizer.ggml.pre": "dbrx"}, **more, **window)
    granite = dict(
        embedding_multiplier=6.0, residual_multiplier=0.3, attention_multiplier=0.2, logits_scaling=4.0
    )
    scales = {"embedding_scale": 6.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 4.0}
    scales |= {"tokenizer.ggml.pre": "refact"}
    yield small("Granite", "granite", scales, rope_parameters=plain, tie_word_embeddings=True, **granite)
    experts = dict(num_local_experts=6, num_experts_per_tok=2, intermediate_size=32)
    yield small("GraniteMoe", "granitemoe", scales, rope_parameters=plain, **granite, **experts)
    half = rope(1e4, partial_rotary_factor=0.5)
    keys = {"tokenizer.ggml.pre": "glm4", "rope.dimension_count": 8}
    yield small("Glm4", "glm4", keys, head_dim=16, attention_bias=True, rope_parameters=half)
    keys = {"tokenizer.ggml.pre": "command-r", "attention.sliding_window": 8, "logit_scale": 0.5}
    keys |= {"rope.scaling.type": "none", "attention.sliding_window_pattern": [True, False, True]}
    cohere2 = dict(sliding_window=8, logit_scale=0.5, layer_types=[kinds[0], kinds[2], kinds[0]], **layered)
    yield small("Cohere2", "cohere2", keys, num_hidden_layers=3, rope_parameters=plain, **cohere2)
    keys = {"tokenizer.ggml.pre": "exaone4"}
    exaone4 = dict(sliding_window=None, sliding_window_pattern=None, rope_parameters=rope(1e6))
    yield small("Exaone4", "exaone4", keys, layer_types=["full_attention"] * 2, **exaone4)
    keys |= {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, False]}
    exaone4 = dict(sliding_window=8, sliding_window_pattern="LLG", rope_parameters=rope(1e6))
    yield small("Exaone4", "exaone4-window", keys, num_hidden_layers=3, layer_types=kinds, **exaone4)
    yield small("Ernie4_5", "ernie4_5", head_dim=16, tie_word_embeddings=True, rope_parameters=rope(5e5))
    keys = {"tokenizer.ggml.pre": "seed-coder"}
    yield small("SeedOss", "seed_oss", keys, head_dim=16, attention_bias=True, rope_parameters=rope(1e7))
    keys = {"tokenizer.ggml.pre": "hunyuan-dense"}
    yield small("HunYuanDenseV1", "hunyuan-dense", keys, head_dim=16, rope_parameters=plain)
    keys = {"tokenizer.ggml.pre": "starcoder"}
    starcoder2 = dict(norm_epsilon=1e-3, sliding_window=None, use_bias=True)
    yield small("Starcoder2", "starcoder2", keys, rope_parameters=rope(1e5), **starcoder2)
    keys = {"tokenizer.ggml.pre": "stablelm2", "rope.dimension_count": 4}
    quarter = rope(1e4, partial_rotary_factor=0.25)
    stablelm = dict(use_qkv_bias=True, num_attention_heads=2, rope_parameters=quarter, **layered)
    yield small("StableLm", "stablelm", keys, **stablelm)


def mixture_goldens(yarn: dict[str, Any]) -> Iterator[Golden]:
    keys = {"tokenizer.ggml.pre": "gpt-4o", "attention.sliding_window": 8}
    gpt_oss = dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, sliding_window=8)
    gpt_oss |= dict(layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4)
    scaled = rope(1.5e5, **yarn, truncate=False, beta_fast=32.0, beta_slow=1.0)
    yield small("GptOss", "gpt-oss", keys, head_dim=16, rope_parameters=scaled, **gpt_oss)
    keys = {"tokenizer.ggml.pre": "glm4", "rope.dimension_count": 8, "leading_dense_block_count": 1}
    keys |= {"expert_shared_count": 1, "expert_gating_func": 2, "expert_weights_scale": 1.5}
    keys |= {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32}
    keys |= {"expert_weights_norm": True}
    experts = dict(num_experts_per_tok=3, moe_intermediate_size=32)
    glm = dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5)
    glm |= dict(use_qk_norm=True, attention_bias=True, head_dim=16, **experts)
    yield small("Glm4Moe", "glm4moe", keys, rope_parameters=rope(1e6, partial_rotary_factor=0.5), **glm)
    keys = {"leading_dense_block_count": 1, "interleave_moe_layer_step": 1}
    keys |= {"expert_shared_feed_forward_length": 32, "expert_count": 8, "expert_used_count": 3}
    keys |= {"expert_feed_forward_length": 32}
    ernie = dict(moe_num_experts=8, moe_k=3, moe_intermediate_size=32, moe_num_shared_experts=1)
    ernie |= dict(moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1)
    yield small("Ernie4_5_Moe", "ernie4_5-moe", keys, rope_parameters=rope(5e5), **ernie)
    keys = {"tokenizer.ggml.pre": "hunyuan", "expert_shared_feed_forward_length": 64}
    keys |= {"expert_shared_count": 1}
    hunyuan = dict(num_experts=4, moe_topk=2, num_experts_per_tok=2, num_shared_expert=1, head_dim=16)
    yield small("HunYuanMoEV1", "hunyuan-moe", keys, rope_parameters=rope(1e4), **hunyuan)


def longrope_magnitude(context: int, trained: int) -> float:
    return math.sqrt(1 + math.log(context / trained) / math.log(trained))


NAMES = {
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "gpt_oss": "gpt-oss",
}
REORDERED = ("llama", "mistral3", "smollm3", "granite", "granitemoe")  # Q and K for rotation of neighbours
LAYER_NORMS = ("cohere2", "starcoder2", "stablelm")


# Tensors of a layer that the name map of `gguf` does not have.
RENAMED = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "mlp.gate.wg.weight": "ffn_gate_inp.weight",
}


def architecture(golden: Golden) -> str:
    name = golden.config.model_type.removesuffix("_text")
    return NAMES.get(name, name.replace("_moe", "moe"))


def make_model(golden: Golden, generator: torch.Generator) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_config(golden.config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and not name.endswith("bias"):
            value = (0.0 if "gemma" in golden.config.model_type else 1.0) + 0.3 * noise
        elif "embed" in name or name.endswith("bias"):
            value = 0.4 * noise
        elif "gate_up" in name and golden.config.model_type == "gpt_oss":  # so large that some are clamped
            value = 0.5 * noise
        else:  # gain 2 for queries and keys: attention that prefers some positions
            gain = 2.0 if ("q_proj" in name or "k_proj" in name) else 1.0
            value = gain * parameter.shape[-1] ** -0.5 * noise
        parameter.data = torch.round(value * 64) / 64
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.data = torch.round(0.2 * torch.randn(buffer.shape, generator=generator) * 64) / 64
    return model


def converted_tensors(golden: Golden, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    config = golden.config
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture(golden))
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "gemma" in config.model_type and name.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture(golden) in REORDERED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])  # rotated pairs: halves -> neighbours
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        layer, rest = ".".join(["blk", *name.split(".")[2:3]]), ".".join(name.split(".")[3:])
        if "experts." in name and "shared" not in name:
            kind = "bias" if name.endswith("bias") else "weight"
            turned = config.model_type == "gpt_oss"  # [experts, columns, rows]; gate and up in turn
            tensor = tensor.swapaxes(1, 2) if turned and kind == "weight" else tensor
            halves = (tensor[:, ::2], tensor[:, 1::2]) if turned else tensor.chunk(2, dim=1)
            parts = {"gate": halves[0], "up": halves[1]} if "gate_up" in name else {"down": tensor}
            for part, values in parts.items():
                yield f"{layer}.ffn_{part}_exps.{kind}", values.contiguous().numpy()
        elif rest in RENAMED:
            yield (
                f"{layer}.{RENAMED[rest]}",
                tensor.reshape(tensor.shape[-2 if "weight" in rest else -1 :]).numpy(),
            )
        else:
            tensor = tensor.squeeze(0) if "shared_expert_gate" in name else tensor
            yield names.get_name(name, (".weight", ".bias")), tensor.contiguous().numpy()
    for kind in ("long", "short"):
        if factors := config.rope_parameters.get(f"{kind}_factor"):
            yield f"rope_factors_{kind}.weight", np.array(factors)
    if config.rope_parameters.get("rope_type") == "llama3":
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, 1, 2 / config.head_dim))
        yield "rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy()


def metadata(golden: Golden) -> dict[str, Any]:
    """The keys after "{architecture}." that the converter writes."""
    c = golden.config
    keys = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
    }
    kind = "layer_norm" if architecture(golden) in LAYER_NORMS else "layer_norm_rms"
    keys |= {f"attention.{kind}_epsilon": 1e-3}
    if experts := getattr(c, "num_experts", getattr(c, "num_local_experts", None)):
        keys |= {"expert_count": experts, "expert_used_count": getattr(c, "num_experts_per_tok", 0)}
        keys |= {"expert_feed_forward_length": getattr(c, "moe_intermediate_size", c.intermediate_size)}
    if shared := getattr(c, "shared_expert_intermediate_size", None):
        keys |= {"expert_shared_feed_forward_length": shared}
    if head := getattr(c, "head_dim", None):
        keys |= {"attention.key_length": head, "attention.value_length": head}
    if architecture(golden) in REORDERED:
        size = c.hidden_size // c.num_attention_heads
        keys |= {"vocab_size": c.vocab_size, "rope.dimension_count": getattr(c, "head_dim", None) or size}
    if c.model_type.startswith("gemma") or c.model_type == "olmo3":
        keys |= {"attention.sliding_window": c.sliding_window}
    if c.model_type == "gemma2":
        keys |= {"attn_logit_softcapping": c.attn_logit_softcapping}
    if getattr(c, "final_logit_softcapping", None):
        keys |= {"final_logit_softcapping": c.final_logit_softcapping}
    if c.model_type != "gemma2":  # whose files leave the RoPE base to its default of 10,000
        local = c.rope_parameters.get("sliding_attention")
        scaling = c.rope_parameters.get("full_attention", c.rope_parameters)
        keys |= {"rope.freq_base": scaling["rope_theta"]}
        keys |= {"rope.freq_base_swa": local["rope_theta"]} if local else {}
        if scaling["rope_type"] in ("linear", "yarn"):
            keys |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
        if scaling["rope_type"] == "yarn":
            keys |= {"rope.scaling.original_context_length": scaling["original_max_position_embeddings"]}
    return keys


PIECES = ["\u2581", "e", "t", "a", "he", "\u2581t", "\u2581the"]
SPECIAL = {"gemma": ["<pad>", "<eos>", "<bos>", "<unk>"], "llama": ["<unk>", "<s>", "</s>"]}


def byte_alphabet() -> list[str]:
    """The printable characters that stand for the bytes 0 to 255 in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def write_tokenizer(writer: gguf.GGUFWriter, golden: Golden) -> None:
    """A vocabulary of bytes, special tokens and a few merges, of the kind the family uses."""
    pre = golden.keys.get("tokenizer.ggml.pre")
    special = SPECIAL["gemma" if "gemma" in golden.config.model_type else "llama"]
    if pre:
        merges = ["t h", "th e", "Ġ t", "Ġ a", "i n", "e r", "o n"]
        tokens = special + byte_alphabet() + [merge.replace(" ", "") for merge in merges]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_merges(merges)
    else:
        tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + PIECES
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([0.0] * (len(special) + 256) + [-float(i) for i in range(len(PIECES))])
        writer.add_add_space_prefix("gemma" not in golden.config.model_type)
    kinds = {"<unk>": gguf.TokenType.UNKNOWN} | dict.fromkeys(special, gguf.TokenType.CONTROL)
    byte_kind = gguf.TokenType.NORMAL if pre else gguf.TokenType.BYTE
    writer.add_tokenizer_pre(pre or "default")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [kinds[token] for token in special] + [byte_kind] * 256 + [gguf.TokenType.NORMAL] * 7
    )
    writer.add_bos_token_id(special.index("<bos>" if "<bos>" in special else "<s>"))
    writer.add_eos_token_id(special.index("<eos>" if "<eos>" in special else "</s>"))
    writer.add_add_bos_token(not pre)


def write_model(golden: Golden, model: torch.nn.Module) -> None:
    arch = architecture(golden)
    writer = gguf.GGUFWriter(GOLDENS / f"{golden.name}.gguf", arch)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    own = {key: value for key, value in golden.keys.items() if not key.startswith("tokenizer.")}
    for key, value in (metadata(golden) | own).items():
        if isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif value is not None:
            add = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
            }[type(value)]
            add(f"{arch}.{key}", value)
    write_tokenizer(writer, golden)
    for name, tensor in converted_tensors(golden, model):
        writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_logits(golden: Golden, model: torch.nn.Module, generator: torch.Generator) -> None:
    arrays = {}
    for length in PROMPT_LENGTHS[: 2 if golden.name.endswith("27b") else 3]:  # less data for the deep models
        ids = torch.randint(golden.config.vocab_size, (length,), generator=generator)
        arrays[f"ids_{length}"] = ids.numpy().astype(np.int32)
        arrays[f"logits_{length}"] = model(ids[None], use_cache=False).logits[0].numpy()
    np.savez_compressed(GOLDENS / f"{golden.name}.npz", **arrays)


@torch.no_grad()
def main() -> None:
    GOLDENS.mkdir(exist_ok=True)
    for golden in goldens():
        if sys.argv[1:] and golden.name not in sys.argv[1:]:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(golden.name.encode()))
        model = make_model(golden, generator)
        write_model(golden, model)
        write_logits(golden, model, generator)
        print(golden.name)


if __name__ == "__main__":
    main()
