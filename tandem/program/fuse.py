"""Rewrites a model's op list into fewer, larger ops. Each pass can be switched off; results agree.

`quantise` is listed here for completeness: with it, norms, GLUs and attention write int8 tiles themselves
(program/lower.py asks); without it a launch of its own does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tandem.kernels.abi import GLU_ROWS
from tandem.program.graph import Matrix, Op, Value

PASSES = ("merge_matmuls", "glu", "residual_norm", "heads", "quantise")
LayoutOf = Callable[[Matrix], str]


def fuse(ops: list[Op], layout_of: LayoutOf, passes: Iterable[str] = PASSES) -> list[Op]:
    wanted = set(passes)
    if "merge_matmuls" in wanted:
        ops = merge_matmuls(ops, layout_of)
    if "glu" in wanted:
        ops = glu_into_matmul(ops, layout_of)
    if "residual_norm" in wanted:
        ops = residual_norm(ops)
    if "heads" in wanted:
        ops = heads(ops)
    return ops


def merge_matmuls(ops: list[Op], layout_of: LayoutOf) -> list[Op]:
    """Q, K and V, and gate and up, read the same input: one matmul each where the weights have one layout."""
    out: list[Op] = []
    open_ops: dict[tuple[int, str], Op] = {}
    for op in ops:
        if op.kind != "matmul" or op.attrs["softcap"]:
            out.append(op)
            continue
        key = (id(op.inputs[0]), layout_of(op.attrs["matrices"][0]))
        first = open_ops.get(key)
        # Stacking moves a part's first row; only whole panels can be moved.
        if first is not None and all(m.rows % 16 == 0 for m in first.attrs["matrices"]):
            first.attrs["matrices"] += op.attrs["matrices"]
            first.attrs["biases"] += op.attrs["biases"]
            first.outputs += op.outputs
        else:
            open_ops[key] = op
            out.append(op)
    return out


def glu_into_matmul(ops: list[Op], layout_of: LayoutOf) -> list[Op]:
    """activation(gate) * up as the epilogue of the matmul that makes both."""
    maker = {id(op.outputs[0]): op for op in ops if op.kind == "matmul" and len(op.outputs) == 2}
    out: list[Op] = []
    for op in ops:
        source = maker.get(id(op.inputs[0])) if op.kind == "glu" else None
        if (
            source
            and source.outputs == op.inputs
            and op.inputs[0].width % GLU_ROWS == 0
            and not any(source.attrs["biases"])
        ):
            source.outputs = op.outputs
            source.attrs["activation"] = op.attrs["activation"]
        else:
            out.append(op)
    return out


def residual_norm(ops: list[Op]) -> list[Op]:
    """x += norm(y); h = norm(x): one op, as is common between the halves of a layer."""
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
            and last.attrs["eps"] in (0.0, op.attrs["eps"])  # the kernel has one for both norms
        ):
            last.outputs = [*last.outputs, *op.outputs]
            last.attrs |= {"weight": op.attrs["weight"], "eps": op.attrs["eps"]}
        else:
            out.append(op)
    return out


def heads(ops: list[Op]) -> list[Op]:
    """Head norm, RoPE and the KV store of a layer in one op, which works on q and k in place."""
    out: list[Op] = []
    for op in ops:
        last = out[-1] if out else None
        if op.kind in ("head_norm", "rope"):
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
    found: dict[Value, list[Op]] = {}
    for op in ops:
        for value in op.inputs:
            found.setdefault(value, []).append(op)
    return found
