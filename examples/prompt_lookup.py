"""Speculative decoding by prompt lookup: draft tokens come from the prompt, so an edit of a text is faster.

    python examples/prompt_lookup.py [MODEL]

The tokens are the same with and without it: draft tokens are accepted only where the model would have sampled them.
"""

import sys
import time

from tandem import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
CODE = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return width * height

def perimeter(width, height):
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return 2 * (width + height)
"""
MESSAGES = [{"role": "user", "content": f"Rename `width` to `w`. Only the code.\n```python\n{CODE}```"}]


def timed(**options: bool) -> tuple[list[int], float]:
    with LLM(MODEL, **options) as llm:
        llm.chat(MESSAGES, max_tokens=2)  # warm up: the prompt is now in the prefix cache
        start = time.perf_counter()
        result = llm.chat(MESSAGES, max_tokens=96)
        seconds = time.perf_counter() - start
        if found := llm.stats().speculation:
            print(f"{found.accepted} of {found.drafted} draft tokens accepted in {found.steps} steps")
        return result.token_ids, seconds


plain, plain_seconds = timed()
drafted, drafted_seconds = timed(prompt_lookup=True)
print(f"without {plain_seconds:.2f} s, with prompt lookup {drafted_seconds:.2f} s for {len(plain)} tokens")
print(f"same tokens: {plain == drafted}")
