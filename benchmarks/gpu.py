"""Checks and times the Vulkan device on a real GPU in one run, and prints a table last.

    python -m benchmarks.gpu [--device vulkan] [--model gemma-3-27b:q4_0] [--skip-checks] [--steady]

Checks: every kernel on its cases, the matrix-unit paths on larger shapes, the golden models. Times: a synthetic model
(no file) at decode batches 1 to 64, prompts, and depths; with GB/s, TFLOP/s and the profile of each kernel. With
`--steady` only: the host's part of a step and how long the device waits for it, as the engine serves requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from tandem.bench.steady import steady
from tandem.devices.opening import open_device
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.engine.scheduler import Chunk
from tandem.engine.sequence import Sequence
from tandem.kernels import all_kernels, matmul
from tandem.kernels.kernel import Case, Kernel
from tandem.kernels.layouts import q8_unpack
from tandem.model.synthetic import SyntheticModel
from tests.vulkan import harness

CONTEXT = 16640
MATRIX_ERROR = 1e-2  # the largest of float16 products: of the result's own size


def check_kernels(device: Any) -> list[str]:
    """Every kernel on its cases; the products that matrix units take are held to float16's error."""
    failures = []
    for kernel in all_kernels().values():
        if kernel.name not in harness.GRIDS:
            failures.append(f"{kernel.name}: no Vulkan version")
            continue
        bad, count, begun = [], 0, time.perf_counter()
        for case in kernel.cases(np.random.default_rng(1)):
            count += 1
            try:
                if kernel.name.startswith("matmul_") and case.counts["tokens"] > 8:
                    check_product(device, kernel, case)
                else:
                    harness.check_case(device, kernel, case)
            except AssertionError as error:
                bad.append(f"{kernel.name}: {case.label}: {str(error).strip().splitlines()[0][:200]}")
        print(
            f"{kernel.name:16} {count - len(bad)}/{count} cases {time.perf_counter() - begun:5.1f} s",
            flush=True,
        )
        failures += bad
    return failures


def check_product(device: Any, kernel: Kernel, case: Case) -> None:
    expected = kernel.reference(case.arrays, case.scalars, case.counts)["out"]
    found = harness.run_kernel(device, kernel, case)["out"]
    step = np.float32(0)  # a value may round to the neighbouring quant
    if case.scalars["out_q8"]:
        expected, found = (q8_unpack(a, case.counts["tokens"]) for a in (expected, found))
        blocks = np.abs(expected).reshape(len(expected), -1, 32).max(axis=2, keepdims=True)
        step = np.broadcast_to(blocks * np.float32(1.5 / 127), (*blocks.shape[:2], 32)).reshape(
            expected.shape
        )
    size = max(float(np.sqrt(np.mean(expected**2))), 1e-9)
    error = (np.maximum(np.abs(expected - found) - step, 0) / size).max()
    assert error < MATRIX_ERROR, f"error {error:.2e} of the result's size"


def large_products(rng: np.random.Generator) -> list[tuple[Kernel, Case]]:
    """Shapes with whole and ragged tiles for the matrix units."""
    found = []
    for layout in ("q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q6_k"):
        for tokens, rows, columns, epilogue, out_q8 in (
            (12, 144, 1024, 0, 0),
            (30, 256, 1024, 1, 1),
            (64, 200, 2048, 0, 0),
            (100, 336, 1024, 0, 0),
            (200, 384, 1024, 2, 1),
        ):  # fmt: skip
            found.append(matmul.product_case(layout, tokens, rows, columns, epilogue, out_q8, rng))
    return [(matmul.BY_LAYOUT[case.label.split()[0]], case) for case in found]


def check_goldens(device_name: str) -> list[str]:
    from tandem import LLM

    failures, folder = [], Path("tests/models/goldens")
    for path in sorted(folder.glob("*.gguf")):
        arrays = np.load(path.with_suffix(".npz"))
        with LLM(path, device=device_name, kv="f32") as llm:
            worst = 0.0
            for name in arrays.files:
                if name.startswith("ids"):
                    logits = arrays[name.replace("ids", "logits")]
                    worst = max(worst, float(np.abs(llm.logits(arrays[name].tolist()) - logits).max()))
        print(f"{path.stem:24} max abs difference {worst:.1e}", flush=True)
        if not worst < 1e-3:
            failures.append(f"golden {path.stem}: {worst:.1e}")
    return failures


