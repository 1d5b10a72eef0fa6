"""Perplexity from the log-probabilities of a prompt's tokens: text that the model finds likely scores low.

    python examples/perplexity.py [MODEL]

`tandem perplexity MODEL FILE` does this for long texts, by llama.cpp's definition.
"""

import math
import sys

from tandem import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
TEXTS = {
    "a sentence": "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "its words in another order": "Lazy the all fox dog over brown mind, quick at not dog the does jumps and the.",
}

with LLM(MODEL) as llm:
    for name, text in TEXTS.items():
        result = llm.generate(text, max_tokens=1, prompt_logprobs=0)
        scores = [token.logprob for token in result.prompt_logprobs or [] if token]
        print(f"{name}: perplexity {math.exp(-sum(scores) / len(scores)):.1f} over {len(scores)} tokens")
