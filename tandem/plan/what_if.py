"""The data of `tandem plan`: memory, decode, prefill, speculative decoding, a target rate, and mixtures of experts.

The fields are documented in docs/PLAN.md. SCHEMA is raised when one is removed or changes its meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tandem.bench.hardware import Hardware
from tandem.errors import RequestError
from tandem.kernels.abi import PANEL_ROWS
from tandem.kernels.panels import LAYOUTS
from tandem.model.model import Model
from tandem.plan.predict import MAX_ROWS, Planned, Seconds, added, kernel_gb_s
from tandem.plan.published_mtp import PUBLISHED

SCHEMA = 2
MAX_ACTIVE = 1e15  # active parameters
MAX_DRAFT_TOKENS = 8
TARGET_DEPTHS = (512, 4096, 16384)
Data = dict[str, Any]


@dataclass(frozen=True)
class PlanOptions:
    """The options of a plan."""

    context: int = 4096
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    depths: Sequence[int] = (128, 4095)
    prompt: int = 512
    acceptance: Sequence[float] = (0.6, 0.7, 0.8)  # acceptance rates of draft tokens: assumed
    target: float | None = None  # tokens per second of all sequences together
    target_depths: Sequence[int] = TARGET_DEPTHS
    active: float | None = None  # active parameters of a mixture of experts

    def check(self) -> None:
        if max((*self.depths, self.prompt)) >= self.context:
            raise RequestError(
                f"a depth or prompt of {max((*self.depths, self.prompt))} leaves no room in a context of "
                f"{self.context}: use a larger --context"
            )
        if not 1 <= min(self.batches) <= max(self.batches) <= MAX_ROWS:
            wrong = next(batch for batch in self.batches if not 1 <= batch <= MAX_ROWS)
            raise RequestError(f"a batch size of {wrong} is not possible: use 1 to {MAX_ROWS}")
        if not all(0 <= rate < 1 for rate in self.acceptance):
            raise RequestError("an acceptance rate must be from 0 to below 1: give one such as 0.7")
        if self.active and self.active > MAX_ACTIVE:
            raise RequestError(f"no model has {self.active / 1e9:g} billion active parameters: give fewer")


def describe(hardware: Hardware) -> Data:
    return {**dataclasses.asdict(hardware), "status": hardware.status, "heaps": hardware.heaps}


def plan_of(planned: Planned, hardware: Hardware, wanted: PlanOptions, draft: Planned | None = None) -> Data:
    """The plan for one model in one weight format with one KV cache type."""
    prompt, memory = _prompt(planned, hardware, wanted.prompt), planned.memory(hardware)
    draft = draft or planned.head
    room = sum(memory.heaps.values()) - memory.needed
    return {
        "kv": planned.kv,
        "weight_bytes_per_step": planned.weights_read,
        "memory": {
            "parts": memory.parts,
            "heaps": {
                name: {"bytes": memory.heaps[name], "used": used} for name, used in memory.used.items()
            },
            "needed": memory.needed,
            "fits": memory.fits,
            "free": room,
            "max_sequences": 1 + int(room / planned.sequence_bytes) if memory.fits else 0,
        },
        "decode": [
            _decode(planned, hardware, batch, depth) for depth in wanted.depths for batch in wanted.batches
        ],
        "prefill": prompt,
        "speculation": _speculation(planned, draft, hardware, wanted.acceptance, wanted.depths[0]) if draft else None,
        "published": _published(planned, planned.head, hardware, wanted.depths[0]) if planned.head else None,
        "target": _target(planned, hardware, wanted.target, wanted.target_depths) if wanted.target else None,
    }  # fmt: skip


def _rates(tokens: float, limit: Seconds, predicted: Seconds) -> Data:
    return {
        "limit": {
            "tokens_per_s": tokens / limit.total,
            "seconds": limit.total,
            "bottleneck": limit.bottleneck,
        },
        "predicted": {
            "tokens_per_s": tokens / predicted.total,
            "seconds": predicted.total,
            "bottleneck": predicted.bottleneck,
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
    seconds = _seconds_with_drafts(planned, draft, hardware, depth)
    needed = planned.memory(hardware).needed
    needed += draft.memory(hardware).needed if draft is not planned.head else 0.0
    fits = needed <= sum(hardware.heaps.values())

    def row(rate: float, draft_tokens: int) -> Data:
        expected = _expected_tokens(rate, draft_tokens)
        speeds = _rates(expected, *seconds[draft_tokens])
        return {
            "acceptance": rate,
            "draft_tokens": draft_tokens,
            "tokens_per_step": expected,
            "fits": fits,
            **speeds,
        }

    return [
        max((row(rate, n) for n in seconds), key=lambda data: float(data["predicted"]["tokens_per_s"]))
        for rate in rates
    ]


def _expected_tokens(rate: float, draft_tokens: int) -> float:
    """Accepted draft tokens of a step, and one of the model's own."""
    return sum(rate**i for i in range(draft_tokens + 1))


