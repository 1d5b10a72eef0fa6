"""Stores a token's latent and its rotated key in the cache of latent attention (MLA): one row for all heads.

attention_latent.py reads it. The row is the latent, then the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.abi import KV_BLOCK, KV_TYPES, MAX_HEAD_DIM, TOKEN_INTS, TOKEN_SLOT
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.kv_layout import latent_bytes, latent_store, latent_zeros
from tandem.kernels.rows import padded, rows_bytes

MAX_ROW = 2 * MAX_HEAD_DIM  # elements


def row(scalars: Scalars) -> int:
    """Elements of a row."""
    return int(scalars["latent"] + scalars["rotated"])


def cost(scalars: Scalars, counts: Counts) -> Cost:
    stored = latent_bytes(1, row(scalars), scalars["kv"]) / KV_BLOCK
    return Cost(bytes=counts["tokens"] * (4 * row(scalars) + stored), ops=0)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    assert row(scalars) <= MAX_ROW, f"store_latent: rows of at most {MAX_ROW} elements"
    n = counts["tokens"]
    return {
        "latent": rows_bytes(n, int(scalars["latent"]), scalars["latent_stride"]),
        "key": rows_bytes(n, int(scalars["rotated"]), scalars["key_stride"]),
        "cache": latent_bytes(scalars["blocks"], row(scalars), scalars["kv"]),
        "tokens": 4 * TOKEN_INTS * n,
    }


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    n, cache = counts["tokens"], arrays["cache"].copy()
    parts = [
        arrays[name][:n, : int(scalars[size])] for name, size in (("latent", "latent"), ("key", "rotated"))
    ]
    slots = arrays["tokens"][:n, int(scalars["slot_field"])]
    stored = slots >= 0
    latent_store(cache, slots[stored], np.concatenate(parts, axis=1)[stored])
    return {"cache": cache}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for kv in KV_TYPES:
        for n, latent, rotated in ((1, 16, 4), (5, 48, 16), (17, 512, 64), (2, 30, 6), (3, 960, 64)):
            yield make_case(rng, n, latent, rotated, kv)


def make_case(rng: np.random.Generator, n: int, latent: int, rotated: int, kv: str, group: int = 1) -> Case:
    """The second token, if there is one, has no slot."""
    blocks = n // KV_BLOCK + 2
    tokens = np.full((n, TOKEN_INTS), -9, np.int32)
    tokens[:, TOKEN_SLOT + group] = rng.permutation(blocks * KV_BLOCK)[:n]
    tokens[1:2, TOKEN_SLOT + group] = -1
    arrays = {
        "latent": padded(rng.standard_normal((n, latent)), latent + 3),
        "key": padded(9 * rng.standard_normal((n, rotated)), rotated + 5),
        "cache": latent_zeros(blocks, latent + rotated, kv),
        "tokens": tokens,
    }
    scalars = {
        "latent": latent,
        "rotated": rotated,
        "latent_stride": latent + 3,
        "key_stride": rotated + 5,
        "slot_field": TOKEN_SLOT + group,
        "kv": KV_TYPES.index(kv),
        "blocks": blocks,
    }
    return Case(f"{n}x{latent}+{rotated} {kv}", arrays, scalars, {"tokens": n, "rows": 1, "work": 0})


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    return Dispatch(counts["tokens"])


KERNEL = Kernel(
    name="store_latent",
    buffers=(
        Buffer("latent", "r"),  # float32 [T, latent_stride]
        Buffer("key", "r"),  # float32 [T, key_stride]
        Buffer("cache", "w"),  # one layer's rows (kv_layout.h)
        Buffer("tokens", "r"),  # int32 [T][TOKEN_INTS]
    ),
    scalars=(
        ("latent", "i"),
        ("rotated", "i"),
        ("latent_stride", "i"),
        ("key_stride", "i"),
        ("slot_field", "i"),  # the column of `tokens` with the KV slot
        ("kv", "i"),  # data type of the cache, an index into KV_TYPES
        ("blocks", "i"),
    ),
    grid=lambda scalars: Grid(1, "tokens"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)
