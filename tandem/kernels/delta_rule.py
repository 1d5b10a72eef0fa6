"""The gated delta rule (Gated DeltaNet): linear attention whose state is a matrix for each head.

For each token and value head, with keys and queries normalised to length 1 (queries then times k_dim^-0.5):

    decay = exp(a softplus(alpha + dt)), beta = sigmoid(beta)
    S = decay S + k (beta (v - decay S^T k))^T          S: float32 [k_dim, v_dim]
    out = S^T q

The recurrent form, token by token: the bits do not depend on how a prompt is cut. Several value heads share a key head:
neighbours, or with `tiled` those k_heads apart.
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
EPS = 1e-6  # added to the squared length of keys and queries


def state_size(v_heads: int, k_dim: int, v_dim: int) -> int:
    """Floats of a state."""
    return v_heads * k_dim * v_dim


def parts(scalars: Scalars) -> int:
    return int(scalars["v_heads"]) * -(-int(scalars["v_dim"]) // ITEM_COLUMNS)


def _state(scalars: Scalars) -> int:
    return state_size(*(int(scalars[name]) for name in ("v_heads", "k_dim", "v_dim")))


def cost(scalars: Scalars, counts: Counts) -> Cost:
    v_heads, k_dim, v_dim = scalars["v_heads"], scalars["k_dim"], scalars["v_dim"]
    row = 2 * scalars["k_heads"] * k_dim + 2 * v_heads * v_dim + 2 * v_heads
    states = 8 * min(counts["work"], counts["tokens"]) * _state(scalars)  # read and written by each chunk
    return Cost(bytes=4 * counts["tokens"] * row + states, ops=7 * counts["tokens"] * _state(scalars))


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    n, v_heads = counts["tokens"], int(scalars["v_heads"])
    values = v_heads * int(scalars["v_dim"])
    width = 2 * int(scalars["k_heads"]) * int(scalars["k_dim"]) + values
    return {
        "qkv": rows_bytes(n, width, scalars["qkv_stride"]),
        "beta": rows_bytes(n, v_heads, scalars["beta_stride"]),
        "alpha": rows_bytes(n, v_heads, scalars["alpha_stride"]),
        "vectors": 8 * v_heads,
        "state": 4 * int(scalars["slots"]) * _state(scalars),
        "chunks": chunks_bytes(scalars, counts),
        "out": rows_bytes(n, values, scalars["out_stride"]),
    }


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    k_heads, v_heads, k_dim, v_dim = (int(scalars[name]) for name in ("k_heads", "v_heads", "k_dim", "v_dim"))
    state, out = arrays["state"].copy(), arrays["out"].copy()
    dt, a = arrays["vectors"].astype(np.float64)
    keys = np.arange(v_heads) % k_heads if scalars["tiled"] else np.arange(v_heads) // (v_heads // k_heads)
    for chunk in read_chunks(arrays["chunks"], scalars, counts):
        matrix = np.zeros((v_heads, k_dim, v_dim)) if chunk.source == NO_STATE else state[chunk.source]
        for token, target in zip(chunk.tokens, chunk.targets, strict=True):
            row = arrays["qkv"][token].astype(np.float64)
            q, k = row[: 2 * k_heads * k_dim].reshape(2, k_heads, k_dim)[:, keys]
            v = row[2 * k_heads * k_dim :][: v_heads * v_dim].reshape(v_heads, v_dim)
            q, k = (x / np.sqrt(np.square(x).sum(axis=1, keepdims=True) + EPS) for x in (q, k))
            decay = np.exp(a * np.logaddexp(0, arrays["alpha"][token, :v_heads].astype(np.float64) + dt))
            beta = 1 / (1 + np.exp(-arrays["beta"][token, :v_heads].astype(np.float64)))
            matrix = matrix * decay[:, None, None]
            delta = (v - np.einsum("hkv,hk->hv", matrix, k)) * beta[:, None]
            matrix = matrix + k[:, :, None] * delta[:, None, :]
            out[token, : v_heads * v_dim] = np.einsum("hkv,hk->hv", matrix, q * k_dim**-0.5).ravel()
            if target != NO_STATE:
                state[target] = matrix
    return {"state": state, "out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    shapes = (
        ([1], 1, 1, 1, 1, 0),
        ([3], 1, 2, 17, 5, 3),
        ([1, 1, 1], 2, 4, 16, 16, 0),
        ([2, 1, 5, 1], 2, 2, 24, 40, 2),
        ([1, 30, 2], 1, 3, 64, 64, 0),
        ([33], 2, 6, 32, 100, 1),
        ([5], 1, 2, 128, 128, 0),
        ([2], 1, 1, MAX_STATE_ROWS, 70, 0),
    )
    for lengths, k_heads, v_heads, k_dim, v_dim, gap in shapes:
        for tiled in (0, 1):
            tokens, sequences, slots = sum(lengths), len(lengths) + 2, 2 + 4 * len(lengths)
            width, values = 2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim
            arrays = {
                "qkv": padded(rng.standard_normal((tokens, width)), width + gap),
                "beta": padded(rng.standard_normal((tokens, v_heads)), v_heads + gap),
                "alpha": padded(3 * rng.standard_normal((tokens, v_heads)), v_heads + 2 * gap),
                "vectors": np.stack([rng.standard_normal(v_heads), -rng.uniform(0.01, 1.0, v_heads)]).astype(
                    np.float32
                ),
                "state": rng.standard_normal((slots, v_heads, k_dim, v_dim)).astype(np.float32),
                "chunks": make_chunks(rng, lengths, slots, sequences),
                "out": padded(np.zeros((tokens, values)), values + gap),
            }
            scalars = {
                "k_heads": k_heads,
                "v_heads": v_heads,
                "k_dim": k_dim,
                "v_dim": v_dim,
                "qkv_stride": width + gap,
                "beta_stride": v_heads + gap,
                "alpha_stride": v_heads + 2 * gap,
                "out_stride": values + gap,
                "tiled": tiled,
                "sequences": sequences,
                "slots": slots,
            }
            counts = {"tokens": tokens, "rows": 1, "work": len(lengths) + 1}
            label = f"{'+'.join(map(str, lengths))} {k_heads}:{v_heads} {k_dim}x{v_dim}{' tiled' * tiled}"
            # Each token adds k_dim terms of order 1: states stay of order 1 to 4.
            yield Case(label, arrays, scalars, counts, atol=2e-5, rtol=2e-5)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One workgroup for GPU_COLUMNS columns of a head's state and a chunk."""
    columns = -(-int(scalars["v_dim"]) // GPU_COLUMNS)
    chunks = min(counts["work"], int(scalars["sequences"]))
    return Dispatch(
        columns, int(scalars["v_heads"]), chunks, constants=(int(scalars["k_dim"]), int(scalars["v_dim"]))
    )


KERNEL = Kernel(
    name="delta_rule",
    buffers=(
        Buffer("qkv", "r"),  # float32 [T, qkv_stride]: queries and keys of k_heads, values of v_heads
        Buffer("beta", "r"),  # float32 [T, beta_stride]
        Buffer("alpha", "r"),  # float32 [T, alpha_stride]
        Buffer("vectors", "r"),  # float32 [2, v_heads]: dt, a
        Buffer("state", "rw"),  # float32 [slots, v_heads, k_dim, v_dim]
        Buffer("chunks", "r"),  # int32 [sequences, CHUNK_INTS], then [T]
        Buffer("out", "w"),  # float32 [T, out_stride]
    ),
    scalars=(
        ("k_heads", "i"),
        ("v_heads", "i"),
        ("k_dim", "i"),
        ("v_dim", "i"),
        ("qkv_stride", "i"),
        ("beta_stride", "i"),
        ("alpha_stride", "i"),
        ("out_stride", "i"),
        ("tiled", "i"),
        ("sequences", "i"),
        ("slots", "i"),
    ),
    grid=lambda scalars: Grid(parts(scalars), "work"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)
