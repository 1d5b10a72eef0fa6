"""Fuses the launches of a step for GPUs: a pass Program -> Program, for each bucket of counts.

A Program has one launch per op. This pass fuses launches of decode steps and of mixtures of experts, and binds launches
to the scratch memory that their shaders use. Fused launches are declared like all others: barriers follow from what
they read and write, validate.py checks them, and `tandem inspect --program` and profiles show them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

from tandem.kernels import (
    attention_prefetch,
    attention_rope,
    combine_norm,
    expand,
    expert_matmul_tokens,
    matmul_norm_partials,
    norm_finish,
    route_group,
)
from tandem.kernels.dispatch import PART_SUMS_BYTES, SCRATCH_BYTES, Gpu
from tandem.kernels.dispatch_table import DISPATCH_RULES, dispatch
from tandem.kernels.kernel import PART_SUMS_ADDRESS, SCRATCH_ADDRESS, Buffer, Counts, Kernel
from tandem.kernels.matmul import layout_of
from tandem.kernels.matmul_dispatch import rows_per_sum
from tandem.kernels.matmul_norm_partials import partials_bytes
from tandem.kernels.panels import LAYOUTS
from tandem.program.hazards import PendingAccesses
from tandem.program.program import Launch, Program, Tensor

SCRATCH = "scratch"  # an arena of the device, in addition to the arenas of the Program
# Key of a bucket in addition to COUNTS: 1 if every sequence has one token (decode only).
SINGLE = "single"


def step_program(
    program: Program, counts: Counts, gpu: Gpu, begin: int = 0, end: int | None = None
) -> Program:
    """The launches that a step with these counts (and SINGLE) runs in place of launches [begin, end)."""
    plain = program.launches[begin:end]
    launches = list(bind_scratch(list(fuse(plain, program.launches, counts, gpu)), counts, gpu))
    limits = {name: min(counts[name], limit) for name, limit in program.max_counts.items()}
    sizes = {**program.arena_bytes, SCRATCH: SCRATCH_BYTES + PART_SUMS_BYTES}
    return Program(with_barriers(launches, set(plain)), limits, sizes)


# ---- fusion


def fuse(launches: Sequence[Launch], whole: Sequence[Launch], counts: Counts, gpu: Gpu) -> Iterator[Launch]:
    """Yields `launches`, with some neighbours replaced by a fused launch. Mixtures: routing, grouping and quantising,
    and `combine` with its norm. Steps with one token per sequence: `rope` and attention. Steps with a single token: a
    matmul and the norm of its result. `whole`: all launches of the Program, of which `launches` may be a part."""
    reads = Counter(tensor.root for launch in whole for tensor in launch.touched("r"))
    at = 0
    while at < len(launches):
        if routed := _route_group(launches[at : at + 3], counts, gpu):
            yield routed
            at += 2 + (routed.buffers["x"] is not None)
        elif at + 1 < len(launches) and (fused := _fuse(launches[at], launches[at + 1], reads, counts, gpu)):
            yield from fused
            at += 2
        else:
            yield launches[at]
            at += 1


def _route_group(launches: Sequence[Launch], counts: Counts, gpu: Gpu) -> Launch | None:
    """Routing, grouping and, if it follows, the quantisation of the experts' activations."""
    names = [launch.kernel.name for launch in launches]
    if names[:2] != ["route", "group_tokens"]:
        return None
    route, group, quantise = launches[0], launches[1], launches[2] if names[2:] == ["quantise"] else None
    if quantise and quantise.scalars["count_rows"]:
        quantise = None
    sizes = {name: quantise.scalars[name] if quantise else 0 for name in ("dim", "x_stride")}
    scalars = {**route.scalars, **sizes}
    if not DISPATCH_RULES[route_group.KERNEL.name](scalars, counts, gpu):
        return None
    of_quantise = {"x": quantise.buffers["x"], "quantised": quantise.buffers["out"]} if quantise else {}
    buffers = {
        "x": None,
        "quantised": None,
        **route.buffers,
        "groups": group.buffers["groups"],
        **of_quantise,
    }
    barrier = any(launch.barrier for launch in launches[: 3 if quantise else 2])
    return Launch(route_group.KERNEL, buffers, scalars, route.name, barrier)


