"""Checks the bytes that launches declare against the times of the H200's profiles (docs/appendix/PLAN_TABLES.md)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from benchmarks import figures
from benchmarks.plan_rows import GPU_MODEL, planned
from tandem.bench.hardware import load_hardware
from tandem.bench.profile import value_name
from tandem.bench.step_cost import Step, added, step_costs


class Profiled(NamedTuple):
    """All launches of a kernel in a step, each timed alone, and the bytes that they declare."""

    step: str
    kernel: str
    launches: int
    nbytes: float
    seconds: float

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.seconds / 1e9


def profiled() -> Iterator[Profiled]:
    """Matmuls and attention of the H200's profiles, with the bytes that they declare."""
    program = planned(GPU_MODEL).program
    for row in figures.read("h200")["rows"]:
        step = _step(row["label"])
        if step is None:
            continue
        costs = list(zip(program.launches, step_costs(program, step), strict=True))
        for kernel, ms in sorted(row["ms"].items()):
            found = [cost for launch, cost in costs if launch.kernel.name == kernel]
            if found and kernel.startswith(("matmul", "attention")):
                label = row["label"].removeprefix("profile ")
                yield Profiled(label, kernel, len(found), added(found).bytes, ms / 1e3)


ONE_TOKEN = "profile decode 1, batch 1 at 160", [(160, 1)]
WITHIN = 0.1  # maximum relative difference of time x bandwidth from the bytes counted


class Matmul(NamedTuple):
    """A matmul of a step for one token: the bytes of a launch, and its microseconds on the H200."""

    kernel: str
    name: str
    nbytes: float
    us: float  # alone: between barriers
    row_us: float | None  # in a row without barriers; None: that run did not measure it

    def read(self, us: float, gb_s: float) -> float:
        """Ratio of the bytes that could be read in that time to those counted: 1 if count and bandwidth are right."""
        return us * gb_s * 1e3 / self.nbytes

    def is_read_in(self, us: float, gb_s: float) -> bool:
        return abs(self.read(us, gb_s) - 1) <= WITHIN


def _groups() -> list[dict[str, Any]]:
    rows = figures.read("h200")["rows"]
    return next(cast(list[dict[str, Any]], row["groups"]) for row in rows if row["label"] == ONE_TOKEN[0])


def matmuls() -> list[Matmul]:
    """The matmuls of a step for one token, those that read most first."""
    program = planned(GPU_MODEL).program
    counted = {
        value_name(launch): cost.bytes
        for launch, cost in zip(program.launches, step_costs(program, ONE_TOKEN[1]), strict=True)
    }
    rows = {row["name"]: row["us"] for row in figures.read("h200").get("streams", ())}
    found = [
        Matmul(g["kernel"], g["name"], counted[g["name"]], g["ms"] * 1e3 / g["launches"], rows.get(g["name"]))
        for g in _groups()
        if g["kernel"].startswith("matmul")
    ]
    return sorted(found, key=lambda each: -each.nbytes)


def measured_launch_us() -> float:
    """Microseconds of a launch that moves almost nothing: the embedding of one token."""
    return next(float(g["ms"]) * 1e3 / g["launches"] for g in _groups() if g["kernel"].startswith("embed"))


def launch_us() -> dict[str, float]:
    """Launch overhead by kernel, for hardware.toml: of matmuls the intercept of the line through their bytes; of others
    their whole time for one token."""
    found = {"matmul": bytes_line().launch_us}
    for kernel in ("norm", "rope", "attention"):
        groups = [g for g in _groups() if g["kernel"].partition("_")[0] == kernel]  # fused ones too
        count = sum(g["launches"] for g in groups if g["kernel"] != "attention_prefetch")
        found[kernel] = sum(g["ms"] for g in groups) * 1e3 / count if count else 0.0
    return {**found, "other": measured_launch_us()}


