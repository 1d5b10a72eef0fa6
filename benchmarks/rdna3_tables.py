"""The tables of docs/AMD.md and docs/appendix/AMD_CALIBRATION.md, made by `python -m benchmarks.plan_errors`."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from benchmarks.plan_profile import table
from benchmarks.rdna3_fit import Figure, counted, left_out, published
from tandem.bench.hardware import load_hardware
from tandem.bench.step_cost import Step
from tandem.model.synthetic import SyntheticModel
from tandem.plan.predict import MAX_ROWS, Planned
from tandem.plan.rdna3 import FITTED, gpu_of, launch_time
from tandem.plan.rdna3_step import launches

TARGET = 81.0  # tokens per second of all sequences
AIM, WORST = 0.15, 0.35  # of the median and of any figure
MODEL, HARDWARE, DEPTH, PROMPT, CONTEXT = "gemma-3-27b", "phoenix-780m", 512, 512, 4096
FORMATS = ("q4_0", "q4_k", "q5_k", "q6_k", "q8_0", "q4_k_m")
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
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
    gpu = gpu_of(load_hardware(HARDWARE))
    assert gpu
    step: Step = [(0, tokens)] if prompt else [(DEPTH, 1)] * tokens
    seconds, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    parts = defaultdict[str, defaultdict[str, float]](lambda: defaultdict(float))
    for _, shader, work in launches(_planned(layout, kv).program, step):
        time = launch_time(work, gpu)
        seconds[shader] += time.total
        counts[shader] += 1
        for part, value in {**time.parts, "launch": time.launch}.items():
            parts[shader][part] += value
    found = [Kernel(shader, counts[shader], seconds[shader], dict(parts[shader])) for shader in seconds]
    return sorted(found, key=lambda kernel: -kernel.seconds)


@cache
def _planned(layout: str, kv: str) -> Planned:
    return Planned(SyntheticModel(f"{MODEL}:{layout}"), CONTEXT, kv)


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
