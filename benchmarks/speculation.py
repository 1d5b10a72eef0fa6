"""What speculation gains or loses: the same requests with and without it, in turn, in one engine.

    python -m benchmarks.speculation [--parts prompt_lookup,draft] [--batches 1,4,16] [--rounds 7] [--output FILE]

Prompt lookup: code edits (answers repeat their prompts) and stories sampled at temperature 1 (nothing repeats). A draft
model: questions about programming, with batches of 1, 4 and 16. The draft length is the engine's choice, or fixed at
every step: this shows the acceptance rate where the engine would not speculate. Each round has new prompts, so that
neither model has them in its cache; the draft model's prefill counts. Times are of whole requests, and of the tokens
after the first token of all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.against_llama_cpp import machine, say, versions
from benchmarks.pairs import HERE
from tandem import LLM, SamplingParams
from tandem.bench.statistics import ratio_of_medians, summarise
from tandem.engine.sequence import Sequence
from tandem.engine.speculation import Proposer, Speculator
from tandem.engine.speculation_cost import SpeculationCostModel
from tests.packages import model_path

PROMPT_LOOKUP_MODELS = ("qwen2.5-coder-1.5b", "smollm2")
DRAFT, DRAFTED = "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
TOKENS = {"qwen2.5-coder-1.5b": 96, "smollm2": 256}  # of an answer
# Minimum speed with speculation as a fraction of that without, if the engine chooses the length.
MIN_SPEED = 0.95
ALWAYS = 3  # draft tokens of each sequence, if it does not
CODE = '''class {Noun}Store:
    """Keeps {noun}s by name, and knows which were used last."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._{noun}s: dict[str, {Noun}] = {{}}
        self._order: list[str] = []

    def add(self, name: str, {noun}: {Noun}) -> None:
        if name in self._{noun}s:
            raise KeyError(f"there is a {noun} named {{name}} already")
        self._{noun}s[name] = {noun}
        self._order.append(name)
        while len(self._order) > self.limit:
            oldest = self._order.pop(0)
            del self._{noun}s[oldest]

    def get(self, name: str) -> {Noun} | None:
        {noun} = self._{noun}s.get(name)
        if {noun} is not None:
            self._order.remove(name)
            self._order.append(name)
        return {noun}

    def remove(self, name: str) -> None:
        del self._{noun}s[name]
        self._order.remove(name)
