"""Counts what our kernels execute on an RDNA3 GPU, in the emulator, and writes the table that `tandem plan` reads.

    TANDEM_RADV=build/mesa python -m tandem.plan.count_kernels

Models of one layer run steps of each size. Of each launch that is new, a few workgroups are executed; from launches of
several shapes follow the counts of a wave and of a unit of work (rdna3_counts.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from math import prod

from tandem.bench.profile import program_of, step_written
from tandem.bench.rounds import Bench, Workload
from tandem.bench.step_cost import Step
from tandem.devices.rdna3.counting import counts_of
from tandem.devices.rdna3.device import EmulatedDevice
from tandem.devices.vulkan.recording import bucket
from tandem.kernels.dispatch_table import dispatch
from tandem.kernels.panels import LAYOUTS
from tandem.model.config import Rope
from tandem.model.synthetic import SyntheticModel
from tandem.plan.rdna3_counts import FIELDS, FILE, Sample, fit, shape_of
from tandem.program.program import Launch

MIN_COLUMNS = 1024
ENOUGH, ENOUGH_MATMULS = 5, 12  # launches of a shader to count
GROUPS = 2  # workgroups along x that are executed
SIZES = ((1536, 3072, 200), (2048, 5120, 400))  # width of a model, of its feed-forward, and a depth
TOKENS, PROMPTS, VOCAB = (1, 2, 4, 8, 12, 16, 24, 32, 33, 47, 64), (512, 256, 70, 100, 128), 2048
FAMILIES = ("llama-3-8b", "qwen3-8b", "gemma-3-4b")  # of which each has launches that the others have not
QUERY_GROUPS, USUAL_GROUP = (1, 2, 4, 8), 4  # query heads of a KV head; prompts run alike with any
HEADS = (64, 128, 256)  # columns

Done = dict[str, set[tuple[int, float, int]]]  # of each entry: workgroups, units and tokens


def main() -> None:
    device, done = EmulatedDevice(), Done()
    found: list[Sample] = []
    try:
        for layout, size in ((layout, size) for layout in LAYOUTS for size in SIZES):
            found += samples(device, done, FAMILIES[0], layout, size, USUAL_GROUP, 128)
            print(f"{layout}, {size[0]} columns: {len(found)} launches", flush=True)
        attention = [(kv, group, head) for kv in ("f16", "q8") for group in QUERY_GROUPS for head in HEADS]
        for kv, group, head in attention:
            for family in FAMILIES if group == USUAL_GROUP else FAMILIES[:1]:
                for size in SIZES:
                    found += samples(device, done, family, "q4_0", size, group, head, kv)
        print(f"{len(found)} launches", flush=True)
    finally:
        device.close()
    write(found)


def write(found: list[Sample]) -> None:
    by_key = groupby(sorted(found, key=lambda s: s.shape.key), lambda s: s.shape.key)
    lines = ",\n".join(f'  "{key}": {json.dumps(fit(list(same)))}' for key, same in by_key)
    FILE.write_text(f'{{\n "fields": {json.dumps(FIELDS)},\n "shaders": {{\n{lines}\n }}\n}}\n')


def samples(
    device: EmulatedDevice, done: Done, family: str, layout: str, size: tuple[int, int, int], group: int, head: int,
    kv: str = "f16",
) -> Iterator[Sample]:  # fmt: skip
    """Of the launches of a layer and what is around it that are not in `done`."""
    columns, ffn, depth = size
    model = SyntheticModel(f"{family}:{layout}", 1)
    old = model.config
    model.config = replace(
        old, dim=columns, ffn_dim=ffn, q_heads=2 * group, kv_heads=2, head_dim=head, vocab=VOCAB,
        ropes=tuple(Rope(rope.base, head, rope.linear) for rope in old.ropes),
    )  # fmt: skip
    workloads = [Workload("decode", 1, tokens, depth) for tokens in TOKENS]
    if group == USUAL_GROUP:
        workloads += [Workload("prefill", tokens) for tokens in PROMPTS]
    bench = Bench(model, device, workloads, kv)
    for workload in workloads:
        yield from _step(device, done, bench, workload)


def _step(device: EmulatedDevice, done: Done, bench: Bench, workload: Workload) -> Iterator[Sample]:
    step: Step = next(iter(bench.steps(workload)))
    with step_written(bench, workload, step) as slot:
        header = device.memory("step").view("int32")
        limits = bench.engine.program.max_counts
        own = {name: int(header[i]) for i, name in enumerate(limits)}
        counts = {name: bucket(own[name], limit) for name, limit in limits.items()}
        for launch in program_of(bench.engine, step).launches:
            chosen = dispatch(launch.kernel.name, launch.scalars, counts, device.capabilities)
            shape = shape_of(launch, chosen, step, own)
            counted = done.setdefault(shape.key, set())
            enough = ENOUGH_MATMULS if launch.kernel.name.startswith("matmul") else ENOUGH
            if (new := shape[1:3] + shape[4:]) in counted or len(counted) >= enough or _is_narrow(launch):
                continue
            counted.add(new)
            device.counting = True
            device.launch(launch, counts, groups=GROUPS)
            device.counting = False
            assert device.executed and slot
            threads = prod(device.executed.program.machine_code.threads)
            share = prod(device.executed.grid) / shape.groups
            yield Sample(shape, share, counts_of(device.executed), threads)


def _is_narrow(launch: Launch) -> bool:
    """Too few columns for all waves of a workgroup: no model has such matrices."""
    return launch.kernel.name.startswith("matmul") and launch.scalars["columns"] < MIN_COLUMNS


if __name__ == "__main__":
    main()
