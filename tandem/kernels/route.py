"""Routing of a mixture of experts: the experts that each token uses, and their weights.

Scores are the softmax or the sigmoid of the router's logits. A token uses the experts with the highest score plus
`bias`, of the best `sets_used` of `sets` expert groups (topk_group of n_group; a group's rank: the sum of its `set_top`
highest). Weights are the scores without bias, divided by their sum with `normalise`, times `scale`. A softmax over the
chosen logits alone is the same as one over all logits with `normalise`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.abi import SCORE_SIGMOID, SCORE_SOFTMAX
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.experts import chosen_bytes
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.rows import padded, rows_bytes


def cost(s: Scalars, counts: Counts) -> Cost:
    elements = counts["tokens"] * s["experts"]
    return Cost(bytes=4 * elements + 2 * chosen_bytes(counts["tokens"], s), ops=elements * (3 + s["used"]))


def extents(s: Scalars, counts: Counts) -> dict[str, int]:
    n, experts = counts["tokens"], int(s["experts"])
    return {
        "logits": rows_bytes(n, experts, s["stride"]),
        "bias": 4 * experts,
        "chosen": chosen_bytes(n, s),
        "weights": chosen_bytes(n, s),
    }


def reference(arrays: Mapping[str, Array], s: Scalars, counts: Counts) -> dict[str, Array]:
    n, experts, used, groups = counts["tokens"], int(s["experts"]), int(s["used"]), int(s["sets"])
    logits = arrays["logits"][:n, :experts].astype(np.float64)
    if s["score"] == SCORE_SIGMOID:
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    choice = scores + arrays["bias"][:experts] if "bias" in arrays else scores
    if groups > 1:
        by_group = choice.reshape(n, groups, -1)
        rank = np.sort(by_group, axis=2)[:, :, -int(s["set_top"]) :].sum(axis=2)
        best = np.argsort(-rank, axis=1, kind="stable")[:, : int(s["sets_used"])]
        allowed = np.zeros((n, groups), bool)
        np.put_along_axis(allowed, best, True, axis=1)
        choice = np.where(allowed[:, :, None], by_group, -np.inf).reshape(n, experts)
    chosen = np.argsort(-choice, axis=1, kind="stable")[:, :used]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if s["normalise"]:
        weights = weights / weights.sum(axis=1, keepdims=True)
    out = {name: arrays[name].copy() for name in ("chosen", "weights")}
    out["chosen"][:n], out["weights"][:n] = chosen, weights * s["scale"]
    return out


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for tokens, experts, used, groups, group_top, sigmoid, normalise, bias, scale in (
        (1, 8, 2, 1, 1, False, True, False, 1.0),
        (5, 128, 8, 1, 1, False, True, False, 1.0),
        (33, 60, 4, 1, 1, False, False, False, 1.0),
        (17, 32, 4, 1, 1, False, True, False, 2.5),
        (9, 64, 6, 8, 2, True, True, True, 2.5),
        (3, 160, 6, 8, 1, False, False, False, 16.0),
        (2, 128, 8, 1, 1, True, True, True, 1.0),
        (2, 5, 5, 1, 1, False, False, False, 1.0),
    ):
        logits = rng.standard_normal((tokens, experts)).astype(np.float32) * 2
        arrays = {
            "logits": padded(logits, experts + 3),
            "chosen": np.zeros((tokens, used), np.int32),
            "weights": np.zeros((tokens, used), np.float32),
        }
        if bias:
            arrays["bias"] = rng.uniform(-0.5, 0.5, experts).astype(np.float32)
        scalars: dict[str, float] = {
            "experts": experts, "used": used, "stride": experts + 3,
            "score": SCORE_SIGMOID if sigmoid else SCORE_SOFTMAX, "normalise": int(normalise), "scale": scale,
            "sets": groups, "sets_used": max(1, groups // 2), "set_top": group_top,
        }  # fmt: skip
        label = f"{tokens} tokens, {used} of {experts} experts in {groups} groups, bias={bias}"
        counts = {"tokens": tokens, "rows": 0, "work": 0}
        yield Case(label, arrays, scalars, counts, rtol=3e-6)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One workgroup chooses the experts of one token."""
    return Dispatch(counts["tokens"], constants=(64,))


KERNEL = Kernel(
    name="route",
    buffers=(
        Buffer("logits", "r"),  # float32 [T, stride]
        Buffer("bias", "r"),  # float32 [experts]
        Buffer("chosen", "w"),  # int32 [T, used]
        Buffer("weights", "w"),  # float32 [T, used]
    ),
    scalars=(
        ("experts", "i"),
        ("used", "i"),
        ("stride", "i"),
        ("score", "i"),
        ("normalise", "i"),
        ("scale", "f"),
        ("sets", "i"),
        ("sets_used", "i"),
        ("set_top", "i"),
    ),
    grid=lambda scalars: Grid(1, "tokens"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)
