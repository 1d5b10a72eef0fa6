"""`tandem bench`: how fast a model runs here, beside what the memory allows."""

from __future__ import annotations

import argparse
import dataclasses
from itertools import product

from tandem.bench.bandwidth import measure_bandwidth
from tandem.bench.profile import Group, profile
from tandem.bench.runs import Bench, Measured, Workload
from tandem.cli.models import model_file
from tandem.cli.npu import open_with_npu, settled
from tandem.cli.terminal import human_size, note, print_json, print_table
from tandem.errors import RequestError
from tandem.model.model import Model, open_model
from tandem.model.synthetic import SyntheticModel

HEADER = ("TEST", "TOK/S:", "95%:", "MS A STEP:", "GB/S:", "TFLOP/S:", "BANDWIDTH:")
PROFILE_HEADER = ("KERNEL", "VALUE", "LAUNCHES:", "US EACH:", "SHARE:", "MB:", "GB/S:", "TOP/S:")
OVER = 1.1  # of the bandwidth: one of the two figures is wrong then


def main(options: argparse.Namespace) -> int:
    options.npu = settled(options.npu)
    workloads = _workloads(options)
    model = _model(options)
    device = open_with_npu(
        options.npu, options.device, threads=options.threads,
        gpu_memory=options.gpu_memory and options.gpu_memory * 1e9,
        split=options.split, placement=options.placement,
    )  # fmt: skip
    try:
        bandwidth, how = measure_bandwidth(device, model.nbytes)
        note("loading")
        bench = Bench(model, device, workloads, options.kv)
        if not options.json:
            name = options.synthetic or options.model
            print(f"{name}, {human_size(model.nbytes)} of weights, on {device.describe()}")
            print(f"bandwidth: {how}, {bandwidth / 1e9:,.1f} GB/s; median of {options.rounds} rounds\n")
        rows = [_measure(bench, workload, options.rounds) for workload in workloads]
        profiles = {w.label: profile(bench, w) for w in workloads} if options.profile else {}
    finally:
        device.close()
    if options.json:
        print_json(
            {
                "model": options.synthetic or options.model,
                "weights_bytes": model.nbytes,
                "device": device.describe(),
                "bandwidth": {"bytes_per_s": bandwidth, "measured_by": how},
                "rows": [_data(row, bandwidth) for row in rows],
                "profiles": {
                    label: [dataclasses.asdict(group) for group in groups]
                    for label, groups in profiles.items()
                },
            }
        )
        return 0
    print_table(HEADER, [_cells(row, bandwidth) for row in rows])
    for row in rows:
        if row.gb_per_s > OVER * bandwidth / 1e9:
            print(f"Wrong: {row.workload.label} is above the bandwidth: one of the two was mismeasured.")
    for label, groups in profiles.items():
        _print_profile(label, groups)
    return 0


def _workloads(options: argparse.Namespace) -> list[Workload]:
    found = []
    for depth in options.depth:
        found += [Workload("prefill", n, 1, depth) for n in options.prompt if n]
        found += [
            Workload("decode", n, batch, depth)
            for n, batch in product(options.generate, options.batch)
            if n and batch
        ]
    if not found:
        raise RequestError("nothing to measure: give -p or -n a number above 0")
    return found


def _model(options: argparse.Namespace) -> Model:
    if bool(options.model) == bool(options.synthetic):
        raise RequestError("give either a MODEL or --synthetic SHAPE:FORMAT")
    return SyntheticModel(options.synthetic) if options.synthetic else open_model(model_file(options.model))


def _measure(bench: Bench, workload: Workload, rounds: int) -> Measured:
    measured = bench.measure(workload, rounds)
    note(f"{workload.label}: {measured.tokens_per_s:.1f} tok/s")
    return measured


def _cells(row: Measured, bandwidth: float) -> list[str]:
    low, high = row.interval
    return [
        row.workload.label,
        f"{row.tokens_per_s:,.1f}",
        f"{low:,.1f} to {high:,.1f}",
        f"{row.median / row.steps * 1e3:,.2f}",
        f"{row.gb_per_s:,.1f}",
        f"{row.tflop_per_s:,.2f}",
        f"{row.gb_per_s * 1e9 / bandwidth:.0%}",
    ]


def _data(row: Measured, bandwidth: float) -> dict[str, object]:
    return {
        **dataclasses.asdict(row),
        "label": row.workload.label,
        "tokens_per_s": row.tokens_per_s,
        "interval": row.interval,
        "gb_per_s": row.gb_per_s,
        "tflop_per_s": row.tflop_per_s,
        "of_bandwidth": row.gb_per_s * 1e9 / bandwidth,
    }


def _print_profile(label: str, groups: list[Group]) -> None:
    total = sum(group.seconds for group in groups)
    print(f"\n{label}: the first step, each launch alone: {total * 1e3:.2f} ms")
    rows = [
        (
            group.kernel,
            group.name,
            str(group.launches),
            f"{group.seconds / group.launches * 1e6:,.1f}",
            f"{group.seconds / total:.1%}",
            f"{group.cost.bytes / 1e6:,.1f}",
            f"{group.gb_per_s:,.1f}",
            f"{group.top_per_s:,.2f}",
        )
        for group in groups
    ]
    print_table(PROFILE_HEADER, rows)
