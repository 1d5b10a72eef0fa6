"""Writes goldens/vision/: tiny random models that see, their mmproj files, and what `transformers` computes.

Run by hand, like make_goldens.py, whose tokenizer and text tensors it uses:
    python tests/models/make_vision_goldens.py
"""

from __future__ import annotations

import zlib

import gguf
import make_goldens
import numpy as np
import torch
import transformers
from make_goldens import Golden, make_model, rope, small

make_goldens.GOLDENS = GOLDENS = make_goldens.GOLDENS / "vision"
make_goldens.SPECIAL["gemma"] += [
    "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
]  # fmt: skip
SPECIAL = make_goldens.SPECIAL["gemma"]
IMAGE, PATCH, MERGE, WIDTH, FFN, LAYERS, HEADS = 56, 14, 2, 48, 80, 2, 2  # heads of 24: not a multiple of 16
TOKENS = (IMAGE // PATCH // MERGE) ** 2
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
NAMES = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
}


def text_golden() -> Golden:
    return small(
        "Gemma3Text",
        "gemma3",
        {"attention.sliding_window_pattern": 2},
        head_dim=16,
        query_pre_attn_scalar=16,
        rope_parameters={"full_attention": rope(1e6), "sliding_attention": rope(1e4)},
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )


def seeing_model(golden: Golden, text: torch.nn.Module, generator: torch.Generator) -> torch.nn.Module:
    vision = transformers.SiglipVisionConfig(
        hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        image_size=IMAGE, patch_size=PATCH, vision_use_head=False, attn_implementation="eager",
    )  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=golden.config,
        vision_config=vision,
        mm_tokens_per_image=TOKENS,
        image_token_index=SPECIAL.index("<image_soft_token>"),
        boi_token_index=SPECIAL.index("<start_of_image>"),
        eoi_token_index=SPECIAL.index("<end_of_image>"),
        attn_implementation="eager",
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    for part in (model.model.vision_tower, model.model.multi_modal_projector):
        for name, parameter in part.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                value = (0.0 if "soft_emb" in name else 1.0) + 0.3 * noise
            elif name.endswith("bias") or "position" in name:
                value = 0.4 * noise
            else:
                fan = parameter[0].numel() if "projection_weight" not in name else parameter.shape[0]
                value = (2.0 if "q_proj" in name or "k_proj" in name else 1.0) * fan**-0.5 * noise
            parameter.data = torch.round(value * 64) / 64
    return model


def mmproj_tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in model.model.vision_tower.state_dict().items():
        stem, _, part = name.removeprefix("vision_model.").rpartition(".")
        if stem.startswith("encoder.layers."):
            layer, _, rest = stem.removeprefix("encoder.layers.").partition(".")
            found[f"v.blk.{layer}.{LAYER_NAMES[rest]}.{part}"] = tensor
        else:
            found[f"{NAMES[stem]}.{part}"] = tensor
    projector = model.model.multi_modal_projector
    found["mm.input_projection.weight"] = projector.mm_input_projection_weight.data
    found["mm.soft_emb_norm.weight"] = projector.mm_soft_emb_norm.weight.data + 1
    return {name: np.ascontiguousarray(tensor.numpy(), np.float32) for name, tensor in found.items()}


def write_mmproj(model: torch.nn.Module) -> None:
    writer = gguf.GGUFWriter(GOLDENS / "mmproj-gemma3.gguf", "clip")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "gemma3")
    writer.add_bool("clip.use_gelu", True)
    sizes = {
        "image_size": IMAGE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": FFN,
        "block_count": LAYERS, "attention.head_count": HEADS, "projection_dim": 32, "projector.scale_factor": MERGE,
    }  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    for name, tensor in mmproj_tensors(model).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_results(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Two images in a prompt, with text before, between and after; -1 marks their tokens in `ids`."""
    pixels = torch.randint(0, 256, (2, 3, IMAGE, IMAGE), generator=generator).float() / 127.5 - 1
    image, first, end = (
        SPECIAL.index(f"<{name}>") for name in ("image_soft_token", "start_of_image", "end_of_image")
    )
    text = torch.randint(
        len(SPECIAL), model.config.text_config.vocab_size, (3, 11), generator=generator
    ).tolist()
    picture = [first, *[image] * TOKENS, end]
    ids = torch.tensor([[2, *text[0], *picture, *text[1], *picture, *text[2][:3]]])
    features = model.model.get_image_features(pixels)
    features = getattr(features, "pooler_output", features)
    out = model(input_ids=ids, pixel_values=pixels, token_type_ids=(ids == image).long(), use_cache=False)
    np.savez_compressed(
        GOLDENS / "gemma3.npz",
        pixels=pixels.numpy(),
        embeddings=torch.stack(list(features)).reshape(2, TOKENS, -1).numpy(),
        ids=torch.where(ids == image, -1, ids)[0].numpy().astype(np.int32),
        logits=out.logits[0].numpy(),
    )


@torch.no_grad()
def main() -> None:
    GOLDENS.mkdir(exist_ok=True, parents=True)
    golden = text_golden()
    generator = torch.Generator().manual_seed(zlib.crc32(b"gemma3 vision"))
    text = make_model(golden, generator)
    make_goldens.write_model(golden, text)
    model = seeing_model(golden, text, generator)
    write_mmproj(model)
    write_results(model, generator)


if __name__ == "__main__":
    main()
