"""Embeds texts with llama-cpp-python, for embeddings.py, in a Python that has it.

Reads a JSON line {"model", "threads", "context", "texts", "output"} and writes the vectors to `output`; then embeds all
texts once more for each line that comes, and answers with the seconds.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from llama_cpp import Llama


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    model = Llama(
        asked["model"],
        embedding=True,
        n_ctx=asked["context"],
        n_batch=asked["context"],
        n_ubatch=asked["context"],
        n_threads=asked["threads"],
        n_threads_batch=asked["threads"],
        verbose=False,
    )
    vectors = np.array(model.embed(asked["texts"], normalize=True), np.float32)
    np.save(asked["output"], vectors)
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        model.embed(asked["texts"], normalize=True)
        print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main()
