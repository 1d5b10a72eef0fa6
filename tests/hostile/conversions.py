"""Generated Hugging Face folders: sound ones with a few values or bytes changed. Each is made from its number alone."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

from tandem.convert.convert import FILE_TYPES, convert
from tandem.convert.families import FAMILIES
from tandem.errors import TandemError
from tandem.model.model import open_model
from tests.convert.folders import LLAMA, MIXTRAL, llama_tensors, safetensors, tokenizer
from tests.hostile.generated import ODD

FIELDS = (
    "sliding_window", "layer_types", "no_rope_layers", "rope_scaling", "rope_parameters", "rope_theta", "text_config",
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace",
    "n_shared_experts", "routed_scaling_factor", "norm_topk_prob", "attn_logit_softcapping", "final_logit_softcapping",
    "sliding_window_pattern", "query_pre_attn_scalar", "embedding_multiplier", "residual_multiplier",
    "attention_multiplier", "logits_scaling", "logit_scale", "moe_layer_start_index", "moe_layer_interval",
    "moe_num_shared_experts", "num_shared_expert", "shared_expert_intermediate_size", "decoder_sparse_step",
    "mlp_only_layers", "use_sliding_window", "qk_layernorm", "head_dim", "partial_rotary_factor",
    "original_max_position_embeddings", "bos_token_id", "eos_token_id", "rope_local_base_freq", "layer_norm_eps",
    "layer_norm_epsilon", "norm_epsilon", "use_parallel_residual", "hidden_act", "attention_bias",
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group",
    "mlp_layer_types", "topk_method",
)  # fmt: skip
TYPES = ("linear", "yarn", "llama3", "longrope", "dynamic", "default", "su", "proportional")


def odd(rng: random.Random) -> Any:
    """A value of any type."""
    return rng.choice(
        (
            None, True, False, -1, 0.5, -0.0, 1e300, 1e999, float("nan"), "", "x", "\0", "\ud800", [], {}, [[]], [{}],
            {"type": rng.choice(TYPES), "factor": rng.choice((0, 2.0, -1, "x", None, 1e300))},
            {"rope_type": rng.choice(TYPES), "short_factor": [1.0] * 4, "long_factor": rng.choice((1, [2.0] * 4))},
            ["sliding_attention", "full_attention"], ["x"], [1] * 9, {"0": 1}, *ODD, 10**40,
        )
    )  # fmt: skip


def change(value: Any, rng: random.Random) -> None:
    """Changes something in a JSON value: replaces, removes, adds or repeats a part at any depth."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places or rng.random() < 0.05:
            break
        place = rng.choice(places)
        if isinstance(value[place], dict | list) and value[place] and rng.random() < 0.8:
            value = value[place]
            continue
        kind = rng.random()
        if kind < 0.6:
            value[place] = odd(rng)
        elif kind < 0.8:
            del value[place]
        elif isinstance(value, list):
            value.insert(0, copy.deepcopy(value[place]))
        else:
            value[f"{place}x"] = value[place]
        return
    if isinstance(value, dict):
        value[rng.choice(FIELDS)] = odd(rng)
    else:
        value.append(odd(rng))


def config(rng: random.Random, sound: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(sound)
    if rng.random() < 0.5:
        made["architectures"] = [rng.choice(list(FAMILIES))]
    for _ in range(rng.choice((0, 1, 2, 6))):
        made[rng.choice((*made, *FIELDS))] = odd(rng)
    if rng.random() < 0.1:
        made = {"architectures": made["architectures"], "text_config": made}
    return made


def weights(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with bytes or entries of its header changed."""
    kind = rng.random()
    if kind < 0.6:
        return data
    (length,) = struct.unpack_from("<Q", data)
    if kind < 0.85:
        header = json.loads(data[8 : 8 + length])
        change(header, rng)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]
    changed = bytearray(data)
    for _ in range(rng.choice((1, 4))):
        at = rng.randrange(8) if rng.random() < 0.2 else rng.randrange(len(changed))
        changed[at] = rng.randrange(256)
    if rng.random() < 0.3:
        del changed[rng.randrange(len(changed)) :]
    return bytes(changed)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def sentencepiece(rng: random.Random) -> bytes:
    def field(number: int, data: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(data)) + data

    pieces = [*tokenizer()["model"]["vocab"]]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    data = b"".join(
        field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", -i) + b"\x18" + varint(types[i]))
        for i, text in enumerate(pieces)
    )
    whole = bytearray(data + field(2, b"\x18\x02") + field(3, b"\x18\x01"))
    for _ in range(rng.choice((0, 0, 1, 5))):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    return bytes(whole[: len(whole) if rng.random() < 0.9 else rng.randrange(len(whole))])


TENSORS = {
    "llama": (LLAMA, llama_tensors("llama", 4, 1)),
    "mixtral": (MIXTRAL, llama_tensors("mixtral", 4, 2)),
}


def write_folder(folder: Path, rng: random.Random) -> None:
    sound, tensors = TENSORS[rng.choice(("llama", "llama", "mixtral"))]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    files: dict[str, Any] = {"config": config(rng, sound), "tokenizer": tokenizer()}
    if rng.random() < 0.3:
        files["tokenizer_config"] = {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>"},
            "chat_template": "{{ messages }}",
        }
        files["generation_config"] = {"eos_token_id": [2, 1]}
    for name in list(files)[1:]:
        if rng.random() < 0.4:
            change(files[name], rng)
    if rng.random() < 0.2:
        index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        change(index, rng)
        files["model.safetensors.index"] = index
    for name, content in files.items():
        text = json.dumps(content)
        if rng.random() < 0.03:
            text = rng.choice(
                (text[: rng.randrange(len(text))], "[" * 100_000, "1" * 5000, "\ufeff" + text, "")
            )
        (folder / f"{name}.json").write_text(text)
    (folder / "model.safetensors").write_bytes(weights(rng, safetensors(tensors)))
    if rng.random() < 0.2:
        (folder / "tokenizer.model").write_bytes(sentencepiece(rng))
        if rng.random() < 0.7:
            (folder / "tokenizer.json").unlink()
    if rng.random() < 0.05:  # a file of another kind
        path = folder / rng.choice(
            ("chat_template.jinja", "tokenizer.json", "config.json", "model.safetensors", "vocab.json")
        )
        path.unlink(missing_ok=True)
        rng.choice(
            (
                Path.mkdir,
                os.mkfifo,
                lambda path: path.symlink_to(path),
                lambda path: path.symlink_to("/dev/zero"),
            )
        )(path)


def run_conversion(folder: Path, number: int) -> None:
    """Converts folder `number`: the file opens, or an error says what is wrong and leaves nothing behind."""
    rng = random.Random(number)
    source, output = folder / "source", folder / "out"
    write_folder(source, rng)
    output.mkdir(exist_ok=True)
    target = output / "model.gguf"
    target.unlink(missing_ok=True)
    try:
        convert(source, target, rng.choice(list(FILE_TYPES)))
        open_model(target).gguf.close()
    except TandemError as error:
        assert str(error) and "\n" not in str(error)
        assert not list(output.iterdir()), "what is not done is removed"
