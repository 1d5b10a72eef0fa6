"""The scan of Mamba-2 (SSD): a linear recurrence whose state is a matrix for each head.

For each token and head, with x of the head, and B and C of the group of heads that it is in:

    dt = softplus(dt + bias), decay = exp(a dt)
    S = decay S + B (dt x)^T          S: float32 [state_rows, head_dim]
    out = S^T C + d x

Token by token: the bits do not depend on how a prompt is cut. Heads of a group are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.abi import MAX_STATE_ROWS
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.rows import padded, rows_bytes
from tandem.kernels.states import NO_STATE, chunks_bytes, make_chunks, read_chunks

ITEM_COLUMNS = 64  # columns of a state that one item computes
GPU_COLUMNS = 32  # and that a workgroup computes


def parts(scalars: Scalars) -> int:
    return int(scalars["heads"]) * -(-int(scalars["head_dim"]) // ITEM_COLUMNS)


def _inner(scalars: Scalars) -> int:
    return int(scalars["heads"]) * int(scalars["head_dim"])


def _width(scalars: Scalars) -> int:
    return _inner(scalars) + 2 * int(scalars["groups"]) * int(scalars["state_rows"])


def _state(scalars: Scalars) -> int:
    return _inner(scalars) * int(scalars["state_rows"])


def cost(scalars: Scalars, counts: Counts) -> Cost:
    row = _width(scalars) + scalars["heads"] + _inner(scalars)
    states = 8 * min(counts["work"], counts["tokens"]) * _state(scalars)  # read and written by each chunk
    return Cost(bytes=4 * counts["tokens"] * row + states, ops=5 * counts["tokens"] * _state(scalars))


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    n, heads = counts["tokens"], int(scalars["heads"])
    return {
        "xbc": rows_bytes(n, _width(scalars), scalars["xbc_stride"]),
        "dt": rows_bytes(n, heads, scalars["dt_stride"]),
        "vectors": 12 * heads,
        "state": 4 * int(scalars["slots"]) * _state(scalars),
        "chunks": chunks_bytes(scalars, counts),
        "out": rows_bytes(n, _inner(scalars), scalars["out_stride"]),
    }


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    heads, groups, dim, rows = (int(scalars[name]) for name in ("heads", "groups", "head_dim", "state_rows"))
    state, out = arrays["state"].copy(), arrays["out"].copy()
    bias, a, d = arrays["vectors"].astype(np.float64)
    group = np.arange(heads) // (heads // groups)
    for chunk in read_chunks(arrays["chunks"], scalars, counts):
        matrix = np.zeros((heads, rows, dim)) if chunk.source == NO_STATE else state[chunk.source]
        for token, target in zip(chunk.tokens, chunk.targets, strict=True):
            row = arrays["xbc"][token].astype(np.float64)
            x = row[: heads * dim].reshape(heads, dim)
            b, c = row[heads * dim :][: 2 * groups * rows].reshape(2, groups, rows)[:, group]
            dt = np.logaddexp(0, arrays["dt"][token, :heads].astype(np.float64) + bias)
            matrix = matrix * np.exp(a * dt)[:, None, None] + b[:, :, None] * (dt[:, None] * x)[:, None, :]
            result = np.einsum("hsd,hs->hd", matrix, c) + d[:, None] * x
            out[token, : heads * dim] = result.ravel()
            if target != NO_STATE:
                state[target] = matrix
    return {"state": state, "out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    shapes = (
        ([1], 1, 1, 1, 1, 0),
        ([3], 2, 1, 5, 17, 3),
        ([1, 1, 1], 4, 2, 16, 16, 0),
        ([2, 1, 5, 1], 2, 2, 40, 24, 2),
        ([1, 30, 2], 3, 1, 64, 64, 0),
        ([33], 6, 3, 100, 32, 1),
        ([5], 2, 1, 64, 128, 0),
        ([2], 1, 1, 70, MAX_STATE_ROWS, 0),
    )
    for lengths, heads, groups, dim, rows, gap in shapes:
        tokens, sequences, slots = sum(lengths), len(lengths) + 2, 2 + 4 * len(lengths)
        inner = heads * dim
        width = inner + 2 * groups * rows
        vectors = rng.standard_normal(heads), -rng.uniform(0.01, 1.0, heads), rng.standard_normal(heads)
        arrays = {
            "xbc": padded(rng.standard_normal((tokens, width)), width + gap),
            "dt": padded(3 * rng.standard_normal((tokens, heads)), heads + 2 * gap),
            "vectors": np.stack(vectors).astype(np.float32),
            "state": rng.standard_normal((slots, heads, rows, dim)).astype(np.float32),
            "chunks": make_chunks(rng, lengths, slots, sequences),
            "out": padded(np.zeros((tokens, inner)), inner + gap),
        }
        scalars = {
            "heads": heads,
            "groups": groups,
            "head_dim": dim,
            "state_rows": rows,
            "xbc_stride": width + gap,
            "dt_stride": heads + 2 * gap,
            "out_stride": inner + gap,
            "sequences": sequences,
            "slots": slots,
        }
        counts = {"tokens": tokens, "rows": 1, "work": len(lengths) + 1}
        label = f"{'+'.join(map(str, lengths))} {heads}:{groups} {rows}x{dim}"
        # Each token adds `rows` terms of order 1 to 10 to an output.
        yield Case(label, arrays, scalars, counts, atol=1e-4, rtol=2e-5)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One workgroup for GPU_COLUMNS columns of a head's state and a chunk."""
    columns = -(-int(scalars["head_dim"]) // GPU_COLUMNS)
    chunks = min(counts["work"], int(scalars["sequences"]))
    constants = int(scalars["state_rows"]), int(scalars["head_dim"])
    return Dispatch(columns, int(scalars["heads"]), chunks, constants=constants)


KERNEL = Kernel(
    name="ssm_scan",
    buffers=(
        Buffer("xbc", "r"),  # float32 [T, xbc_stride]: x of heads, B and C of groups
        Buffer("dt", "r"),  # float32 [T, dt_stride]
        Buffer("vectors", "r"),  # float32 [3, heads]: bias of dt, a, d
        Buffer("state", "rw"),  # float32 [slots, heads, state_rows, head_dim]
        Buffer("chunks", "r"),  # int32 [sequences, CHUNK_INTS], then [T]
        Buffer("out", "w"),  # float32 [T, out_stride]
    ),
    scalars=(
        ("heads", "i"),
        ("groups", "i"),
        ("head_dim", "i"),
        ("state_rows", "i"),
        ("xbc_stride", "i"),
        ("dt_stride", "i"),
        ("out_stride", "i"),
        ("sequences", "i"),
        ("slots", "i"),
    ),
    grid=lambda scalars: Grid(parts(scalars), "work"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)
