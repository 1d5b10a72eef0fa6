"""The tokens of each expert: sorts the choices of a step by expert, and gives each a slot (experts.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.experts import chosen_bytes, group, groups_bytes, random_choice
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars

MAX_WORKGROUPS = 16


def extents(s: Scalars, counts: Counts) -> dict[str, int]:
    return {"chosen": chosen_bytes(counts["tokens"], s), "groups": groups_bytes(counts["tokens"], s)}


def cost(s: Scalars, counts: Counts) -> Cost:
    return Cost(bytes=sum(extents(s, counts).values()), ops=2 * counts["tokens"] * s["used"])


def reference(arrays: Mapping[str, Array], s: Scalars, counts: Counts) -> dict[str, Array]:
    groups = arrays["groups"].copy()
    written = group(arrays["chosen"][: counts["tokens"]], int(s["experts"]))
    groups[: len(written)] = written
    return {"groups": groups}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for tokens, experts, used in ((1, 8, 2), (5, 128, 8), (33, 4, 2), (64, 32, 4), (512, 8, 2), (3, 3, 3)):
        arrays = {
            "chosen": random_choice(tokens, used, experts, rng),
            "groups": np.zeros(groups_bytes(tokens, {"experts": experts, "used": used}) // 4, np.int32),
        }
        label = f"{tokens} tokens, {used} of {experts} experts"
        counts = {"tokens": tokens, "rows": 0, "work": 0}
        yield Case(label, arrays, {"experts": experts, "used": used}, counts)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch | None:
    """Workgroups with some of the experts each, and a thread for each expert or several."""
    threads, experts = min(1024, gpu.workgroup_invocations), int(scalars["experts"])
    workgroups = min(experts, MAX_WORKGROUPS)
    return Dispatch(workgroups, constants=(threads, workgroups)) if experts <= threads else None


KERNEL = Kernel(
    name="group_tokens",
    buffers=(Buffer("chosen", "r"), Buffer("groups", "w")),
    scalars=(("experts", "i"), ("used", "i")),
    grid=lambda scalars: Grid(1),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)
