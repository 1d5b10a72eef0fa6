"""Embeddings: texts become vectors of length 1, and the nearest vector answers a search.

    python examples/embeddings.py [MODEL]

A chat model's vectors all point in a similar direction: subtracting their mean makes them tell texts apart.
"""

import sys

import numpy as np

from tandem import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
TEXTS = [
    "The cat sleeps on the sofa.",
    "A dog runs after the ball.",
    "The bank raised its interest rates.",
    "Investors sold their shares.",
    "Bake the bread for forty minutes.",
    "Add salt to the soup.",
]
QUERY = "Stock markets fell on Monday."

with LLM(MODEL) as llm:
    vectors = np.stack([llm.embed(text) for text in TEXTS])
    query = llm.embed(QUERY)

mean = vectors.mean(axis=0)
vectors, query = vectors - mean, query - mean
scores = vectors @ query / (np.linalg.norm(vectors, axis=1) * np.linalg.norm(query))
print(f"nearest to: {QUERY}")
for score, text in sorted(zip(scores.tolist(), TEXTS, strict=True), reverse=True):
    print(f"{score:6.2f}  {text}")
