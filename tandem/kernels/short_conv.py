"""A causal convolution over the last few tokens of a sequence, each channel for itself, with its tail in a state slot.

out[t] = sum of weight[j] x[t - taps + 1 + j], plus a bias, through SiLU if `silu`. A state is the last taps - 1 inputs:
those before a chunk come from its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.abi import ACTIVATION_SILU
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.glu import activate
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.rows import padded, rows_bytes
from tandem.kernels.states import NO_STATE, chunks_bytes, make_chunks, read_chunks

ITEM_CHANNELS = 64


def state_size(channels: int, taps: int) -> int:
    """Floats of a state."""
    return (taps - 1) * channels


def parts(scalars: Scalars) -> int:
    return -(-int(scalars["channels"]) // ITEM_CHANNELS)


def cost(scalars: Scalars, counts: Counts) -> Cost:
    channels, taps, tokens = scalars["channels"], scalars["taps"], counts["tokens"]
    states = 8 * counts["work"] * channels * (taps - 1)
    return Cost(bytes=4 * channels * (2 * tokens + taps) + states, ops=2 * channels * taps * tokens)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    channels, taps = int(scalars["channels"]), int(scalars["taps"])
    return {
        "x": rows_bytes(counts["tokens"], channels, scalars["x_stride"]),
        "weight": 4 * channels * taps,
        "bias": 4 * channels,
        "state": 4 * int(scalars["slots"]) * state_size(channels, taps),
        "chunks": chunks_bytes(scalars, counts),
        "out": rows_bytes(counts["tokens"], channels, scalars["out_stride"]),
    }


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    channels, taps = int(scalars["channels"]), int(scalars["taps"])
    state, out, weight = arrays["state"].copy(), arrays["out"].copy(), arrays["weight"].astype(np.float64)
    for chunk in read_chunks(arrays["chunks"], scalars, counts):
        tail = np.zeros((taps - 1, channels)) if chunk.source == NO_STATE else state[chunk.source]
        for token, target in zip(chunk.tokens, chunk.targets, strict=True):
            seen = np.vstack([tail, arrays["x"][token, :channels]])
            result = np.einsum("jc,cj->c", seen, weight)
            if "bias" in arrays:
                result = result + arrays["bias"]
            out[token, :channels] = activate(result, ACTIVATION_SILU) if scalars["silu"] else result
            tail = seen[1:]
            if target != NO_STATE:
                state[target] = tail
    return {"state": state, "out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    shapes = (
        ([1], 1, 4, 0),
        ([3], 17, 4, 3),
        ([1, 1, 1], 48, 4, 0),
        ([2, 1, 5, 1], 100, 3, 4),
        ([1, 30, 2], 160, 4, 0),
        ([9], 70, 2, 0),
        ([40], 64, 8, 0),
    )
    for lengths, channels, taps, gap in shapes:
        for biased, silu in ((0, 1), (1, 0)):
            tokens, sequences, slots = sum(lengths), len(lengths) + 2, 2 + 4 * len(lengths)
            arrays = {
                "x": padded(rng.standard_normal((tokens, channels)), channels + gap),
                "weight": rng.uniform(-1, 1, (channels, taps)).astype(np.float32),
                "state": rng.standard_normal((slots, taps - 1, channels)).astype(np.float32),
                "chunks": make_chunks(rng, lengths, slots, sequences),
                "out": padded(np.zeros((tokens, channels)), channels + 2 * gap),
            }
            if biased:
                arrays["bias"] = rng.standard_normal(channels).astype(np.float32)
            scalars = {
                "channels": channels,
                "taps": taps,
                "x_stride": channels + gap,
                "out_stride": channels + 2 * gap,
                "silu": silu,
                "sequences": sequences,
                "slots": slots,
            }
            counts = {"tokens": tokens, "rows": 1, "work": len(lengths) + 1}
            label = f"{'+'.join(map(str, lengths))} x{channels} taps {taps}{' bias' * biased}{' silu' * silu}"
            yield Case(label, arrays, scalars, counts, atol=2e-6, rtol=4e-6)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One thread for a channel of a chunk."""
    chunks = min(counts["work"], int(scalars["sequences"]))
    return Dispatch(parts(scalars), chunks, constants=(int(scalars["taps"]), int(scalars["silu"])))


KERNEL = Kernel(
    name="short_conv",
    buffers=(
        Buffer("x", "r"),  # float32 [T, x_stride]
        Buffer("weight", "r"),  # float32 [channels, taps]
        Buffer("bias", "r"),  # float32 [channels]; absent (address 0): none
        Buffer("state", "rw"),  # float32 [slots, taps - 1, channels]
        Buffer("chunks", "r"),  # int32 [sequences, CHUNK_INTS], then [T]
        Buffer("out", "w"),  # float32 [T, out_stride]
    ),
    scalars=(
        ("channels", "i"),
        ("taps", "i"),
        ("x_stride", "i"),
        ("out_stride", "i"),
        ("silu", "i"),
        ("sequences", "i"),
        ("slots", "i"),
    ),
    grid=lambda scalars: Grid(parts(scalars), "work"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)