class Line(NamedTuple):
    """Microseconds that launches of one kernel take, by the bytes that they declare: `launch_us` + bytes / `gb_s`."""

    launch_us: float
    gb_s: float
    rows: list[tuple[str, float, float]]  # (what it makes, bytes, microseconds) of each shape

    def us(self, nbytes: float) -> float:
        return self.launch_us + nbytes / self.gb_s / 1e3


def bytes_line() -> Line:
    """Fits the layers' matmuls for one token, each timed alone. A shape counted wrongly would be off the line."""
    rows = [(p.name, p.nbytes, p.us) for p in matmuls() if p.kernel == "matmul_q4_0"]
    nbytes, us = np.array([row[1:] for row in rows]).T
    launch, each = np.linalg.lstsq(np.column_stack([1 / us, nbytes / us]), np.ones(len(us)), rcond=None)[0]
    return Line(float(launch), float(1e-3 / each), rows)


def _step(label: str) -> Step | None:
    if found := re.fullmatch(r"profile decode 1, batch (\d+) at (\d+)", label):
        return [(int(found[2]), 1)] * int(found[1])
    found = re.fullmatch(r"profile prefill (\d+)", label)
    return [(0, int(found[1]))] if found else None


def gpu_read_gb_s() -> float:
    """The rate of a kernel that only reads, if the file has it; else that of hardware.toml."""
    rows = figures.read("h200")["rows"]
    return next((row["GB_s"] for row in rows if row["label"] == "read"), load_hardware("h200").read_gb_s)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def profile_table() -> str:
    heads = ("step", "kernel", "launches", "MB each", "ms in total", "GB/s", "share of read bandwidth")
    best = gpu_read_gb_s()
    rows = [
        (p.step, p.kernel, str(p.launches), f"{p.nbytes / p.launches / 1e6:,.1f}", f"{p.seconds * 1e3:.2f}",
         f"{p.gb_s:,.0f}", f"{p.gb_s / best:.0%}")
        for p in profiled()
    ]  # fmt: skip
    return table(heads, rows)


def counted_table() -> str:
    """Time x bandwidth beside the bytes counted, for every matmul of one token."""
    best, launch, found = gpu_read_gb_s(), measured_launch_us(), matmuls()
    ways = {"alone": [p.us for p in found], f"less {launch:.1f} us": [p.us - launch for p in found]}
    in_a_row = [p.row_us for p in found if p.row_us]
    if len(in_a_row) == len(found):
        ways["in a row"] = in_a_row
    heads = ["value", "MB counted", *(f"{way}: us x {best:,.0f} GB/s" for way in ways)]
    rows = [
        [p.name, f"{p.nbytes / 1e6:,.1f}", *(_time_as_bytes(p, us[i], best) for us in ways.values())]
        for i, p in enumerate(found)
    ]
    near = {way: sum(p.is_read_in(us, best) for p, us in zip(found, ways[way], strict=True)) for way in ways}
    said = ", ".join(f"{count} of {len(found)} {way}" for way, count in near.items())
    missing = "" if "in a row" in ways else " That run did not time matmuls in a row."
    return f"{table(heads, rows)}\n\nWithin {WITHIN:.0%} of the bytes counted: {said}.{missing}"


def _time_as_bytes(found: Matmul, us: float, gb_s: float) -> str:
    mark = "" if found.is_read_in(us, gb_s) else "**"
    return f"{us:,.1f} us: {us * gb_s / 1e3:,.1f} MB, {mark}{found.read(us, gb_s) - 1:+.0%}{mark}"


def bytes_table() -> str:
    line, best = bytes_line(), gpu_read_gb_s()
    heads = ("value", "MB counted", "us", "by the line", "off")
    rows = [
        (
            name,
            f"{nbytes / 1e6:.2f}",
            f"{us:.2f}",
            f"{line.us(nbytes):.2f}",
            f"{line.us(nbytes) / us - 1:+.1%}",
        )
        for name, nbytes, us in line.rows
    ]
    said = f"The line: {line.launch_us:.1f} us per launch, and {line.gb_s:,.0f} GB/s ({line.gb_s / best:.0%} of reads)."
    return f"{table(heads, rows)}\n\n{said}"
