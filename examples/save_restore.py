"""A conversation on disk: its keys and values are saved, and another process goes on without computing them again.

python examples/save_restore.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

from tandem import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
FACTS = " ".join(f"Room {100 + i} belongs to team {chr(65 + i % 26)}." for i in range(60))
MESSAGES = [{"role": "user", "content": f"{FACTS} Which team does room 103 belong to?"}]

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "conversation.kv"
    with LLM(MODEL) as llm:
        print(f"saved {llm.save(MESSAGES, file)} tokens, {file.stat().st_size / 1e6:.1f} MB")
        first = llm.chat(MESSAGES, max_tokens=16)

    with LLM(MODEL) as llm:  # as a later run would
        llm.restore(file)
        later = llm.chat(MESSAGES, max_tokens=16)

print(f"after restore {later.usage.cached_tokens} of {later.usage.prompt_tokens} tokens were there already")
print(f"{later.text!r}, the same answer: {first.text == later.text}")
