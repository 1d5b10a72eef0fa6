"""The launches of a step on an RDNA3 GPU, as the engine makes them there, with the work of each."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tandem.bench.step_cost import ATTENTION, Step, kv_read
from tandem.devices.rdna3.device import PHOENIX
from tandem.devices.vulkan.fuse_launches import SINGLE, step_program
from tandem.devices.vulkan.recording import bucket
from tandem.engine.batch import QUERIES_PER_ITEM, ROWS_PER_ITEM
from tandem.kernels.dispatch_table import dispatch
from tandem.kernels.kernel import Counts
from tandem.plan.rdna3 import LaunchWork
from tandem.plan.rdna3_counts import shape_of, work_of
from tandem.program.program import Launch, Program


class Launched(NamedTuple):
    launch: Launch
    shader: str  # its entry in the table of counts
    work: LaunchWork


def step_counts(step: Step, rows: int | None, queries: int) -> Counts:
    """`queries`: query heads of a KV head."""
    of_item = max(1, min(ROWS_PER_ITEM, QUERIES_PER_ITEM // queries))
    items = sum(-(-count // of_item) for _, count in step)
    return {"tokens": sum(count for _, count in step), "rows": rows or len(step), "work": items}


def launches(program: Program, step: Step, rows: int | None = None) -> list[Launched]:
    """Every launch of a step, with its work."""
    attention = (launch.scalars for launch in program.launches if launch.kernel.name in ATTENTION)
    heads = next(attention, {"q_heads": 1})  # a model without attention has no items of it
    counts = step_counts(step, rows, int(heads["q_heads"] // heads.get("kv_heads", 1)))
    single = all(count == 1 for _, count in step)
    limits = {**program.max_counts, "work": max(program.max_counts["work"], counts["work"])}
    sizes = {name: bucket(counts[name], limits[name]) for name in counts}
    alike, known, found = Counter(step), dict[tuple[object, ...], tuple[str, LaunchWork]](), []
    for launch in step_program(program, {**sizes, SINGLE: int(single)}, PHOENIX).launches:
        key = (launch.kernel.name, *launch.scalars.values())
        if key not in known:
            nbytes = launch.cost(counts).bytes + kv_read(launch, alike)
            chosen = dispatch(launch.kernel.name, launch.scalars, sizes, PHOENIX)
            shape = shape_of(launch, chosen, step, counts)
            known[key] = shape.key, work_of(shape, nbytes)
        found.append(Launched(launch, *known[key]))
    return found
