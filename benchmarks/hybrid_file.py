"""Writes a GGUF file with random weights in the shape of a Qwen 3.5, which llama.cpp loads too.

    python -m benchmarks.hybrid_file FILE [--shape qwen3.5-2b:q4_k_m] [--layers 12]

No registry that tests may use has real weights of a hybrid. Formats are those of published files. The tokenizer is that
of Qwen 2.5, from the model that tests fetch. Without a draft head.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tandem.gguf.file import GGUF
from tandem.gguf.formats import by_name, quantise
from tandem.gguf.write import NewTensor, Value, header, padding
from tandem.kernels.kernel import Array
from tandem.model.config import ModelConfig
from tandem.model.synthetic import SyntheticModel
from tests.packages import model_path

VOCABULARY = "qwen2.5-coder-0.5b"
PATTERN = 1 << 20  # random weights of a format and row length, repeated over its matrices
FILE_TYPE = 15  # Q4_K_M
SECTIONS = [11, 11, 10, 0]  # of RoPE


def write_hybrid(path: Path, name: str, layers: int | None = None) -> int:
    """Writes the file; returns the number of parameters."""
    with GGUF.open(model_path(VOCABULARY)) as gguf:
        vocabulary = {k: _plain(v) for k, v in gguf.metadata.items() if k.startswith("tokenizer.")}
    model = SyntheticModel(name, layers)
    vocab = len(vocabulary["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    model.config = replace(model.config, vocab=vocab, draft_layers=0, draft_tensors=())
    tensors = _tensors(model)
    rng, patterns = np.random.default_rng(1), dict[tuple[str, int], Array]()
    with open(path, "wb") as file:
        file.write(header({**_metadata(model.config, name), **vocabulary}, tensors))
        for tensor in tensors:
            data = _data(tensor, rng, patterns)
            file.write(data.tobytes() + padding(data.nbytes))
    return sum(int(np.prod(tensor.shape)) for tensor in tensors)


def _plain(value: Any) -> Value:
    """A value of a file's metadata, as it is written; its lists are arrays or texts that are not decoded yet."""
    if isinstance(value, bool | int | float | str):
        return value
    listed: list[Any] = value.tolist() if isinstance(value, np.ndarray) else list(value)
    return listed


def _metadata(c: ModelConfig, name: str) -> dict[str, Value]:
    heads = c.delta_heads
    assert heads is not None
    of_architecture: dict[str, Value] = {
        "context_length": c.trained_context, "embedding_length": c.dim, "block_count": c.layers,
        "feed_forward_length": c.ffn_dim, "attention.head_count": c.q_heads, "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim, "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.eps, "rope.freq_base": c.ropes[0].base,
        "rope.dimension_count": c.ropes[0].rot_dim, "rope.dimension_sections": SECTIONS,
        "ssm.conv_kernel": c.conv_taps, "ssm.state_size": heads.k_dim, "ssm.group_count": heads.k_heads,
        "ssm.time_step_rank": heads.v_heads, "ssm.inner_size": heads.v_heads * heads.v_dim,
        "full_attention_interval": 4,
    }  # fmt: skip
    return {
        "general.architecture": c.architecture, "general.name": f"{name}, random weights",
        "general.file_type": FILE_TYPE, "general.quantization_version": 2,
        **{f"{c.architecture}.{key}": value for key, value in of_architecture.items()},
    }  # fmt: skip


def _tensors(model: SyntheticModel) -> list[NewTensor]:
    """In a file, an attention layer has queries and gates in one matrix."""
    found, c, matrices = [], model.config, model.matrices()
    for name, shape in model.architecture.tensors(c).items():
        layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
        attention = layer >= 0 and not c.is_recurrent(layer)
        if attention and name.endswith("attn_gate.weight"):
            continue
        if attention and name.endswith("attn_q.weight"):
            shape = (2 * shape[0], *shape[1:])
        format = matrices[name][0] if name in matrices else "f32"
        found.append(NewTensor(name, by_name(format.upper()), shape))
    return found


def _data(tensor: NewTensor, rng: np.random.Generator, patterns: dict[tuple[str, int], Array]) -> Array:
    """Weights with which activations stay of order 1, and states decay at different rates."""
    format, columns = tensor.format, tensor.shape[-1]
    if format.name == "F32":
        values = rng.standard_normal(tensor.shape, np.float32)
        scale, middle = next(
            (each for end, each in VECTORS.items() if tensor.name.endswith(end)), (0.02, 1.0)
        )
        return values * np.float32(scale) + np.float32(middle)
    key = format.name, columns
    if key not in patterns:
        rows = max(1, PATTERN // columns)
        values = rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)
        patterns[key] = quantise(format, values).reshape(rows, -1)
    first = int(rng.integers(len(patterns[key])))
    taken: Array = np.resize(np.roll(patterns[key], first, axis=0), (tensor.shape[0], patterns[key].shape[1]))
    return taken


VECTORS = {
    "ssm_conv1d.weight": (0.3, 0.0),
    "ssm_dt.bias": (0.5, 0.0),
    "ssm_a": (0.1, -0.6),
}  # others are norms


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.hybrid_file", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", default="qwen3.5-2b:q4_k_m", metavar="SHAPE:FORMAT")
    parser.add_argument("--layers", type=int, default=12, metavar="N")
    options = parser.parse_args()
    parameters = write_hybrid(options.file, options.shape, options.layers)
    print(
        f"{options.file}: {parameters / 1e9:.2f} billion parameters, {options.file.stat().st_size / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
