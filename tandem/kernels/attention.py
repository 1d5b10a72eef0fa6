"""Attention over the paged KV cache, with grouped heads, a sliding window, a soft cap on scores, and sinks.

A sink is a score of its own that each query head has in its softmax, without a value. `sinks` may be absent.

Attention is causal, except that all tokens of an entry also see the positions up to WORK_LAST: the entries of an image
end at its last token, and bidirectional attention ends at the sequence's.

An entry of the work list is a run of consecutive tokens of one sequence; each (entry, KV head) is one item. Entries
of about 64 queries (tokens times query heads per KV head) are fastest, but the bits of a result do not depend on how
tokens are divided into entries. The keys and values that it sees must be in the cache already. Blocks
before the window of an entry's first token are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tandem.kernels.abi import KV_BLOCK, KV_TYPES, MAX_HEAD_DIM, WORK_INTS
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.kv_layout import kv_bytes, kv_load, kv_store, kv_zeros
from tandem.kernels.q8_tiles import q8_bytes, q8_store, q8_zeros
from tandem.kernels.rows import padded, rows_bytes


def grid(scalars: Scalars) -> Grid:
    assert scalars["head_dim"] <= MAX_HEAD_DIM, f"attention: heads of at most {MAX_HEAD_DIM} columns"
    return Grid(int(scalars["kv_heads"]), "work")


def cost(scalars: Scalars, counts: Counts) -> Cost:
    """Counts queries and results only; the number of keys is known only in the work list."""
    columns = scalars["q_heads"] * scalars["head_dim"]
    return Cost(bytes=counts["tokens"] * columns * (4 + (1.5 if scalars["out_q8"] else 4)), ops=0)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    tokens, columns = counts["tokens"], int(scalars["q_heads"] * scalars["head_dim"])
    out_stride = int(scalars["out_stride"])
    return {
        "q": rows_bytes(tokens, columns, scalars["q_stride"]),
        "cache": kv_bytes(scalars["blocks"], scalars["kv_heads"], scalars["head_dim"], scalars["kv"]),
        "tables": 4 * int(scalars["sequences"] * scalars["table_stride"]),
        "work": 4 * WORK_INTS * counts["work"],
        "out": q8_bytes(tokens, out_stride) if scalars["out_q8"] else rows_bytes(tokens, columns, out_stride),
        "sinks": 4 * int(scalars["q_heads"]),
    }


def attend(
    q: Array, keys: Array, values: Array, position: int, scalars: Scalars, sinks: Array | None = None
) -> Array:
    """One token: q [q_heads, head_dim] over keys and values [n, kv_heads, head_dim], the last of which are its own."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (keys, values))
    scores = np.einsum("hd,nhd->hn", q.astype(np.float64), keys) * scalars["scale"]
    if scalars["softcap"]:
        scores = scalars["softcap"] * np.tanh(scores / scalars["softcap"])
    none = np.full((len(q), 1), -np.inf)
    scores = np.concatenate([scores, none if sinks is None else sinks[:, None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    out: Array = np.einsum("hn,nhd->hd", weights[:, :-1], values)
    return out


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    heads, dim, window = int(scalars["q_heads"]), int(scalars["head_dim"]), int(scalars["window"])
    rows = np.zeros((counts["tokens"], heads * dim))
    for row, n, sequence, position, last in arrays["work"][: counts["work"], :5]:
        first = max(0, position - window + 1) if window else 0
        seen = np.arange(first, max(position + n, last + 1))
        slots = arrays["tables"][sequence, seen // KV_BLOCK] * KV_BLOCK + seen % KV_BLOCK
        keys, values = kv_load(arrays["cache"], slots)
        for i in range(n):
            own = position + i
            visible = (seen <= max(own, last)) & (seen > own - window if window else True)
            q = arrays["q"][row + i, : heads * dim].reshape(heads, dim)
            rows[row + i] = attend(
                q, keys[visible], values[visible], own, scalars, arrays.get("sinks")
            ).reshape(-1)
    out = arrays["out"].copy()
    if scalars["out_q8"]:
        q8_store(out, rows)
    else:
        out[: counts["tokens"], : heads * dim] = rows
    return {"out": out}


def make_work_list(rows: Sequence[tuple[int, int]], max_rows: int, *, bidirectional: bool = False) -> Array:
    """The work list for sequences with (position of the first new token, new tokens).

    An entry has at most `max_rows` rows. `bidirectional`: all of a sequence's tokens see each other.
    """
    work, row = [], 0
    for sequence, (position, new) in enumerate(rows):
        for i in range(0, new, max_rows):
            last = position + new - 1 if bidirectional else 0
            work.append((row + i, min(max_rows, new - i), sequence, position + i, last, 0, 0, 0))
        row += new
    return np.array(work, np.int32)


def make_case(
    rng: np.random.Generator,
    label: str,
    heads: tuple[int, int, int],
    rows: Sequence[tuple[int, int]],
    window: int = 0,
    softcap: float = 0.0,
    kv: str = "f16",
    out_q8: int = 0,
    max_rows: int = 16,
    size: float = 1.0,
    q_gap: int = 3,
    sinks: bool = False,
    bidirectional: bool = False,
) -> Case:
    """A cache whose unused slots are NaN; blocks before a window are -1 in the tables."""
    q_heads, kv_heads, dim = heads
    tokens, columns = sum(new for _, new in rows), q_heads * dim
    lengths = [-(-(position + new) // KV_BLOCK) for position, new in rows]
    free = list(rng.permutation(sum(lengths) + 3))
    cache = kv_zeros(len(free), kv_heads, dim, kv)
    for field in ("k_scale", "v_scale") if kv == "q8" else ("k", "v"):
        cache[field] = np.nan
    tables = np.full((len(rows), max(lengths) + 1), -1, np.int32)
    for sequence, (position, new) in enumerate(rows):
        first = max(0, position - window + 1) // KV_BLOCK if window else 0
        for block in range(first, lengths[sequence]):
            tables[sequence, block] = free.pop()
        seen = np.arange(first * KV_BLOCK, position + new)
        slots = tables[sequence, seen // KV_BLOCK] * KV_BLOCK + seen % KV_BLOCK
        k, v = (rng.standard_normal((len(seen), kv_heads, dim)) for _ in range(2))
        kv_store(cache, slots, k * size, v)
    work = make_work_list(rows, max_rows, bidirectional=bidirectional)
    gap = 0 if out_q8 else 5
    arrays = {
        "q": padded(rng.standard_normal((tokens, columns)), columns + q_gap),
        "cache": cache,
        "tables": tables,
        "work": work,
        "out": q8_zeros(tokens, columns) if out_q8 else padded(np.zeros((tokens, columns)), columns + gap),
    }
    if sinks:  # far below the scores, among them, and far above
        arrays["sinks"] = np.resize([-100.0, 1.5, 0.0, 4.0, 30.0], q_heads).astype(np.float32)
    scalars = {
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "q_stride": columns + q_gap,
        "out_stride": columns + gap,
        "table_stride": tables.shape[1],
        "window": window,
        "scale": dim**-0.5,
        "softcap": softcap,
        "kv": KV_TYPES.index(kv),
        "out_q8": out_q8,
        "sequences": len(tables),
        "blocks": len(cache),
    }
    # The error of a score is float32's 6e-8 of |q||k| per term; that of a weight is as large, and so is a result's.
    return Case(
        label, arrays, scalars, {"tokens": tokens, "rows": 1, "work": len(work)}, atol=4e-6 * size, rtol=4e-6
    )


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for dim in (8, 16, 20, 40, 64, 72, 80, 96, 128, 256):
        yield make_case(rng, f"head_dim {dim}", (2, 1, dim), [(0, 17), (70, 1)])
        yield make_case(rng, f"head_dim {dim} float32", (2, 2, dim), [(15, 2), (0, 1)], kv="f32")
    for dim in (20, 64, 72, 256):
        yield make_case(rng, f"head_dim {dim} q8", (2, 1, dim), [(0, 19), (70, 1)], kv="q8")
    for group in range(1, 9):
        yield make_case(
            rng, f"{group} heads per group", (2 * group, 2, 32), [(30, 40), (5, 1)], out_q8=group % 2
        )
    for group in (1, 4, 7):
        yield make_case(rng, f"{group} heads per group, q8", (group, 1, 64), [(30, 9), (5, 1)], kv="q8")
    for window in (1, 15, 16, 17, 64, 100, 1000):
        rows = [(0, 33), (90, 20), (200, 1)]
        yield make_case(rng, f"window {window}", (3, 1, 32), rows, window=window)
        yield make_case(rng, f"window {window} by 3 rows", (2, 1, 16), rows, window=window, max_rows=3)
        yield make_case(rng, f"window {window} q8", (2, 1, 64), rows, window=window, kv="q8")
    yield make_case(rng, "softcap", (4, 2, 32), [(100, 9)], softcap=2.0)
    yield make_case(rng, "softcap, window, float32", (4, 2, 32), [(100, 9)], window=50, softcap=5.0, kv="f32")
    yield make_case(rng, "softcap, window, q8", (4, 2, 32), [(100, 9)], window=50, softcap=5.0, kv="q8")
    for position in (62, 511, 512, 1023, 1300):
        kv = KV_TYPES[position % 3]
        yield make_case(rng, f"context {position} {kv}", (4, 1, 64), [(position, 3)], kv=kv)
    yield make_case(rng, "context 8190", (2, 1, 32), [(8190, 2)], kv="f32")
    yield make_case(rng, "window over splits", (2, 1, 32), [(1290, 16)], window=700)
    yield make_case(rng, "chunk of a prompt", (9, 3, 64), [(450, 100)], out_q8=1)
    yield make_case(rng, "more queries than one pass takes", (16, 2, 16), [(3, 20), (0, 16)], max_rows=20)
    yield make_case(rng, "very large head", (4, 1, 512), [(20, 17)], window=30)
    yield make_case(rng, "very large head q8", (4, 1, 512), [(20, 17)], window=30, kv="q8")
    yield make_case(rng, "sharp scores", (4, 2, 64), [(600, 5)], size=8.0)
    yield make_case(rng, "sharp scores, q8", (4, 2, 64), [(600, 5)], size=8.0, kv="q8")
    for kv in KV_TYPES:
        yield make_case(rng, f"sinks, {kv}", (5, 1, 64), [(0, 17), (600, 1), (70, 3)], kv=kv, sinks=True)
    yield make_case(rng, "sinks, window, softcap", (10, 2, 32), [(90, 20)], 16, 5.0, sinks=True)
    yield make_case(rng, "large odd head", (4, 1, 328), [(20, 17)])
    # Rows that begin on 16 bytes, as in a Program: matrix units need that.
    for dim in (64, 128, 256):
        rows, single = [(0, 40), (130, 1), (700, 20)], [(0, 1), (77, 1), (1500, 1)]
        yield make_case(rng, f"aligned {dim}", (4, 2, dim), rows, out_q8=1, q_gap=0)
        yield make_case(rng, f"aligned {dim}, window", (2, 1, dim), rows, window=200, q_gap=0)
        yield make_case(rng, f"aligned {dim}, single tokens", (8, 1, dim), single, q_gap=0)
    yield make_case(rng, "aligned 64, sinks", (16, 2, 64), rows, window=128, q_gap=0, sinks=True)
    yield make_case(rng, "aligned 64, sinks, single tokens", (16, 2, 64), single, q_gap=0, sinks=True)
    for kv in KV_TYPES:
        images = [(0, 40), (30, 25), (0, 1), (450, 130)]
        label = f"bidirectional, {kv}"
        yield make_case(rng, label, (3, 3, 72), images, kv=kv, bidirectional=True)
        yield make_case(rng, f"{label}, aligned", (4, 2, 64), images, kv=kv, q_gap=0, bidirectional=True)
    yield make_case(rng, "bidirectional, window", (4, 2, 32), [(90, 40)], window=64, bidirectional=True)
    # In software, matrices take long to compile: there q8 runs once per kernel, the rest only on matrix units.
    for label, dim in (("aligned", 64), ("on GPUs", 128), ("on GPUs", 256)):
        yield make_case(rng, f"{label} {dim}, window, q8", (4, 2, dim), rows, window=200, q_gap=0, kv="q8")
        yield make_case(rng, f"{label} {dim}, single tokens, q8", (4, 2, dim), single, q_gap=0, kv="q8")
    yield make_case(rng, "aligned, 16 heads, single tokens", (16, 1, 64), [(100, 1), (5, 1)], q_gap=0)
    yield make_case(rng, "aligned, softcap", (6, 2, 128), [(100, 9), (3, 1)], softcap=5.0, q_gap=0)
    yield make_case(rng, "aligned, many heads", (24, 1, 64), [(333, 18)], window=100, q_gap=0)


KERNEL = Kernel(
    name="attention",
    buffers=(
        Buffer("q", "r"),  # float32 [T, q_stride], heads of head_dim
        Buffer("cache", "r"),  # one layer's KV blocks (kv_layout.h)
        # int32 [sequences][table_stride]: entry i is the block of positions i * KV_BLOCK on
        Buffer("tables", "r"),
        # int32 [W][WORK_INTS]: first row, rows, sequence, position of the first row, last position seen.
        Buffer("work", "r"),
        Buffer("out", "w"),  # float32 [T, out_stride] or q8 [T, out_stride]
        Buffer("sinks", "r"),  # float32 [q_heads]
    ),
    scalars=(
        ("q_heads", "i"),
        ("kv_heads", "i"),
        ("head_dim", "i"),
        ("q_stride", "i"),
        ("out_stride", "i"),
        ("table_stride", "i"),
        ("window", "i"),  # number of keys that a query sees, its own included; 0: all
        ("scale", "f"),
        ("softcap", "f"),  # c: a score s becomes c tanh(s / c); 0: off
        ("kv", "i"),  # data type of the cache, an index into KV_TYPES
        ("out_q8", "i"),  # head_dim is then a multiple of 32
        ("sequences", "i"),  # rows of `tables`, and then blocks of the cache: for the validator
        ("blocks", "i"),
    ),
    grid=grid,
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)
