"""Writes GGUF files for tests of mixtures: changed copies of a file, and a mixture that equals a dense model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tandem.gguf.file import GGUF
from tandem.gguf.formats import dequantise

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = Iterator[tuple[str, Array]]
EXPERTS, USED = 4, 2


def copy(source: Path, target: Path, keys: dict[str, Any], change: Callable[[str, Array], Tensors]) -> Path:
    """`keys`: metadata to set, or to leave out (None). `change`: what to write in place of a tensor."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in keys:
            continue
        kind, *rest = field.types
        writer.add_key_value(key, field.contents(), kind, sub_type=rest[-1] if rest else None)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    with GGUF.open(source) as model:
        for name, info in model.tensors.items():
            values = dequantise(info.format, model.raw(name)).reshape(info.shape)
            for new, array in change(name, values):
                if array.dtype == np.uint8:
                    writer.add_tensor(new, array, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
                    continue
                vector = array.ndim == 1 or new.endswith("bias") or "gate_inp" in new
                writer.add_tensor(new, np.ascontiguousarray(array, np.float32 if vector else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def as_dense(name: str, values: Array) -> Tensors:
    yield name, values


def with_mxfp4_experts(name: str, values: Array) -> Tensors:
    """As gpt-oss is published."""
    if name.endswith("_exps.weight"):
        values = gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType.MXFP4)
    yield name, values


def as_mixture(name: str, values: Array) -> Tensors:
    """A Llama model as a mixture of experts with the same output.

    Experts 0 and 1 are the halves of a feed-forward, 2 and 3 its even and odd columns. The router's rows are r, r, -r,
    -r, so that a token uses 0 and 1, or 2 and 3, each with weight 1/2: their output is doubled.
    """
    layer, _, part = name.removesuffix(".weight").rpartition(".ffn_")
    if part not in ("gate", "up", "down"):
        yield name, values
        return
    hidden = values if part != "down" else values.T
    half = len(hidden) // 2
    experts = np.stack([hidden[:half], hidden[half:], hidden[::2], hidden[1::2]])
    yield f"{layer}.ffn_{part}_exps.weight", experts if part != "down" else 2 * experts.swapaxes(1, 2)
    if part == "gate":
        row = np.random.default_rng(len(layer)).standard_normal(values.shape[1])
        yield f"{layer}.ffn_gate_inp.weight", np.stack([row, row, -row, -row])


def mixture_keys(hidden: int) -> dict[str, Any]:
    return {
        "llama.expert_count": EXPERTS,
        "llama.expert_used_count": USED,
        "llama.feed_forward_length": hidden // 2,
    }


# Where blocks of a format have their float16 scales and minima: bytes.
SCALES = {"Q5_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}


def as_quantised_mixture(source: Path, target: Path) -> Path:
    """A qwen2 file as a qwen2moe of four experts and a shared one with the same output and the same blocks.

    The shared expert has the first three groups of 256 columns of a feed-forward; experts 0 and 1 have halves of the
    others, 2 and 3 its even and odd groups. The router's rows are r, r, -r, -r, so that a token uses 0 and 1, or 2 and
    3, each with weight 1/2, and the gate of the shared expert is 1/2: their output is doubled.
    """
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "qwen2moe")
    hidden, columns = (
        reader.fields[f"qwen2.{key}"].contents() for key in ("feed_forward_length", "embedding_length")
    )
    groups, rng = list(range(hidden // 256)), np.random.default_rng(0)
    shared, rest = groups[:3], groups[3:]
    half = len(rest) // 2
    experts = [rest[:half], rest[half:], rest[::2], rest[1::2]]
    sizes = {"feed_forward_length": half * 256, "expert_feed_forward_length": half * 256, "expert_count": EXPERTS,
             "expert_used_count": USED, "expert_shared_feed_forward_length": 3 * 256}  # fmt: skip
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "qwen2.feed_forward_length"):
            kind, *of = field.types
            name = key.replace("qwen2.", "qwen2moe.")
            writer.add_key_value(name, field.contents(), kind, sub_type=of[-1] if of else None)
    for key, size in sizes.items():
        writer.add_uint32(f"qwen2moe.{key}", size)
    for tensor in reader.tensors:
        layer, _, part = tensor.name.removesuffix(".weight").rpartition(".ffn_")
        if part not in ("gate", "up", "down"):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        if part == "down":
            whole = _doubled(tensor.data, tensor.tensor_type).reshape(columns, len(groups), -1)
            stack = np.stack([whole[:, own].reshape(columns, -1) for own in experts])
            own = whole[:, shared].reshape(columns, -1)
        else:
            whole = tensor.data.reshape(len(groups), 256, -1)
            stack = np.stack([whole[own].reshape(half * 256, -1) for own in experts])
            own = whole[shared].reshape(3 * 256, -1)
        for suffix, values in (("exps", stack), ("shexp", own)):
            name = f"{layer}.ffn_{part}_{suffix}.weight"
            writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=tensor.tensor_type)
        if part == "gate":
            row = (2000 / columns**0.5 * rng.standard_normal(columns)).astype(np.float32)
            writer.add_tensor(f"{layer}.ffn_gate_inp.weight", np.stack([row, row, -row, -row]))
            tiny = (1e-6 * rng.standard_normal(columns)).astype(np.float32)  # llama.cpp divides by it
            writer.add_tensor(f"{layer}.ffn_gate_inp_shexp.weight", tiny)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _doubled(blocks: Array, format: gguf.GGMLQuantizationType) -> Array:
    found = blocks.reshape(-1, gguf.GGML_QUANT_SIZES[format][1]).copy()
    for at in SCALES[format.name]:
        scale = np.ascontiguousarray(found[:, at : at + 2]).view(np.float16) * np.float16(2)
        found[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return found.reshape(blocks.shape)
