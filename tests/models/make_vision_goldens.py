"""Writes goldens/vision/: tiny random models that see, their mmproj files, what `transformers` computes, and what its
image processors make of pictures.py. make_gemma4_vision_goldens.py has Gemma 4.

Run by hand, in the environment of make_goldens.py:
    python -m tests.models.make_vision_goldens [NAME ...]
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tandem.convert.convert import convert
from tests.gguf_files import Key, write
from tests.models import make_goldens, make_hybrid_goldens
from tests.models.make_goldens import rope, small
from tests.models.pictures import COUNT, picture_of

GOLDENS = make_goldens.GOLDENS / "vision"
WIDTH, FFN, LAYERS, HEADS, TEXT = 48, 80, 2, 2, 32  # heads of 24: not a multiple of 16


@dataclass
class Golden:
    """`special`: tokens of the vocabulary. `own`: parts of the model beside its language model. `names`: a tensor's
    name, with a star for the layer -> its name in the mmproj file. `change`: of tensors, for the file."""

    name: str
    config: Any
    special: list[str]
    own: list[str]
    keys: list[Key]
    names: dict[str, str]
    processor: Any
    run: Callable[[Golden, Any, torch.Generator], dict[str, np.ndarray]]
    text_keys: dict[str, Any] = field(default_factory=dict)
    change: Callable[[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]] | None = None
    aspect: int = 0  # of pictures that the processor refuses
    # The language model and the module that writes it, if `tandem convert` does not convert it.
    text: Any = None
    writer: Any = make_hybrid_goldens


def siglip_names(prefix: str) -> dict[str, str]:
    layer = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_out", "layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    }  # fmt: skip
    names = {f"{prefix}encoder.layers.*.{name}": f"v.blk.*.{short}" for name, short in layer.items()}
    return names | {
        f"{prefix}embeddings.patch_embedding": "v.patch_embd",
        f"{prefix}embeddings.position_embedding": "v.position_embd",
        f"{prefix}post_layernorm": "v.post_ln",
    }


def text_config(kind: str, **changes: Any) -> Any:
    return small(kind, "", **changes).config


def goldens() -> Iterator[Golden]:
    yield gemma3()
    yield smolvlm()
    yield qwen3vl()
    yield qwen35()
    yield qwen25vl()


def gemma3() -> Golden:
    special = make_goldens.SPECIAL["gemma"] + [
        "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
    ]  # fmt: skip
    make_goldens.SPECIAL["gemma"] = special
    size, patch, merge = 56, 14, 2
    tokens = (size // patch // merge) ** 2
    vision = transformers.SiglipVisionConfig(
        hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        image_size=size, patch_size=patch, vision_use_head=False, attn_implementation="eager",
    )  # fmt: skip
    text = text_config(
        "Gemma3Text", head_dim=16, query_pre_attn_scalar=16, sliding_window=8,
        rope_parameters={"full_attention": rope(1e6), "sliding_attention": rope(1e4)},
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=tokens,
        image_token_index=special.index("<image_soft_token>"), boi_token_index=special.index("<start_of_image>"),
        eoi_token_index=special.index("<end_of_image>"), attn_implementation="eager",
    )  # fmt: skip
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = siglip_names("model.vision_tower.") | siglip_names("model.vision_tower.vision_model.") | {
        "model.multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
        "model.multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    }  # fmt: skip

    def change(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor + 1 if "soft_emb_norm" in name else tensor

    def run(golden: Golden, model: Any, generator: torch.Generator) -> dict[str, np.ndarray]:
        """Two images in a prompt, with text before, between and after; -1 marks their tokens in `ids`."""
        pixels = torch.randint(0, 256, (2, 3, size, size), generator=generator)
        image, first, end = (
            special.index(f"<{name}>") for name in ("image_soft_token", "start_of_image", "end_of_image")
        )
        text = random_text(golden, generator, 25)
        picture = [first, *[image] * tokens, end]
        ids = torch.tensor([[2, *text[:11], *picture, *text[11:22], *picture, *text[22:]]])
        values = pixels.float() / 127.5 - 1
        features = model.model.get_image_features(values)
        features = getattr(features, "pooler_output", features)
        out = model(input_ids=ids, pixel_values=values, token_type_ids=(ids == image).long(), use_cache=False)
        return results(pixels, features, ids, ids == image, out.logits)

    return Golden(
        "gemma3", config, special, ["model.vision_tower", "model.multi_modal_projector"],
        [*common_keys("gemma3", size, patch), ("clip.vision.projector.scale_factor", "u32", merge)],
        names,
        Gemma3ImageProcessorPil(size={"height": size, "width": size}, do_convert_rgb=True, **RAW),
        run, {"attention.sliding_window_pattern": 2}, change,
    )  # fmt: skip


def smolvlm() -> Golden:
    marks = ["<fake_token_around_image>", "<global-img>", "<image>"]
    special = [
        *make_goldens.SPECIAL["llama"], "<end_of_utterance>", *marks,
        *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    ]  # fmt: skip
    make_goldens.SPECIAL["llama"] = special
    size, patch, merge = 24, 4, 3
    tokens = (size // patch // merge) ** 2
    vision = transformers.SmolVLMConfig().vision_config.__class__(
        hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        image_size=size, patch_size=patch, attn_implementation="eager",
    )  # fmt: skip
    image = special.index("<image>")
    text = text_config("Llama", rope_parameters=rope(1e4), max_position_embeddings=1024)
    config = transformers.SmolVLMConfig(
        text_config=text.to_dict() | {"model_type": "llama"}, vision_config=vision, scale_factor=merge,
        image_token_id=image, tie_word_embeddings=False,
        attn_implementation="eager",
    )  # fmt: skip
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    names = siglip_names("model.vision_model.") | {"model.connector.modality_projection.proj": "mm.model.fc"}

    def run(golden: Golden, model: Any, generator: torch.Generator) -> dict[str, np.ndarray]:
        pixels = torch.randint(0, 256, (3, 3, size, size), generator=generator)
        text = random_text(golden, generator, 25)
        picture = [special.index(marks[0]), *[image] * tokens]
        ids = torch.tensor([[1, *text[:11], *picture, *picture, *text[11:22], *picture, *text[22:]]])
        values = (pixels.float() / 127.5 - 1)[None]
        features = model.model.get_image_features(values)
        features = getattr(features, "pooler_output", features)
        out = model(input_ids=ids, pixel_values=values, use_cache=False)
        return results(pixels, features, ids, ids == image, out.logits)

    return Golden(
        "smolvlm", config, special, ["model.vision_model", "model.connector"],
        [*common_keys("idefics3", size, patch), ("clip.vision.projector.scale_factor", "u32", merge),
         ("clip.vision.preproc_image_size", "u32", 4 * size)],
        names,
        SmolVLMImageProcessorPil(
            size={"longest_edge": 4 * size}, max_image_size={"longest_edge": size}, return_row_col_info=True, **RAW
        ),
        run,
    )  # fmt: skip


def qwen3vl() -> Golden:
    special = qwen_special()
    patch, side, after, width = 4, 6, [0, 2], 24
    config = transformers.Qwen3VLConfig(
        text_config=text_config(
            "Qwen3VLText", head_dim=16, num_hidden_layers=3,
            rope_parameters=rope(1e6, mrope_section=[3, 3, 2], mrope_interleaved=True),
        ).to_dict(),
        vision_config={
            "depth": 3, "hidden_size": width, "intermediate_size": FFN, "num_heads": HEADS, "patch_size": patch,
            "out_hidden_size": TEXT, "num_position_embeddings": side**2, "deepstack_visual_indexes": after,
        },
        **qwen_tokens(special), tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    names = qwen_names("linear_fc1", "linear_fc2") | {
        "model.visual.pos_embed": "v.position_embd", "model.visual.merger.norm": "v.post_ln",
        "model.visual.merger.linear_fc1": "mm.0", "model.visual.merger.linear_fc2": "mm.2",
    }  # fmt: skip
    for i, layer in enumerate(after):
        for part, short in (("norm", "norm"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2")):
            names[f"model.visual.deepstack_merger_list.{i}.{part}"] = f"v.deepstack.{layer}.{short}"
    return Golden(
        "qwen3vl", config, special, ["model.visual"],
        [*common_keys("qwen3vl_merger", side * patch, patch, layers=3, width=width), *qwen_keys(),
         ("clip.vision.is_deepstack_layers", "[bool]", [i in after for i in range(3)])],
        names, qwen_processor(patch), qwen_run, change=two_frames, aspect=200,
    )  # fmt: skip


def qwen35() -> Golden:
    """The encoder of Qwen 3 VL without further embeddings, and a language model with recurrent layers."""
    golden, patch, width = qwen3vl(), 4, 24
    hybrid = next(each for each in make_hybrid_goldens.hybrid_goldens() if each.name == "qwen35")
    vision = golden.config.vision_config.to_dict()
    for name in ("deepstack_visual_indexes", "model_type"):
        del vision[name]
    config = transformers.Qwen3_5Config(
        text_config=hybrid.config.to_dict(),
        vision_config=vision,
        **qwen_tokens(golden.special), tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    keys = [*common_keys("qwen3vl_merger", 6 * patch, patch, layers=3, width=width), *qwen_keys()]
    return replace(golden, name="qwen35", config=config, keys=keys, text=hybrid)


def qwen25vl() -> Golden:
    special, patch, width = qwen_special(), 4, 24
    config = transformers.Qwen2_5_VLConfig(
        text_config=text_config("Qwen2_5_VLText", rope_parameters=rope(1e6, mrope_section=[2, 1, 1])).to_dict(),
        vision_config={
            "depth": 4, "hidden_size": width, "intermediate_size": FFN, "num_heads": HEADS, "patch_size": patch,
            "out_hidden_size": TEXT, "fullatt_block_indexes": [1, 3], "window_size": 4 * patch,
        },
        **qwen_tokens(special), tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    names = qwen_names("up_proj", "down_proj") | {
        "model.visual.merger.ln_q": "v.post_ln", "model.visual.merger.mlp.0": "mm.0",
        "model.visual.merger.mlp.2": "mm.2",
        **{f"model.visual.blocks.*.attn.{part}": f"v.blk.*.attn_{part}" for part in "qkv"},
    }  # fmt: skip

    def change(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if ".qkv." not in name:
            yield from two_frames(name, tensor)
            return
        for part, values in zip("qkv", tensor.chunk(3), strict=True):
            yield name.replace("qkv", part), values

    keys = [("clip.vision.n_wa_pattern", "u32", 2), ("clip.vision.window_size", "u32", 4 * patch)]
    return Golden(
        "qwen25vl", config, special, ["model.visual"],
        [*common_keys("qwen2.5vl_merger", 560, patch, gelu=False, layers=4, width=width), *qwen_keys(), *keys],
        names, qwen_processor(patch), qwen_run, change=change, aspect=200,
    )  # fmt: skip


# ---- what the models of Qwen share

QWEN_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
MIN_PIXELS, MAX_PIXELS = 1024, 16384


def qwen_special() -> list[str]:
    known = make_goldens.SPECIAL["llama"]
    known += [mark for mark in ("<|im_start|>", "<|im_end|>", *QWEN_MARKS) if mark not in known]
    return known


def qwen_tokens(special: list[str]) -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {name: special.index(mark) for name, mark in zip(names, QWEN_MARKS, strict=True)}


def qwen_names(up: str, down: str) -> dict[str, str]:
    layer = {
        "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out", f"mlp.{up}": "ffn_up",
        f"mlp.{down}": "ffn_down", "mlp.gate_proj": "ffn_gate",
    }  # fmt: skip
    names = {f"model.visual.blocks.*.{name}": f"v.blk.*.{short}" for name, short in layer.items()}
    kinds = ("weight", "weight.1", "bias")
    return names | {f"model.visual.patch_embed.proj.{kind}": f"v.patch_embd.{kind}" for kind in kinds}


def qwen_keys() -> list[Key]:
    limits = {"spatial_merge_size": 2, "image_min_pixels": MIN_PIXELS, "image_max_pixels": MAX_PIXELS}
    return [(f"clip.vision.{key}", "u32", value) for key, value in limits.items()]


def qwen_processor(patch: int) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    return Qwen2VLImageProcessorPil(size=size, patch_size=patch, merge_size=2, **RAW)


def two_frames(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the patches of a film are two tensors."""
    if name.endswith("patch_embed.proj.weight"):
        yield name, tensor[:, :, 0]
        yield f"{name}.1", tensor[:, :, 1]
    else:
        yield name, tensor


