"""How far `tandem plan` is off: its predictions beside what was measured, as the tables of docs/PLAN.md.

python -m benchmarks.plan_errors
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from tandem.bench.hardware import load_hardware
from tandem.bench.plan import Planned, added
from tandem.cli import main
from tandem.model.synthetic import SyntheticModel

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs" / "PLAN.md"
QUESTION = (
    "gemma-3-27b:q4_0 --hardware phoenix-780m --kv f16,q8 -c 32768 -d 512,4096 -b 1,8,16,32,64 "
    "--draft gemma-3-1b:q4_0 --target 81 --active 3"
)
CONTEXT = 32768
# Published files mix formats; these are as large as they are.
CPU_MODELS = {"smollm2": "smollm2-135m:q4_1", "gemma-3-270m": "gemma-3-270m:q5_0",
              "qwen2.5-coder-1.5b": "qwen2.5-1.5b:q4_k"}  # fmt: skip
OPENING = 128  # tokens before those that are decoded
DECODED = {1: 32, 8: 8, 32: 4}  # steps at each batch in the CPU's results
DECODED_GPU = 64


class Row(NamedTuple):
    hardware: str
    model: str
    test: str
    measured: float  # tokens a second
    predicted: float
    limit: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@cache
def planned(model: str) -> Planned:
    full = SyntheticModel(model)
    return Planned(full, min(CONTEXT, full.config.trained_context))


def prefill(hardware: str, model: str, tokens: int, measured: float) -> Row:
    plan, machine = planned(model), load_hardware(hardware)
    steps = plan.prompt_steps(tokens)
    predicted = tokens / added(plan.predict(machine, step) for step in steps).total
    limit = tokens / added(plan.limit(machine, step) for step in steps).total
    return Row(hardware, model, f"prompt of {tokens}", measured, predicted, limit)


def decode(hardware: str, model: str, batch: int, depth: int, measured: float) -> Row:
    plan, machine, step = planned(model), load_hardware(hardware), [(depth, 1)] * batch
    predicted, limit = batch / plan.predict(machine, step).total, batch / plan.limit(machine, step).total
    return Row(hardware, model, f"decode, batch {batch} at {depth}", measured, predicted, limit)


def ours() -> Iterator[Row]:
    for row in _read("2026-11-15-h200.json")["rows"]:
        if found := re.fullmatch(r"decode 64, batch (\d+) at (\d+)", row["label"]):
            batch, depth = map(int, found.groups())
            yield decode("h200", "gemma-3-27b:q4_0", batch, depth + DECODED_GPU // 2, row["tok_s"])
        elif found := re.fullmatch(r"prefill (\d+)", row["label"]):
            yield prefill("h200", "gemma-3-27b:q4_0", int(found[1]), row["tok_s"])
    for model in _read("2026-11-15-13h.json")["models"]:  # the run that factors were fitted to
        shape = CPU_MODELS[model["name"]]
        for row in model["rows"]:
            measured = row["ours"]["median"]
            if row["measure"] == "prefill 512":
                yield prefill("epyc-2-cores", shape, 512, measured)
            elif found := re.fullmatch(r"decode(?:, batch (\d+))?", row["measure"]):
                batch = int(found[1] or 1)
                yield decode("epyc-2-cores", shape, batch, OPENING + DECODED[batch] // 2, measured)


def published() -> Iterator[Row]:
    for row in _read("published.json")["rows"]:
        yield prefill(row["hardware"], row["model"], 512, row["pp512"])
        yield decode(row["hardware"], row["model"], 1, 64, row["tg128"])


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def table(rows: Iterator[Row]) -> str:
    lines = [
        "| hardware | model | test | measured | predicted | error | limit |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.hardware} | {r.model} | {r.test} | {r.measured:,.1f} | {r.predicted:,.1f} | {r.error:+.0%} "
        f"| {r.limit:,.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


def answer() -> str:
    """The question this project began with, answered by the command."""
    printed = StringIO()
    with redirect_stdout(printed):
        main(["plan", *QUESTION.split()])
    return f"    tandem plan {QUESTION}\n\n```\n{printed.getvalue().strip()}\n```"


def with_figures(text: str) -> str:
    """docs/PLAN.md with what is between its markers computed again."""
    for name, made in (("answer", answer()), ("errors", table(ours())), ("published", table(published()))):
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + made + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    DOCS.write_text(with_figures(DOCS.read_text()))
