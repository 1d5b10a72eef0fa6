"""The prefix cache: a second request that begins like the first computes only what is new of its prompt.

python examples/prefix_cache.py [MODEL]
"""

import sys

from tandem import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
DOCUMENT = "\n".join(
    f"Line {i}: the parcel number {i * 37} was delivered on day {i % 30 + 1}." for i in range(40)
)

with LLM(MODEL) as llm:
    for question in ("How many parcels were there?", "When was parcel 37 delivered?"):
        usage = llm.generate(f"{DOCUMENT}\n\nQ: {question}\nA:", max_tokens=8).usage
        print(
            f"{usage.prompt_tokens} tokens of prompt, {usage.cached_tokens} of them cached: "
            f"first token after {usage.first_token_seconds * 1000:.0f} ms"
        )
