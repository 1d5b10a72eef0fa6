"""Compares `tandem serve` with llama-server on this machine: same files, threads and requests, alternating rounds.

    python -m benchmarks.serving --peer LLAMA_SERVER [MODEL ...]

- load: 1 to 64 clients who come and ask at random times, prompts of 20 to 150 tokens, answers of 16 to 80;
- disturbed: four streams, before and while a prompt of 2,000 tokens arrives;
- shared: first tokens after 1,000 tokens, new ones and those that another prompt began with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import serving_clients as clients
from benchmarks import serving_processes as servers
from benchmarks.against_llama_cpp import machine, output_of, say, versions
from benchmarks.measures import TEXT
from benchmarks.pairs import HERE
from tandem.bench.machine import DISTURBED, busy_seconds
from tandem.bench.statistics import median_interval, ratio_of_medians
from tandem.gguf.file import GGUF
from tandem.model.tokenizer import Tokenizer
from tests.packages import model_path

MODELS = ("smollm2", "gemma-3-270m")
REQUESTS = {1: 4, 4: 8, 16: 32, 64: 64}  # clients: requests in all
CONTEXT, SHORT = 4096, 512  # tokens of a request: at most, and under load
FASTER, BOUND, SHARED = 2.0, 3.0, 0.1  # to reach: tokens/s at 16 clients, p99 between tokens, a shared prefix

Measure = Callable[[int, clients.Texts, int], Coroutine[Any, Any, dict[str, float]]]


def _load(count: int) -> Measure:
    return lambda port, texts, i: clients.load(port, texts, count, REQUESTS[count], i)


MEASURES: dict[str, tuple[int, int, Measure]] = {  # name: slots, context, (port, texts, round)
    **{f"{count} client{'s' * (count > 1)}": (count, SHORT, _load(count)) for count in REQUESTS},
    "disturbed": (clients.STREAMS + 1, CONTEXT, lambda port, texts, i: clients.disturbed(port, texts)),
    "shared": (1, CONTEXT, lambda port, texts, i: clients.shared(port, texts)),
}


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended too
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": machine(),
        "settings": {
            "threads": options.threads, "rounds": options.rounds, "requests": REQUESTS, "prompts": clients.PROMPTS,
            "answers": clients.ANSWERS, "pause": clients.PAUSE, "peer_options": options.peer_options,
        },
        "versions": versions(None) | {"peer": output_of(options.peer, "--version").partition("\n")[0]},
        "models": [],
    }  # fmt: skip
    for name in options.models:
        results["models"].append({"name": name} | run(model_path(name), options))
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    say(f"wrote {options.output}")
    print(table(results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help=f"{', '.join(MODELS)}")
    parser.add_argument("--peer", required=True, metavar="PROGRAM", help="llama-server, built for this CPU")
    parser.add_argument("--peer-options", nargs="*", default=[], metavar="OPTION", help="more of its options")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each side (3)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of each side (2)")
    parser.add_argument("--device", default="cpu", metavar="D", help="of our side (cpu)")
    parser.add_argument(
        "--only", nargs="*", default=list(MEASURES), metavar="MEASURE", help="; ".join(MEASURES)
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="for the data (results/DATE-serving.json)"
    )
    options = parser.parse_args()
    options.output = options.output or HERE / "results" / f"{datetime.now(UTC):%Y-%m-%d}-serving.json"
    return options


def run(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The rounds of a model: for each measure the results of both sides, which alternate."""
    with GGUF.open(model) as gguf:
        texts = clients.Texts(Tokenizer.from_gguf(gguf).encode(TEXT.read_text())[1:])
    rounds, flash = [], prefers_flash(model, texts, options)
    with servers.tandem(model, threads=options.threads, device=options.device, context=CONTEXT) as ours:
        for i in range(options.rounds):
            found: dict[str, Any] = {}
            for name in options.only:
                slots, context, measure = MEASURES[name]
                found[name] = {}
                for side in ("ours", "peer") if i % 2 == 0 else ("peer", "ours"):
                    theirs = peer(model, slots, context, flash, options)
                    with nullcontext(ours) if side == "ours" else theirs as server:
                        asyncio.run(clients.load(server.port, texts, 1, 1, 0))  # to warm up
                        found[name][side] = timed(server, measure(server.port, texts, i))
                say(f"{model.stem}, round {i + 1}, {name}: {brief(found[name])}")
            rounds.append(found)
    return {"file": model.name, "peer_flash_attention": flash, "rounds": rounds}


