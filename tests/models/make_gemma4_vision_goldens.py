"""Writes the goldens of Gemma 4 with images; see make_vision_goldens.py.

python -m tests.models.make_gemma4_vision_goldens [NAME ...]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers

from tests.gguf_files import Key
from tests.models import make_gemma4_goldens, make_goldens
from tests.models.make_goldens import small
from tests.models.make_vision_goldens import FFN, HEADS, LAYERS, RAW, Golden, common_keys, main, random_text

MARKS = ["<|image>", "<|image|>", "<image|>"]
PATCH, TOKENS = 4, 70  # the fewest tokens that the processor has as the most of an image


def goldens() -> Iterator[Golden]:
    yield gemma4()
    yield gemma4_shared()
    yield gemma4u()


def gemma4() -> Golden:
    """As 26B-A4B and 31B: an image's tokens see each other in sliding layers."""
    gemma4_special()
    text = next(each for each in make_gemma4_goldens.goldens() if each.name == "gemma4")
    text.config.use_bidirectional_attention = "vision"
    return gemma4_of(text, standardize=True)


def gemma4_shared() -> Golden:
    """As E2B and E4B: limits of matrices, embeddings of each layer; causal."""
    gemma4_special()
    text = next(each for each in make_gemma4_goldens.goldens() if each.name == "gemma4-shared")
    text.config.vocab_size_per_layer_input = text.config.vocab_size
    text.config.use_bidirectional_attention = None
    return gemma4_of(replace(text, name="gemma4-shared"), use_clipped_linears=True)


def gemma4_special() -> list[str]:
    known = make_goldens.SPECIAL["gemma"]
    known += [mark for mark in ("<start_of_turn>", "<end_of_turn>", *MARKS) if mark not in known]
    return known


