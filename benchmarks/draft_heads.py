"""What a draft head (MTP) gains if a given share of its tokens is right, beside what the cost model says.

    python -m benchmarks.draft_heads [--device cpu] [--batches 1,2,4,8] [--rates 0.5,0.7,0.9] [--output FILE]

The model has random weights, so that its head's tokens are wrong. They are computed, and then replaced: each by the
right one with probability `rate`. A bias makes one token the right one everywhere. Rounds with and without drafts take
turns; the engine chooses the number of draft tokens. The cost model's speed-up is that of its best draft lengths at the
rate that came about, by its own table of measured times. "wrong": no token is right; nothing may be lost.

The first table has what taking draft tokens back costs: a step that writes the state after each of its tokens, one that
does not, and a step of one token more, which a replay of accepted tokens would need.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.against_llama_cpp import machine, versions
from tandem.devices.backends import open_device
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Chunk, Sequence
from tandem.engine.speculation import MAX_DRAFT_TOKENS, Speculator, best_lengths
from tandem.model.synthetic import SyntheticModel

SHAPE, VOCAB = "qwen3.5-0.8b:q4_k_m", 32768
CONTEXT, PROMPT = 1024, 16
RIGHT = 7  # the token of all answers


class RightTokens:
    """A draft head of which a share of the tokens is right."""

    def __init__(self, propose: Callable[[list[tuple[Sequence, int]]], list[list[int]]]) -> None:
        self.propose, self.rate, self.random = propose, 0.0, Random(0)
        self.verified = self.right = 0

    def __call__(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        drafts = self.propose(wanted)
        for draft in drafts:
            wrong = False
            for i in range(len(draft)):
                self.verified += not wrong
                wrong |= self.random.random() >= self.rate
                self.right += not wrong
                draft[i] = RIGHT + wrong
        return drafts


def run(engine: Engine, batch: int, tokens: int, seed: int) -> float:
    """Tokens per second after the first of all."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logit_bias={RIGHT: 100.0})
    prompts = [[seed * 64 + i, *range(1, PROMPT)] for i in range(batch)]
    sequences = [engine.submit(prompt, params) for prompt in prompts]
    while not all(sequence.generated for sequence in sequences):
        engine.step()
    begun, had = time.perf_counter(), sum(len(sequence.generated) for sequence in sequences)
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    return (batch * tokens - had) / (time.perf_counter() - begun)


def predicted(speculator: Speculator, batch: int, rate: float) -> tuple[float, list[int]]:
    """The speed-up of the best draft lengths at this rate, by the cost model, and the lengths."""
    costs = speculator.cost_model
    lengths = best_lengths([rate] * batch, [MAX_DRAFT_TOKENS] * batch, costs, batch, 16)
    accepted = sum(rate**n for length in lengths for n in range(1, length + 1))
    plain = costs.seconds(batch, [])
    return (batch + accepted) / batch * plain / costs.seconds(batch, lengths), lengths


def measure(
    engine: Engine, without: Engine, batch: int, rate: float, rounds: int, tokens: int
) -> dict[str, Any]:
    """`without`: the engine of runs without drafts."""
    head, scheduler = engine.draft_head, engine.scheduler
    assert head
    right = RightTokens(head.propose)
    right.rate = rate
    head.propose = right  # type: ignore[method-assign]
    speculator, speeds = (
        Speculator(head, clock=time.perf_counter),
        {True: list[float](), False: list[float]()},
    )
    for number in range(rounds + 1):  # the first is a warm-up: it measures the times of steps
        scheduler.speculator = engine.draft_head = None
        plain = run(without, batch, tokens, number)
        scheduler.speculator, engine.draft_head = speculator, head
        drafting = run(engine, batch, tokens, number)
        if number:
            speeds[False].append(plain)
            speeds[True].append(drafting)
    head.propose = right.propose  # type: ignore[method-assign]
    expected, lengths = predicted(speculator, batch, right.right / right.verified if right.right else 0.0)
    return {
        "batch": batch, "rate": rate, "without_tokens_per_s": speeds[False], "with_tokens_per_s": speeds[True],
        "predicted_speedup": expected, "lengths": lengths, "drafted": speculator.drafted,
        "accepted": speculator.accepted,
    }  # fmt: skip


