"""Writes goldens/: tiny random models as GGUF files, and the logits `transformers` gives for them.

Run by hand, only to add or change a model, in an environment with torch and transformers that also has Tandem:
    python -m tests.models.make_goldens [NAME ...]
The files are made by `tandem convert`, in float32. `keys` are those that differ from what it writes.
Weights are multiples of 1/64, so that the files compress well; they are large enough for each feature of a
model (window, RoPE scaling, soft cap, ...) to move the logits by far more than the tests' tolerance.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tandem.convert.convert import convert
from tandem.convert.families import FAMILIES

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
        num_hidden_layers=5,
        head_dim=32,
        query_pre_attn_scalar=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
        layer_types=["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding],
    )
    yield gemma3("gemma3-global", layer_types=["full_attention"] * 2)
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
    yield small("Mistral", "mistral-window", head_dim=16, sliding_window=8, rope_parameters=rope(1e4))
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
    keys = {"tokenizer.ggml.pre": "tekken"}
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
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    yield small(
        "Olmo3",
        "olmo3",
        {"tokenizer.ggml.pre": "dbrx"},
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
        # A window as in Phi 3 mini, which llama.cpp does not look at, and none, as in Phi 4.
        window = {} if trained == 256 else {"sliding_window": 8}
        more = dict(rope_parameters=scaled, original_max_position_embeddings=trained)
        yield small("Phi3", name, {"tokenizer.ggml.pre": "dbrx"}, **more, **window)
    granite = dict(
        embedding_multiplier=6.0, residual_multiplier=0.3, attention_multiplier=0.2, logits_scaling=4.0
    )
    keys = {"tokenizer.ggml.pre": "refact"}
    yield small("Granite", "granite", keys, rope_parameters=plain, tie_word_embeddings=True, **granite)
    experts = dict(num_local_experts=6, num_experts_per_tok=2, intermediate_size=32)
    yield small("GraniteMoe", "granitemoe", keys, rope_parameters=plain, **granite, **experts)
    half = rope(1e4, partial_rotary_factor=0.5)
    keys = {"tokenizer.ggml.pre": "glm4"}
    yield small("Glm4", "glm4", keys, head_dim=16, attention_bias=True, rope_parameters=half)
    keys = {"tokenizer.ggml.pre": "command-r"}
    cohere2 = dict(sliding_window=8, logit_scale=0.5, layer_types=[kinds[0], kinds[2], kinds[0]], **layered)
    yield small("Cohere2", "cohere2", keys, num_hidden_layers=3, rope_parameters=plain, **cohere2)
    keys = {"tokenizer.ggml.pre": "exaone4"}
    exaone4 = dict(sliding_window=None, sliding_window_pattern=None, rope_parameters=rope(1e6))
    yield small("Exaone4", "exaone4", keys, layer_types=["full_attention"] * 2, **exaone4)
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
    keys = {"tokenizer.ggml.pre": "stablelm2"}
    quarter = rope(1e4, partial_rotary_factor=0.25)
    stablelm = dict(use_qkv_bias=True, num_attention_heads=2, rope_parameters=quarter, **layered)
    yield small("StableLm", "stablelm", keys, **stablelm)


def mixture_goldens(yarn: dict[str, Any]) -> Iterator[Golden]:
    keys = {"tokenizer.ggml.pre": "gpt-4o"}
    gpt_oss = dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, sliding_window=8)
    gpt_oss |= dict(layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4)
    scaled = rope(1.5e5, **yarn, truncate=False, beta_fast=32.0, beta_slow=1.0)
    yield small("GptOss", "gpt-oss", keys, head_dim=16, rope_parameters=scaled, **gpt_oss)
    keys = {"tokenizer.ggml.pre": "glm4"}
    experts = dict(num_experts_per_tok=3, moe_intermediate_size=32)
    glm = dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5)
    glm |= dict(use_qk_norm=True, attention_bias=True, head_dim=16, **experts)
    yield small("Glm4Moe", "glm4moe", keys, rope_parameters=rope(1e6, partial_rotary_factor=0.5), **glm)
    latent = dict(
        kv_lora_rank=16, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4
    )
    # transformers has this epsilon in the norms of latents whatever the config says; files have one for all.
    latent |= dict(rms_norm_eps=1e-6)
    latent |= dict(n_routed_experts=8, routed_scaling_factor=1.5, **experts)
    scaled = yarn | {"mscale": 0.7, "mscale_all_dim": 0.7}
    # llama.cpp knows the variant without latents of queries by its 26 or 27 layers.
    lite = dict(q_lora_rank=None, n_shared_experts=2, first_k_dense_replace=25, rope_parameters=scaled)
    lite |= dict(num_hidden_layers=26, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32)
    lite |= dict(n_routed_experts=4, num_experts_per_tok=2)
    yield small("DeepseekV2", "deepseek-v2-lite", **(latent | lite))
    groups = dict(q_lora_rank=20, n_shared_experts=1, n_group=4, topk_group=2, first_k_dense_replace=1)
    yield small(
        "DeepseekV3",
        "deepseek-v3",
        rope_parameters=yarn | {"mscale": 1.0, "mscale_all_dim": 1.0},
        **latent,
        **groups,
    )
    glm4 = dict(q_lora_rank=20, n_shared_experts=1, rope_parameters=rope(1e6))
    yield small("Glm4MoeLite", "glm4moe-lite", keys, **latent, **glm4)
    ernie = dict(moe_num_experts=8, moe_k=3, moe_intermediate_size=32, moe_num_shared_experts=1)
    ernie |= dict(moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1)
    yield small("Ernie4_5_Moe", "ernie4_5-moe", rope_parameters=rope(5e5), **ernie)
    keys = {"tokenizer.ggml.pre": "hunyuan"}
    hunyuan = dict(num_experts=4, moe_topk=2, num_experts_per_tok=2, num_shared_expert=1, head_dim=16)
    yield small("HunYuanMoEV1", "hunyuan-moe", keys, rope_parameters=rope(1e4), **hunyuan)


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


PIECES = ["\u2581", "e", "t", "a", "he", "\u2581t", "\u2581the"]
SPECIAL = {"gemma": ["<pad>", "<eos>", "<bos>", "<unk>"], "llama": ["<unk>", "<s>", "</s>"]}


def byte_alphabet() -> list[str]:
    """The printable characters that stand for the bytes 0 to 255 in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def write_tokenizer(folder: Path, golden: Golden) -> None:
    """A vocabulary of bytes, special tokens and a few merges, of the kind the family uses."""
    is_gemma = "gemma" in golden.config.model_type
    special = SPECIAL["gemma" if is_gemma else "llama"]
    added = [{"id": i, "content": text, "special": True} for i, text in enumerate(special)]
    # The converter finds a name that splits alike; the golden has its own.
    if "tokenizer.ggml.pre" in golden.keys:
        merges = ["t h", "th e", "Ġ t", "Ġ a", "i n", "e r", "o n"]
        tokens = special + byte_alphabet() + [merge.replace(" ", "") for merge in merges]
        model: dict[str, Any] = {"type": "BPE", "merges": merges}
        rest = {"pre_tokenizer": {"type": "ByteLevel", "use_regex": True}}
    else:
        tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + PIECES
        model = {"type": "BPE", "merges": [], "byte_fallback": True, "unk_token": "<unk>"}
        rest = {"normalizer": None if is_gemma else {"type": "Prepend", "prepend": "\u2581"}}
    model |= {"vocab": {token: id for id, token in enumerate(tokens)}}
    whole = {"model": model, "added_tokens": added, **rest}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    options = {"bos_token": "<bos>" if is_gemma else "<s>", "eos_token": "<eos>" if is_gemma else "</s>"}
    options |= {"add_bos_token": "tokenizer.ggml.pre" not in golden.keys}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


def write_model(golden: Golden, model: transformers.PreTrainedModel) -> None:
    """Saves the model as Hugging Face does, and converts the folder as `tandem convert` does."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        write_tokenizer(Path(folder), golden)
        [name] = golden.config.architectures
        prefix = FAMILIES[name].architecture
        own = {key if "tokenizer." in key else f"{prefix}.{key}": v for key, v in golden.keys.items()}
        if "tokenizer.ggml.pre" not in golden.keys:  # as its vocabulary has no merges
            zeros = golden.config.vocab_size - len(PIECES)
            own["tokenizer.ggml.scores"] = [0.0] * zeros + [-float(i) for i in range(len(PIECES))]
        own |= {"general.name": None}
        convert(Path(folder), GOLDENS / f"{golden.name}.gguf", "f32", changed=own)


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
