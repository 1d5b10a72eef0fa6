"""Real models, teacher-forced over real text, stay as near to their float32 selves as they do in llama.cpp.

The measure is the mean KL divergence from what the NumPy reference predicts with the same weights dequantised
to float32, and the perplexity of the text.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tandem import LLM
from tests.models.llama_cpp import LlamaCpp
from tests.models.mixtures import as_quantised_mixture
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


def windows(
    peer: LlamaCpp, text: str, count: int, window: int = WINDOW
) -> Iterator[tuple[list[int], list[int]]]:
    """Sequences of `window` tokens, each begun as the model wants a text to begin, and the tokens one later."""
    start = peer.tokenize("")
    body = peer.tokenize(text)[len(start) :]
    step = window + 1 - len(start)
    assert len(body) >= count * step, f"the text has only {len(body)} tokens"
    for first in range(0, count * step, step):
        ids = start + body[first : first + step]
        yield ids[:-1], ids[1:]


def compare(
    path: Path, text: str, count: int, window: int = WINDOW, of: Path | None = None
) -> tuple[Score, Score]:
    """Scores of Tandem and of llama.cpp over the first `count` windows of `text`. `of`: a file with the same output, of
    which the reference is."""
    reference, peer = ReferenceModel(of or path), LlamaCpp(path, context=window)
    ours, theirs = Score(), Score()
    with LLM(path, device="cpu", threads=2, context=window) as llm:
        for ids, targets in windows(peer, text, count, window):
            hidden, logits = reference.final_hidden(ids), llm.logits(ids)
            for row, peer_logits in zip(range(0, window, peer.batch), peer.logits(ids), strict=True):
                # Few at a time: 1,000 rows of Gemma's vocabulary are 1 GB.
                rows = slice(row, row + peer.batch)
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
    check(*compare(model_path(name), Path(__file__).with_name("text.txt").read_text(), count=1))


@pytest.mark.soak
def test_a_mixture_is_as_near_to_float32_as_in_llama_cpp(tmp_path: Path) -> None:
    """Qwen2.5 Coder 0.5B as a qwen2moe with the same output: any slip in routing would show."""
    dense, text = model_path("qwen2.5-coder-0.5b"), Path(__file__).with_name("text.txt").read_text()
    mixture = as_quantised_mixture(dense, tmp_path / "mixture.gguf")
    check(*compare(mixture, text, count=1, of=dense))


@pytest.mark.soak
@pytest.mark.parametrize("name", [*MODELS, "qwen2.5-coder-1.5b"])
def test_as_near_to_float32_over_50_000_tokens(name: str) -> None:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    text = "".join(path.read_text(encoding="utf-8") for path in sources)[:400_000]
    check(*compare(model_path(name), text, count=50))
