"""`combine` and the norm that adds its result to the residual stream: one launch, in which the result is not stored.

For GPUs only (norm.slang), and without a shared expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from tandem.kernels import combine, norm, norm_dispatch
from tandem.kernels.dispatch import Dispatch, Gpu, padded
from tandem.kernels.experts import chosen_bytes, group, groups_bytes, max_slots, random_choice
from tandem.kernels.kernel import AFTER_SCALARS, Array, Buffer, Case, Cost, Counts, Kernel, Scalars

COMBINED_CONSTANT = 7  # of norm.slang


def fused_scalars(of_combine: Scalars, of_norm: Scalars) -> dict[str, float]:
    """The scalars of two launches: the experts' outputs are what the norm adds."""
    sizes = {name: of_combine[name] for name in ("experts", "used")}
    return {**of_norm, **sizes, "add_stride": of_combine["x_stride"]}


def _of_combine(s: Scalars) -> dict[str, float]:
    return {
        "dim": s["dim"], "experts": s["experts"], "used": s["used"], "x_stride": s["add_stride"],
        "shared_stride": 0, "gate_stride": 0, "out_stride": s["dim"],
    }  # fmt: skip


def _of_norm(s: Scalars) -> dict[str, float]:
    own = {name: s[name] for name, _ in norm.KERNEL.scalars}
    return {**own, "add_stride": s["dim"]}


def cost(s: Scalars, counts: Counts) -> Cost:
    stored = 8.0 * counts["tokens"] * s["dim"]  # the result of `combine`, which is neither written nor read
    both = combine.cost(_of_combine(s), counts), norm.cost(_of_norm(s), counts)
    return Cost(sum(c.bytes for c in both) - stored, sum(c.ops for c in both))


def extents(s: Scalars, counts: Counts) -> dict[str, int]:
    n, of_norm = counts["tokens"], norm.extents(s, counts)
    return {
        **{name: of_norm[name] for name in ("x", "post_weight", "weight", "out")},
        "add": combine.extents(_of_combine(s), counts)["x"],
        "weights": chosen_bytes(n, s),
        "groups": groups_bytes(n, s),
    }


def reference(arrays: Mapping[str, Array], s: Scalars, counts: Counts) -> dict[str, Array]:
    of_combine = {name: arrays[name] for name in ("weights", "groups")}
    out = np.zeros((counts["tokens"], int(s["dim"])))
    added = combine.reference({**of_combine, "x": arrays["add"], "out": out}, _of_combine(s), counts)["out"]
    return norm.reference({**arrays, "add": added}, _of_norm(s), counts)


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for case in combine.cases(rng):
        if case.scalars["shared_stride"]:
            continue
        tokens, dim = case.counts["tokens"], int(case.scalars["dim"])
        for options in ("add", "add post", "add only", *(["add q8"] if dim % 32 == 0 else [])):
            of_norm = norm.make_case(rng, f"{tokens}x{dim}", tokens, dim, options)
            arrays = {**of_norm.arrays, **{name: case.arrays[name] for name in ("weights", "groups")}}
            arrays["add"] = case.arrays["x"]
            scalars = fused_scalars(case.scalars, of_norm.scalars)
            yield Case(f"{case.label} {options}", arrays, scalars, case.counts, atol=1e-5, rtol=1e-5)
    for experts, used, tokens, dim in ((4, 2, 2, 256), (9, 8, 1, 2048), (8, 3, 20, 64)):
        of_norm = norm.make_case(rng, f"{tokens}x{dim}, aligned", tokens, dim, "add q8")
        sizes = {"experts": experts, "used": used}
        arrays = {
            **of_norm.arrays,
            "groups": group(random_choice(tokens, used, experts, rng), experts),
            "add": rng.standard_normal((max_slots(tokens, sizes), dim)).astype(np.float32),
            "weights": rng.uniform(0.1, 1.0, (tokens, used)).astype(np.float32),
        }
        scalars = fused_scalars({**sizes, "x_stride": dim}, of_norm.scalars)
        yield Case(of_norm.label, arrays, scalars, of_norm.counts, atol=1e-5, rtol=1e-5)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """As the norm alone."""
    alone = norm_dispatch.norm(scalars, counts, gpu)
    return replace(alone, constants=(*padded(alone.constants, COMBINED_CONSTANT), int(scalars["used"])))


KERNEL = Kernel(
    name="combine_norm",
    buffers=(
        Buffer("x", "rw"),  # float32 [T, x_stride]
        Buffer("add", "r"),  # float32 [slots, add_stride]
        Buffer("post_weight", "r"),  # float32 [dim]
        Buffer("weight", "r"),  # float32 [dim]
        Buffer("out", "w"),  # float32 [T, out_stride] or q8 [T, dim]
        Buffer("groups", "r"),
        Buffer("weights", "r", AFTER_SCALARS),  # float32 [T, used]
    ),
    scalars=(*norm.KERNEL.scalars, ("experts", "i"), ("used", "i")),
    grid=norm.KERNEL.grid,
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
    gpu_only=True,
)
