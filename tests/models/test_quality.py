"""Real models, teacher-forced over real text, are no further from their float32 selves here than in llama.cpp.

The measure is the mean KL divergence from what the NumPy reference predicts with the same weights dequantised to
float32, and the perplexity of the text.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tandem import LLM
from tests.models.llama_cpp import LlamaCpp
from tests.models.reference import Array, ReferenceModel
from tests.packages import model_path

WINDOW = 1000  # tokens scored in one sequence
MODELS = ["smollm2", "gemma-3-270m", "qwen2.5-coder-0.5b"]


@dataclass
class Score:
    """What a model's predictions cost, summed over tokens."""

    divergence: float = 0.0  # KL(reference || model), in nats
    surprise: float = 0.0  # -log p(next token)
    tokens: int = 0

    def add(self, reference: Array, logits: Array, targets: list[int]) -> None:
        """`reference` and `logits` are [tokens, vocabulary]; the former are log-probabilities."""
        predicted = log_softmax(logits)
        self.divergence += float(np.sum(np.exp(reference) * (reference - predicted), dtype=np.float64))
        self.surprise -= float(np.sum(predicted[np.arange(len(targets)), targets], dtype=np.float64))
        self.tokens += len(targets)

    @property
    def mean_divergence(self) -> float:
        return self.divergence / self.tokens

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.surprise / self.tokens))


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
    return shifted


def compare(name: str, text: str, windows: int) -> tuple[Score, Score]:
    """Scores of Tandem and of llama.cpp over the first `windows` * 1,000 tokens of `text`."""
    path = model_path(name)
    reference, peer = ReferenceModel(path), LlamaCpp(path, context=WINDOW)
    llm = LLM(path, device="cpu", threads=2, context=1024)
    start, body = (
        peer.tokenize(""),
        peer.tokenize(text),
    )  # start: the token that begins a text, where there is one
    body = body[len(start) :]
    step = WINDOW + 1 - len(start)
    assert len(body) >= windows * step, f"the text has only {len(body)} tokens for {name}"
    ours, theirs = Score(), Score()
    for first in range(0, windows * step, step):
        ids = start + body[first : first + step]
        ids, targets = ids[:-1], ids[1:]
        hidden, logits = reference.final_hidden(ids), llm.logits(ids)
        for row, peer_logits in zip(range(0, WINDOW, peer.batch), peer.logits(ids), strict=True):
            rows = slice(row, row + peer.batch)  # a few at a time: 1,000 rows of Gemma's vocabulary are 1 GB
            truth = log_softmax(reference.head(hidden[rows]))
            ours.add(truth, logits[rows], targets[rows])
            theirs.add(truth, peer_logits, targets[rows])
    peer.close()
    return ours, theirs


def check(ours: Score, theirs: Score) -> None:
    print(f"KL {ours.mean_divergence:.6f} against llama.cpp's {theirs.mean_divergence:.6f}; ", end="")
    print(f"perplexity {ours.perplexity:.4f} against {theirs.perplexity:.4f}")
    assert ours.mean_divergence <= 1.1 * theirs.mean_divergence
    assert abs(ours.perplexity / theirs.perplexity - 1) <= 0.005


@pytest.mark.parametrize("name", MODELS)
def test_as_near_to_float32_as_llama_cpp(name: str) -> None:
    check(*compare(name, Path(__file__).with_name("text.txt").read_text(), windows=1))


@pytest.mark.soak
@pytest.mark.parametrize("name", [*MODELS, "qwen2.5-coder-1.5b"])
def test_as_near_to_float32_over_50_000_tokens(name: str) -> None:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    text = "".join(path.read_text(encoding="utf-8") for path in sources)[:400_000]
    check(*compare(name, text, windows=50))
