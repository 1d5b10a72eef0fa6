"""A run of `tandem bench` that never was: all that a report has to show, the same each time."""

from __future__ import annotations

from typing import cast

import numpy as np

from tandem.bench.result import SCHEMA, BenchResult, Launches, PeerRow, Row
from tandem.bench.statistics import drift, median_interval, outliers

READ, PEAK = 32.5e9, 0.92e12
LAUNCHES = [  # kernel, what it makes, how many, bytes, operations for a token
    ("matmul_q4_1", "ffn_act", 30, 34.7e6, 106e6),
    ("matmul_q8_0", "logits", 1, 30.3e6, 56.6e6),
    ("matmul_q4_1", "ffn_out", 30, 17.8e6, 53.1e6),
    ("matmul_q4_1", "q+k+v", 30, 10.9e6, 33.2e6),
    ("matmul_q4_1", "attn_out", 30, 6.7e6, 19.9e6),
    ("attention", "attn", 30, 1.2e6, 0.7e6),
    ("rope", "kv", 30, 0.25e6, 0.07e6),
    ("norm", "ffn_norm", 30, 0.30e6, 0.12e6),
    ("norm", "attn_norm", 30, 0.30e6, 0.12e6),
    ("sample", "result", 1, 0.2e6, 0.05e6),
    ("embed_q8_0", "embedding", 1, 0.012e6, 0.0),
]


def profile(tokens: int, depth: int) -> list[Launches]:
    found = []
    for kernel, name, count, size, ops in LAUNCHES:
        if name == "attn":
            size, ops = size + 23e3 * depth, ops * (1 + depth / 10)
        size, ops = size + 0.04 * size * tokens, ops * (1 if name == "logits" and tokens > 64 else tokens)
        seconds = max(size / (0.85 * READ), ops / (0.45 * PEAK)) + count * 1e-6
        found.append(Launches(kernel=kernel, name=name, launches=count, seconds=seconds, bytes=size, ops=ops))
    return sorted(found, key=lambda each: -each["seconds"])


def row(kind: str, tokens: int, batch: int, depth: int, rng: np.random.Generator, rounds: int = 7) -> Row:
    launches = profile(tokens if kind == "prefill" else batch, depth)
    steps = tokens if kind == "decode" else 1
    size, ops = (steps * sum(each[key] for each in launches) for key in ("bytes", "ops"))
    step = sum(each["seconds"] for each in launches) * 1.05
    taken = step * (1 + 0.01 * rng.standard_normal((rounds, steps)) + 0.02 * rng.pareto(3, (rounds, steps)))
    samples = [float(tokens * batch / seconds) for seconds in taken.sum(axis=1)]
    median, seconds = float(np.median(samples)), tokens * batch / float(np.median(samples))
    memory, arithmetic = size / seconds / READ, ops / seconds / PEAK
    where = f", batch {batch}" if kind == "decode" else ""
    return Row(
        label=f"{kind} {tokens}{where}" + (f" at {depth}" if depth else ""), kind=kind, tokens=tokens, batch=batch,
        depth=depth, steps=steps, seconds=[tokens * batch / value for value in samples], samples=samples, median=median,
        interval=median_interval(samples), outliers=outliers(samples), ttft=step,
        ttft_interval=(0.97 * step, 1.04 * step), step_seconds=taken.ravel().tolist(), bytes=size, ops=ops,
        gb_per_s=size / seconds / 1e9,
        tflop_per_s=ops / seconds / 1e12, of_roofline=max(memory, arithmetic),
        bound="memory" if memory > arithmetic else "arithmetic", drift=drift(samples), energy=None, clock=None,
        peer=None, others=0.01, warnings=[], valid=True, why="",
    )  # fmt: skip


def result(model: str = "smollm2", seed: int = 0, speed: float = 1.0, peer: bool = False) -> BenchResult:
    """With an outlier in its third row, and what `peer` measured in the first two."""
    rng = np.random.default_rng(seed)
    rows = [row("prefill", 512, 1, depth, rng) for depth in (0, 4096)]
    rows += [row("decode", 64, batch, depth, rng) for depth in (0, 4096) for batch in (1, 8, 32)]
    rows[2]["samples"][4] *= 0.8
    for each in rows:
        each["samples"] = [speed * value for value in each["samples"]]
        each["median"] = float(np.median(each["samples"]))
        each["interval"], each["outliers"] = median_interval(each["samples"]), outliers(each["samples"])
        each["warnings"] = [f"round {i + 1} is an outlier" for i in each["outliers"]]
    for each in rows[:2] if peer else []:
        slower = [0.4 * value for value in each["samples"]]
        each["peer"] = PeerRow(
            samples=slower, median=float(np.median(slower)), interval=median_interval(slower), ratio=2.5,
            ratio_interval=(2.4, 2.6),
        )  # fmt: skip
    found = {
        "schema": SCHEMA, "date": "2026-11-15T12:00:00+00:00", "version": "0.1.0",
        "command": "tandem bench smollm2 -p 512 -n 64 -b 1,8,32 -d 0,4096 --profile --html out.html", "model": model,
        "weights_bytes": 100_356_096, "device": "the CPU: avx512, 2 threads", "kv": "f16", "threads": 2, "rounds": 7,
        "machine": {
            "cpu": "Some CPU", "cores": 2, "memory_bytes": 25e9, "kernel": "6.1", "python": "3.11.7", "governor": None,
            "load_before": 0.1,
        },
        "limits": {
            "bytes_per_s": READ, "bytes_from": "reads of the weights", "ops_per_s": PEAK,
            "ops_from": "int8 dot products",
        },
        "rows": rows,
        "profiles": {
            each["label"]: profile(each["tokens"] if each["kind"] == "prefill" else each["batch"], each["depth"])
            for each in rows
        },
        "peer": {"name": "llama.cpp", "version": "b1", "build": "AVX512 = 1"} if peer else None,
        "comparison": None, "notes": ["energy is not known on this machine"],
    }  # fmt: skip
    return cast(BenchResult, found)
