"""Streaming: text is printed as soon as a token completes it; the last token has the usage.

python examples/stream.py [MODEL]
"""

import sys

from tandem import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
MESSAGES = [{"role": "user", "content": "Name the planets of the solar system in order."}]

with LLM(MODEL) as llm:
    for token in llm.stream(MESSAGES, max_tokens=64):
        print(token.text, end="", flush=True)
        if token.usage:
            speed = (token.usage.completion_tokens - 1) / token.usage.decode_seconds
            print(f"\n[{token.finish_reason}: {token.usage.completion_tokens} tokens, {speed:.0f} tokens/s]")
