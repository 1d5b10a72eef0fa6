"""Compares Tandem with llama.cpp on this machine: same files, same threads, alternating rounds."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import tandem
from benchmarks.measures import OPENING, PREFILL, PROMPT, STEPS, TARGETS, Comparison
from benchmarks.pairs import HERE
from benchmarks.result_table import one_line, table
from tandem.bench.machine import cpu_fields, machine_facts
from tests.packages import model_path


def main() -> None:
    options = parse()
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": machine(),
        "settings": {
            "threads": options.threads, "rounds": options.rounds, "prefill": PREFILL, "opening": OPENING,
            "steps": STEPS, "prompt": PROMPT,
        },
        "versions": versions(options.peer),
        "models": [],
    }  # fmt: skip
    for name in options.models:
        say(f"{name}: fetching and loading")
        comparison = Comparison(name, model_path(name), options.peer, options.threads, options.rounds)
        rows = []
        for row in comparison.rows():
            rows.append(row)
            say(f"{name}: {one_line(row)}")
        results["peer_system"] = comparison.peer.info["system"]
        results["models"].append(
            {
                "name": name,
                "file": comparison.path.name,
                "tandem": comparison.ours.info,
                "int8_gop_per_s_limit": comparison.int8_gop_per_s,
                "peer_flash_attention": comparison.flash,
                "rows": rows,
            }
        )
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    say(f"wrote {options.output}")
    print(table(results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.against_llama_cpp", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(TARGETS)} (all of them)")
    parser.add_argument("--peer", default=str(HERE.parent / ".venv-peer" / "bin" / "python"), metavar="PYTHON",
                        help="a Python with llama_cpp built for this CPU (make bench builds one)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="that count, of each side (7)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of each side (2)")
    parser.add_argument("--quick", action="store_true", help="one round of the smallest model")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="for the data (benchmarks/results/DATE.json)"
    )
    options = parser.parse_args()
    unknown = set(options.models) - TARGETS.keys()
    if unknown:
        parser.error(f"there are no targets for {unknown.pop()}, only for {', '.join(TARGETS)}")
    if options.quick:
        options.rounds, options.models = 1, options.models or list(TARGETS)[:1]
    options.models = options.models or list(TARGETS)
    if "/" in options.peer:  # not a command on PATH; workers run in another folder
        options.peer = str(Path(options.peer).absolute())
    name = "quick" if options.quick else f"{datetime.now(UTC):%Y-%m-%d}"
    options.output = options.output or HERE / "results" / f"{name}.json"
    return options


def machine() -> dict[str, Any]:
    facts = machine_facts()
    more = {"flags": cpu_fields().get("flags", ""), "memory_gb": round(facts["memory_bytes"] / 2**30)}
    return {**facts, **more}


def versions(peer: str | None) -> dict[str, str]:
    """`peer`: a Python with llama_cpp."""
    version = "import importlib.metadata as m; print(m.version('llama-cpp-python'))"
    found = {"peer": f"llama.cpp of llama-cpp-python {output_of(peer, '-c', version)}"} if peer else {}
    return found | {
        "tandem": f"Tandem {tandem.__version__} ({output_of('git', 'describe', '--always', '--dirty')})",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "compiler": output_of("cc", "--version").partition("\n")[0],
    }


def output_of(*command: str) -> str:
    """What a command prints, on either stream."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, check=False)
    return (done.stdout or done.stderr).strip()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
