"""`route`, `group_tokens` and `quantise` of the experts' activations, in one launch.

For GPUs only (route.slang), and few tokens: the last workgroup that has routed its token groups them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels import group_tokens, quantise, route
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.experts import groups_bytes
from tandem.kernels.kernel import AFTER_SCALARS, Array, Buffer, Case, Cost, Counts, Kernel, Scalars
from tandem.kernels.q8_tiles import q8_bytes, q8_pack
from tandem.kernels.rows import padded, rows_bytes

MAX_TOKENS = 32  # for more, grouping takes more threads than routing


def _of_quantise(s: Scalars) -> dict[str, float]:
    return {"dim": s["dim"], "x_stride": s["x_stride"], "count_rows": 0}


def cost(s: Scalars, counts: Counts) -> Cost:
    each = route.cost(s, counts), group_tokens.cost(s, counts), quantise.cost(_of_quantise(s), counts)
    return Cost(sum(c.bytes for c in each), sum(c.ops for c in each))


def extents(s: Scalars, counts: Counts) -> dict[str, int]:
    n, dim = counts["tokens"], int(s["dim"])
    return {
        **route.extents(s, counts),
        "groups": groups_bytes(n, s),
        "x": rows_bytes(n, dim, s["x_stride"]),
        "quantised": q8_bytes(n, dim),
    }


def reference(arrays: Mapping[str, Array], s: Scalars, counts: Counts) -> dict[str, Array]:
    out = route.reference(arrays, s, counts)
    grouped = group_tokens.reference({"chosen": out["chosen"], "groups": arrays["groups"]}, s, counts)
    if "x" not in arrays:
        return {**out, **grouped}
    x = {"x": arrays["x"], "out": arrays["quantised"]}
    return {**out, **grouped, "quantised": quantise.reference(x, _of_quantise(s), counts)["out"]}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for case, dim in zip(route.cases(rng), (64, 2048, 0, 96, 160, 32, 64, 0), strict=True):
        n = case.counts["tokens"]
        sizes = {"dim": dim, "x_stride": dim + 3 if dim else 0}
        groups = np.zeros(groups_bytes(n, case.scalars) // 4, np.int32)
        arrays = {**case.arrays, "groups": groups}
        if dim:
            arrays["x"] = padded(rng.standard_normal((n, dim)).astype(np.float32), dim + 3)
            arrays["quantised"] = q8_pack(rng.standard_normal((n, dim)))
        scalars = {**case.scalars, **sizes}
        yield Case(f"{case.label}, dim={dim}", arrays, scalars, case.counts, rtol=case.rtol)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch | None:
    """x: a token. y: the first workgroup routes it, with a thread for each expert; each of the others quantises a part
    of its activations. None for too many tokens or experts."""
    threads = max(64, 1 << (int(scalars["experts"]) - 1).bit_length())
    if counts["tokens"] > MAX_TOKENS or threads > gpu.workgroup_invocations:
        return None
    parts = -(-int(scalars["dim"]) // (4 * threads))
    return Dispatch(counts["tokens"], 1 + parts, constants=(threads,), scratch="w")


KERNEL = Kernel(
    name="route_group",
    buffers=(
        *route.KERNEL.buffers,
        Buffer("groups", "w"),
        Buffer("x", "r"),  # float32 [T, x_stride]
        Buffer("quantised", "w", AFTER_SCALARS),  # q8 [T, dim]
    ),
    scalars=(*route.KERNEL.scalars, ("dim", "i"), ("x_stride", "i")),
    grid=route.KERNEL.grid,
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
    gpu_only=True,
)
