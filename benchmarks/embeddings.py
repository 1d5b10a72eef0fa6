"""Compares embeddings with a reference's vectors, and their throughput with llama.cpp's, on this machine.

    python -m benchmarks.embeddings --peer PYTHON --texts TEXTS.json --output RESULT.json NAME=FILE.gguf:VECTORS.npy ...

TEXTS.json is a list of texts, VECTORS.npy has the vector of each: float32 [texts, width]. PYTHON has llama_cpp,
built for this CPU (`make bench` builds it). Rounds of both alternate; each embeds all texts, from text to vector.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.against_llama_cpp import machine
from tandem import LLM

PEER = Path(__file__).parent / "embeddings_peer.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="NAME=FILE:VECTORS")
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    texts = json.loads(options.texts.read_text())
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": machine(),
        "settings": {"threads": options.threads, "rounds": options.rounds, "texts": len(texts)},
        "models": [],
    }
    for given in options.models:
        name, _, rest = given.partition("=")
        file, _, vectors = rest.rpartition(":")
        row = compare(name, Path(file), np.load(vectors), texts, options)
        print(json.dumps(row), flush=True)
        results["models"].append(row)
        options.output.write_text(json.dumps(results, indent=1) + "\n")


def compare(
    name: str, file: Path, reference: np.ndarray[Any, Any], texts: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(file, device="cpu", threads=options.threads) as llm,
        subprocess.Popen(
            [options.peer, PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as peer,
    ):
        assert peer.stdin and peer.stdout
        output = Path(folder) / "vectors.npy"
        asked = {"model": str(file), "threads": options.threads, "context": llm.context}
        print(json.dumps(asked | {"texts": texts, "output": str(output)}), file=peer.stdin, flush=True)
        ours = llm.embed(texts, truncate=True)
        if peer.stdout.readline().strip() != "ready":
            raise SystemExit("llama.cpp could not load the model")
        theirs, seconds = np.load(output), {"tandem": list[float](), "llama.cpp": list[float]()}
        for _ in range(options.rounds):
            begin = time.perf_counter()
            llm.embed(texts, truncate=True)
            seconds["tandem"].append(time.perf_counter() - begin)
            print(file=peer.stdin, flush=True)
            seconds["llama.cpp"].append(float(peer.stdout.readline()))
        peer.stdin.close()
        tokens = sum(len(llm.embedding_ids(text, truncate=True)) for text in texts)
    rates = {engine: [round(tokens / each) for each in times] for engine, times in seconds.items()}
    medians = {engine: float(np.median(each)) for engine, each in rates.items()}
    return {
        "name": name,
        "tokens": tokens,
        "cosine": {
            engine: {"least": round(float(each.min()), 6), "mean": round(float(each.mean()), 6)}
            for engine, each in (
                (engine, (vectors * reference).sum(axis=1))
                for engine, vectors in (("tandem", ours), ("llama.cpp", theirs))
            )
        },
        "tokens_per_second": rates,
        "ratio": round(medians["tandem"] / medians["llama.cpp"], 2),
    }


if __name__ == "__main__":
    main()
