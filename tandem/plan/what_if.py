"""What `tandem plan` says, as data: memory, decoding, prompts, speculation, a rate to reach, and experts.

The fields are documented in docs/PLAN.md; a change that takes one away or alters its meaning raises SCHEMA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.bench.hardware import Hardware
from tandem.errors import RequestError
from tandem.kernels.abi import PANEL_ROWS
from tandem.kernels.panels import LAYOUTS
from tandem.model.model import Model
from tandem.plan.predict import MOST_ROWS, Planned, Seconds, added

SCHEMA = 1
MAX_DRAFT_TOKENS = 8
TARGET_DEPTHS = (512, 4096, 16384)
Data = dict[str, Any]


@dataclass(frozen=True)
class Wish:
    """What is asked of a plan."""

    context: int = 4096
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    depths: Sequence[int] = (128, 4095)
    prompt: int = 512
    acceptance: Sequence[float] = (0.6, 0.7, 0.8)  # acceptance rates of draft tokens: assumed
    target: float | None = None  # tokens a second of all sequences together
    target_depths: Sequence[int] = TARGET_DEPTHS
    active: float | None = None  # parameters of a mixture of experts that a token takes

    def check(self) -> None:
        if max((*self.depths, self.prompt)) >= self.context:
            raise RequestError(
                f"a depth or prompt of {max((*self.depths, self.prompt))} leaves no room in a context of "
                f"{self.context}: use a larger --context"
            )
        if not 1 <= min(self.batches) <= max(self.batches) <= MOST_ROWS:
            wrong = next(batch for batch in self.batches if not 1 <= batch <= MOST_ROWS)
            raise RequestError(f"a batch of {wrong} sequences is not planned for: use 1 to {MOST_ROWS}")
        if not all(0 <= chance < 1 for chance in self.acceptance):
            raise RequestError("an acceptance rate is a chance: give numbers from 0 to below 1, such as 0.7")


def describe(hardware: Hardware) -> Data:
    return {**dataclasses.asdict(hardware), "status": hardware.status, "heaps": hardware.heaps}


def plan_of(planned: Planned, hardware: Hardware, wish: Wish, draft: Planned | None = None) -> Data:
    """All that is known of one model in one format, with one kind of keys and values."""
    prompt, memory = _prompt(planned, hardware, wish.prompt), planned.memory(hardware)
    room = sum(memory.heaps.values()) - memory.needed
    return {
        "kv": planned.kv,
        "weights_bytes_a_token": planned.weights_read,
        "memory": {
            "parts": memory.parts,
            "heaps": {
                name: {"bytes": memory.heaps[name], "used": used} for name, used in memory.used.items()
            },
            "needed": memory.needed,
            "fits": memory.fits,
            "left": room,
            "sequences": 1 + int(room / planned.kv_bytes(planned.context, 1)) if memory.fits else 0,
        },
        "decode": [
            _decode(planned, hardware, batch, depth) for depth in wish.depths for batch in wish.batches
        ],
        "prefill": prompt,
        "speculation": _speculation(planned, draft, hardware, wish.acceptance, wish.depths[0]) if draft else None,
        "target": _target(planned, hardware, wish.target, wish.target_depths) if wish.target else None,
    }  # fmt: skip


def _rates(tokens: float, limit: Seconds, predicted: Seconds) -> Data:
    return {
        "limit": {"tokens_per_s": tokens / limit.total, "seconds": limit.total, "binds": limit.binds},
        "predicted": {
            "tokens_per_s": tokens / predicted.total,
            "seconds": predicted.total,
            "binds": predicted.binds,
        },
    }


def _decode(planned: Planned, hardware: Hardware, batch: int, depth: int) -> Data:
    step = [(depth, 1)] * batch
    rates = _rates(batch, planned.limit(hardware, step), planned.predict(hardware, step))
    fits = planned.memory(hardware, depth + 1, batch).fits
    return {"batch": batch, "depth": depth, "fits": fits, **rates}


def _prompt(planned: Planned, hardware: Hardware, tokens: int) -> Data:
    steps = planned.prompt_steps(tokens)
    limit = added(planned.limit(hardware, step) for step in steps)
    predicted = added(planned.predict(hardware, step) for step in steps)
    rates = _rates(tokens, limit, predicted)
    return {"tokens": tokens, "first_token_s": predicted.total, "first_token_limit_s": limit.total, **rates}


def _speculation(
    planned: Planned, draft: Planned, hardware: Hardware, rates: Sequence[float], depth: int
) -> list[Data]:
    """One sequence: a step of the draft model for each draft token, and a step of the model that verifies them all.
    For each acceptance rate, with the number of draft tokens that gives most."""
    _check_vocabularies(planned, draft)
    needed = sum(each.memory(hardware).needed for each in (planned, draft))
    fits = needed <= sum(hardware.heaps.values())
    drafting = draft.limit(hardware, [(depth, 1)]), draft.predict(hardware, [(depth, 1)])
    seconds = {}
    for draft_tokens in range(1, MAX_DRAFT_TOKENS + 1):
        step = hardware, [(depth, draft_tokens + 1)], draft_tokens + 1
        check = planned.limit(*step), planned.predict(*step)
        seconds[draft_tokens] = [
            added([a] + [b] * draft_tokens) for a, b in zip(check, drafting, strict=True)
        ]

    def row(rate: float, draft_tokens: int) -> Data:
        expected = sum(rate**i for i in range(draft_tokens + 1))  # accepted, and one of the model's own
        speeds = _rates(expected, *seconds[draft_tokens])
        return {
            "acceptance": rate,
            "draft_tokens": draft_tokens,
            "expected": expected,
            "fits": fits,
            **speeds,
        }

    return [
        max((row(rate, n) for n in seconds), key=lambda data: float(data["predicted"]["tokens_per_s"]))
        for rate in rates
    ]


def _check_vocabularies(planned: Planned, draft: Planned) -> None:
    """A shape has no tokens to compare, but how many; models of one family pad them by less than a hundredth."""
    ours, its = planned.config.vocab, draft.config.vocab
    if abs(ours - its) > 0.01 * ours:
        raise RequestError(
            f"the draft has a vocabulary of {its} tokens and the model one of {ours}: use one of the same family"
        )


def _target(planned: Planned, hardware: Hardware, target: float, depths: Sequence[int]) -> Data:
    """The smallest batch that gives so many tokens a second in all, at some depths."""
    rows = []
    for depth in depths:
        if depth >= planned.context:
            continue
        row: Data = {"depth": depth}
        for how in ("limit", "predict"):
            batch = _least_batch(planned, hardware, how, depth, target)
            fits = batch is not None and planned.memory(hardware, depth + 1, batch).fits
            row["limit" if how == "limit" else "predicted"] = {"batch": batch, "fits": fits}
        rows.append(row)
    return {"tokens_per_s": target, "most_batch": MOST_ROWS, "rows": rows}


def _least_batch(planned: Planned, hardware: Hardware, how: str, depth: int, target: float) -> int | None:
    def enough(batch: int) -> bool:
        seconds: Seconds = getattr(planned, how)(hardware, [(depth, 1)] * batch)
        return batch / seconds.total >= target

    # More sequences give more tokens, but where other kernels take over there may be a step down.
    for low, high in ((0, min(hardware.matrix_from - 1, MOST_ROWS)), (hardware.matrix_from - 1, MOST_ROWS)):
        if high > low and enough(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if enough(middle) else (middle, high)
            return high
    return None


def experts(active: float, layout: str, hardware: Hardware) -> Data:
    """One sequence of a mixture of experts by arithmetic alone: what a token takes of its weights, read once. We have
    no such model; routing, attention and launches are not in it."""
    each, reached = LAYOUTS[layout], hardware.calibration
    nbytes, ops = active * each.chunk_bytes / (each.span * PANEL_ROWS), 2 * active
    limit = max(nbytes / (hardware.read_gb_s * 1e9), ops / (hardware.peak_top_s * 1e12))
    moved = nbytes / (hardware.usual_gb_s * 1e9 * reached.dot_memory)
    computed = ops / (hardware.dot_top_s * 1e12 * reached.dot_ops)
    predicted = moved + computed if hardware.matrix_from <= 1 else max(moved, computed)
    return {
        "active_parameters": active,
        "weights": layout,
        "bytes_a_token": nbytes,
        "limit_tokens_per_s": 1 / limit,
        "predicted_tokens_per_s": 1 / predicted,
    }


def parameters(model: Model) -> Data:
    """Weights of matrices: in the layers, in the embedding, and in a head of its own."""
    shapes = model.architecture.tensors(model.config)
    sizes = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}
    embedding, head = sizes.pop("token_embd.weight", 0), sizes.pop("output.weight", 0)
    return {"layers": sum(sizes.values()), "embedding": embedding, "head": head}
