"""Times weight formats side by side on a GPU: synthetic models with every matrix in one format, one after the other.

    python -m benchmarks.gpu_formats [--device NAME] [--model SHAPE] [--formats q4_0,q4_k,...] [--profile] [--out FILE]

Rows are decode with batches of 1 to 64 and prefill; cells are tokens/s. `--profile` also prints the time per kernel.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tandem.bench.profile import profile
from tandem.bench.rounds import Bench, Workload
from tandem.devices.backends import open_device
from tandem.errors import TandemError
from tandem.model.synthetic import SyntheticModel

WORKLOADS = [
    *(Workload("decode", 24, batch, 128) for batch in (1, 2, 4, 8, 9, 16, 32, 64)),
    Workload("prefill", 512),
]


def time_format(name: str, device_name: str, profiled: bool) -> dict[str, Any]:
    """Tokens/s by workload, and GB/s or TFLOP/s of the first and the last."""
    device = open_device(device_name)
    try:
        bench = Bench(SyntheticModel(name), device, WORKLOADS)
        rows = {}
        for workload in WORKLOADS:
            row = bench.measure(workload, rounds=4)
            rows[workload.label] = {
                "tok_s": row.tokens_per_s,
                "GB_s": row.gb_per_s,
                "TFLOP_s": row.tflop_per_s,
            }
        for workload in (Workload("decode", 1, 1, 160), WORKLOADS[-1]) if profiled else ():
            print(f"profile of {name}: {workload.label}")
            for group in profile(bench, workload):
                print(
                    f"  {group.kernel:16} {group.name:24} {group.launches:4} {group.seconds * 1e3:8.3f} ms "
                    f"{group.gb_per_s:8.0f} GB/s {group.top_per_s:8.1f} TOP/s"
                )
        return rows
    finally:
        device.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--model", default="gemma-3-27b")
    parser.add_argument(
        "--formats",
        default="q4_0,q4_1,q5_0,q5_1,q8_0,q4_k,q5_k,q6_k,q3_k,q2_k,iq4_nl,iq4_xs,mxfp4,f16,bf16,f32",
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    lines = []
    for layout in options.formats.split(","):
        try:
            found[layout] = time_format(f"{options.model}:{layout}", options.device, options.profile)
        except TandemError as error:
            print(f"{layout}: {error}", flush=True)
            continue
        cells = list(found[layout].values())
        rates = " ".join(f"{cell['tok_s']:8.0f}" for cell in cells)
        lines.append(f"{layout:6} {rates} {cells[0]['GB_s']:8.0f} {cells[-1]['TFLOP_s']:8.1f}")
        print(lines[-1], flush=True)
        if options.out:
            options.out.write_text(json.dumps({"model": options.model, "formats": found}, indent=1) + "\n")
    head = " ".join(f"{w.batch if w.kind == 'decode' else 'prefill':>8}" for w in WORKLOADS)
    print(
        f"\n{options.model}, tok/s by batch size\n{'':6} {head} {'GB/s':>8} {'TFLOP/s':>8}", *lines, sep="\n"
    )


if __name__ == "__main__":
    main()