def peer(
    model: Path, slots: int, context: int, flash: bool, options: argparse.Namespace
) -> AbstractContextManager[servers.Server]:
    wanted = ["-fa", "on" if flash else "off", *options.peer_options]
    return servers.llama_cpp(
        options.peer, model, threads=options.threads, slots=slots, context=context, options=wanted
    )


def prefers_flash(model: Path, texts: clients.Texts, options: argparse.Namespace) -> bool:
    """Which of its two ways to compute attention is faster for llama.cpp here."""
    rates = {}
    for flash in (False, True):
        with peer(model, 16, SHORT, flash, options) as server:
            rates[flash] = asyncio.run(clients.load(server.port, texts, 16, 16, 0))["tokens_per_s"]
    return rates[True] >= rates[False]


def timed(server: servers.Server, measure: Coroutine[Any, Any, dict[str, float]]) -> dict[str, float]:
    """The result of a measure, and the share of the machine that other processes took."""
    busy, own, began = busy_seconds(), time.process_time() + server.cpu_seconds, time.perf_counter()
    found = asyncio.run(measure)
    seconds = time.perf_counter() - began
    others = busy_seconds() - busy - (time.process_time() + server.cpu_seconds - own)
    return found | {"others": max(0.0, others) / (seconds * (os.cpu_count() or 1)), "seconds": seconds}


def brief(found: dict[str, dict[str, float]]) -> str:
    return "; ".join(
        f"{side} " + ", ".join(f"{key} {value:.4g}" for key, value in values.items())
        for side, values in found.items()
    )


# ---- the table


def table(results: dict[str, Any]) -> str:
    lines = [["model", "measure", "Tandem", "llama.cpp", "ratio", "aim", ""]]
    for model in results["models"]:
        for name in model["rounds"][0]:
            rounds = [each[name] for each in model["rounds"]]
            lines += [[model["name"], *cells] for cells in _rows(name, rounds)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    text = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    settings, cpu = results["settings"], results["machine"]
    others = [
        side["others"] for model in results["models"] for each in model["rounds"] for pair in each.values()
        for side in pair.values()
    ]  # fmt: skip
    notes = [
        f"Medians of {settings['rounds']} rounds in turn with their 95% interval, {settings['threads']} threads each; "
        f"{cpu['cpu']}, {cpu['cores']} cores, {results['date']}.",
        f"{results['versions']['tandem']} against llama-server, {results['versions']['peer']}.",
    ]
    if max(others) > DISTURBED:
        notes.append(f"Warning: other processes took up to {max(others):.0%} of the machine.")
    return "\n".join([*text, "", *notes])


def _rows(name: str, rounds: list[dict[str, dict[str, float]]]) -> list[list[str]]:
    def both(key: str) -> tuple[list[float], list[float]]:
        return [each["ours"][key] for each in rounds], [each["peer"][key] for each in rounds]

    def row(
        label: str, key: str, form: str, aim: str = "", met: Callable[[float], bool] | None = None
    ) -> list[str]:
        ours, peer = both(key)
        ratio = ratio_of_medians(ours, peer)
        value = ratio.value if key == "tokens_per_s" else float(np.median(ours))
        verdict = ("met" if met(value) else "missed") if met else ""
        between = f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})" if key == "tokens_per_s" else ""
        return [label, _figure(ours, form), _figure(peer, form), between, aim, verdict]

    if name == "disturbed":
        p99 = "p99 between tokens while 2,000 tokens arrive, of the median "
        return [
            row(p99 + "meanwhile", "p99_of_during", ".2f", f"<= {BOUND:g}", lambda value: value <= BOUND),
            row(p99 + "before", "p99_of_quiet", ".2f", f"<= {BOUND:g}", lambda value: value <= BOUND),
            row("their first token, s", "first_token_s", ".2f"),
        ]
    if name == "shared":
        return [
            row("first token after 1,000 new tokens, ms", "cold_s", "ms"),
            row(
                "after 1,000 shared tokens, of that",
                "warm_of_cold",
                ".1%",
                f"<= {SHARED:.0%}",
                lambda v: v <= SHARED,
            ),
        ]
    at_16 = name == "16 clients"
    return [
        row(
            f"{name}, tokens/s", "tokens_per_s", ".0f", f">= {FASTER:g}" if at_16 else "",
            (lambda value: value >= FASTER) if at_16 else None,
        ),
        row(f"{name}, first token p99, ms", "first_token_p99_s", "ms"),
    ]  # fmt: skip


def _figure(values: list[float], form: str) -> str:
    if form == "ms":
        values, form = [1e3 * value for value in values], ".0f"
    low, high = median_interval(values)
    return f"{np.median(values):{form}} ({low:{form}}-{high:{form}})"


if __name__ == "__main__":
    main()