def _fuse(first: Launch, second: Launch, reads: Counter[Tensor], counts: Counts, gpu: Gpu) -> list[Launch]:
    """The launches that replace two launches; empty: these stay."""
    if (first.kernel.name, second.kernel.name) == ("combine", "norm"):
        return _combine_norm(first, second, reads)
    if first.kernel.name == "gather_tokens" and second.kernel.name.startswith("expert_matmul_"):
        return _experts_by_token(first, second, reads, counts, gpu)
    if not counts.get(SINGLE):
        return []
    if (first.kernel.name, second.kernel.name) == ("rope", "attention"):
        return _attention_rope(first, second, reads, counts, gpu)
    if first.kernel.name.startswith("matmul_") and second.kernel.name == "norm" and counts["tokens"] == 1:
        return _matmul_norm(first, second, reads, counts, gpu)
    return []


def _experts_by_token(
    gather: Launch, experts: Launch, reads: Counter[Tensor], counts: Counts, gpu: Gpu
) -> list[Launch]:
    """Experts that find the activations of their slots' tokens themselves."""
    slots, kernel = gather.buffers["out"], expert_matmul_tokens.BY_LAYOUT.get(layout_of(experts.scalars))
    scalars = {**experts.scalars, "x_stride": gather.scalars["x_stride"]}
    if kernel is None or slots is None or experts.buffers["x"] is not slots or reads[slots.root] > 1:
        return []
    if not DISPATCH_RULES[kernel.name](scalars, counts, gpu):
        return []
    buffers = {**experts.buffers, "x": gather.buffers["x"]}
    return [Launch(kernel, buffers, scalars, experts.name, gather.barrier or experts.barrier)]


def _combine_norm(combine: Launch, norm: Launch, reads: Counter[Tensor]) -> list[Launch]:
    """The norm of a residual stream to which it adds what experts computed."""
    added = combine.buffers["out"]
    if norm.buffers["add"] is not added or added is None or reads[added.root] > 1:
        return []
    if combine.buffers["shared"] is not None or norm.scalars["use_rows"]:
        return []
    scalars = combine_norm.fused_scalars(combine.scalars, norm.scalars)
    of_combine = {
        "add": combine.buffers["x"],
        **{name: combine.buffers[name] for name in ("weights", "groups")},
    }
    of_norm = {name: norm.buffers[name] for name in ("x", "post_weight", "weight", "out")}
    barrier = combine.barrier or norm.barrier
    return [Launch(combine_norm.KERNEL, {**of_norm, **of_combine}, scalars, norm.name, barrier)]


