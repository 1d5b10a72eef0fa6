"""A model split by layers over several devices, which together hold what one could not.

    python examples/split_devices.py [MODEL] [DEVICES]

DEVICES is `cpu,cpu` (works everywhere, to try it), `vulkan:0,cpu`, `vulkan:0,vulkan:1`: see `tandem inspect --device`.
The layers are divided by speed and memory, or as `split=[20, 10]` says.
"""

import sys

from tandem import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
DEVICES = sys.argv[2] if len(sys.argv) > 2 else "cpu,cpu"
PROMPT = "The capital of France is"

with LLM(MODEL) as llm:
    layers = llm.config["layers"]
    whole = llm.generate(PROMPT, max_tokens=8)

with LLM(MODEL, device=DEVICES, split=[layers // 2, layers - layers // 2]) as llm:
    parts = llm.generate(PROMPT, max_tokens=8)

print(f"one device:  {PROMPT}{whole.text!r}")
print(f"{DEVICES}:  {PROMPT}{parts.text!r}, {layers // 2} of {layers} layers on the first")
print(f"same tokens: {whole.token_ids == parts.token_ids}")
