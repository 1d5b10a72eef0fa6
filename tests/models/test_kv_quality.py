"""What it costs to keep keys and values in int8: `python -m tests.models.test_kv_quality MODEL...` prints the table of
docs/PERFORMANCE.md, over 1,000 tokens, against the same weights in float32. The test does without that reference, which
takes long: it looks at how far the predictions are from those with float16, over fewer tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem import LLM
from tests.models.reference import Array, ReferenceModel
from tests.models.test_quality import Score, log_softmax
from tests.packages import model_path

TEXT = Path(__file__).with_name("text.txt")
TOKENS = 1001
ROWS = 100  # at a time: all logits of a large vocabulary would be 1 GB more
SOME_TOKENS = 129


def predicted(path: Path, kv: str, tokens: int) -> tuple[list[int], Array, float]:
    """Token ids of the text, logits after each but the last, and bytes of keys and values a token."""
    with LLM(path, device="cpu", context=tokens, kv=kv) as llm:
        ids = llm.tokenize(TEXT.read_text())[:tokens]
        blocks = llm.engine.cache.blocks[0]
        return ids, llm.logits(ids[:-1]), llm.engine.program.arena_bytes["kv"] / blocks / 16


@pytest.mark.parametrize(
    ("name", "most"), [("smollm2", 0.008), ("gemma-3-270m", 0.008), ("qwen2.5-coder-0.5b", 0.006)]
)
def test_predictions_stay_near_those_of_float16(name: str, most: float) -> None:
    """Some of it is what any change of a bit does: activations then round elsewhere, too. Had keys not been stored
    less their mean, Qwen's would be at 0.03."""
    (ids, f16, full), (_, q8, half) = (predicted(model_path(name), kv, SOME_TOKENS) for kv in ("f16", "q8"))
    score = Score()
    score.add(log_softmax(f16), q8, ids[1:])
    print(f"{name}: KL {score.mean_divergence:.6f}, {full:.0f} and {half:.0f} bytes a token")
    assert score.mean_divergence <= most
    assert half < 0.54 * full


def main() -> None:
    print("| model | KL, float16 | KL, int8 | perplexity, float16 | int8 | bytes a token, float16 | int8 |")
    print("|---" * 7 + "|")
    for name in sys.argv[1:]:
        path = model_path(name)
        reference, found, logits, sizes = ReferenceModel(path), {}, {}, {}
        for kv in ("f16", "q8"):
            ids, logits[kv], sizes[kv] = predicted(path, kv, TOKENS)
            found[kv] = Score()
        hidden = reference.final_hidden(ids[:-1])
        for row in range(0, len(hidden), ROWS):
            truth = log_softmax(reference.head(hidden[row : row + ROWS]))
            for kv, score in found.items():
                score.add(truth, logits[kv][row : row + ROWS], ids[row + 1 : row + 1 + len(truth)])
        cells = [f"{found[kv].mean_divergence:.6f}" for kv in found]
        cells += [f"{found[kv].perplexity:.4f}" for kv in found] + [f"{sizes[kv]:,.0f}" for kv in found]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
