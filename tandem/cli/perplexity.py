"""`tandem perplexity`: the perplexity of a text, defined as in llama.cpp's tool of that name.

The text is cut into chunks. Each begins with the BOS token if the model uses one. Only the second half of a chunk is
scored, so that every scored token has at least half a chunk of context.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.run import open_llm
from tandem.cli.terminal import print_json, read_text
from tandem.errors import RequestError

if TYPE_CHECKING:
    from tandem.engine.llm import LLM


@dataclass
class Score:
    """Sums of -log p and of its square over the scored tokens."""

    total: float = 0.0
    squares: float = 0.0
    tokens: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.total / self.tokens)

    @property
    def error(self) -> float:
        """The standard error of the perplexity, from the variance over tokens."""
        mean = self.total / self.tokens
        variance = max(0.0, self.squares / self.tokens - mean * mean)
        return self.perplexity * math.sqrt(variance / max(1, self.tokens - 1))


def main(options: argparse.Namespace) -> int:
    text = read_text(Path(options.file))
    with open_llm(options, context=options.chunk, batch=64) as llm:
        ids = llm.tokenize(text)
        size = min(options.chunk, len(ids))
        if size < 4:
            raise RequestError(f"{options.file} has {len(ids)} tokens: give a longer text")
        chunks = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)][
            : options.chunks
        ]
        score = Score()
        for number, chunk in enumerate(chunks, 1):
            _score(llm, chunk, score)
            _show(f"chunk {number} of {len(chunks)}: {score.perplexity:.4f}")
        _show("")
    if options.json:
        data = {"perplexity": score.perplexity, "error": score.error, "tokens": score.tokens}
        print_json({"model": options.model, **data, "chunk": size, "chunks": len(chunks)})
    else:
        print(f"perplexity {score.perplexity:.4f} ± {score.error:.4f} ({score.tokens} tokens scored)")
    return 0


def _score(llm: LLM, chunk: Sequence[int], score: Score) -> None:
    import numpy as np

    bos = [llm.tokenizer.bos_id] if llm.tokenizer.add_bos and llm.tokenizer.bos_id is not None else []
    ids = [*bos, *chunk[len(bos) :]]
    logits = llm.logits(ids)
    for row in range(len(ids) // 2, len(ids) - 1):
        scores: Any = logits[row].astype(np.float64)
        nats = float(np.logaddexp.reduce(scores) - scores[ids[row + 1]])
        score.total += nats
        score.squares += nats * nats
        score.tokens += 1


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
