"""Latent attention (MLA) over rows that store_latent.py has stored, one for all heads.

The query of a head is in two parts: one for the latent (the query times the matrix that would have made a key of the
latent), and one that RoPE has turned. The value is the latent itself: the result has one for each head, which a matrix
of the head then makes its output of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tandem.kernels.abi import KV_BLOCK, KV_TYPES, TOKEN_INTS, TOKEN_POSITION, TOKEN_SEQUENCE
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.kv_layout import latent_bytes, latent_load, latent_store, latent_zeros
from tandem.kernels.rows import padded, rows_bytes
from tandem.kernels.store_latent import MAX_ROW, row

HEADS_AT_ONCE = 4  # of an item on the CPU


def cost(scalars: Scalars, counts: Counts) -> Cost:
    """Counts queries and results only, as attention.py."""
    return Cost(bytes=4 * counts["tokens"] * scalars["q_heads"] * (row(scalars) + scalars["latent"]), ops=0)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    assert row(scalars) <= MAX_ROW, f"attention_latent: rows of at most {MAX_ROW} elements"
    n, heads = counts["tokens"], int(scalars["q_heads"])
    return {
        "q": rows_bytes(n, heads * int(scalars["latent"]), scalars["q_stride"]),
        "rotated_q": rows_bytes(n, heads * int(scalars["rotated"]), scalars["rotated_stride"]),
        "cache": latent_bytes(scalars["blocks"], row(scalars), scalars["kv"]),
        "tables": 4 * int(scalars["sequences"] * scalars["table_stride"]),
        "tokens": 4 * TOKEN_INTS * n,
        "out": rows_bytes(n, heads * int(scalars["latent"]), scalars["out_stride"]),
    }


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    heads, latent, out = int(scalars["q_heads"]), int(scalars["latent"]), arrays["out"].copy()
    for i in range(counts["tokens"]):
        token = arrays["tokens"][i]
        seen = np.arange(token[TOKEN_POSITION] + 1)
        slots = arrays["tables"][token[TOKEN_SEQUENCE], seen // KV_BLOCK] * KV_BLOCK + seen % KV_BLOCK
        rows = latent_load(arrays["cache"], slots).astype(np.float64)
        parts = [
            arrays[name][i, : heads * int(scalars[size])].reshape(heads, -1)
            for name, size in (("q", "latent"), ("rotated_q", "rotated"))
        ]
        scores = np.concatenate(parts, axis=1).astype(np.float64) @ rows.T * scalars["scale"]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[i, : heads * latent] = (weights @ rows[:, :latent]).reshape(-1)
    return {"out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for kv in KV_TYPES:
        yield make_case(rng, 1, 16, 4, [(0, 1)], kv)
        yield make_case(rng, 5, 48, 16, [(40, 1), (3, 7)], kv)
        yield make_case(rng, 20, 512, 64, [(150, 2), (0, 17)], kv)
        yield make_case(rng, 3, 30, 6, [(15, 2), (300, 1)], kv)
    yield make_case(rng, 4, 960, 64, [(70, 1)], "f16")


def make_case(
    rng: np.random.Generator, heads: int, latent: int, rotated: int, rows: Sequence[tuple[int, int]], kv: str
) -> Case:
    """`rows`: (position of the first new token, new tokens) of each sequence. Unused rows of the cache are NaN."""
    n, blocks = sum(new for _, new in rows), [-(-(position + new) // KV_BLOCK) for position, new in rows]
    cache = latent_zeros(sum(blocks) + 2, latent + rotated, kv)
    cache["scale" if kv == "q8" else "row"] = np.nan
    tables = np.full((len(rows), max(blocks) + 1), -1, np.int32)
    free, tokens = rng.permutation(len(cache)).tolist(), np.full((n, TOKEN_INTS), -9, np.int32)
    begin = 0
    for sequence, (position, new) in enumerate(rows):
        tables[sequence, : blocks[sequence]] = [free.pop() for _ in range(blocks[sequence])]
        seen = np.arange(position + new)
        slots = tables[sequence, seen // KV_BLOCK] * KV_BLOCK + seen % KV_BLOCK
        latent_store(cache, slots, rng.standard_normal((len(seen), latent + rotated)).astype(np.float32))
        tokens[begin : begin + new, TOKEN_POSITION] = position + np.arange(new)
        tokens[begin : begin + new, TOKEN_SEQUENCE] = sequence
        begin += new
    arrays = {
        "q": padded(rng.standard_normal((n, heads * latent)), heads * latent + 3),
        "rotated_q": padded(rng.standard_normal((n, heads * rotated)), heads * rotated + 1),
        "cache": cache,
        "tables": tables,
        "tokens": tokens,
        "out": padded(np.zeros((n, heads * latent)), heads * latent + 2),
    }
    scalars = {
        "q_heads": heads,
        "latent": latent,
        "rotated": rotated,
        "q_stride": heads * latent + 3,
        "rotated_stride": heads * rotated + 1,
        "out_stride": heads * latent + 2,
        "table_stride": tables.shape[1],
        "scale": 1.5 * (latent + rotated) ** -0.5,
        "kv": KV_TYPES.index(kv),
        "sequences": len(tables),
        "blocks": len(cache),
    }
    label = f"{heads}x{latent}+{rotated} {kv} " + ",".join(f"{position}+{new}" for position, new in rows)
    return Case(label, arrays, scalars, {"tokens": n, "rows": 1, "work": 0}, atol=2e-5, rtol=2e-5)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """A workgroup for a token and head."""
    return Dispatch(int(scalars["q_heads"]), counts["tokens"])


KERNEL = Kernel(
    name="attention_latent",
    buffers=(
        Buffer("q", "r"),  # float32 [T, q_stride]: [q_heads][latent]
        Buffer("rotated_q", "r"),  # float32 [T, rotated_stride]: [q_heads][rotated]
        Buffer("cache", "r"),  # one layer's rows (kv_layout.h)
        # int32 [sequences][table_stride]: entry i is the block of positions i * KV_BLOCK on
        Buffer("tables", "r"),
        Buffer("tokens", "r"),  # int32 [T][TOKEN_INTS]
        Buffer("out", "w"),  # float32 [T, out_stride]: [q_heads][latent]
    ),
    scalars=(
        ("q_heads", "i"),
        ("latent", "i"),
        ("rotated", "i"),
        ("q_stride", "i"),
        ("rotated_stride", "i"),
        ("out_stride", "i"),
        ("table_stride", "i"),
        ("scale", "f"),
        ("kv", "i"),  # data type of the cache, an index into KV_TYPES
        ("sequences", "i"),
        ("blocks", "i"),
    ),
    grid=lambda scalars: Grid(-(-int(scalars["q_heads"]) // HEADS_AT_ONCE), "tokens"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)
