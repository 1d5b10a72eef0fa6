"""Reads the memory that attention of a single token is about to read into the GPU's cache; writes nothing.

For GPUs only (attention_prefetch.slang). It runs beside the matmul that computes the query. Since the last step, the
weights have evicted this layer's KV blocks from the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels import attention_rope
from tandem.kernels.kernel import AFTER_SCALARS, Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars


def cost(scalars: Scalars, counts: Counts) -> Cost:
    """Zero: attention already counts these bytes."""
    return Cost(bytes=0.0, ops=0.0)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    extents = attention_rope.extents(scalars, counts)
    return {buffer.name: extents[buffer.name] for buffer in KERNEL.buffers}


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    return {}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for positions, window in (([0], 0), ([300], 100), ([700], 0)):
        case = attention_rope.make_case(rng, f"at {positions[0]}", (4, 2, 64), positions, window)
        arrays = {buffer.name: case.arrays[buffer.name] for buffer in KERNEL.buffers}
        yield Case(case.label, arrays, case.scalars, case.counts)


KERNEL = Kernel(
    name="attention_prefetch",
    # The inputs of attention_rope that no launch of the step writes.
    buffers=(
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
