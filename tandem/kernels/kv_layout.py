"""The paged KV cache in NumPy, as kv_layout.h has it: blocks of KV_BLOCK tokens, in float16, float32 or int8."""

from __future__ import annotations

from typing import Any

import numpy as np

from tandem.kernels.abi import KV_BLOCK, KV_SCALED, KV_TYPES
from tandem.kernels.kernel import Array


def kv_head_bytes(head_dim: float, kv: float) -> int:
    """Bytes of one head's keys and values in a block."""
    if KV_TYPES[int(kv)] == "q8":
        return int(2 * KV_BLOCK * (head_dim + 2 * -(-head_dim // KV_SCALED)))
    return int(2 * KV_BLOCK * head_dim * (4 if KV_TYPES[int(kv)] == "f32" else 2))


def kv_bytes(blocks: float, kv_heads: float, head_dim: float, kv: float) -> int:
    """Bytes of a layer's cache, as `kv_zeros` allocates it."""
    return int(blocks * kv_heads) * kv_head_bytes(head_dim, kv)


def kv_zeros(blocks: int, kv_heads: int, head_dim: int, kv: str) -> Array:
    """One layer's cache: [blocks, kv_heads] of `kv_dtype`."""
    return np.zeros((blocks, kv_heads), kv_dtype(head_dim, kv))


def kv_dtype(head_dim: int, kv: str) -> np.dtype[np.void]:
    """Keys [head_dim, KV_BLOCK] and values [KV_BLOCK, head_dim] of one block and head; in q8 also their scales."""
    element = {"f16": np.float16, "f32": np.float32, "q8": np.int8}[kv]
    fields: list[Any] = [("k", element, (head_dim, KV_BLOCK)), ("v", element, (KV_BLOCK, head_dim))]
    if kv == "q8":
        scales = (-(-head_dim // KV_SCALED), KV_BLOCK)
        fields += [("k_scale", np.float16, scales), ("v_scale", np.float16, scales)]
    return np.dtype(fields)


def kv_quantise(x: Array) -> tuple[Array, Array]:
    """x [..., head_dim] as int8, and float16 scales [..., scales]: the same float32 operations as rope.c's store_q8."""
    dim = x.shape[-1]
    padded = np.pad(x.astype(np.float32), [(0, 0)] * (x.ndim - 1) + [(0, -dim % KV_SCALED)])
    groups = padded.reshape(*x.shape[:-1], -1, KV_SCALED)
    scale = (np.abs(groups).max(axis=-1) / np.float32(127)).astype(np.float16)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale.astype(np.float32), np.float32(0))
    q = np.rint(np.clip(groups * inverse[..., None], -127, 127)).astype(np.int8)
    return q.reshape(padded.shape)[..., :dim], scale


def kv_store(cache: Array, slots: Array, k: Array | None, v: Array | None) -> None:
    """Writes k and v [n, kv_heads, head_dim] at `slots`, in place."""
    block, inside = np.divmod(slots, KV_BLOCK)
    for name, x in (("k", k), ("v", v)):
        if x is None:
            continue
        if "k_scale" in (cache.dtype.names or ()):
            x, scales = kv_quantise(x)
            cache[f"{name}_scale"][block, :, :, inside] = scales
        if name == "k":
            cache["k"][block, :, :, inside] = x
        else:
            cache["v"][block, :, inside] = x


def kv_load(cache: Array, slots: Array) -> tuple[Array, Array]:
    """The keys and values at `slots`, each float32 [n, kv_heads, head_dim]."""
    block, inside = np.divmod(slots, KV_BLOCK)
    k, v = (x.astype(np.float32) for x in (cache["k"][block, :, :, inside], cache["v"][block, :, inside]))
    if "k_scale" in (cache.dtype.names or ()):
        for x, name in ((k, "k_scale"), (v, "v_scale")):
            scales = cache[name][block, :, :, inside].astype(np.float32)
            x *= np.repeat(scales, KV_SCALED, axis=-1)[..., : x.shape[-1]]
    return k, v


# ---- latent attention


def latent_bytes(blocks: float, elements: float, kv: float) -> int:
    """Bytes of a layer's cache of rows of that many elements."""
    return kv_bytes(blocks, 1, int(elements) // 2, kv)


def latent_zeros(blocks: int, elements: int, kv: str) -> Array:
    """One layer's cache: [blocks] of `latent_dtype`."""
    return np.zeros(blocks, latent_dtype(elements, kv))


def latent_dtype(elements: int, kv: str) -> np.dtype[np.void]:
    """The rows of a block, and in q8 their scales; as long as `latent_bytes` says."""
    element = {"f16": np.float16, "f32": np.float32, "q8": np.int8}[kv]
    fields: list[Any] = [("row", element, (KV_BLOCK, elements))]
    if kv == "q8":
        fields.append(("scale", np.float16, (KV_BLOCK, -(-elements // KV_SCALED))))
    unused = latent_bytes(1, elements, KV_TYPES.index(kv)) - np.dtype(fields).itemsize
    return np.dtype([*fields, ("unused", np.uint8, (unused,))] if unused else fields)


def latent_store(cache: Array, slots: Array, rows: Array) -> None:
    """Writes rows [n, elements] at `slots`, in place."""
    block, inside = np.divmod(slots, KV_BLOCK)
    if "scale" in (cache.dtype.names or ()):
        rows, cache["scale"][block, inside] = kv_quantise(rows)
    cache["row"][block, inside] = rows


def latent_load(cache: Array, slots: Array) -> Array:
    """The rows at `slots`: float32 [n, elements]."""
    block, inside = np.divmod(slots, KV_BLOCK)
    rows: Array = cache["row"][block, inside].astype(np.float32)
    if "scale" in (cache.dtype.names or ()):
        scales = cache["scale"][block, inside].astype(np.float32)
        rows *= np.repeat(scales, KV_SCALED, axis=-1)[:, : rows.shape[1]]
    return rows
