"""Real models on the Vulkan device stay as near to their float32 selves as on the CPU.

The measure is that of tests/models/test_quality.py: the mean KL divergence from the NumPy reference. Both devices round
activations to 8 bits, in other places of the sum, so that single tokens differ by factors and only a mean says which is
nearer: the short test leaves room for what so few tokens leave open, the soak test for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tandem import LLM
from tests.models.reference import Array, ReferenceModel
from tests.models.test_quality import log_softmax
from tests.packages import model_path

TEXT = Path(__file__).parents[1] / "models" / "text.txt"
MODELS = ["smollm2", "gemma-3-270m"]
GENERATED = 32
RATIO = 1.1  # maximum ratio to the CPU's divergence
FAR = 3.0  # maximum ratio for a few tokens: more is not by chance
CLOSE = 0.3  # difference of logits below which tokens may change places


@dataclass
class Divergences:
    """Divergences from the reference for the same tokens: one entry per token."""

    ours: Array
    cpu: Array

    def ratio(self) -> tuple[float, float]:
        """The ratio of the means, and the low end of its 95% bootstrap interval."""
        samples = np.random.default_rng(0).integers(0, len(self.cpu), (2000, len(self.cpu)))
        ratios = self.ours[samples].mean(axis=1) / self.cpu[samples].mean(axis=1)
        return float(self.ours.mean() / self.cpu.mean()), float(np.percentile(ratios, 2.5))


def divergences(truth: Array, logits: Array) -> Array:
    truth = truth[: len(logits)]
    return np.sum(np.exp(truth) * (truth - log_softmax(logits)), axis=1)


def logits(llm: LLM, ids: list[int], rows: int) -> Array:
    """Logits from steps of at most `rows` tokens."""
    scheduler = llm.engine.scheduler
    whole, scheduler.limits = scheduler.limits, replace(scheduler.limits, logits_rows=rows)
    try:
        return llm.logits(ids)
    finally:
        scheduler.limits = whole


def check_greedy(on_cpu: Array, ids: list[int], prompt: int) -> None:
    """The CPU, given the same tokens, would have chosen each of those generated, or nearly."""
    rows = on_cpu[prompt - 1 :]
    lost = rows.max(axis=1) - rows[np.arange(len(rows)), ids[prompt:]]
    assert lost.max() < CLOSE, f"token {lost.argmax()} of the answer is not the likeliest, by {lost.max()}"
    assert (lost == 0).mean() > 0.8


def compare(
    reference: ReferenceModel, llm: LLM, cpu: LLM, ids: list[int], steps: dict[int, int]
) -> dict[int, Divergences]:
    """Divergences by the rows of a step: matmuls of 1, 2 to 4, 5 to 8 and more tokens use different shaders.

    `steps`: rows of a step -> number of tokens to measure.
    """
    truth = log_softmax(reference.logits(ids))
    on_cpu = divergences(truth, cpu.logits(ids))
    found = {rows: divergences(truth, logits(llm, ids[:count], rows)) for rows, count in steps.items()}
    return {rows: Divergences(ours, on_cpu[: len(ours)]) for rows, ours in found.items()}


def joined(parts: Iterable[Divergences]) -> Divergences:
    parts = list(parts)
    return Divergences(np.concatenate([p.ours for p in parts]), np.concatenate([p.cpu for p in parts]))


def report(name: str, found: dict[int, Divergences]) -> None:
    for rows, each in found.items():
        ratio, low = each.ratio()
        print(
            f"{name}, steps of {rows}: KL {each.ours.mean():.6f}, the CPU's {each.cpu.mean():.6f}, ", end=""
        )
        print(f"{ratio:.3f} of it (from {low:.3f}), over {len(each.cpu)} tokens")


@contextmanager
def opened(name: str, device: str) -> Iterator[tuple[ReferenceModel, LLM, LLM]]:
    path = model_path(name)
    with (
        LLM(path, device=device, context=256, batch=64) as llm,
        LLM(path, device="cpu", context=256, batch=64) as cpu,
    ):
        yield ReferenceModel(path), llm, cpu


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_divergence(lavapipe: str, name: str) -> None:
    with opened(name, lavapipe) as (reference, llm, cpu):
        prompt = llm.tokenize(TEXT.read_text())[:16]
        ids = prompt + llm.generate(prompt, max_tokens=GENERATED, ignore_eos=True).token_ids
        check_greedy(cpu.logits(ids[:-1]), ids, len(prompt))
        found = compare(reference, llm, cpu, ids[:-1], steps={64: 32, 8: 8, 4: 4, 1: 2})
    report(name, found)
    assert all(each.ratio()[0] < FAR for each in found.values())
    assert joined(found.values()).ratio()[1] <= RATIO


@pytest.mark.soak
@pytest.mark.parametrize("name", [*MODELS, "qwen2.5-coder-0.5b"])
def test_divergence_over_many_texts(lavapipe: str, name: str) -> None:
    """Texts of their own, since an error in one token's keys and values goes on through the rest of its text."""
    total: dict[int, list[Divergences]] = {64: [], 8: [], 4: [], 1: []}
    with opened(name, lavapipe) as (reference, llm, cpu):
        start = llm.tokenize("")  # as the model wants a text to begin
        body, size = llm.tokenize(TEXT.read_text())[len(start) :], 64 - len(start)
        for begin in range(0, 16 * size, size):
            ids = start + body[begin : begin + size]
            for rows, each in compare(reference, llm, cpu, ids, {64: 64, 8: 16, 4: 8, 1: 4}).items():
                total[rows].append(each)
    found = {rows: joined(parts) for rows, parts in total.items()}
    report(name, found)
    assert found[64].ratio()[0] <= RATIO
    assert all(each.ratio()[1] <= RATIO for each in found.values())