'''
NOUNS = (
    "ticket", "invoice", "sensor", "picture", "letter", "recipe", "planet", "ledger", "bottle", "engine", "window",
    "parcel", "record", "signal", "garden", "bridge", "market", "camera", "hammer", "island", "mirror", "needle",
    "orange", "pencil", "rabbit", "saddle", "tunnel", "violin", "wallet", "zipper", "anchor", "basket",
)  # fmt: skip
ASKED = (
    "sorts a list of {}s by weight",
    "counts {}s in a text",
    "reads {}s from a CSV file",
    "merges two lists of {}s",
)

Prompts = Callable[[int], str]  # of the n-th request


def edit(n: int) -> str:
    noun = NOUNS[n % len(NOUNS)]
    code = CODE.format(noun=noun, Noun=noun.capitalize())
    return f"Give me this code again, with `get` renamed to `find_{n}`, and nothing else:\n\n```python\n{code}```"


def story(n: int) -> str:
    return f"Write chapter {n + 1} of a story about a {NOUNS[n % len(NOUNS)]} and a {NOUNS[(7 * n + 3) % len(NOUNS)]}."


def question(n: int) -> str:
    noun = NOUNS[n % len(NOUNS)]
    return f"Write a Python function that {ASKED[n % len(ASKED)].format(noun)}, and explain it."


class AnyCost(SpeculationCostModel):
    def is_measured(self, batch_size: int) -> bool:
        return True


class Always(Speculator):
    """The same draft length at every step, whether it pays or not."""

    def __init__(self, proposer: Proposer) -> None:
        super().__init__(proposer, AnyCost(proposer.cost_coefficient))

    def _draft_lengths(
        self,
        sequences: list[Sequence],
        max_lengths: list[int],
        uncached: list[int],
        batch_size: int,
        max_tokens: int,
    ) -> list[int]:
        return [min(ALWAYS, max_length, max_tokens // len(max_lengths)) for max_length in max_lengths]

    def should_wait(self, sequence: Sequence) -> bool:
        return True


class Rounds:
    """The same requests with and without speculation."""

    def __init__(self, llm: LLM, prompts: Prompts, batch: int, tokens: int, temperature: float) -> None:
        self.llm, self.prompts, self.batch, self.tokens, self.temperature = (
            llm,
            prompts,
            batch,
            tokens,
            temperature,
        )
        self.scheduler = llm.engine.scheduler
        self.speculator = self.scheduler.speculator
        self.scheduler.prefix_caching = False  # each round computes its prompts

    def run(self, number: int, speculate: bool) -> tuple[float, float, list[list[int]]]:
        """Total seconds, tokens per second after the first token of all, and the tokens of the answers."""
        self.scheduler.speculator = self.speculator if speculate else None
        sequences = []
        begun = time.perf_counter()
        for i in range(number * self.batch, (number + 1) * self.batch):
            ids = self.llm.chat_ids([{"role": "user", "content": self.prompts(i)}])
            params = SamplingParams(
                max_tokens=self.tokens, ignore_eos=True, temperature=self.temperature, seed=i
            )
            sequences.append(self.llm.engine.submit(ids, params))
        first, had = 0.0, 0
        while any(sequence.finish_reason is None for sequence in sequences):
            self.llm.engine.step()
            if not first and all(sequence.generated for sequence in sequences):
                first, had = time.perf_counter(), sum(len(sequence.generated) for sequence in sequences)
        end = time.perf_counter()
        speed = (self.batch * self.tokens - had) / (end - first)
        return end - begun, speed, [[s.id for s in sequence.generated] for sequence in sequences]

    def measure(self, rounds: int) -> dict[str, Any]:
        """A warm-up, then rounds with and without speculation in alternating order."""
        assert self.speculator
        self.run(0, True)
        drafted, accepted = self.speculator.drafted, self.speculator.accepted
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        same = 0
        for number in range(1, rounds + 1):
            answers = []
            for speculate in (number % 2 == 0, number % 2 == 1):
                seconds, speed, answer = self.run(number, speculate)
                found[speculate].append((seconds, speed))
                answers.append(answer)
            same += answers[0] == answers[1]
        drafted = self.speculator.drafted - drafted
        accepted = self.speculator.accepted - accepted
        return {
            "batch": self.batch,
            "without_tokens_per_s": [speed for _, speed in found[False]],
            "with_tokens_per_s": [speed for _, speed in found[True]],
            "without_seconds": [seconds for seconds, _ in found[False]],
            "with_seconds": [seconds for seconds, _ in found[True]],
            "drafted": drafted,
            "accepted": accepted,
            "accepted_of_all": accepted / (rounds * self.batch * self.tokens),
            "saved_seconds_by_its_own_account": self.speculator.cost_model.saved,
            "same_answers": same,
            "rounds": rounds,
        }


def prompt_lookup_rows(models: list[str], rounds: int, threads: int, device: str) -> Iterator[dict[str, Any]]:
    for name in models:
        for task, prompts, temperature in (("code edit", edit, 0.0), ("prose", story, 1.0)):
            with LLM(
                model_path(name), device=device, threads=threads, context=1024, batch=1, prompt_lookup=True
            ) as llm:
                found = Rounds(llm, prompts, 1, TOKENS[name], temperature).measure(rounds)
            yield {"model": name, "proposer": "prompt lookup", "task": task, **found}


def draft_rows(batches: list[int], rounds: int, threads: int, device: str) -> Iterator[dict[str, Any]]:
    for batch in batches:
        with LLM(
            model_path(DRAFTED),
            device=device,
            threads=threads,
            context=512,
            batch=batch,
            draft=model_path(DRAFT),
        ) as llm:
            tokens, fewer = max(32, TOKENS[DRAFTED] // (1 + batch // 8)), max(3, rounds - batch // 4)
            asked = Rounds(llm, question, batch, tokens, 0.0)
            row = {"model": DRAFTED, "proposer": f"draft {DRAFT}", "task": "questions"}
            yield row | asked.measure(min(rounds, fewer))
            assert asked.speculator
            asked.speculator = Always(asked.speculator.proposer)
            row["proposer"] += f", always {ALWAYS}"
            yield row | {"always": True} | asked.measure(min(rounds, fewer))


OLD_NAMES = {
    "guesses": "proposer",
    "guessed": "drafted",
    "right": "accepted",
    "right_of_all": "accepted_of_all",
}
OLD_PROPOSERS = {"lookup": "prompt lookup"}


def line(row: dict[str, Any]) -> str:
    row = {OLD_NAMES.get(key, key): value for key, value in row.items()}  # results of before 2026-11-16
    proposer = OLD_PROPOSERS.get(row["proposer"], row["proposer"])
    speed = ratio_of_medians(row["with_tokens_per_s"], row["without_tokens_per_s"])
    whole = ratio_of_medians(row["without_seconds"], row["with_seconds"])
    off, on = summarise(row["without_tokens_per_s"]), summarise(row["with_tokens_per_s"])
    share = f"{100 * row['accepted'] / row['drafted']:.0f}%" if row["drafted"] else "none"
    verdict = "" if speed.value >= MIN_SPEED or row.get("always") else " (slower than allowed)"
    return (
        f"| {row['model']} | {proposer} | {row['task']} | {row['batch']} | {off.median:.1f} ±{off.mad:.1f} "
        f"| {on.median:.1f} ±{on.mad:.1f} | {speed.value:.2f} ({speed.low:.2f}-{speed.high:.2f}){verdict} "
        f"| {whole.value:.2f} ({whole.low:.2f}-{whole.high:.2f}) | {share} of {row['drafted']} "
        f"| {100 * row['accepted_of_all']:.0f}% | {row['same_answers']} of {row['rounds']} |"
    )


HEAD = """| model | drafts by | task | batch | tok/s without | with | ratio | whole requests | accepted | of all tokens | same answers |
|---|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.speculation", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--parts", default="prompt_lookup,draft", help="prompt_lookup, draft or both")
    parser.add_argument(
        "--models",
        default=",".join(PROMPT_LOOKUP_MODELS),
        help=f"of prompt lookup ({', '.join(PROMPT_LOOKUP_MODELS)})",
    )
    parser.add_argument("--batches", default="1,4,16", help="of draft (1,4,16)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of each kind (7)")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--output", type=Path, default=HERE / "results" / f"{datetime.now(UTC):%Y-%m-%d}-speculation.json"
    )
    options = parser.parse_args()
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"), "machine": machine(), "versions": versions(None),
        "settings": {key: str(value) for key, value in vars(options).items()}, "rows": [],
    }  # fmt: skip
    common = options.rounds, options.threads, options.device
    rows: list[Iterator[dict[str, Any]]] = []
    if "prompt_lookup" in options.parts.split(","):
        rows.append(prompt_lookup_rows(options.models.split(","), *common))
    if "draft" in options.parts.split(","):
        rows.append(draft_rows([int(batch) for batch in options.batches.split(",")], *common))
    for row in (row for part in rows for row in part):
        results["rows"].append(row)
        say(line(row))
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write("\n".join([HEAD, *map(line, results["rows"])]) + "\n")


if __name__ == "__main__":
    main()
