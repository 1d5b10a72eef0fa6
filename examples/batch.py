"""Batching: a list of prompts runs as one batch, which gives the same tokens in less time than one after the other.

python examples/batch.py [MODEL]
"""

import sys
import time

from tandem import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
COUNTRIES = ["France", "Italy", "Spain", "Japan", "Egypt", "Canada", "Peru", "Norway"]
PROMPTS = [f"The capital of {country} is" for country in COUNTRIES]

with LLM(MODEL) as llm:
    llm.generate("Warm up", max_tokens=2)
    start = time.perf_counter()
    single = [llm.generate(prompt, max_tokens=16, ignore_eos=True) for prompt in PROMPTS]
    middle = time.perf_counter()
    batch = llm.generate(PROMPTS, max_tokens=16, ignore_eos=True)
    end = time.perf_counter()

for prompt, result in zip(PROMPTS, batch, strict=True):
    print(prompt + result.text.split(".")[0])
same = [result.token_ids for result in single] == [result.token_ids for result in batch]
print(f"one after the other {middle - start:.2f} s, one batch {end - middle:.2f} s, same tokens: {same}")