def gemma4_of(text: Any, **features: bool) -> Golden:
    patch, width = PATCH, 24
    special = gemma4_special()
    vision = transformers.Gemma4VisionConfig(
        hidden_size=width, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=width // HEADS, patch_size=patch, pooling_kernel_size=3,
        position_embedding_size=3 * TOKENS + 6, attn_implementation="eager", **features,
    )  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=text.config.to_dict(), vision_config=vision, audio_config=None, **gemma4_tokens(special),
        attn_implementation="eager",
    )  # fmt: skip
    layer = {
        "input_layernorm": "ln1", "post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "ffn_post_norm", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }  # fmt: skip
    for part in ("q", "k", "v", "o"):
        short = "attn_out" if part == "o" else f"attn_{part}"
        layer |= {f"self_attn.{part}_proj": short, f"self_attn.{part}_proj.linear": short}
    for part in ("gate", "up", "down"):
        layer |= {f"mlp.{part}_proj": f"ffn_{part}", f"mlp.{part}_proj.linear": f"ffn_{part}"}
    tower = "model.vision_tower."
    names = {f"{tower}encoder.layers.*.{name}": f"v.blk.*.{short}" for name, short in layer.items()} | {
        f"{tower}patch_embedder.input_proj": "v.patch_embd",
        f"{tower}patch_embedder.position_embedding_table": "v.position_embd.weight",
        f"{tower}std_bias": "v.std_bias", f"{tower}std_scale": "v.std_scale",
        "model.embed_vision.embedding_projection": "mm.input_projection",
    }  # fmt: skip

    def change(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if name.endswith("input_proj.weight"):
            tensor = tensor.reshape(-1, patch, patch, 3).permute(0, 3, 1, 2)
        yield name, tensor

    keys = common_keys("gemma4v", 224, patch, mean=(0.0,) * 3, std=(1.0,) * 3, width=width)
    return Golden(
        text.name, config, special, ["model.vision_tower", "model.embed_vision"], [*keys, *gemma4_keys()], names,
        gemma4_processor(patch), gemma4_run, change=change, text=text, writer=make_gemma4_goldens,
    )  # fmt: skip


def gemma4u() -> Golden:
    """As 12B: without layers."""
    patch, width = PATCH, 24
    special = gemma4_special()
    text = small("Gemma4UnifiedText", "gemma4u", **make_gemma4_goldens.DENSE)
    config = transformers.Gemma4UnifiedConfig(
        text_config=text.config.to_dict(), audio_config=None,
        vision_config={
            "patch_size": patch, "pooling_kernel_size": 3, "mm_embed_dim": width, "output_proj_dims": width,
            "mm_posemb_size": TOKENS + 2,
        },
        **gemma4_tokens(special), attn_implementation="eager",
    )  # fmt: skip
    own, side = "model.embed_vision.", 3 * patch
    names = {f"{own}patch_ln{i}": f"v.patch_norm.{i}" for i in (1, 2)} | {
        f"{own}patch_dense": "v.patch_embd", f"{own}pos_norm": "v.patch_norm.3",
        f"{own}pos_embedding": "v.position_embd.weight",
        f"{own}multimodal_embedder.embedding_projection": "mm.input_projection",
    }  # fmt: skip

    def change(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Colours come one after the other in a file, and tables of columns and rows, too."""
        if "patch_dense.weight" in name or "patch_ln1" in name:
            shape = tensor.shape
            tensor = tensor.reshape(-1, side, side, 3).permute(0, 3, 1, 2).reshape(shape)
        yield name, tensor.permute(1, 0, 2) if name.endswith("pos_embedding") else tensor

    keys = common_keys("gemma4uv", 224, patch, mean=(0.0,) * 3, std=(1.0,) * 3, width=width, layers=0)
    return Golden(
        "gemma4u", config, special, [own[:-1]], [*keys, *gemma4_keys()], names, gemma4_processor(patch), gemma4_run,
        change=change, text=text, writer=make_gemma4_goldens,
    )  # fmt: skip


def gemma4_tokens(special: list[str]) -> dict[str, int]:
    names = ("boi_token_id", "image_token_id", "eoi_token_id")
    return {name: special.index(mark) for name, mark in zip(names, MARKS, strict=True)}


def gemma4_keys() -> list[Key]:
    return [
        ("clip.vision.projector.scale_factor", "u32", 3),
        ("clip.vision.image_max_pixels", "u32", TOKENS * (3 * PATCH) ** 2),
    ]


def gemma4_processor(patch: int) -> Any:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(patch_size=patch, pooling_kernel_size=3, max_soft_tokens=TOKENS, **RAW)


def gemma4_run(golden: Golden, model: Any, generator: torch.Generator) -> dict[str, np.ndarray]:
    """Images of three sizes in a prompt, the first two with nothing but their marks between them."""
    sizes, patch = ((2, 3), (5, 1), (1, 4)), PATCH  # in embeddings
    side = patch if golden.name != "gemma4u" else 3 * patch
    each, most = 3 * patch // side, max(rows * columns for rows, columns in sizes)
    values = torch.zeros(len(sizes), most * each**2, 3 * side**2)
    places = torch.full((len(sizes), most * each**2, 2), -1)
    ids, pixels, pictures = golden.config, [], []
    for i, (rows, columns) in enumerate(sizes):
        shape = (each * rows, each * columns)
        image = torch.randint(0, 256, (shape[0] * side, shape[1] * side, 3), generator=generator)
        pixels.append(image.numpy().astype(np.uint8))
        patches = (image.float() / 255).reshape(shape[0], side, shape[1], side, 3).transpose(1, 2)
        count = shape[0] * shape[1]
        values[i, :count] = patches.reshape(count, -1)
        places[i, :count] = torch.cartesian_prod(*map(torch.arange, shape)).flip(1)
        pictures.append([ids.boi_token_id, *[ids.image_token_id] * (rows * columns), ids.eoi_token_id])
    text = random_text(golden, generator, 25)
    prompt = torch.tensor(
        [[2, *text[:11], *pictures[0], *pictures[1], *text[11:22], *pictures[2], *text[22:]]]
    )
    features = model.model.get_image_features(values, image_position_ids=places)
    features = getattr(features, "pooler_output", features)
    features = features if isinstance(features, (tuple, list)) else features.split([r * c for r, c in sizes])
    is_image = prompt == ids.image_token_id
    # That of the models without an encoder is another by mistake where `generate` does not call them.
    masks = None
    if golden.name == "gemma4u":
        embeddings = model.get_input_embeddings()(prompt)
        masks = model.create_masks_for_generate(
            golden.config, embeddings, None, None, None, mm_token_type_ids=is_image.int()
        )
    out = model(
        input_ids=prompt, pixel_values=values, image_position_ids=places, mm_token_type_ids=is_image.int(),
        attention_mask=masks, use_cache=False,
    )  # fmt: skip
    return {
        **{f"pixels{i}": image for i, image in enumerate(pixels)},
        **{f"embeddings{i}": part.numpy() for i, part in enumerate(features)},
        "ids": torch.where(is_image, -1, prompt)[0].numpy().astype(np.int32),
        "logits": out.logits[0].numpy(),
    }


if __name__ == "__main__":
    main(goldens())
