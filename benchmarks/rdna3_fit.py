"""Fits the three numbers of the RDNA3 cost model (tandem/plan/rdna3.py) to published rates of llama.cpp on AMD GPUs.

What llama.cpp's own shaders execute was counted in the same emulator: results/llama-cpp-rdna3.json has the counts of
each shader, for a workgroup and for each of its columns, and the launches of a step beside the matmuls.
results/published.json has the rates, with their sources.

python -m benchmarks.rdna3_fit              prints the numbers for rdna3.py, and the error of every figure
python -m benchmarks.rdna3_fit counts.json  puts new counts into results/llama-cpp-rdna3.json first
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import figures
from tandem.bench.hardware import load_hardware
from tandem.kernels.panels import LAYOUTS
from tandem.model.synthetic import SyntheticModel
from tandem.plan.rdna3 import MAX_WAVES, Fitted, LaunchWork, RDNA3Gpu, gpu_of, launch_time

Floats = NDArray[np.float64]
FACTS, FIGURES = figures.RESULTS / "llama-cpp-rdna3.json", figures.RESULTS / "published.json"
START, LEAST, MOST = Fitted(0.85, 0.6, 4.0), Fitted(0.3, 0.1, 0.5), Fitted(1.0, 1.0, 50.0)
VECTOR, LDS, SCALAR = ("buffer_", "global_", "scratch_"), "ds_", "s_"
COUNTS = ("valu", "transcendental", "wmma", "scalar", "segments", "lds_cycles")  # of LaunchWork
FP32_FLOPS = 128  # of a CU and cycle: 64 lanes, a multiplication and an addition
QUANTISED_INPUTS = 4  # of a layer: activations that several matmuls share are quantised once


# ---- what was counted


@cache
def facts() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FACTS.read_text())
    return found


def reduced(counted: dict[str, Any]) -> dict[str, Any]:
    """What the model needs of the counts, for the repository."""
    by_shader: dict[str, list[dict[str, Any]]] = {}
    for launch in counted["launches"]:
        by_shader.setdefault(f"{launch['version']}/{launch['kernel']}", []).append(launch)
    steps = {f"{s['version']}/{s['model']}/{s['phase']}/{s['tokens']}": s["small"] for s in counted["steps"]}
    return {
        "sources": counted["sources"],
        "counts": COUNTS,
        "shaders": {name: _shader(launches) for name, launches in by_shader.items()},
        "others": {
            name: [[small[key] for key in ("kernel", "times", "bytes", "flops")] for small in others]
            for name, others in steps.items()
        },
    }


def _shader(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of a workgroup, fitted to launches of several widths: a constant, and an amount for each column."""
    first = launches[0]
    each = np.array([_counts(launch) for launch in launches])
    columns = np.column_stack([np.ones(len(launches)), [launch["k"] for launch in launches]])
    weights = 1 / columns[:, 1:]  # relative errors
    group, column = np.linalg.lstsq(columns * weights, each * weights, rcond=None)[0]
    tile = first.get("tile") or [first["m"] // first["groups"], first["n"]]
    return {
        "lanes": first["lanes"], "waves": first["waves"] / first["groups"], "vgprs": first["vgprs"],
        "lds_bytes": first["lds_bytes"], "scratch_bytes": first["scratch_bytes"], "rows": tile[0], "tokens": tile[1],
        "group": [round(float(v), 2) for v in group], "column": [float(f"{v:.6g}") for v in column],
    }  # fmt: skip


def _counts(launch: dict[str, Any]) -> list[float]:
    """COUNTS of a workgroup."""
    c = launch["counts"]

    def of(start: str | tuple[str, ...], field: str) -> float:
        return float(sum(m[field] for op, m in c["memory"].items() if op.startswith(start)))

    scalar = c["salu"] + c["branches"] + of(SCALAR, "instructions")
    found = c["valu"], c["transcendental"], c["wmma"], scalar, of(VECTOR, "segments"), of(LDS, "cycles")
    return [value / launch["groups"] for value in found]


# ---- the launches of a step


@dataclass(frozen=True)
class Other:
    """Launches that are not matmuls: bytes to and from memory, and operations."""

    times: float
    bytes: float
    ops: float


def matmul(shader: dict[str, Any], layout: str, rows: int, columns: int, tokens: int) -> LaunchWork:
    tiles = -(-tokens // shader["tokens"])
    groups = -(-rows // shader["rows"]) * tiles
    counts = [groups * (g + c * columns) for g, c in zip(shader["group"], shader["column"], strict=True)]
    weights = rows * columns * LAYOUTS[layout].matrix_bytes(16, 256) / (16 * 256)
    return LaunchWork(
        groups=groups, waves=groups * shader["waves"], lanes=shader["lanes"], vgprs=shader["vgprs"],
        lds_bytes=shader["lds_bytes"], dram_bytes=weights + 4.0 * tokens * (rows + columns), weight_bytes=weights,
        token_tiles=tiles, input_bytes=4.0 * tokens * columns, input_stride=4 * columns,
        tile_tokens=min(tokens, shader["tokens"]), row_tiles=-(-rows // shader["rows"]),
        **dict(zip(COUNTS, counts, strict=True)),
    )  # fmt: skip


def _shaders(version: str, layout: str, tokens: int) -> list[str]:
    """The shaders that multiply a number of tokens: up to 8 as vectors, more in tiles."""
    few = tokens <= 8
    start = f"{version}/mul_mat_vec_{layout}_" if few else f"{version}/matmul_{layout}_"
    size = "" if few else "_s" if tokens <= 32 else "_m" if tokens <= 64 else "_l"
    known = facts()["shaders"]
    return [
        name
        for name in known
        if name.startswith(start) and name.endswith(size) and (not few or known[name]["tokens"] == tokens)
    ]


class StepWork(NamedTuple):
    """What a step executes."""

    works: list[tuple[LaunchWork, int]]  # the matmuls, with how often each runs
    others: list[Other]
    spills: bool  # a shader spills registers to scratch memory


def step_work(version: str, name: str, phase: str, tokens: int) -> StepWork | None:
    """None: not counted."""
    model, shape = SyntheticModel(name), name.partition(":")[0]
    others = facts()["others"].get(f"{version}/{shape}/{phase}/{tokens}")
    others = others or _scaled(version, shape, phase, tokens)
    works, names = [], set[str]()
    for (layout, rows, columns, head), times in Counter(_matrices(model)).items():
        count = 1 if head else tokens
        known = _shaders(version, layout, count)
        if not known or others is None:
            return None
        names.add(known[0])
        works.append((matmul(facts()["shaders"][known[0]], layout, rows, columns, count), times))
    rest = [Other(*other[1:]) for other in others or ()]
    if any("_q8_1_" in name for name in names):
        rest.append(Other(QUANTISED_INPUTS * model.config.layers, 5.0 * tokens * model.config.dim, 0.0))
    return StepWork(works, rest, any(facts()["shaders"][name]["scratch_bytes"] for name in names))


def _matrices(model: SyntheticModel) -> Iterator[tuple[str, int, int, bool]]:
    """(format, rows, columns, is it the head) of every matmul of a step."""
    matrices = model.matrices()
    head = "output.weight" if "output.weight" in matrices else "token_embd.weight"
    for name, (layout, rows, columns) in matrices.items():
        if name == head or name != "token_embd.weight":
            yield layout, rows, columns, name == head


def _scaled(version: str, shape: str, phase: str, tokens: int) -> list[list[Any]] | None:
    """The other launches of a model that was not counted: as in Llama 3 8B, by layers, width and tokens."""
    counted = 1 if phase == "decode" else 512
    known = facts()["others"].get(f"{version}/llama-3-8b/{phase}/{counted}")
    if known is None:
        return None
    base, own = SyntheticModel("llama-3-8b:q4_0").config, SyntheticModel(f"{shape}:q4_0").config
    layers, wider = own.layers / base.layers, own.dim / base.dim * tokens / counted
    return [[kernel, times * layers, nbytes * wider, flops * wider] for kernel, times, nbytes, flops in known]


# ---- figures


@dataclass(frozen=True)
class Figure:
    """A published rate, the GPU it was measured on, and what a step executes there."""

    entry: dict[str, Any]
    test: str
    rate: float
    gpu: RDNA3Gpu
    tokens: int
    step: StepWork

    @cached_property
    def _parts(self) -> tuple[Floats, Floats, Floats]:
        """Of each launch: how often it runs, its parts at the full rates, and the waves of a SIMD."""
        full, gpu = Fitted(1.0, 1.0, 0.0), self.gpu
        parts = [list(launch_time(work, gpu, full).parts.values()) for work, _ in self.step.works]
        for other in self.step.others:
            ops = other.ops / (FP32_FLOPS * gpu.cus * gpu.ghz * 1e9)
            parts.append([other.bytes / (gpu.gb_s * 1e9), ops, 0.0, 0.0, 0.0])
        times = [n for _, n in self.step.works] + [other.times for other in self.step.others]
        waves = [work.waves_of_simd(gpu) for work, _ in self.step.works] + [MAX_WAVES] * len(self.step.others)
        return np.array(times, float), np.array(parts), np.array(waves)

    def seconds(self, fitted: Fitted) -> float:
        """As launch_time adds them up."""
        times, parts, waves = self._parts
        slower = parts / np.array([fitted.memory, *[fitted.compute] * 4])
        longest = slower.max(axis=1)
        busy = longest + (slower.sum(axis=1) - longest) / waves
        return float(times @ (busy + fitted.launch_us * 1e-6))

    @property
    def unfitted(self) -> str:
        """Why it is not fitted; "": it is. Scratch memory is not in the model, and no shader of ours needs it."""
        return "shaders spill registers" if self.step.spills else str(self.entry.get("unfitted", ""))

    def predicted(self, fitted: Fitted) -> float:
        return self.tokens / self.seconds(fitted)

    def error(self, fitted: Fitted) -> float:
        return self.predicted(fitted) / self.rate - 1


@cache
def counted() -> list[Figure]:
    """The figures whose launches were counted."""
    found = []
    for entry in json.loads(FIGURES.read_text())["rows"]:
        hardware = load_hardware(entry["hardware"])
        gpu = gpu_of(hardware)
        if not gpu or "counted" not in entry or "file_bytes" in entry:
            continue
        gpu = replace(gpu, gb_s=entry.get("pin_gb_s", hardware.pin_gb_s))
        for key, rate in entry.items():
            if test := re.fullmatch(r"(pp|tg)(\d+)", key):
                phase, tokens = ("decode", 1) if test[1] == "tg" else ("prompt", int(test[2]))
                if step := step_work(entry["counted"], entry["model"], phase, tokens):
                    found.append(Figure(entry, key, rate, gpu, tokens, step))
    return found


def published() -> list[Figure]:
    """The figures to fit."""
    return [row for row in counted() if not row.unfitted]


# ---- the fit


def loss(rows: Sequence[Figure], fitted: Fitted) -> float:
    """Squared logarithms; a large one counts less than its square."""
    off = np.array([np.log(row.predicted(fitted) / row.rate) for row in rows])
    return float(np.sum(np.sqrt(1 + (off / 0.15) ** 2) - 1))


def fit(rows: Sequence[Figure]) -> Fitted:
    """Coordinate descent over the logarithms of the three numbers."""
    best, step = np.log(astuple(START)), 0.3
    low, high = np.log(astuple(LEAST)), np.log(astuple(MOST))
    known = loss(rows, _from(best))
    while step > 1e-3:
        moved = False
        for i in range(3):
            for sign in (1, -1):
                tried = best.copy()
                tried[i] = np.clip(tried[i] + sign * step, low[i], high[i])
                if (now := loss(rows, _from(tried))) < known - 1e-9:
                    best, known, moved = tried, now, True
        step *= 1 if moved else 0.5
    return _from(best)


def _from(logs: Floats) -> Fitted:
    return Fitted(*(float(f"{v:.4g}") for v in np.exp(logs)))


def left_out(rows: Sequence[Figure]) -> list[float]:
    """The error of each figure by numbers that were fitted to all others."""
    return [row.error(fit([other for other in rows if other is not row])) for row in rows]


def main() -> None:
    for file in sys.argv[1:]:
        made = json.dumps(reduced(json.loads(Path(file).read_text())))
        FACTS.write_text(re.sub(r'("20\d\d-\d\d/)', r"\n\1", made) + "\n")
    rows = published()
    fitted = fit(rows)
    print(fitted)
    for row, alone in zip(rows, left_out(rows), strict=True):
        print(f"{row.entry['hardware']:18}{row.entry['model']:22}{row.entry['counted']:10}{row.test:6}{row.rate:9.1f}"
              f"{row.predicted(fitted):9.1f}{row.error(fitted):+8.0%}{alone:+8.0%}")  # fmt: skip
    for row in counted():
        if row.unfitted:
            print(
                f"not fitted: {row.entry['model']} {row.entry['counted']} {row.test}: {row.error(fitted):+.0%}"
            )
    errors = [abs(row.error(fitted)) for row in rows]
    print(f"median {median(errors):.1%}, worst {max(errors):.1%}, of {len(rows)}")


if __name__ == "__main__":
    main()