def _seconds_with_drafts(
    planned: Planned, draft: Planned, hardware: Hardware, depth: int
) -> dict[int, tuple[Seconds, Seconds]]:
    """For each number of draft tokens, the limit and the prediction of a step that verifies them, and of drafting."""
    drafting = draft.limit(hardware, [(depth, 1)]), draft.predict(hardware, [(depth, 1)])
    stored = planned.state_bytes / (hardware.usual_gb_s * 1e9)  # the state after a draft token is written
    storing = Seconds(0.0, 0.0), Seconds(stored, 0.0, 0.0, stored)
    found = {}
    for count in range(1, MAX_DRAFT_TOKENS + 1):
        step = hardware, [(depth, count + 1)], count + 1
        verifying = planned.limit(*step), planned.predict(*step)
        limit, predicted = (
            added([a] + [b] * count + [c] * count)
            for a, b, c in zip(verifying, drafting, storing, strict=True)
        )
        found[count] = limit, predicted
    return found


def _published(planned: Planned, head: Planned, hardware: Hardware, depth: int) -> list[Data]:
    """What others have measured with a draft head there, and what is predicted at their acceptance."""
    shape = getattr(planned.model, "shape", "")
    seconds = _seconds_with_drafts(planned, head, hardware, depth)
    plain = planned.predict(hardware, [(depth, 1)]).total
    return [
        {
            **each._asdict(),
            "acceptance": each.acceptance,
            "predicted_plain": 1 / plain,
            "predicted_drafted": _expected_tokens(each.acceptance, each.draft_tokens)
            / seconds[each.draft_tokens][1].total,
        }
        for each in PUBLISHED
        if (each.hardware, each.shape) == (hardware.name, shape)
    ]


def _check_vocabularies(planned: Planned, draft: Planned) -> None:
    """Compares the sizes of the vocabularies. Models of one family pad them by less than 1%."""
    ours, its = planned.config.vocab, draft.config.vocab
    if abs(ours - its) > 0.01 * ours:
        raise RequestError(
            f"the draft has a vocabulary of {its} tokens and the model one of {ours}: use one of the same family"
        )


def _target(planned: Planned, hardware: Hardware, target: float, depths: Sequence[int]) -> Data:
    """The smallest batch that reaches `target` tokens per second in total, at some depths."""
    rows = []
    for depth in depths:
        if depth >= planned.context:
            continue
        row: Data = {"depth": depth}
        for how in ("limit", "predict"):
            batch = _min_batch(planned, hardware, how, depth, target)
            fits = batch is not None and planned.memory(hardware, depth + 1, batch).fits
            row["limit" if how == "limit" else "predicted"] = {"batch": batch, "fits": fits}
        rows.append(row)
    return {"tokens_per_s": target, "max_batch": MAX_ROWS, "rows": rows}


def _min_batch(planned: Planned, hardware: Hardware, how: str, depth: int, target: float) -> int | None:
    def enough(batch: int) -> bool:
        seconds: Seconds = getattr(planned, how)(hardware, [(depth, 1)] * batch)
        return batch / seconds.total >= target

    # Throughput grows with the batch, but may drop where other shaders take over: each range is searched.
    ends = {min(hardware.matrix_from - 1, MAX_ROWS), *(1 << i for i in range(MAX_ROWS.bit_length()))}
    for low, high in pairwise([0, *sorted(ends - {0})]):
        if enough(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if enough(middle) else (middle, high)
            return high
    return None


def experts(active: float, layout: str, hardware: Hardware) -> Data:
    """A mixture of experts at batch 1, from its active weights alone: read once for each token. Routing, attention and
    launches are not counted."""
    each, reached = LAYOUTS[layout], hardware.calibration
    nbytes, ops = active * each.chunk_bytes / (each.span * PANEL_ROWS), 2 * active
    limit = max(nbytes / (hardware.read_gb_s * 1e9), ops / (hardware.peak_top_s * 1e12))
    moved = nbytes / (kernel_gb_s(hardware) * 1e9)
    computed = ops / (hardware.dot_top_s * 1e12 * reached.dot_ops)
    predicted = moved + computed if hardware.matrix_from <= 1 else max(moved, computed)
    return {
        "active_parameters": active,
        "weights": layout,
        "bytes_per_token": nbytes,
        "limit_tokens_per_s": 1 / limit,
        "predicted_tokens_per_s": 1 / predicted,
    }


def parameters(model: Model) -> Data:
    """Matrix parameters in the layers, the embedding, and the head (0 if tied to the embedding)."""
    shapes = model.architecture.tensors(model.config)
    sizes = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}
    embedding, head = sizes.pop("token_embd.weight", 0), sizes.pop("output.weight", 0)
    return {"layers": sum(sizes.values()), "embedding": embedding, "head": head}