def _attention_rope(
    rope: Launch, attention: Launch, reads: Counter[Tensor], counts: Counts, gpu: Gpu
) -> list[Launch]:
    """Attention with RoPE and the KV store, preceded by a prefetch of its inputs if that is faster."""
    q, k, v, cache = (rope.buffers[name] for name in ("q", "k", "v", "cache"))
    if q is None or k is None or v is None or cache is None or cache is not attention.buffers["cache"]:
        return []
    norms, sinks, table = rope.buffers["vectors"], attention.buffers["sinks"], rope.buffers["table"]
    if (norms and sinks) or not table or table.arena == "step":  # the kernel finds angles by position
        return []
    qkv = q.root  # one matrix, which no other launch reads
    together = qkv is k.root is v.root and q.stride == k.stride == v.stride == qkv.stride
    if q is not attention.buffers["q"] or q.start != qkv.start or not together or reads[qkv] != 4:
        return []
    columns = ((t.start - qkv.start) // 4 for t in (k, v))
    scalars = attention_rope.fused_scalars(rope.scalars, attention.scalars, *columns)
    bound = {**rope.buffers, **attention.buffers, "qkv": qkv}
    launches = []
    for kernel, barrier, vectors in (
        (attention_prefetch.KERNEL, False, norms),
        (attention_rope.KERNEL, attention.barrier, norms or sinks),
    ):
        bound["vectors"] = vectors
        if DISPATCH_RULES[kernel.name](scalars, counts, gpu):
            buffers = {buffer.name: bound[buffer.name] for buffer in kernel.buffers}
            launches.append(Launch(kernel, buffers, scalars, attention.name, barrier))
    return launches if launches and launches[-1].kernel is attention_rope.KERNEL else []


def _matmul_norm(
    matmul: Launch, norm: Launch, reads: Counter[Tensor], counts: Counts, gpu: Gpu
) -> list[Launch]:
    """A matmul that writes partial sums, and the norm that finishes them.

    The matmul's result is not stored, so no other launch may read it.
    """
    s, n, out = matmul.scalars, norm.scalars, matmul.buffers["out"]
    if out is None or norm.buffers["add"] is not out or norm.buffers["weight"] is None or reads[out.root] > 1:
        return []
    plain = not (n["use_rows"] or s["epilogue"] or s["count"]) and LAYOUTS[layout_of(s)].quantised
    if not plain or s["rows"] != n["dim"] or n["dim"] % 32:
        return []
    per_sum = {"rows_per_sum": rows_per_sum(gpu)}
    kernel, scalars = matmul_norm_partials.BY_LAYOUT[layout_of(s)], {**s, **per_sum}
    if not DISPATCH_RULES[kernel.name](scalars, counts, gpu):
        return []
    partials = Tensor(
        f"{out.name}.partials", SCRATCH, "f32", partials_bytes(n["dim"], per_sum["rows_per_sum"]), offset=0
    )
    of_norm = {name: norm.buffers[name] for name in ("weight", "post_weight")}
    given = {name: matmul.buffers[name] for name in ("x", "weights", "bias")}
    buffers = {**given, **of_norm, "residual": norm.buffers["x"], "partials": partials}
    finished = {name: norm.buffers[name] for name in ("x", "post_weight", "out")} | {"partials": partials}
    return [
        Launch(kernel, buffers, scalars, matmul.name, matmul.barrier),
        Launch(norm_finish.KERNEL, finished, {**n, **per_sum}, norm.name, norm.barrier),
    ]


# ---- scratch memory


def bind_scratch(launches: Sequence[Launch], counts: Counts, gpu: Gpu) -> Iterator[Launch]:
    """Binds the device's scratch memory to the launches whose shaders use it.

    A matmul that reads its activations from there is preceded by a launch that expands them, unless the norm before it
    has written them.
    """
    expanded: Tensor | None = None  # activations that the previous launch has written to scratch memory
    expanded_from: Tensor | None = None  # the same activations in int8
    for launch in launches:
        dispatch_ = dispatch(launch.kernel.name, launch.scalars, counts, gpu)
        if dispatch_.expand:
            x, kernel = launch.buffers["x"], expand.BY_NAME[dispatch_.expand]
            assert x is not None
            if expanded is None or expanded_from is not x:
                nbytes = expand.expanded_bytes(kernel.name, launch.scalars, counts)
                expanded = Tensor(f"{x.name}.expanded", SCRATCH, "f16", nbytes, offset=0)
                yield Launch(
                    kernel, {"x": x, "expanded": expanded}, launch.scalars, expanded.name, launch.barrier
                )
            reading = _with_buffer(launch, SCRATCH, "r", SCRATCH_ADDRESS, expanded)
            if dispatch_.part_sums:
                name, place = f"{launch.name}.part_sums", SCRATCH_BYTES
                sums = Tensor(name, SCRATCH, "f32", PART_SUMS_BYTES, offset=place)
                reading = _with_buffer(reading, "part_sums", "w", PART_SUMS_ADDRESS, sums)
            yield reading
            expanded = expanded_from = None
        elif dispatch_.scratch:
            scratch = Tensor(f"{launch.name}.scratch", SCRATCH, "", SCRATCH_BYTES, offset=0)
            # A norm also writes its output there, in register order.
            is_norm = launch.kernel.name in ("norm", "combine_norm")
            expanded, expanded_from = (scratch, launch.buffers["out"]) if is_norm else (None, None)
            yield _with_buffer(launch, SCRATCH, "w", SCRATCH_ADDRESS, scratch)
        else:
            expanded = expanded_from = None
            yield launch


def _with_buffer(
    launch: Launch, name: str, access: Literal["r", "w"], address: int, tensor: Tensor
) -> Launch:
    kernel = _kernel_with(launch.kernel, Buffer(name, access, address))
    return replace(launch, kernel=kernel, buffers={**launch.buffers, name: tensor})


@cache
def _kernel_with(kernel: Kernel, buffer: Buffer) -> Kernel:
    """The kernel as a GPU runs it, with a buffer in scratch memory that it does not declare itself."""

    def extents(scalars: object, counts: Counts) -> dict[str, int]:
        return {**kernel.extents(scalars, counts), buffer.name: 0}  # type: ignore[arg-type]

    return replace(kernel, buffers=(*kernel.buffers, buffer), extents=extents)


def with_barriers(launches: Sequence[Launch], plain: set[Launch]) -> list[Launch]:
    """Each launch with the barrier that it had, or that the changes of this pass make necessary.

    `plain`: unchanged launches, which have the barriers that they need among themselves.
    """
    since, changed_since, ordered = PendingAccesses(), PendingAccesses(), []
    for launch in launches:
        changed = launch not in plain
        barrier = launch.barrier or (since if changed else changed_since).conflict(launch) is not None
        if barrier:
            since, changed_since = PendingAccesses(), PendingAccesses()
        since.add(launch)
        if changed:
            changed_since.add(launch)
        ordered.append(launch if launch.barrier == barrier else replace(launch, barrier=barrier))
    return ordered