def rollback(engine: Engine, drafts: int, repeats: int) -> dict[str, float]:
    """The fewest milliseconds of a step that verifies `drafts` tokens: with the state after each, with the last one
    alone, and that with one token more."""
    batch, recording = engine.step_slots[0].batch, engine.step_slots[0].recording
    sequence = engine.new_sequence(list(range(PROMPT)), SamplingParams(max_tokens=64, temperature=0.0))
    sequence.state.table_row = 0
    assert engine.cache.reserve(sequence.kv.tables, 64) and engine.cache.reserve_state(sequence.kv.states)
    assert engine.cache.states
    slots = [engine.cache.states.allocate() for _ in range(drafts + 1)]
    found: dict[str, list[float]] = {"each": [], "last": [], "more": []}
    for _ in range(repeats):
        for name, times in found.items():
            chunk = Chunk(sequence, PROMPT - 1, 1, True)
            chunk.draft_tokens = [1] * (drafts + (name == "more"))
            chunk.source, last = sequence.kv.states.own, len(chunk.draft_tokens)
            chunk.targets = list(enumerate(slots)) if name == "each" else [(last, slots[0])]
            batch.write([chunk])
            begun = time.perf_counter()
            recording.replay()
            times.append(time.perf_counter() - begun)
    return {name: 1000 * min(times) for name, times in found.items()}


def line(row: dict[str, Any]) -> str:
    on, off, said = row["with_tokens_per_s"], row["without_tokens_per_s"], row["predicted_speedup"]
    speedup = median(fast / slow for fast, slow in zip(on, off, strict=True))  # rounds that follow each other
    lengths = "-".join(map(str, sorted({min(row["lengths"]), max(row["lengths"])})))
    share = f"{row['accepted'] / row['drafted']:.0%} of {row['drafted']}" if row["drafted"] else "none"
    return (
        f"| {row['batch']} | {row['rate'] or 'wrong'} | {median(off):.1f} | {median(on):.1f} | {speedup:.2f} "
        f"| {said:.2f} | {speedup / said - 1:+.0%} | {lengths} | {share} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.draft_heads", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--rates", default="0.0,0.5,0.7,0.9", help="0: no draft token is right")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="of each answer (96)")
    parser.add_argument("--shape", default=SHAPE, metavar="SHAPE:FORMAT", help=f"({SHAPE})")
    parser.add_argument("--layers", type=int, metavar="N", help="of the model (all)")
    parser.add_argument("--device", default="cpu", metavar="NAME")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the time that one thread computes: where others use the machine",
    )
    options = parser.parse_args()
    if options.cpu_time:
        options.threads = 1
        time.perf_counter = time.process_time  # also that by which the engine learns
    model = SyntheticModel(options.shape, options.layers)
    model.config = replace(model.config, vocab=VOCAB)
    device = open_device(options.device, threads=options.threads)
    batches = [int(batch) for batch in options.batches.split(",")]
    engine = Engine.load(
        model, device, context=CONTEXT, batch=max(batches), prefix_caching=False, draft_head=True
    )
    without = engine
    if device.step_slots > 1:  # without a draft head, two steps are in flight
        other = SyntheticModel(options.shape, options.layers)
        other.config = replace(other.config, vocab=VOCAB)
        without = Engine.load(
            other, open_device(options.device), context=CONTEXT, batch=max(batches), prefix_caching=False
        )
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"), "machine": machine(), "versions": versions(None),
        "settings": {key: str(value) for key, value in vars(options).items()} | {"vocab": VOCAB},
        "rollback": rollback(engine, 4, 15), "rows": [],
    }  # fmt: skip
    times = results["rollback"]
    sys.stdout.write(
        f"a step with 4 draft tokens: {times['each']:.1f} ms with the state after each, {times['last']:.1f} with the "
        f"last, {times['more']:.1f} with one token more\n"
        "| batch | rate | tok/s without | with | speed-up | cost model | off by | lengths | accepted |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    for batch in batches:
        for rate in map(float, options.rates.split(",")):
            results["rows"].append(measure(engine, without, batch, rate, options.rounds, options.tokens))
            sys.stdout.write(line(results["rows"][-1]) + "\n")
            sys.stdout.flush()
            if options.output:
                options.output.write_text(json.dumps(results, indent=1) + "\n")
    device.close()


if __name__ == "__main__":
    main()
