"""Compares two source trees of Tandem on this CPU: the same files, threads and token ids, in alternating rounds.

    python -m benchmarks.two_trees OLD_TREE [--model FILE ...] [--rounds N] [--out FILE]

OLD_TREE is a checkout of an earlier commit with its C core built. Rows: prefill, decode of 1, 8 and 32 sequences,
Python's part of a decode step, and the time from the start of a process to its first token. A ratio above 1 means that
this tree is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measures import OPENING, PREFILL, STEPS, TEXT, alternate
from benchmarks.pairs import HERE, first_output
from tandem.bench.peers.worker import Worker
from tandem.bench.statistics import ratio_of_medians, summarise

WORKERS = ("tandem_worker.py", "worker_tandem.py")  # the script's name now, and in older trees
PROMPT = "The sky is blue because"


def worker_script(tree: Path) -> Path:
    for name in WORKERS:
        if (script := tree / "benchmarks" / name).exists():
            return script
    raise SystemExit(f"{tree} has no benchmarks/{WORKERS[0]}: name a source tree of Tandem")


@contextmanager
def imports_from(tree: Path) -> Iterator[None]:
    """Processes started inside import `tandem` from this tree."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tree)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def compare(model: Path, trees: tuple[Path, Path], threads: int, rounds: int) -> Iterator[dict[str, Any]]:
    model.read_bytes()  # into the page cache
    room = -(-(OPENING + STEPS[1] * (3 * rounds + 1) + PREFILL) // 256) * 256
    workers = []
    for tree in trees:
        with imports_from(tree):
            workers.append(Worker(sys.executable, worker_script(tree), model, threads, room))
    new, old = workers
    from tandem.gguf.file import GGUF
    from tandem.model.tokenizer import Tokenizer

    with GGUF.open(model) as gguf:
        ids = Tokenizer.from_gguf(gguf).encode(TEXT.read_text())
    with new, old:
        for sequences in (0, *STEPS):
            prompts = [ids[32 * i :][:OPENING] for i in range(sequences)]

            def request(i: int, sequences: int = sequences) -> dict[str, Any]:
                if sequences:
                    return {"do": "steps", "count": STEPS[sequences]}
                return {"do": "prefill", "tokens": ids[48 * i % (len(ids) - PREFILL) :][:PREFILL]}

            for side in (new, old):
                side.ask("open", prompts=prompts)
            pairs = alternate(
                lambda i, request=request: new.measure(**request(i)),
                lambda i, request=request: old.measure(**request(i)),
                rounds,
            )
            for side in (new, old):
                side.ask("close")
            tokens = sequences * STEPS[sequences] if sequences else PREFILL
            label = f"decode, batch {sequences}" if sequences else f"prefill {PREFILL}"
            yield row(
                label,
                "tok/s",
                [tokens / pair.ours.seconds for pair in pairs],
                [tokens / pair.peer.seconds for pair in pairs],
            )
            if sequences:
                outside = [
                    [1e6 * (m.seconds - m.inside) / STEPS[sequences] for m in side]
                    for side in zip(*((pair.ours, pair.peer) for pair in pairs), strict=True)
                ]
                yield row(f"Python's part of a step, batch {sequences}", "us", *outside, less=True)


def start_up(model: Path, trees: tuple[Path, Path], threads: int, rounds: int) -> dict[str, Any]:
    def first(tree: Path) -> Callable[[int], Any]:
        command = [sys.executable, str(worker_script(tree)), str(model), str(threads), "0"]

        def measured(_: int) -> Any:
            with imports_from(tree):
                return first_output([*command, PROMPT])

        return measured

    pairs = alternate(first(trees[0]), first(trees[1]), rounds)
    return row(
        "first token of a new process",
        "s",
        [pair.ours.seconds for pair in pairs],
        [pair.peer.seconds for pair in pairs],
        less=True,
    )


def row(measure: str, unit: str, new: list[float], old: list[float], *, less: bool = False) -> dict[str, Any]:
    """`less`: fewer is better, so the ratio is old / new."""
    ratio = ratio_of_medians(*((old, new) if less else (new, old)))
    return {"measure": measure, "unit": unit, "new": new, "old": old, "ratio": asdict(ratio)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD_TREE")
    parser.add_argument("--model", type=Path, action="append", required=True, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trees = (HERE.parent, options.old.resolve())
    found: dict[str, list[dict[str, Any]]] = {}
    for model in options.model:
        found[model.name] = []
        rows = compare(model, trees, options.threads, options.rounds)
        for each in (*rows, start_up(model, trees, options.threads, options.rounds)):
            found[model.name].append(each)
            new, old, ratio = summarise(each["new"]), summarise(each["old"]), each["ratio"]
            medians = f"new {new.median:9.3f} old {old.median:9.3f} {each['unit']:6}"
            interval = f"{ratio['value']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"
            print(f"{model.stem[:28]:28} {each['measure']:36} {medians} ratio {interval}", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"rounds": options.rounds, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
