"""Tries LangChain with an image on a running server whose model sees; see try_clients.py.

python tests/server/try_images.py [http://127.0.0.1:8000] [MODEL]
"""

from __future__ import annotations

import sys

import try_clients
from langchain_core.messages import HumanMessage

# A red square of 8 x 8 pixels.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEUlEQVR42mP4z8CAFTEMLQkAKP8/wc53yE8AAAAASUVORK5CYII="
TEXT = "What is this?"

try_clients.URL, try_clients.MODEL = [
    *sys.argv[1:],
    *("http://127.0.0.1:8000", "gemma3")[len(sys.argv) - 1 :],
]
image = {"type": "image", "base64": PNG, "mime_type": "image/png"}
seen = HumanMessage(content=[{"type": "text", "text": TEXT}, image])
for model in try_clients.langchain_models():
    counts = [model.invoke(asked).usage_metadata["input_tokens"] for asked in (TEXT, [seen])]
    assert counts[1] > counts[0] + 3 and list(model.stream([seen])), (model, counts)
    print(f"{type(model).__name__}: works, {counts[1] - counts[0]} tokens of an image")
