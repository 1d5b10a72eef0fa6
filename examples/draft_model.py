"""Speculative decoding with a draft model: a smaller model of the same family drafts, the larger one verifies.

    python examples/draft_model.py [MODEL] [DRAFT]

It pays where the draft model is many times as fast and most of its tokens are accepted; where it does not pay, the
engine stops drafting. The output is that of the larger model.
"""

import sys
import time

from tandem import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-1.5b"
DRAFT = sys.argv[2] if len(sys.argv) > 2 else "qwen2.5-coder-0.5b"
MESSAGES = [{"role": "user", "content": "Write a Python function that returns the factorial of n."}]


def timed(draft: str | None) -> tuple[str, float]:
    with LLM(MODEL, draft=draft) as llm:
        llm.chat(MESSAGES, max_tokens=2)
        start = time.perf_counter()
        return llm.chat(MESSAGES, max_tokens=48).text, time.perf_counter() - start


plain, plain_seconds = timed(None)
drafted, drafted_seconds = timed(DRAFT)
print(drafted)
print(f"without {plain_seconds:.2f} s, with a draft model {drafted_seconds:.2f} s")
print(f"same text: {plain == drafted}")
