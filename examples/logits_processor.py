"""A sampler of your own: a Python function that changes the logits before each token is sampled.

    python examples/logits_processor.py [MODEL]

The function gets the tokens so far and float32 [vocabulary]. It is slow, as each token waits for Python: use
`logit_bias`, `json_schema` or `regex` where they do. This one forbids every token with the letter e.
"""

import sys

import numpy as np

from tandem import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
PROMPT = "Once upon a time"

with LLM(MODEL) as llm:
    vocabulary = llm.config["vocab"]
    has_e = np.array(["e" in llm.detokenize([token]).lower() for token in range(vocabulary)])

    def without_e(tokens: list[int], logits: np.ndarray) -> None:
        logits[has_e] = -np.inf

    plain = llm.generate(PROMPT, max_tokens=24)
    lipogram = llm.generate(PROMPT, max_tokens=24, logits_processor=without_e)

print(f"as it is:  {PROMPT}{plain.text}")
print(f"without e: {PROMPT}{lipogram.text}")
print(f"letters e: {plain.text.lower().count('e')} and {lipogram.text.lower().count('e')}")
