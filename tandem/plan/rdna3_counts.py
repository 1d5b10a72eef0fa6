"""What our kernels execute on an RDNA3 GPU: emulated counts (rdna3_counts.json), for launches of any shape.

A shader's counts are a sum of two terms: one for each wave, and one for each unit of work (a column of a matmul's
workgroup, 64 keys of an attention's, a column of a norm's). Of a matmul, both grow linearly with the tokens. `python -m
tandem.plan.count_kernels` makes the table in the emulator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandem.bench.step_cost import Step
from tandem.devices.rdna3 import counting
from tandem.kernels.abi import Q8_TILE
from tandem.kernels.dispatch import Dispatch, shader_layout
from tandem.kernels.experts import expected_experts
from tandem.kernels.kernel import Counts, Scalars
from tandem.kernels.matmul import layout_of, token_count
from tandem.kernels.panels import LAYOUTS
from tandem.plan.rdna3 import LaunchWork
from tandem.program.program import Launch

FILE = Path(__file__).with_name("rdna3_counts.json")
FIELDS = ("valu", "transcendental", "wmma", "scalar", "segments", "lds_cycles")  # of LaunchWork
AMOUNTS = ("wave", "unit", "wave_token", "unit_token")  # what an entry has FIELDS for
LITTLE = 1e-9  # rounding errors of a fit
UNIT_KEYS = 64  # keys of a unit of attention


class LaunchShape(NamedTuple):
    """A launch as the table sees it: its entry, its workgroups and the units of work of all of them."""

    key: str
    groups: int
    units: float
    threads: int | None  # of a workgroup; None: as in the table
    tokens: int = 1  # of each unit


def shape_of(launch: Launch, chosen: Dispatch, step: Step, counts: Counts) -> LaunchShape:
    """`counts`: of the step itself, which its bucket may exceed."""
    s, name = launch.scalars, launch.kernel.name
    shader, groups = chosen.shader or name, chosen.x * chosen.y * chosen.z
    constants, units = chosen.constants, 0.0
    if name.startswith("matmul"):
        layout = layout_of(s)  # several share a shader
        shader = shader.replace(f"matmul_{shader_layout(layout)}_", f"matmul_{layout}_", 1)
        own = constants[0] if constants and constants[0] else None
        if shader.endswith("_rows"):  # tokens at a time
            shader += f"/{constants[1]}"
        if shader.endswith("_many") and own:  # a workgroup of more threads has more tokens
            shader += f"/{own}"
        return LaunchShape(
            shader + ("/glu" if s["epilogue"] else ""),
            groups,
            groups * s["columns"],
            own,
            max(1, token_count(s, counts) // chosen.y),
        )
    if name.startswith("expert_matmul") and LAYOUTS[layout_of(s)].quantised:
        return _expert_shape(launch, chosen, counts)
    if name == "attention":
        shader += "/" + "/".join(map(str, (*constants[:3], chosen.subgroup)))
        return LaunchShape(shader, groups, _key_units(s, constants[0], step), None)
    if name in ("norm", "combine_norm"):
        return LaunchShape(
            f"{shader}/{'/'.join(map(str, constants[3:6]))}", groups, groups * s["dim"], constants[0]
        )
    if name == "norm_finish":
        units = groups * s["dim"]
    if name == "rope":
        shader += "/" + "/".join(map(str, constants))
    return LaunchShape(shader, groups, units, None)


def _expert_shape(launch: Launch, chosen: Dispatch, counts: Counts) -> LaunchShape:
    """As of a matmul with a row a lane, whose code it shares, for each expert in use."""
    s = launch.scalars
    experts = expected_experts(counts["tokens"], s)
    tokens = counts["tokens"] * s["used"] / experts  # of an expert
    tiles = math.ceil(tokens / Q8_TILE)
    groups = max(1, round(chosen.x * experts))
    key = f"matmul_{layout_of(s)}_rows/{Q8_TILE}" + ("/glu" if s["epilogue"] else "")
    return LaunchShape(
        key, groups, groups * s["columns"] * tiles, chosen.constants[0], math.ceil(tokens / tiles)
    )


def _key_units(s: Scalars, queries: int, step: Step) -> float:
    """Units of keys that the workgroups of an attention visit: each tile of queries sees all keys of its item."""
    units, group = 0.0, int(s["q_heads"] // s["kv_heads"])
    window = int(s["window"]) or 1 << 30
    for begin, count in step:
        if count == 1:
            units += -(-group // queries) * min(begin + 1, window) / UNIT_KEYS
            continue
        tiles = count * group / queries  # a tile sees the keys up to its last query
        seen = np.minimum(np.arange(begin, begin + count) + 1, window).mean() + UNIT_KEYS / 2
        units += tiles * seen / UNIT_KEYS
    return float(units * s["kv_heads"])


@dataclass(frozen=True)
class Sample:
    """Some workgroups of a launch, counted."""

    shape: LaunchShape
    share: float  # of its workgroups
    counts: counting.Counts
    threads: int

    @property
    def values(self) -> list[float]:
        """FIELDS of the whole launch."""
        c = self.counts
        scalar = c.salu + c.branches + c.memory_of("s_").instructions
        segments, lds = c.memory_of("global_").segments, c.memory_of("ds_").cycles
        found = c.valu, c.transcendental, c.wmma, scalar, segments, lds
        return [value / self.share for value in found]


def fit(samples: Sequence[Sample]) -> dict[str, Any]:
    """An entry of the table: the counts of a wave and of a unit that explain the samples."""
    first = samples[0]
    waves = np.array([s.shape.groups * -(-s.threads // s.counts.lanes) for s in samples], float)
    units = np.array([s.shape.units for s in samples])
    tokens = np.array([s.shape.tokens for s in samples]) * (len({s.shape.tokens for s in samples}) > 1)
    values = np.array([s.values for s in samples])
    weights = 1 / np.maximum(values.sum(axis=1, keepdims=True), 1)  # relative errors
    a = np.column_stack([waves, units, waves * tokens, units * tokens]) * weights
    found = np.linalg.lstsq(a, values * weights, rcond=None)[0]  # what has no units is a wave's alone
    less = found[0] + found[2] * tokens.max() < 0  # rounding, as the number of threads follows from the shape
    found[:, less] = np.linalg.lstsq(a * [0, 1, 0, 1], (values * weights)[:, less], rcond=None)[0]
    threads = {s.threads for s in samples}
    return {
        "threads": threads.pop() if first.shape.threads is None else 0,
        "lanes": first.counts.lanes,
        "vgprs": max(s.counts.vgprs for s in samples),
        "lds_bytes": max(s.counts.lds_bytes for s in samples),
        **{name: _digits(each) for name, each in zip(AMOUNTS, found, strict=True)},
    }


def _digits(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") if abs(value) > LITTLE else 0.0 for value in values]


@cache
def _table() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(FILE.read_text())["shaders"]
    return found


def known(shape: LaunchShape) -> Mapping[str, Any] | None:
    """The entry of a launch; where its constants were not counted, that of the nearest. None: there is none."""
    table = _table()
    if shape.key in table:
        return table[shape.key]  # type: ignore[no-any-return]
    start, *wanted = shape.key.split("/")
    kernel = start.partition("_")[0]
    near = [key for key in table if key.split("/")[0] == start]
    if not near and kernel in ("norm", "attention"):
        near = [key for key in table if key.startswith(kernel)]
    if not near:
        return None
    return table[min(near, key=lambda key: _distance(key.split("/")[1:], wanted))]  # type: ignore[no-any-return]


def _distance(a: Sequence[str], b: Sequence[str]) -> float:
    numbers = [(float(x), float(y)) for x, y in zip(a, b, strict=False) if x.isdigit() and y.isdigit()]
    return sum(abs(x - y) / max(x, y, 1) for x, y in numbers) + abs(len(a) - len(b))


def work_of(shape: LaunchShape, dram_bytes: float) -> LaunchWork:
    """A launch, with the bytes that it moves to and from memory; of a shader that was not counted, those alone."""
    entry = known(shape)
    if entry is None:
        return LaunchWork(shape.groups, shape.groups, 64, 1, 0, dram_bytes)
    threads = shape.threads or entry["threads"]
    waves = shape.groups * -(-threads // entry["lanes"])
    amounts = waves, shape.units, waves * shape.tokens, shape.units * shape.tokens
    rates = zip(*(entry[per] for per in AMOUNTS), strict=True)
    values = [max(0.0, sum(n * rate for n, rate in zip(amounts, each, strict=True))) for each in rates]
    return LaunchWork(
        groups=shape.groups, waves=waves, lanes=entry["lanes"], vgprs=entry["vgprs"], lds_bytes=entry["lds_bytes"],
        dram_bytes=dram_bytes,
        **dict(zip(FIELDS, values, strict=True)),
    )  # fmt: skip
