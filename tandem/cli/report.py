"""`tandem report`: writes a file about this machine to attach to an issue."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tandem.bench.machine import disturbed
from tandem.cli.terminal import check_writable, printable
from tandem.devices.backends import check_timed
from tandem.report.sections import Report


def main(options: argparse.Namespace) -> int:
    check_writable(options.output)
    check_timed(options.device)
    report = Report(options.device, full=options.full, npu=options.npu, threads=options.threads)
    data = report.write(
        options.output, lambda text: print(f"  {printable(text)}", file=sys.stderr, flush=True)
    )
    _summary(data)
    print(f"\nwritten to {options.output}, without names or paths: check it, then attach it to an issue")
    return int(bool(data["problems"]))


def _summary(data: dict[str, Any]) -> None:
    print(data["device"].get("description", data["asked_for"]))
    rates = data.get("rates", {})
    for name, unit in (
        ("read_bytes_per_s", "GB/s read"),
        ("int8_ops_per_s", "GOP/s int8 dot products"),
        ("fp16_matrix_ops_per_s", "GFLOP/s float16 matrix units"),
    ):
        if rates.get(name):
            print(f"{rates[name] / 1e9:12,.1f} {unit}")
    rows = [
        (f"{model['model']}, {row['label']}", row)
        for model in data.get("bench", ()) if isinstance(model, dict) for row in model.get("rows", ())
    ]  # fmt: skip
    for label, row in rows:
        rate = f"{row['median']:12,.1f} tokens/s" if row["valid"] else f"{'INVALID':>12}         "
        print(f"{rate}  {label}")
    if others := disturbed(max((row["others"] for _, row in rows), default=0.0)):
        print(f"Warning: {others} at times, so the figures are too low: run it again on an idle machine.")
    for kernel in data.get("predictions", {}).get("worst", ()):
        print(
            f"{kernel['measured_us']:12,.1f} us, {kernel['predicted_us']:,.1f} predicted: {kernel['kernel']} of "
            f"{kernel['value']} ({kernel['model']}, {kernel['step']})"
        )
    if "npu" in data:
        print(f"NPU: {data['npu'].get('missing') or 'results are in the file'}")
    print(
        "\n".join(f"problem: {printable(problem)}" for problem in data["problems"])
        or "all kernels match NumPy"
    )
