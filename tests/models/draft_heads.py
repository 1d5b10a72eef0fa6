"""Models with a draft head (MTP): a golden with one more layer, in the names and keys of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tandem.gguf.file import GGUF
from tandem.gguf.formats import dequantise
from tests.gguf_files import Key, Tensor, write

GOLDENS = Path(__file__).parent / "goldens"


def contents(path: Path) -> tuple[list[Key], list[Tensor]]:
    """The keys and tensors of a file."""
    with GGUF.open(path) as file:
        keys = [(key, kind(value), value) for key, value in file.metadata.items()]
        tensors: list[Tensor] = []
        for name, info in file.tensors.items():
            values = dequantise(info.format, file.raw(name)).reshape(info.shape)
            tensors.append((name, "F32", values.astype(np.float32)))
        return [(key, kind, list(value) if "[" in kind else value) for key, kind, value in keys], tensors


def kind(value: Any) -> str:
    if isinstance(value, (bool, int, float, str)):
        return {bool: "bool", int: "u32", float: "f32", str: "str"}[type(value)]
    if isinstance(value, np.ndarray):
        return "[f32]" if value.dtype.kind == "f" else "[i32]"
    return "[str]"


def write_with_draft_head(path: Path, name: str, *, without: str = "", copied: bool = False) -> Path:
    """A golden, and after its last layer one that is like it, with other weights. `without`: a tensor to leave out.
    `copied`: the embedding and LM head of the draft head are in the file too."""
    keys, tensors = contents(GOLDENS / f"{name}.gguf")
    rng = np.random.default_rng(11)
    layers = next(value for key, _, value in keys if key == f"{name}.block_count")
    keys = [(key, kind, layers + 1 if key == f"{name}.block_count" else value) for key, kind, value in keys]
    keys.append((f"{name}.nextn_predict_layers", "u32", 1))
    last, new = f"blk.{layers - 1}.", f"blk.{layers}."
    for tensor, _, values in tensors.copy():
        if tensor.startswith(last):
            noise = rng.standard_normal(values.shape) * np.abs(values).mean()
            tensors.append((tensor.replace(last, new), "F32", (values + 0.5 * noise).astype(np.float32)))
    found = {tensor: values for tensor, _, values in tensors}
    dim = found["token_embd.weight"].shape[1]
    own = {"eh_proj": rng.standard_normal((dim, 2 * dim)) * (2 * dim) ** -0.5}
    own |= {norm: 1 + 0.3 * rng.standard_normal(dim) for norm in ("enorm", "hnorm", "shared_head_norm")}
    if copied:
        own |= {"embed_tokens": found["token_embd.weight"], "shared_head_head": found["output.weight"]}
    tensors += [(f"{new}nextn.{each}.weight", "F32", x.astype(np.float32)) for each, x in own.items()]
    return write(path, keys, [tensor for tensor in tensors if not without or without not in tensor[0]])
