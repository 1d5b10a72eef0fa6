"""Compares a model with recurrent layers with llama.cpp on this CPU: prefill, decoding of one and of eight sequences.

    python -m benchmarks.hybrid_cpu --peer PYTHON [--model FILE] [--rounds 5] [--output FILE]

Measured as `make bench` does it (measures.py). Without FILE, random weights in the shape of Qwen 3.5 2B with twelve
layers: a billion parameters (hybrid_file.py).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.against_llama_cpp import machine, say, versions
from benchmarks.hybrid_file import write_hybrid
from benchmarks.measures import OPENING, PREFILL, STEPS, Comparison
from benchmarks.pairs import HERE
from benchmarks.result_table import one_line, table

SHAPE, LAYERS = "qwen3.5-2b:q4_k_m", 12
TARGETS = {0: 2.0, 1: 1.2, 8: 2.5}  # ratios to reach in prefill, and in decoding one and eight sequences


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.hybrid_cpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--peer", default=str(HERE.parent / ".venv-peer" / "bin" / "python"), metavar="PYTHON"
    )
    parser.add_argument("--model", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument(
        "--sequences", type=int, nargs="*", default=list(TARGETS), choices=list(TARGETS), metavar="N",
        help="of 0 (prefill), 1 and 8",
    )  # fmt: skip
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the time that one thread computes: where others use the machine",
    )
    options = parser.parse_args()
    options.threads = 1 if options.cpu_time else options.threads
    with tempfile.TemporaryDirectory() as folder:
        file = options.model or Path(folder, "hybrid.gguf")
        if not options.model:
            write_hybrid(file, SHAPE, LAYERS)
        comparison = Comparison(
            "hybrid", file, options.peer, options.threads, options.rounds, cpu_time=options.cpu_time
        )
        rows = []
        for row in comparison.speeds({n: TARGETS[n] for n in options.sequences}):
            rows.append(row)
            say(one_line(row))
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"), "machine": machine(),
        "settings": {
            "threads": options.threads, "rounds": options.rounds, "prefill": PREFILL, "opening": OPENING,
            "steps": STEPS, "shape": SHAPE, "layers": LAYERS, "cpu_time": options.cpu_time,
        },
        "versions": versions(options.peer), "peer_system": comparison.peer.info["system"],
        "models": [
            {
                "name": "hybrid", "file": f"{SHAPE}, {LAYERS} layers, random weights", "tandem": comparison.ours.info,
                "int8_gop_per_s_limit": comparison.int8_gop_per_s, "peer_flash_attention": comparison.flash,
                "rows": rows,
            }
        ],
    }  # fmt: skip
    print(table(results))
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
