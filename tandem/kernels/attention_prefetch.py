"""Reads what attention of a single token is about to read, so that it is in the GPU's cache by then; writes nothing.

For GPUs only (attention_prefetch.slang). It runs beside the matmul that makes the query: since this layer's attention
in the last step, all weights have gone through the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels import attention_rope
from tandem.kernels.kernel import AFTER_SCALARS, Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars


def cost(scalars: Scalars, counts: Counts) -> Cost:
    """None of its own: what it reads counts as attention's, which reads it again, from cache."""
    return Cost(bytes=0.0, ops=0.0)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    of_all = attention_rope.extents(scalars, counts)
    return {buffer.name: of_all[buffer.name] for buffer in KERNEL.buffers}


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    return {}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for positions, window in (([0], 0), ([300], 100), ([700], 0)):
        case = attention_rope.make_case(rng, f"at {positions[0]}", (4, 2, 64), positions, window)
        arrays = {buffer.name: case.arrays[buffer.name] for buffer in KERNEL.buffers}
        yield Case(case.label, arrays, case.scalars, case.counts)


KERNEL = Kernel(
    name="attention_prefetch",
    buffers=(  # of attention_rope, those that it reads and no launch of the step has written
        Buffer("cache", "r", 1),
        Buffer("tables", "r", 2),
        Buffer("work", "r", 3),
        Buffer("vectors", "r", 5),
        Buffer("table", "r", AFTER_SCALARS),
    ),
    scalars=attention_rope.KERNEL.scalars,
    constants=attention_rope.KERNEL.constants,
    grid=lambda scalars: Grid(int(scalars["kv_heads"])),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
    gpu_only=True,
)