def qwen_run(golden: Golden, model: Any, generator: torch.Generator) -> dict[str, np.ndarray]:
    """Images of three sizes in a prompt, the first two without text between them but their marks."""
    config = golden.config.vision_config
    patch, ids = config.patch_size, golden.config
    pixels, values, grids, pictures = [], [], [], []
    for rows, columns in ((3, 5), (5, 2), (1, 4)):
        shape = (2 * rows * patch, 2 * columns * patch)
        image = torch.randint(0, 256, (*shape, 3), generator=generator)
        pixels.append(image.numpy().astype(np.uint8))
        scaled = (image.float() / 127.5 - 1).reshape(rows, 2, patch, columns, 2, patch, 3)
        patches = scaled.permute(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None].repeat(1, 1, 1, 1, 1, 2, 1, 1)
        values.append(patches.reshape(4 * rows * columns, -1))
        grids.append([1, 2 * rows, 2 * columns])
        pictures.append(
            [ids.vision_start_token_id, *[ids.image_token_id] * (rows * columns), ids.vision_end_token_id]
        )
    text = random_text(golden, generator, 25)
    prompt = torch.tensor([[*text[:11], *pictures[0], *pictures[1], *text[11:22], *pictures[2], *text[22:]]])
    given, grid = torch.cat(values), torch.tensor(grids)
    features = model.model.get_image_features(given, image_grid_thw=grid)
    columns = [features.pooler_output, *(getattr(features, "deepstack_features", None) or [])]
    whole = torch.cat([x if torch.is_tensor(x) else torch.cat(list(x)) for x in columns], dim=1)
    is_image = prompt == ids.image_token_id
    out = model(
        input_ids=prompt, pixel_values=given, image_grid_thw=grid, mm_token_type_ids=is_image.int(),
        use_cache=False,
    )  # fmt: skip
    counts = [rows * columns // 4 for _, rows, columns in grids]
    return {
        **{f"pixels{i}": image for i, image in enumerate(pixels)},
        **{f"embeddings{i}": part.numpy() for i, part in enumerate(whole.split(counts))},
        "ids": torch.where(is_image, -1, prompt)[0].numpy().astype(np.int32),
        "logits": out.logits[0].numpy(),
    }


def qwen_pixels(patches: np.ndarray, grid: np.ndarray, patch: int) -> np.ndarray:
    """The picture that the patches of a processor are: [1, channels, height, width]."""
    _, rows, columns = grid
    cut = patches.reshape(rows // 2, columns // 2, 2, 2, 3, 2, patch, patch)[:, :, :, :, :, 0]
    return cut.transpose(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * patch, columns * patch)


def gemma4_pixels(patches: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The picture that the patches of a processor are: [1, channels, height, width]."""
    (columns, rows), side = places.max(axis=0) + 1, math.isqrt(patches.shape[-1] // 3)
    cut = patches[: rows * columns].reshape(rows, columns, side, side, 3)
    return cut.transpose(4, 0, 2, 1, 3).reshape(1, 3, rows * side, columns * side)


# A processor that returns bytes of colours.
RAW: dict[str, Any] = {"do_rescale": False, "do_normalize": False}


def random_text(golden: Golden, generator: torch.Generator, count: int) -> list[int]:
    vocab = golden.config.get_text_config().vocab_size
    return torch.randint(len(golden.special), vocab, (count,), generator=generator).tolist()


def results(pixels: Any, features: Any, ids: Any, images: Any, logits: Any) -> dict[str, np.ndarray]:
    return {
        "pixels": pixels.numpy().astype(np.uint8).transpose(0, 2, 3, 1),
        "embeddings": torch.stack(list(features)).reshape(len(pixels), -1, features[0].shape[-1]).numpy(),
        "ids": torch.where(images, -1, ids)[0].numpy().astype(np.int32),
        "logits": logits[0].numpy(),
    }


def common_keys(
    projector: str,
    size: int,
    patch: int,
    mean: Any = (0.5,) * 3,
    std: Any = (0.5,) * 3,
    gelu: bool = True,
    layers: int = LAYERS,
    width: int = WIDTH,
) -> list[Key]:
    sizes = {
        "image_size": size, "patch_size": patch, "embedding_length": width, "feed_forward_length": FFN,
        "block_count": layers, "attention.head_count": HEADS, "projection_dim": TEXT,
    }  # fmt: skip
    return [
        ("general.architecture", "str", "clip"),
        ("clip.has_vision_encoder", "bool", True),
        ("clip.projector_type", "str", projector),
        ("clip.use_gelu" if gelu else "clip.use_silu", "bool", True),
        *((f"clip.vision.{key}", "u32", value) for key, value in sizes.items()),
        ("clip.vision.attention.layer_norm_epsilon", "f32", 1e-6),
        ("clip.vision.image_mean", "[f32]", mean),
        ("clip.vision.image_std", "[f32]", std),
    ]


def make_model(golden: Golden, generator: torch.Generator) -> Any:
    model = transformers.AutoModelForImageTextToText.from_config(golden.config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if golden.text and not name.startswith(tuple(golden.own)):
            parameter.data = torch.round(golden.writer.value_of(name, noise) * 64) / 64
            continue
        is_gemma = golden.name == "gemma3" and not name.startswith("model.vision_tower")
        if ("norm" in name or "ln_q" in name) and not name.endswith("bias"):
            value = (0.0 if is_gemma else 1.0) + 0.3 * noise
            value = 0.3 * value if "q_norm" in name else value  # nothing else scales scores
        elif name.endswith("bias") or any(part in name for part in ("embed_tokens", "position", "pos_embed")):
            value = 0.4 * noise
        else:  # gain 2 for queries and keys: attention that prefers some positions
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            fan = parameter.shape[0] if name.endswith("projection_weight") else parameter[0].numel()
            value = gain * fan**-0.5 * noise
        parameter.data = torch.round(value * 64) / 64
    for name, buffer in model.named_buffers():
        noise = torch.randn(buffer.shape, generator=generator).abs()
        limit = 0.5 + 0.5 * noise
        kinds = {"_min": -limit, "_max": limit, "std_bias": noise, "std_scale": limit, "layer_scalar": limit}
        for kind, value in kinds.items():
            if name.endswith(kind):
                buffer.data = torch.round(value * 64) / 64
    model.tie_weights()
    return model


class TextOnly:
    """The language model of a model that sees."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._tensors


def write_text_model(golden: Golden, model: Any) -> None:
    """Saves the whole model as Hugging Face does, and converts its language model."""
    if golden.text:
        text_only = TextOnly(
            {name.replace("language_model.", ""): tensor for name, tensor in model.state_dict().items()
             if not name.startswith(tuple(golden.own))}
        )  # fmt: skip
        golden.writer.GOLDENS = GOLDENS
        golden.writer.write_model(golden.text, text_only)
        return
    text = golden.config.get_text_config()
    keys = golden.text_keys
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        make_goldens.write_tokenizer(Path(folder), make_goldens.Golden("", text, keys))
        saved = json.loads((Path(folder) / "config.json").read_text())
        family = make_goldens.FAMILIES[saved["architectures"][0]]
        own = {key if "tokenizer." in key else f"{family.architecture}.{key}": v for key, v in keys.items()}
        if "tokenizer.ggml.pre" not in keys:  # as its vocabulary has no merges
            pieces = make_goldens.PIECES
            own["tokenizer.ggml.scores"] = [0.0] * (text.vocab_size - len(pieces)) + [
                -float(i) for i in range(len(pieces))
            ]
        convert(Path(folder), GOLDENS / f"{golden.name}.gguf", "f32", changed=own | {"general.name": None})


def write_mmproj(golden: Golden, model: Any) -> None:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(tuple(golden.own)):
            for changed, values in golden.change(name, tensor) if golden.change else [(name, tensor)]:
                found[short_name(golden, changed)] = values
    tensors = [
        (name, "F32", np.ascontiguousarray(values.numpy(), np.float32)) for name, values in found.items()
    ]
    write(GOLDENS / f"mmproj-{golden.name}.gguf", golden.keys, tensors)


def short_name(golden: Golden, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if name in golden.names:
        return golden.names[name]
    parts = stem.split(".")
    number = next((part for part in parts if part.isdigit()), "")
    pattern = ".".join("*" if part == number and number else part for part in parts)
    pattern = stem if stem in golden.names else pattern
    return f"{golden.names[pattern].replace('*', number)}.{kind}"


def write_processed(golden: Golden) -> None:
    """The checksum of the pixels that the model's own processor makes of each picture, and their shapes."""
    found = []
    for index in range(COUNT):
        picture = picture_of(index)
        if golden.aspect and max(picture.size) > golden.aspect * min(picture.size):
            found.append((0,) * 6)
            continue
        out = golden.processor.preprocess(picture, return_tensors="np")
        values = np.asarray(out["pixel_values"])
        if "image_grid_thw" in out:
            values = qwen_pixels(values, out["image_grid_thw"][0], golden.processor.patch_size)
        if "image_position_ids" in out:
            values = gemma4_pixels(values[0], out["image_position_ids"][0])
        tiles = [np.asarray(tile) for tile in np.reshape(values, (-1, *values.shape[-3:]))]
        pixels = np.stack([tile.transpose(1, 2, 0) for tile in tiles])
        assert (pixels == pixels.astype(np.uint8)).all()
        rows, columns = (int(np.ravel(out.get(key, [0]))[0]) for key in ("rows", "cols"))
        found.append((*pixels.shape[:3], rows, columns, zlib.crc32(pixels.astype(np.uint8).tobytes())))
    np.savez_compressed(GOLDENS / f"{golden.name}-processed.npz", found=np.array(found, np.int64))


@torch.no_grad()
def main(found: Iterable[Golden]) -> None:
    GOLDENS.mkdir(exist_ok=True, parents=True)
    for golden in found:
        if sys.argv[1:] and golden.name not in sys.argv[1:]:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{golden.name} vision".encode()))
        model = make_model(golden, generator)
        write_text_model(golden, model)
        write_mmproj(golden, model)
        np.savez_compressed(GOLDENS / f"{golden.name}.npz", **golden.run(golden, model, generator))
        write_processed(golden)
        print(golden.name)


if __name__ == "__main__":
    main(goldens())
