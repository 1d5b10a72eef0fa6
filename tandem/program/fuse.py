"""Fuses ops, for every device; fusions for GPUs only are in devices/vulkan/fuse_launches.py.

Rewrites a model's op list into fewer, larger ops. Each pass can be switched off without changing results.

The pass `quantise` takes place in program/lower.py: with it, norm, GLU and attention kernels write int8 tiles
themselves; without it, a separate launch quantises their results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tandem.kernels.layout import Layout
from tandem.program.graph import Op, Value

PASSES = ("merge_matmuls", "glu", "residual_norm", "heads", "quantise")


def fuse(ops: list[Op], layouts: Mapping[str, Layout], passes: Iterable[str] = PASSES) -> list[Op]:
    """`layouts`: the layout of each matrix, by its name."""
    wanted = set(passes)
    if "merge_matmuls" in wanted:
        ops = merge_matmuls(ops, layouts)
    if "glu" in wanted:
        ops = glu_into_matmul(ops, layouts)
    if "residual_norm" in wanted:
        ops = residual_norm(ops)
    if "heads" in wanted:
        ops = heads(ops)
    return ops


def merge_matmuls(ops: list[Op], layouts: Mapping[str, Layout]) -> list[Op]:
    """Matmuls of the same input become one where their weights have the same layout: Q, K and V; gate and up."""
    out: list[Op] = []
    open_ops: dict[tuple[int, Layout], Op] = {}
    for op in ops:
        # A feed-forward that reads the same value as Q, K and V stays a GLU of its own.
        if op.kind == "attention":
            open_ops.clear()
        if op.kind != "matmul" or op.attrs["softcap"]:
            out.append(op)
            continue
        layout = layouts[op.attrs["matrices"][0].name]
        key = (id(op.inputs[0]), layout)
        first = open_ops.get(key)
        # Matrices are stacked by whole groups of rows.
        if first is not None and all(m.rows % layout.group_rows == 0 for m in first.attrs["matrices"]):
            first.attrs["matrices"] += op.attrs["matrices"]
            first.attrs["biases"] += op.attrs["biases"]
            first.outputs += op.outputs
        else:
            open_ops[key] = op
            out.append(op)
    return out


def glu_into_matmul(ops: list[Op], layouts: Mapping[str, Layout]) -> list[Op]:
    """activation(gate) * up becomes the epilogue of the matmul that computes both."""
    maker = {id(op.outputs[0]): op for op in ops if op.kind == "matmul" and len(op.outputs) == 2}
    out: list[Op] = []
    for op in ops:
        source = maker.get(id(op.inputs[0])) if op.kind == "glu" else None
        if (
            source
            and source.outputs == op.inputs
            and op.inputs[0].width % layouts[source.attrs["matrices"][0].name].glu_rows == 0
            and not any(source.attrs["biases"])
        ):
            source.outputs = op.outputs
            source.attrs["activation"] = op.attrs["activation"]
        else:
            out.append(op)
    return out


def residual_norm(ops: list[Op]) -> list[Op]:
    """x += norm(y) and h = norm(x) become one op: they follow each other between attention and feed-forward."""
    readers = consumers(ops)
    out: list[Op] = []
    for op in ops:
        last = out[-1] if out else None
        if op.kind == "add" and last and last.kind == "norm" and readers[last.outputs[0]] == [op]:
            attrs = {"post": last.attrs["weight"], "weight": None, "eps": last.attrs["eps"]}
            out[-1] = Op("add_norm", [op.inputs[0], last.inputs[0]], op.outputs, attrs)
        elif op.kind == "add":
            out.append(Op("add_norm", op.inputs, op.outputs, {"weight": None, "eps": 0.0}))
        elif (
            op.kind == "norm"
            and last
            and last.kind == "add_norm"
            and last.outputs == op.inputs
            and last.attrs["eps"] in (0.0, op.attrs["eps"])  # the kernel has one eps for both norms
        ):
            last.outputs = [*last.outputs, *op.outputs]
            last.attrs |= {"weight": op.attrs["weight"], "eps": op.attrs["eps"]}
        else:
            out.append(op)
    return out


def heads(ops: list[Op]) -> list[Op]:
    """Head norm, RoPE and the KV store of a layer become one op, which changes q and k in place."""
    out: list[Op] = []
    for op in ops:
        last = out[-1] if out else None
        if op.kind in ("head_norm", "rope") and not op.attrs["heads"].q_table:
            if op.kind == "rope" and last and last.kind == "heads" and last.outputs == op.inputs:
                last.outputs = op.outputs
                last.attrs["rope"] = True
            else:
                attrs = {
                    "heads": op.attrs["heads"],
                    "norm": op.attrs.get("weights"),
                    "rope": op.kind == "rope",
                    "store": False,
                }
                out.append(Op("heads", op.inputs, op.outputs, attrs))
        elif op.kind == "store" and last and last.kind == "heads" and last.outputs[1] is op.inputs[0]:
            last.inputs = [*last.inputs, op.inputs[1]]
            last.attrs["store"] = True
        else:
            out.append(op)
    return out


def consumers(ops: list[Op]) -> dict[Value, list[Op]]:
    readers: dict[Value, list[Op]] = {}
    for op in ops:
        for value in op.inputs:
            readers.setdefault(value, []).append(op)
    return readers
