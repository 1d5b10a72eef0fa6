"""Samples a token from each row of logits, with the filters of llama.cpp in the same order.

The order is: logit adjustments (bias, then penalties), token mask, top_k, top_p, min_p, temperature, sampling. At
temperature 0 the highest logit wins. Of equal logits the lower id wins. NaN counts as -inf; if all logits are -inf, the
token is 0. Log-probabilities come from the unadjusted logits. The random number depends on seed and counter alone.
`logits` is not changed. The adjustments of a row are sorted by token, with one entry for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tandem.kernels.abi import LOGIT_ADJUSTMENT, MAX_TOP_LOGPROBS, SAMPLING_PARAMETERS, SAMPLING_RESULT
from tandem.kernels.dispatch import ENOUGH_WORKGROUPS, Dispatch, Gpu
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.rows import padded, rows_bytes


def cost(scalars: Scalars, counts: Counts) -> Cost:
    elements = counts["rows"] * scalars["vocab"]
    return Cost(bytes=4 * elements, ops=elements)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    rows = counts["rows"]
    return {
        "logits": rows_bytes(rows, int(scalars["vocab"]), scalars["stride"]),
        "params": SAMPLING_PARAMETERS.itemsize * rows,
        "adjustments": LOGIT_ADJUSTMENT.itemsize * int(scalars["adjustments"]),
        "masks": 4 * int(scalars["mask_words"]) * rows,
        "out": SAMPLING_RESULT.itemsize * rows,
    }


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def uniform(seed: int, counter: int) -> float:
    """A random number 0 <= u < 1 with 53 bits."""
    return (mix((mix(seed) + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) * 2.0**-53


def clean(logits: Array) -> Array:
    return np.clip(np.where(np.isnan(logits), -np.inf, logits), -np.inf, np.finfo(np.float32).max)


def adjusted(logits: Array, p: Any, adjustments: Array) -> Array:
    """Applies the adjustments in float32 like the kernel, so that equal logits are equal here too."""
    x = clean(logits).astype(np.float32)
    for token, count, bias, _ in adjustments:
        value = x[token] + bias
        if count > 0:
            value = value / p["repeat_penalty"] if value > 0 else value * p["repeat_penalty"]
            value = value - (np.float32(count) * p["frequency_penalty"] + p["presence_penalty"])
        x[token] = value
    return clean(x)


def kept(x: Array, p: Any) -> Array:
    """The ids that pass the filters, ascending."""
    order = np.argsort(-x, kind="stable")
    if 0 < p["top_k"] < len(x):
        order = order[: p["top_k"]]
    if p["top_p"] < 1:
        weights = np.exp(x[order].astype(np.float64) - x[order[0]])
        order = order[: np.searchsorted(np.cumsum(weights), max(0, p["top_p"]) * weights.sum()) + 1]
    if p["min_p"] > 0:
        order = order[x[order] >= x[order[0]] + np.log(min(p["min_p"], np.float32(1)))]
    return np.sort(order)


def pick(x: Array, p: Any) -> int:
    if x.max() == -np.inf:
        return 0
    if not p["temperature"] > 0:
        return int(x.argmax())
    ids = kept(x, p)
    weights = np.exp((x[ids].astype(np.float64) - x.max()) / np.clip(p["temperature"], 1e-30, 1e30))
    random = uniform(int(p["seed_high"]) << 32 | int(p["seed_low"]), int(p["counter"]))
    return int(ids[np.searchsorted(np.cumsum(weights), random * weights.sum(), side="right")])


def log_softmax(x: Array) -> Array:
    if x.max() == -np.inf:
        return x
    shifted = x.astype(np.float64) - x.max()
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    out = arrays["out"].copy()
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for row, p in enumerate(arrays["params"][: counts["rows"]]):
            logits = arrays["logits"][row, : int(scalars["vocab"])]
            adjustments = (
                arrays["adjustments"][p["first_adjustment"] :][: p["adjustments"]]
                if p["adjustments"]
                else np.zeros(0, LOGIT_ADJUSTMENT)
            )
            result = np.zeros((), SAMPLING_RESULT)
            x = adjusted(logits, p, adjustments)
            if p["masked"]:
                bits = np.unpackbits(arrays["masks"][row].view(np.uint8), bitorder="little")[: len(x)]
                x = np.where(bits, x, -np.inf)
            result["token"] = pick(x, p)
            if p["top_logprobs"] >= 0:
                logprobs = log_softmax(clean(logits))
                n = min(p["top_logprobs"], MAX_TOP_LOGPROBS, len(logprobs))
                tops = np.argsort(-clean(logits), kind="stable")[:n]
                result["logprob"] = logprobs[result["token"]]
                result["top_count"], result["top_ids"][:n], result["top_logprobs"][:n] = (
                    n,
                    tops,
                    logprobs[tops],
                )
            out[row] = result
    return {"out": out}


OFF: dict[str, float] = {"temperature": 1, "top_p": 1, "repeat_penalty": 1, "top_logprobs": -1}


def make_case(label: str, logits: Array, wanted: Sequence[Mapping[str, Any]], gap: int = 0) -> Case:
    """A row for each of `wanted`: parameters by name, `seed`, `mask` and `adjustments` as (token, count, bias)."""
    rows = len(wanted)
    masks = np.zeros((rows, -(-logits.shape[-1] // 32)), np.uint32)
    params = np.zeros(rows, SAMPLING_PARAMETERS)
    adjustments: list[tuple[Any, ...]] = []
    for row, (p, want) in enumerate(zip(params, wanted, strict=True)):
        for name, value in {**OFF, **want}.items():
            if name == "seed":
                p["seed_low"], p["seed_high"] = value % 2**32, value >> 32
            elif name == "adjustments":
                p["first_adjustment"], p["adjustments"] = len(adjustments), len(value)
                adjustments += [(*adjustment, 0) for adjustment in sorted(value)]
            elif name == "mask":
                p["masked"] = 1
                bits = np.packbits(value, bitorder="little")
                masks[row].view(np.uint8)[: len(bits)] = bits
            else:
                p[name] = value
    logits = np.broadcast_to(logits, (rows, logits.shape[-1]))
    vocab = logits.shape[1]
    arrays: dict[str, Array] = {
        "logits": padded(logits, vocab + gap),
        "params": params,
        "out": np.ones(rows, SAMPLING_RESULT),
    }
    if adjustments:
        arrays["adjustments"] = np.array(adjustments, LOGIT_ADJUSTMENT)
    if params["masked"].any():
        arrays["masks"] = masks
    mask_words = masks.shape[1] if "masks" in arrays else 0
    scalars = {
        "vocab": vocab,
        "stride": vocab + gap,
        "adjustments": len(adjustments),
        "mask_words": mask_words,
    }
    return Case(label, arrays, scalars, {"tokens": 1, "rows": rows, "work": 0}, atol=2e-5, rtol=1e-6)


def cases(rng: np.random.Generator) -> Iterator[Case]:
    seeds = [{"seed": int(rng.integers(2**63)), "counter": i} for i in range(8)]
    filters: tuple[dict[str, float], ...] = (
        {},
        {"temperature": 0},
        {"temperature": 0, "top_logprobs": 0},
        {"temperature": 0.7, "top_logprobs": 20},
        {"temperature": 1e-30},
        {"temperature": 1e30, "top_logprobs": 3},
        {"top_k": 1},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
        {"top_k": 100_000},
        {"top_p": 0.9},
        {"top_p": 1e-9},
        {"top_p": 0},
        {"top_p": 0.999999},
        {"min_p": 0.1},
        {"min_p": 1},
        {"top_k": 5, "min_p": 1e-30, "temperature": 2},
    )
    for vocab, gap in ((1, 0), (7, 1), (63, 0), (64, 5), (65, 0), (1000, 3), (5000, 0)):
        wanted = [{**some, **seeds[i % 8]} for i, some in enumerate(filters)]
        logits = rng.standard_normal((len(wanted), vocab)) * 4
        yield make_case(f"{vocab} tokens", logits, wanted, gap)
        yield make_case(f"{vocab} tokens, many ties", np.round(logits / 4), wanted, gap)
        adjustments = [
            (int(t), i % 3, (i % 2) * 1.5) for i, t in enumerate(np.unique(rng.integers(0, vocab, 20)))
        ]
        penalties = {
            "repeat_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "adjustments": adjustments,
        }
        yield make_case(f"{vocab} tokens, penalties", logits, [{**want, **penalties} for want in wanted], gap)
        banned = [(t, 0, -np.inf) for t in range(0, vocab, 2)]
        yield make_case(
            f"{vocab} tokens, even ones banned", logits, [{**want, "adjustments": banned} for want in wanted]
        )
        masks = rng.random((len(wanted), vocab)) < 0.1
        masked = [{**want, "mask": mask} for want, mask in zip(wanted, masks, strict=True)]
        some = [{**want, **penalties} if i % 2 else want for i, want in enumerate(masked)]
        yield make_case(f"{vocab} tokens, masked", logits, [*some[:-1], wanted[-1]], gap)
    wanted = [{**some, **seeds[i % 8]} for i, some in enumerate(filters)]
    everything = [(t, 0, -np.inf) for t in range(100)]
    yield make_case(
        "everything banned",
        rng.standard_normal(100),
        [{**want, "adjustments": everything} for want in wanted],
    )
    one_hot = np.full(300, -np.inf)
    one_hot[123] = 5
    strange = rng.standard_normal(300)
    strange[::3], strange[1::30] = np.nan, -np.inf
    for label, row in {
        "all equal": np.full(300, 2.5),
        "one finite": one_hot,
        "all -inf": np.full(300, -np.inf),
        "all NaN": np.full(300, np.nan),
        "NaN and -inf among them": strange,
        "one +inf": np.where(np.arange(300) == 77, np.inf, strange),
        "both zeros": np.where(np.arange(300) % 2, -0.0, 0.0),
        "huge": rng.standard_normal(300) * 1e38,
        "tiny": rng.standard_normal(300) * 1e-40,
        "upwards": np.arange(300) * 0.01,
        "downwards": -np.arange(300) * 10.0,
    }.items():
        yield make_case(label, row, wanted)
    big = rng.standard_normal(300_000) * 3
    yield make_case("300,000 tokens", big, [wanted[i] for i in (0, 1, 3, 7, 9, 15)])
    few = rng.random(300_000) < 1e-4
    yield make_case("300,000 tokens, few allowed", big, [{**wanted[i], "mask": few} for i in (0, 1, 3)])


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """2 to 16 workgroups per row; more do not read 1 MB faster."""
    parts = max(2, min(16, ENOUGH_WORKGROUPS.get(gpu.kind, 8) // 4 // max(1, counts["rows"])))
    return Dispatch(parts, counts["rows"], scratch="w")


KERNEL = Kernel(
    name="sample",
    buffers=(
        Buffer("logits", "r"),  # float32 [R, stride]
        Buffer("params", "r"),  # SAMPLING_PARAMETERS [R]
        Buffer("adjustments", "r"),  # LOGIT_ADJUSTMENT [...]
        Buffer("masks", "r"),  # uint32 [R, mask_words], one bit per token
        Buffer("out", "w"),  # SAMPLING_RESULT [R]
    ),
    scalars=(
        ("vocab", "i"),
        ("stride", "i"),
        ("adjustments", "i"),  # capacity of the buffer
        ("mask_words", "i"),
    ),
    grid=lambda scalars: Grid(1, "rows"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)
