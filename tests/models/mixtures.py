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
