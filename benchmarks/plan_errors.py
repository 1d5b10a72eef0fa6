"""Compares the predictions of `tandem plan` with measurements: writes the tables of docs/PLAN.md and its appendix.

python -m benchmarks.plan_errors
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import figures, rdna3_tables
from benchmarks.plan_fit import CPU, GPU, SOFTWARE, held_out
from benchmarks.plan_profile import bytes_table, counted_table, profile_table, table
from benchmarks.plan_rows import (
    Row,
    cpu_rows,
    decode,
    gpu_rows,
    lavapipe_rows,
    prefill,
)
from tandem.bench.hardware import Hardware, calibration_of, load_hardware
from tandem.cli import main
from tandem.plan.predict import KERNELS, kernel_gb_s

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    DOCS / "PLAN.md", DOCS / "appendix" / "PLAN_TABLES.md", DOCS / "AMD.md", DOCS / "appendix" / "AMD_CALIBRATION.md",
)  # fmt: skip
QUESTION = (
    "gemma-3-27b:q4_0 --hardware phoenix-780m --kv f16,q8 -c 32768 -d 512,4096 -b 1,8,16,32,64 "
    "--draft gemma-3-1b:q4_0 --target 81 --active 3"
)
DECODING, PROMPTS = 0.15, 0.25  # aims: maximum relative errors


class Checked(NamedTuple):
    """A row with its errors: by the calibration in hardware.toml, and by ones that were fitted without the row."""

    row: Row
    error: float
    without: list[float]

    @property
    def aim(self) -> float:
        return DECODING if self.row.decodes else PROMPTS


@cache
def checked_cpu() -> list[Checked]:
    """Held out: its model, and the row itself."""
    rows = cpu_rows()
    alone = held_out(rows, CPU, lambda row: f"{row.run} {row.model} {row.test}")
    return _checked(rows, [held_out(rows, CPU, lambda row: row.model), alone])


@cache
def checked_gpu() -> list[Checked]:
    """Without the row itself."""
    rows = gpu_rows()
    return _checked(rows, [held_out(rows, GPU, lambda row: row.test)])


@cache
def checked_lavapipe() -> list[Checked]:
    """Without the row itself."""
    rows = lavapipe_rows()
    return _checked(rows, [held_out(rows, SOFTWARE, lambda row: row.test)])


def _checked(rows: Sequence[Row], without: Sequence[Iterable[float]]) -> list[Checked]:
    each = zip(*(map(float, errors) for errors in without), strict=True)
    return [Checked(row, row.error, list(errors)) for row, errors in zip(rows, each, strict=True)]


class Published(NamedTuple):
    """A published rate of llama.cpp, and the prediction for Tandem."""

    entry: dict[str, Any]
    test: str
    measured: float
    predicted: float
    limit: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def aim(self) -> float:
        return DECODING if self.test.startswith("decode") else PROMPTS


@cache
def published() -> list[Published]:
    rows = json.loads((figures.RESULTS / "published.json").read_text())["rows"]
    return [
        _published(entry, found[1] == "tg", int(found[2]), rate)
        for entry in rows
        for key, rate in entry.items()
        if (found := re.fullmatch(r"(pp|tg)(\d+)", key))
    ]


def _hardware(entry: dict[str, Any]) -> Hardware:
    """With the speed of the memory that the source tells."""
    known = load_hardware(entry["hardware"])
    faster = entry.get("pin_gb_s", known.pin_gb_s) / known.pin_gb_s
    rates = {name: getattr(known, name) * faster for name in ("pin_gb_s", "read_gb_s", "usual_gb_s")}
    return replace(known, **rates)


def _published(entry: dict[str, Any], decodes: bool, tokens: int, rate: float) -> Published:
    hardware = _hardware(entry)
    if nbytes := entry.get("file_bytes"):  # an unknown shape: a token reads the whole file
        limit = hardware.read_gb_s * 1e9 / nbytes
        predicted = kernel_gb_s(hardware) * 1e9 / nbytes
        return Published(entry, "decode, batch 1, by bytes alone", rate, predicted, limit)
    if decodes:
        row = decode("", hardware, entry["model"], 1, tokens // 2, rate)
    else:
        row = prefill("", hardware, entry["model"], tokens, rate)
    return Published(entry, row.test, rate, row.predicted, row.limit)


def cpu_table() -> str:
    heads = (
        "run", "model", "test", "GB/s", "measured", "predicted", "off", "held-out model", "held-out row", "limit",
    )  # fmt: skip
    found = checked_cpu()
    rows = [
        (c.row.run, c.row.model, c.row.test, f"{c.row.hardware.usual_gb_s:.0f}", *_figures(c), f"{c.row.limit:,.0f}")
        for c in found
    ]  # fmt: skip
    return f"{table(heads, rows)}\n\n{summary(found)}"


def gpu_table() -> str:
    return _table_of(checked_gpu())


def lavapipe_table() -> str:
    return _table_of(checked_lavapipe())


def _table_of(found: Sequence[Checked]) -> str:
    heads = ("model", "test", "measured", "predicted", "off", "held-out row", "limit")
    rows = [(c.row.model, c.row.test, *_figures(c), f"{c.row.limit:,.0f}") for c in found]
    return f"{table(heads, rows)}\n\n{summary(found)}"


def _figures(checked: Checked) -> list[str]:
    row = checked.row
    return [
        f"{row.measured:,.1f}",
        f"{row.predicted:,.1f}",
        *(_off(off, checked.aim) for off in (checked.error, *checked.without)),
    ]


def _off(error: float, aim: float) -> str:
    return f"**{error:+.0%}**" if abs(error) > aim else f"{error:+.0%}"


def summary(rows: Sequence[Checked]) -> str:
    """How many rows are within the aim, by the calibration in use and by the worst of those fitted without the row."""

    def within(chosen: Sequence[Checked], off: Callable[[Checked], float]) -> str:
        errors = [abs(off(c)) for c in chosen]
        good = sum(error <= c.aim for error, c in zip(errors, chosen, strict=True))
        return f"{good} of {len(chosen)} within {chosen[0].aim:.0%} (median {median(errors):.0%})"

    parts = []
    for name, chosen in (
        ("Decode", [c for c in rows if c.row.decodes]), ("Prefill", [c for c in rows if not c.row.decodes])
    ):  # fmt: skip
        held = within(chosen, lambda c: max(c.without, key=abs))
        parts.append(f"{name}: {within(chosen, lambda c: c.error)}; held out: {held}.")
    return " ".join(parts)


def published_table() -> str:
    heads = ("hardware", "model", "test", "engine", "measured", "predicted for Tandem", "difference", "limit")
    found = published()
    rows = [
        (
            p.entry["hardware"],
            p.entry["model"],
            p.test,
            rdna3_tables.linked(p.entry),
            f"{p.measured:,.1f}",
            f"{p.predicted:,.1f}",
            _off(p.error, p.aim),
            f"{p.limit:,.1f}",
        )
        for p in found
    ]
    return f"{table(heads, rows)}\n\n{_published_summary(found)}"


def _published_summary(rows: Sequence[Published]) -> str:
    """By hardware: how many are within the aims."""
    lines = []
    for name in dict.fromkeys(p.entry["hardware"] for p in rows):
        parts = []
        for aim, tests in ((DECODING, "decode"), (PROMPTS, "prefill")):
            errors = [abs(p.error) for p in rows if p.entry["hardware"] == name and p.aim == aim]
            good = sum(error <= aim for error in errors)
            parts.append(f"{tests} {good} of {len(errors)} within {aim:.0%}")
        lines.append(f"- {name}: {', '.join(parts)}")
    return "\n".join(lines)


def answer() -> str:
    """The output of the command for Gemma 3 27B on a Radeon 780M."""
    printed = StringIO()
    with redirect_stdout(printed):
        main(["plan", *QUESTION.split()])
    return f"    tandem plan {QUESTION}\n\n```\n{printed.getvalue().strip()}\n```"


def factors_table() -> str:
    """The calibrations of hardware.toml: the shares of a machine's rates that our kernels reach."""
    kinds = {"GPU (from the H200)": "gpu", "CPU": "cpu", "lavapipe": "software"}
    found = {title: calibration_of(kind) for title, kind in kinds.items()}
    names = {
        "dot_memory": "bandwidth, in matmuls of few tokens",
        "matrix_memory": "bandwidth, in matmuls on matrix units",
        "attention_memory": "bandwidth, in attention",
        "dot_ops": "peak of int8 dot products",
        "matrix_ops": "peak of matrix units",
        "attention_ops": "that peak, in attention",
    }
    rows = [[said, *(f"{each.parts[name]:.1%}" for each in found.values())] for name, said in names.items()]
    us = [
        [f"us per launch: {kernel}", *(f"{each.launch_us[kernel]:g}" for each in found.values())]
        for kernel in KERNELS
    ]
    return table(["share of", *found], [*rows, *us])


def accuracy() -> str:
    """How many rows are within the aim, by machine."""
    found = {"Two cores of an EPYC": checked_cpu(), "H200": checked_gpu(), "lavapipe": checked_lavapipe()}
    return "\n".join(f"- {name}. {summary(rows)}" for name, rows in found.items())


MADE = {
    "accuracy": accuracy,
    "factors": factors_table,
    "answer": answer,
    "cpu": cpu_table,
    "gpu": gpu_table,
    "profile": profile_table,
    "counted": counted_table,
    "bytes": bytes_table,
    "lavapipe": lavapipe_table,
    "published": published_table,
    "calibration-summary": rdna3_tables.calibration_summary,
    "calibration": rdna3_tables.calibration_table,
    "unfitted": rdna3_tables.unfitted_table,
    "predicted-780m": rdna3_tables.predicted_table,
    "one-sequence": rdna3_tables.one_sequence_table,
    "fused": rdna3_tables.fused_table,
    "binding": rdna3_tables.binding_table,
}


def with_figures(text: str) -> str:
    """A page with the regions between its markers computed again."""
    for name, made in MADE.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if begin in text:
            text = f"{text.partition(begin)[0]}{begin}{made()}\n{end}{text.partition(end)[2]}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_figures(page.read_text()))