class Timer:
    """Steps of a synthetic model with any number of tokens, sequences and depth."""

    def __init__(self, model: str, device: Any) -> None:
        self.engine = Engine(SyntheticModel(model), device, context=CONTEXT, batch=64)
        self.sequences = [
            Sequence([1] * CONTEXT, SamplingParams(), frozenset(), self.engine.cache.new_tables(), slot=i)
            for i in range(64)
        ]

    def seconds(self, batch: int, count: int, depth: int, repeats: int = 10) -> float:
        """Median seconds of a step of `count` tokens for each of `batch` sequences at `depth`."""
        self._write(batch, count, depth)
        times = []
        for _ in range(repeats + 2):
            begun = time.perf_counter()
            self.engine.turns[0].recording.replay()
            times.append(time.perf_counter() - begun)
        return float(np.median(times[2:]))

    def profile(self, batch: int, count: int, depth: int) -> dict[str, tuple[float, float, float]]:
        """Kernel -> (seconds, GB, Gop) of a step."""
        self._write(batch, count, depth)
        recording: Any = self.engine.turns[0].recording
        recording.replay()
        seconds = recording.replay_timed()
        work = int(self.engine.turns[0].batch.inputs.header[2])
        counts = {"tokens": batch * count, "rows": batch, "work": work}
        total: dict[str, list[float]] = {}
        for launch, s in zip(self.engine.program.launches, seconds, strict=True):
            cost, entry = launch.cost(counts), total.setdefault(launch.kernel.name, [0.0, 0.0, 0.0])
            for i, v in enumerate((s, cost.bytes / 1e9, cost.ops / 1e9)):
                entry[i] += v
        return {name: (v[0], v[1], v[2]) for name, v in sorted(total.items(), key=lambda e: -e[1][0])}

    def _write(self, batch: int, count: int, depth: int) -> None:
        chunks = []
        for sequence in self.sequences:
            self.engine.cache.release(sequence.tables)
        for sequence in self.sequences[:batch]:
            assert self.engine.cache.reserve(sequence.tables, depth + count), "not enough KV blocks"
            chunks.append(Chunk(sequence, depth, count, True))
        self.engine.turns[0].batch.write(chunks)


def time_model(name: str, device: Any) -> list[dict[str, Any]]:
    begun = time.perf_counter()
    timer = Timer(name, device)
    print(f"{name}: loaded in {time.perf_counter() - begun:.1f} s", flush=True)
    for batch, count in (
        (1, 1),
        (8, 1),
        (32, 1),
        (1, 512),
    ):  # a driver settles on a shader in its first second
        begun = time.perf_counter()
        while time.perf_counter() - begun < 1.5:
            timer.seconds(batch, count, 0, 1)
    cost = [launch.cost({"tokens": 1, "rows": 1, "work": 1}) for launch in timer.engine.program.launches]
    weights, ops = sum(c.bytes for c in cost), sum(c.ops for c in cost)
    rows = []
    for label, batch, count, depth in (
        *((f"decode, batch {b}", b, 1, 160) for b in (1, 2, 4, 8, 9, 16, 32, 64)),
        ("prefill 512", 1, 512, 0), ("prefill 512 at 3584", 1, 512, 3584),
        ("decode at depth 4096", 1, 1, 4096), ("decode at depth 16384", 1, 1, 16384),
    ):  # fmt: skip
        s = timer.seconds(batch, count, depth, 5 if count > 1 else 10)
        tokens = batch * count
        rows.append(
            {
                "label": label,
                "ms": s * 1e3,
                "tok_s": tokens / s,
                "GB_s": weights / s / 1e9,
                "TFLOP_s": ops * tokens / s / 1e12,
            }
        )
        print(f"{label:24} {s * 1e3:9.2f} ms {tokens / s:9.0f} tok/s", flush=True)
    for batch, count in ((1, 1), (8, 1), (32, 1), (1, 512)):
        print(f"profile: {batch} x {count} tokens")
        profile = timer.profile(batch, count, 160 if count == 1 else 0)
        for kernel, (s, gb, gop) in profile.items():
            print(f"  {kernel:16} {s * 1e3:8.3f} ms {gb / s:8.0f} GB/s {gop / s / 1e3:8.1f} TOP/s")
        rows.append(
            {"label": f"profile {batch} x {count}", "ms": {k: v[0] * 1e3 for k, v in profile.items()}}
        )
    return rows


def time_steady(name: str, device: Any) -> list[dict[str, Any]]:
    engine = Engine(SyntheticModel(name), device, context=4096, batch=64)
    rows = []
    for batch in (1, 8, 64):
        begun = time.perf_counter()
        while time.perf_counter() - begun < 1.5:  # a driver settles on a shader in its first second
            steady(engine, batch=batch, steps=20)
        found = steady(engine, batch=batch, steps=200)
        rows.append({"label": f"steady, batch {batch}", **dataclasses.asdict(found)})
        print(
            f"batch {batch:2}: step {found.step_us:.0f} us, {batch / found.step_us * 1e6:.0f} tok/s, "
            f"host {found.host_us:.0f} us, device idle {found.idle or 0:.2%}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--model", default="gemma-3-27b:q4_0")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--steady", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.steady:
        rows = time_steady(options.model, open_device(options.device))
        if options.out:
            options.out.write_text(json.dumps({"rows": rows}, indent=1))
        return
    failures: list[str] = []
    if not options.skip_checks:
        device = harness.open_device(options.device)
        print(device.describe())
        failures += check_kernels(device)
        for kernel, case in large_products(np.random.default_rng(2)):
            try:
                check_product(device, kernel, case)
            except AssertionError as error:
                failures.append(f"{case.label}: {error}")
        device.close()
        print("\n".join(failures) or "all kernels agree with NumPy", flush=True)
        failures += check_goldens(options.device)
    rows = time_model(options.model, open_device(options.device))
    print(f"\n{'':24} {'ms':>9} {'tok/s':>9} {'GB/s':>9} {'TFLOP/s':>9}")
    for r in rows:
        if "tok_s" not in r:
            continue
        print(f"{r['label']:24} {r['ms']:9.2f} {r['tok_s']:9.0f} {r['GB_s']:9.0f} {r['TFLOP_s']:9.1f}")
    if options.out:
        options.out.write_text(json.dumps({"rows": rows, "failures": failures}, indent=1))
    print("checks:", "FAILED: " + "; ".join(failures) if failures else "all passed or skipped")


if __name__ == "__main__":
    main()
