"""Checks and times the Vulkan device on a real GPU in one run, and prints a table last.

    python -m benchmarks.gpu [--device vulkan] [--model gemma-3-27b:q4_0] [--skip-checks] [--steady] [--out FILE]

It checks every kernel on its cases, the matrix-unit paths on larger shapes, and the golden models. It times a
synthetic model (random weights, no file): decode with batches of 1 to 64, prefill, and decode at depths of 4,096 and
16,384, with GB/s, TFLOP/s and a profile by kernel; and the vision encoder of Gemma 3 with an image of 896 x 896.
With `--steady` it measures something else: the host time of a step while the engine serves requests, the time that the
device waits for the host, and matmuls in a row without barriers (streams.py). Results go to FILE; a second run, for
example with `--steady`, adds its results to the same file.
Of models that results/h200-targets.json names (the hybrids `qwen3.6-35b-a3b:q4_k` and `qwen3.6-27b:q4_k_m`) it says
which targets are missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.streams import streams
from tandem.bench.bandwidth import measure_bandwidth
from tandem.bench.host_overhead import measure_host_overhead
from tandem.bench.kernel_checks import check_kernels, open_for_checks
from tandem.bench.profile import profile
from tandem.bench.rounds import Bench, Workload
from tandem.devices.backends import open_device
from tandem.engine.engine import Engine
from tandem.engine.image_encoder import ImageEncoder
from tandem.model.synthetic import SyntheticModel, SyntheticVision


def check_all(device: Any) -> list[str]:
    """Checks every kernel on its cases, and larger matmuls on matrix units. Returns the failures."""
    failures = []
    for checked in check_kernels(device):
        passed = checked.cases - len(checked.failures)
        print(f"{checked.kernel:16} {passed}/{checked.cases} cases {checked.seconds:5.1f} s", flush=True)
        failures += checked.failures
    return failures


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


TARGETS = Path(__file__).parent / "results" / "h200-targets.json"
BATCH_SIZES = (1, 2, 4, 8, 9, 16, 32, 64)
WORKLOADS = [
    *(Workload("decode", 64, batch, 128) for batch in BATCH_SIZES),
    Workload("prefill", 512),
    Workload("prefill", 4096),
    Workload("decode", 64, 1, 4096),
    Workload("decode", 64, 1, 16384),
]
PROFILED = [Workload("decode", 1, batch, 160) for batch in (1, 8, 32)] + [Workload("prefill", 512)]


def time_model(name: str, device: Any) -> list[dict[str, Any]]:
    model = SyntheticModel(name)
    bandwidth, how = measure_bandwidth(device, model.nbytes(device.weight_layout))
    print(f"bandwidth: {how}, {bandwidth / 1e9:.0f} GB/s")
    begun = time.perf_counter()
    bench = Bench(model, device, WORKLOADS)
    print(f"{name}: loaded in {time.perf_counter() - begun:.1f} s", flush=True)
    rows: list[dict[str, Any]] = [{"label": "read", "GB_s": bandwidth / 1e9}]
    for workload in WORKLOADS:
        row = bench.measure(workload)
        ms = row.median / row.steps * 1e3
        rates = {"tok_s": row.tokens_per_s, "GB_s": row.gb_per_s, "TFLOP_s": row.tflop_per_s}
        rows.append({"label": workload.label, "ms": ms, **rates, "interval": row.interval})
        print(f"{workload.label:32} {ms:9.2f} ms per step {row.tokens_per_s:9.0f} tok/s", flush=True)
    for workload in PROFILED:
        print(f"profile: {workload.label}")
        times: dict[str, float] = {}
        groups = profile(bench, workload)
        for group in groups:
            times[group.kernel] = times.get(group.kernel, 0.0) + group.seconds * 1e3
            each = f"{group.kernel:16} {group.name:24} {group.launches:4} {group.seconds * 1e3:8.3f} ms"
            print(f"  {each} {group.gb_per_s:8.0f} GB/s {group.top_per_s:8.1f} TOP/s")
        each_group = [
            {"kernel": g.kernel, "name": g.name, "launches": g.launches, "ms": g.seconds * 1e3,
             "GB_s": g.gb_per_s, "TOP_s": g.top_per_s}
            for g in groups
        ]  # fmt: skip
        rows.append({"label": f"profile {workload.label}", "ms": times, "groups": each_group})
    return rows


def time_encoder(name: str, device: Any) -> list[dict[str, Any]]:
    """The vision encoder that Gemma 3 of this shape has, an image at a time."""
    config = SyntheticModel(name).config
    if config.architecture != "gemma3":
        return []
    encoder = ImageEncoder(SyntheticVision(config), device)
    size = encoder.config.image_size
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    seconds = []
    for _ in range(13):  # a driver may still optimise shaders in the first ones
        begun = time.perf_counter()
        encoder.encode(pixels)
        seconds.append(time.perf_counter() - begun)
    encoder.close()
    kept = sorted(seconds[3:])
    row = {"label": f"encode {size}x{size}", "ms": 1e3 * kept[5], "all_ms": [1e3 * each for each in kept]}
    print(f"{row['label']:32} {row['ms']:9.2f} ms per image", flush=True)
    return [row]


def missed_targets(model: str, rows: list[dict[str, Any]]) -> list[str]:
    """The targets of a model that it misses, and batches that are slower than a smaller one."""
    targets = json.loads(TARGETS.read_text())["models"].get(model, [])
    found, missed = {row["label"]: row for row in rows}, []
    for target in targets:
        row = found[target["label"]]
        for name, wanted, unit in (("tok_s", "reach", "tok/s"), ("GB_s", "reach_gb_per_s", "GB/s")):
            if row[name] < target.get(wanted, 0):
                missed.append(f"{row['label']}: {row[name]:.0f} of {target[wanted]} {unit}")
    batches = [found[workload.label] for workload in WORKLOADS[: len(BATCH_SIZES)]] if targets else []
    for row, larger in pairwise(batches):
        if larger["tok_s"] < row["tok_s"]:
            missed.append(f"{larger['label']}: slower than {row['label']}")
    return missed


def time_steady(engine: Engine) -> list[dict[str, Any]]:
    rows = []
    for batch in (1, 8, 64):
        begun = time.perf_counter()
        while time.perf_counter() - begun < 1.5:  # a driver may still optimise a shader in its first second
            measure_host_overhead(engine, batch=batch, steps=20)
        found = measure_host_overhead(engine, batch=batch, steps=200)
        rows.append({"label": f"steady, batch {batch}", **dataclasses.asdict(found)})
        print(
            f"batch {batch:2}: step {found.step_us:.0f} us, {batch / found.step_us * 1e6:.0f} tok/s, "
            f"host {found.host_us:.0f} us and {found.submit_us:.0f} us to submit, device idle {found.idle or 0:.2%}",
            flush=True,
        )
    return rows


def steady_run(options: argparse.Namespace) -> None:
    """Writes each part to the file as soon as it is measured."""
    model, device = SyntheticModel(options.model), open_device(options.device)
    engine = Engine.load(model, device, context=4096, batch=64, prefix_caching=False)
    steady_rows = time_steady(engine)
    if options.out:
        keep(options.out, {"steady": steady_rows})
    rows = streams(Bench.on(engine))
    for row in rows:
        print(f"in a row: {row['kernel']:16} {row['name']:16} {row['us']:8.2f} us per launch", flush=True)
    if options.out:
        keep(options.out, {"streams": rows})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--model", default="gemma-3-27b:q4_0")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--steady", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="commit to record in the file")
    options = parser.parse_args()
    if options.steady:
        steady_run(options)
        return
    failures: list[str] | None = None  # None: not checked
    if not options.skip_checks:
        device = open_for_checks(options.device)
        print(device.describe())
        failures = check_all(device)
        device.close()
        print("\n".join(failures) or "all kernels agree with NumPy", flush=True)
        failures += check_goldens(options.device)
    device = open_device(options.device)
    rows = time_encoder(options.model, device) + time_model(options.model, device)
    print(f"\n{'':32} {'ms per step':>11} {'tok/s':>9} {'GB/s':>9} {'TFLOP/s':>9}")
    for r in rows:
        if "tok_s" not in r:
            continue
        print(f"{r['label']:32} {r['ms']:11.2f} {r['tok_s']:9.0f} {r['GB_s']:9.0f} {r['TFLOP_s']:9.1f}")
    for missed in missed_targets(options.model, rows):
        print("missed:", missed)
    if options.out:
        about = {
            "device": f"{device.capabilities.name}, {device.capabilities.driver}, Vulkan",
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "model": f"{options.model} (synthetic)",
            "commit": options.commit,
            "command": "python -m benchmarks.gpu, and with --steady",
        }
        keep(options.out, about | {"rows": rows, "failures": failures})
    found = "skipped" if failures is None else "; ".join(failures) or "all passed"
    print("checks:", found)


def keep(path: Path, found: dict[str, Any]) -> None:
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
