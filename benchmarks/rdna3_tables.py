"""The tables of docs/AMD.md and docs/appendix/AMD_CALIBRATION.md, made by `python -m benchmarks.plan_errors`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from benchmarks.plan_profile import table
from benchmarks.rdna3_fit import Figure, counted, left_out, published
from tandem.bench.hardware import load_hardware
from tandem.bench.step_cost import ATTENTION, Step
from tandem.model.synthetic import SyntheticModel
from tandem.plan.predict import MAX_ROWS, Planned
from tandem.plan.rdna3 import FITTED, LaunchTime, RDNA3Gpu, gpu_of, launch_time
from tandem.plan.rdna3_step import Launched, launches

TARGET = 81.0  # tokens per second of all sequences
AIM, WORST = 0.15, 0.35  # of the median and of any figure
MODEL, HARDWARE, DEPTH, PROMPT, CONTEXT = "gemma-3-27b", "phoenix-780m", 512, 512, 4096
FORMATS = ("q4_0", "q4_k", "q5_k", "q6_k", "q8_0", "q4_k_m")
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
AIM_OF_ONE = 5.0  # tokens/s of one sequence
FUSED, FUSED_BATCHES, SLOW_LAUNCH_US = (MODEL, "gemma-3-1b"), (1, 8, 16, 24), 5.0
EXPLAINED = (1, 8, 16, 24, 32, 64)  # batches whose longest kernels are shown


@cache
def checked() -> list[tuple[Figure, float, float]]:
    """Every figure with its error, and with that by numbers fitted without it."""
    rows = published()
    return [(row, row.error(FITTED), alone) for row, alone in zip(rows, left_out(rows), strict=True)]


def calibration_summary() -> str:
    errors, alone = [abs(error) for _, error, _ in checked()], [abs(error) for _, _, error in checked()]
    gpus = {row.entry["hardware"] for row, _, _ in checked()}
    over = sum(error > WORST for error in errors)
    return (
        f"{len(errors)} figures on {len(gpus)} GPUs: the median error is {median(errors):.0%} ({median(alone):.0%} "
        f"where the figure itself was left out of the fit), the largest {max(errors):.0%} ({max(alone):.0%}); "
        f"{over} of {len(errors)} over {WORST:.0%}."
    )


def calibration_table() -> str:
    heads = ("GPU", "model", "test", "engine", "published", "predicted", "off", "left out")
    rows = [(*_cells(row), _off(alone)) for row, _, alone in checked()]
    numbers = (
        f"Fitted: {FITTED.memory:.1%} of the memory's bandwidth, {FITTED.compute:.1%} of a CU's cycles, "
        f"{FITTED.launch_us:.2f} us a launch."
    )
    return f"{numbers}\n\n{table(heads, rows)}"


def unfitted_table() -> str:
    """Figures whose launches were counted, but which are not fitted."""
    heads = ("GPU", "model", "test", "engine", "published", "predicted", "off", "why not fitted")
    return table(heads, [(*_cells(row), row.unfitted) for row in counted() if row.unfitted])


def _cells(row: Figure) -> tuple[str, ...]:
    rates = f"{row.rate:,.1f}", f"{row.predicted(FITTED):,.1f}", _off(row.error(FITTED))
    return row.entry["hardware"], row.entry["model"], row.test, linked(row.entry), *rates


def linked(entry: dict[str, Any]) -> str:
    """The engine of a published figure, with the address of its source."""
    engine, source = entry["engine"], entry["source"]
    return f"[{engine}]({source})" if source.startswith("https://") else f"{engine} ({source})"


def _off(error: float) -> str:
    return f"**{error:+.0%}**" if abs(error) > WORST else f"{error:+.0%}"


class Kernel(NamedTuple):
    """All launches of a shader in a step."""

    shader: str
    launches: int
    seconds: float
    parts: dict[str, float]


@cache
def step_kernels(layout: str, tokens: int, prompt: bool, kv: str = "f16") -> list[Kernel]:
    """The kernels of a step on a Radeon 780M, the longest first."""
    step: Step = [(0, tokens)] if prompt else [(DEPTH, 1)] * tokens
    seconds, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    parts = defaultdict[str, defaultdict[str, float]](lambda: defaultdict(float))
    for _, shader, work in launches(_planned(layout, kv).program, step):
        time = launch_time(work, _phoenix())
        seconds[shader] += time.total
        counts[shader] += 1
        for part, value in {**time.parts, "launch": time.launch}.items():
            parts[shader][part] += value
    found = [Kernel(shader, counts[shader], seconds[shader], dict(parts[shader])) for shader in seconds]
    return sorted(found, key=lambda kernel: -kernel.seconds)


@cache
def _phoenix() -> RDNA3Gpu:
    gpu = gpu_of(load_hardware(HARDWARE))
    assert gpu
    return gpu


@cache
def _planned(layout: str, kv: str, model: str = MODEL) -> Planned:
    return Planned(SyntheticModel(f"{model}:{layout}"), CONTEXT, kv)


def rate(layout: str, tokens: int, prompt: bool = False, kv: str = "f16") -> float:
    return tokens / sum(kernel.seconds for kernel in step_kernels(layout, tokens, prompt, kv))


def predicted_table() -> str:
    heads = ("format", "KV cache", *(f"{batch}" for batch in BATCHES), f"prompt of {PROMPT}")
    rows = []
    for layout in FORMATS:
        for kv in ("f16", "q8"):
            rates = [f"{rate(layout, batch, kv=kv):.1f}" for batch in BATCHES]
            rows.append((layout.upper(), kv, *rates, f"{rate(layout, PROMPT, True, kv):.0f}"))
    return f"{table(heads, rows)}\n\n{_answers()}"


def _answers() -> str:
    """The smallest batches that reach the target, and whether a larger batch is ever slower."""
    reached = [
        next((n for n in range(1, MAX_ROWS + 1) if rate("q4_0", n, kv=kv) >= TARGET), 0)
        for kv in ("f16", "q8")
    ]
    falls = [
        layout.upper()
        for layout in FORMATS
        if any(rate(layout, a) > rate(layout, b) for a, b in pairwise(range(1, MAX_ROWS + 1)))
    ]
    one = step_kernels("q4_0", 1, False)
    waiting = sum(kernel.parts["memory"] for kernel in one) / sum(kernel.seconds for kernel in one)
    return (
        f"{TARGET:g} tokens/s in Q4_0 are predicted from {reached[0]} sequences on, and from {reached[1]} with an int8 "
        f"KV cache. Of all batches up to {MAX_ROWS}, a larger one is slower in {', '.join(falls) or 'no format'}. One "
        f"sequence waits for memory in {waiting:.0%} of its time."
    )


def binding_table() -> str:
    """The two longest kernels of each step, with the milliseconds that each unit is busy."""
    units = ("memory", "valu", "scalar", "lds", "cache", "launch")
    heads = ("format", "tokens", "shader", "launches", "ms", *units)
    rows = []
    for layout in FORMATS[:-1]:
        for tokens, prompt in (*((batch, False) for batch in EXPLAINED), (PROMPT, True)):
            for kernel in step_kernels(layout, tokens, prompt)[:2]:
                busy = [f"{kernel.parts[unit] * 1e3:.1f}" for unit in units]
                rows.append(
                    (
                        layout.upper(),
                        str(tokens),
                        f"`{kernel.shader}`",
                        str(kernel.launches),
                        f"{kernel.seconds * 1e3:.1f}",
                        *busy,
                    )
                )
    return table(heads, rows)


class OneSequence:
    """A step of one sequence in Q4_0, by what it waits for."""

    def __init__(self, kv: str) -> None:
        self.found, self.gpu = launches(_planned("q4_0", kv).program, [(DEPTH, 1)]), _phoenix()
        self.times = [launch_time(each.work, self.gpu) for each in self.found]
        self.total = sum(time.total for time in self.times)
        self.launching = sum(time.launch for time in self.times)
        self.bytes = sum(each.work.dram_bytes for each in self.found)
        self.weights, self.keys = (
            sum(each.work.dram_bytes for each in self.found if each.launch.kernel.name.startswith(names))
            for names in (("matmul",), ATTENTION)
        )
        self.matmuls = sum(
            time.total - time.launch - time.parts["memory"]
            for each, time in zip(self.found, self.times, strict=True)
            if each.launch.kernel.name.startswith("matmul")
        )

    @property
    def read_gb_s(self) -> float:
        return self.gpu.gb_s * FITTED.memory

    def needed_gb_s(self) -> float:
        """What memory would have to give for the aim, if all else stays."""
        low, high = 1.0, 1000.0
        for _ in range(40):
            middle = (low + high) / 2
            gpu = replace(self.gpu, gb_s=middle / FITTED.memory)
            slow = sum(launch_time(each.work, gpu).total for each in self.found) > 1 / AIM_OF_ONE
            low, high = (middle, high) if slow else (low, middle)
        return high

    def columns(self) -> list[str]:
        def ms(seconds: float) -> str:
            return f"{seconds * 1e3:.1f}"

        reading = self.bytes / self.read_gb_s / 1e9
        return [
            f"{self.bytes / 1e9:.2f} GB at {self.read_gb_s:.1f} GB/s",
            ms(self.weights / self.read_gb_s / 1e9),
            ms(self.keys / self.read_gb_s / 1e9),
            f"{ms(reading)}: {1 / reading:.2f} tokens/s",
            f"{ms(reading + self.launching)}: {1 / (reading + self.launching):.2f}",
            ms(reading + self.launching + self.matmuls),
            f"{ms(self.total)}: **{1 / self.total:.2f}**",
            f"{self.needed_gb_s():.1f} GB/s",
        ]


def one_sequence_table() -> str:
    kinds = [OneSequence("f16"), OneSequence("q8")]
    names = (
        "bytes of a step, and the rate at which they are read",
        "weights, in ms",
        "keys and values, in ms",
        "all bytes, with activations, in ms",
        f"with {len(kinds[0].found)} launches and their barriers, {FITTED.launch_us:.2f} us each",
        "with the instructions of matmuls that memory does not hide",
        "and those of all other kernels",
        f"rate of memory that {AIM_OF_ONE} tokens/s would need",
    )
    columns = zip(*(kind.columns() for kind in kinds), strict=True)
    return table(
        ("what", "f16 KV", "q8 KV"), [(name, *each) for name, each in zip(names, columns, strict=True)]
    )


def fused_table() -> str:
    """What could still be fused: its share of a step."""

    def named(*starts: str) -> Callable[[Launched], bool]:
        return lambda each: each.launch.kernel.name.startswith(starts)

    def all_of_it(time: LaunchTime) -> float:
        return time.total

    slow = replace(FITTED, launch_us=SLOW_LAUNCH_US)
    rows = (
        ("RoPE and its launches (more than its fusion with attention could save)", FITTED, named("rope"), all_of_it),
        (f"the same, if a launch took {SLOW_LAUNCH_US:g} us", slow, named("rope"), all_of_it),
        ("norms without their launches (in the matmul before them: at most half of it; one token has it so)", FITTED,
         named("norm", "combine_norm"), lambda time: time.total - time.launch),
        ("all launches and their barriers", FITTED, named(""), lambda time: time.launch),
    )  # fmt: skip
    cells = []
    for name, fitted, chosen, part in rows:
        line = [name]
        for model in FUSED:
            shares = []
            for batch in FUSED_BATCHES:
                found = launches(_planned("q4_0", "f16", model).program, [(DEPTH, 1)] * batch)
                times = [(launch_time(each.work, _phoenix(), fitted), chosen(each)) for each in found]
                share = sum(part(time) for time, mine in times if mine) / sum(time.total for time, _ in times)
                shares.append(f"{share:.1%}")
            line.append(", ".join(shares))
        cells.append(tuple(line))
    return table(("what", *FUSED), cells)
