"""Lowering: turns ops into launches. Picks each op's kernel, buffers and scalars, and the launches that quantise."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from tandem.kernels import attention, embed, glu, layer_norm, matmul, norm, rope, sample, scale
from tandem.kernels.abi import (
    EPILOGUE_STORE,
    PART_NORM,
    PART_ROPE,
    PART_SHIFT,
    PART_STORE,
    TOKEN_SLOT,
)
from tandem.kernels.panels import LAYOUT_NAMES
from tandem.kernels.rows import rows_bytes
from tandem.program.fuse import PASSES
from tandem.program.graph import Heads, Matrix, Op, Value, Vector
from tandem.program.hazards import place_barriers
from tandem.program.lowering_base import GLU_EPILOGUES, KVCacheShape, LoweringBase
from tandem.program.plan_memory import plan_memory
from tandem.program.program import OTHER_STEP_SLOT, Program, Tensor
from tandem.program.step_inputs import StepLayout
from tandem.program.weight_plan import WeightPlan

# Ops that few models have, by the module and class that lower them. These and their kernels are imported only for such
# models, since imports take most of the time to a first token.
EXTENSIONS = {
    ("lower_experts", "ExpertLowering"): ("route", "expert_matmul", "activate_slots", "combine"),
    ("lower_latent", "LatentLowering"): ("store_latent", "attention_latent"),
    ("lower_recurrent", "RecurrentLowering"): (
        "short_conv",
        "delta_rule",
        "ssm_scan",
        "group_norm",
        "gated_norm",
    ),
    ("lower_vision", "VisionLowering"): ("pool", "add_input"),
}


def lower(
    ops: list[Op],
    plan: WeightPlan,
    step: StepLayout,
    kv: KVCacheShape,
    passes: Iterable[str] = PASSES,
    *,
    beside: Program | None = None,
) -> Program:
    """`beside`: another Program in the same arenas. It keeps its KV cache and outputs; activations last for one run."""
    lowering = _lowering_class(ops)(ops, plan, step, kv, "quantise" in set(passes))
    if beside:
        lowering.kv_bytes, lowering.output_bytes = (beside.arena_bytes[name] for name in ("kv", "output"))
    for op in ops:
        getattr(lowering, f"_{op.kind}")(op)
    launches = lowering.launches
    activations = max(plan_memory(launches), beside.arena_bytes["activations"] if beside else 0)
    place_barriers(launches)
    sizes = {"weights": plan.nbytes, "kv": lowering.kv_bytes, "activations": activations,
             "output": lowering.output_bytes}  # fmt: skip
    for arena, nbytes in (("step", step.nbytes), ("results", step.result_bytes)):
        sizes |= {arena: nbytes, OTHER_STEP_SLOT[arena]: nbytes}
    limits = step.limits
    counts = {"tokens": limits.tokens, "rows": limits.logits_rows, "work": limits.work}
    return Program(launches, counts, sizes, lowering.values)


def _lowering_class(ops: list[Op]) -> type[_Lowering]:
    """The lowering of all ops of a model: that of every model, and the extensions it needs."""
    kinds = {op.kind for op in ops}
    extensions = tuple(
        getattr(import_module(f"tandem.program.{module}"), name)
        for (module, name), lowered in EXTENSIONS.items()
        if not kinds.isdisjoint(lowered)
    )
    return type("_ModelLowering", (*extensions, _Lowering), {}) if extensions else _Lowering


class _Lowering(LoweringBase):
    """One method for each op that is not among EXTENSIONS."""

    def _embed(self, op: Op) -> None:
        matrix: Matrix = op.attrs["matrix"]
        table, out = self.plan.matrix([matrix]), self._rows(op.outputs[0])
        self._launch(
            embed.BY_LAYOUT[table.dtype],
            op.outputs[0].name,
            {
                "tokens": self.step.tokens,
                "table": table,
                "sampled": self.step.sampled_before,
                "out": out,
                "inputs": self.step.inputs if op.attrs["images"] and self.step.limits.input_width else None,
            },
            format=LAYOUT_NAMES.index(table.dtype),
            rows=matrix.rows,
            columns=matrix.columns,
            out_stride=out.stride,
            scale=op.attrs["scale"],
            input_stride=self.step.inputs.stride,
        )
        self._done(op.outputs[0])

    def _input(self, op: Op) -> None:
        value = op.outputs[0]
        self.f32[value] = self._rows(value) if value.exposed else self.step.inputs
        self.values[value.name] = (0, self.f32[value])

    def _norm(self, op: Op) -> None:
        self._norm_launch(op, op.inputs[0], None, op.outputs[0])

    def _add(self, op: Op) -> None:
        op.attrs |= {"weight": None, "eps": 0.0}
        self._add_norm(op)

    def _add_norm(self, op: Op) -> None:
        x, y = op.inputs
        self._in_place(op, x, op.outputs[0])  # the residual stream is one buffer
        self._norm_launch(op, x, y, op.outputs[1] if len(op.outputs) > 1 else None)
        self._done(op.outputs[0])

    def _norm_launch(self, op: Op, x: Value, y: Value | None, normed: Value | None) -> None:
        post, weight = op.attrs.get("post"), op.attrs["weight"]
        source = self.selected.get(x, x)
        x_tensor = self.f32[source]
        y_tensor = self.f32[y] if y else None
        out, out_q8 = self._output(normed) if normed else (None, False)
        self._launch(
            norm.KERNEL,
            op.outputs[-1].name,
            {
                "x": x_tensor,
                "add": y_tensor,
                "post_weight": self.plan.vector(post) if post else None,
                "weight": self.plan.vector(weight) if weight else None,
                "out": out,
                "rows": self.step.rows if x.count == "rows" else None,
            },
            dim=x.width,
            x_stride=x_tensor.stride,
            add_stride=y_tensor.stride if y_tensor else 0,
            out_stride=out.stride if out else 0,
            eps=op.attrs["eps"],
            out_q8=out_q8,
            use_rows=x.count == "rows",
        )
        if normed:
            self._done(normed)

    def _layer_norm(self, op: Op) -> None:
        x, bias = op.inputs[0], op.attrs["bias"]
        source, listed = self.selected.get(x, x), x in self.selected
        x_tensor, (out, out_q8) = self.f32[source], self._output(op.outputs[0])
        self._launch(
            layer_norm.KERNEL,
            op.outputs[0].name,
            {
                "x": x_tensor,
                "weight": self.plan.vector(op.attrs["weight"]),
                "bias": self.plan.vector(bias) if bias else None,
                "rows": self.step.rows if listed else None,
                "out": out,
            },
            dim=x.width,
            x_stride=x_tensor.stride,
            out_stride=out.stride,
            eps=op.attrs["eps"],
            out_q8=out_q8,
            use_rows=layer_norm.LISTED if listed else layer_norm.OWN_ROWS * (x.count == "rows"),
        )
        self._done(op.outputs[0])

    def _scale(self, op: Op) -> None:
        x, factor = self.f32[op.inputs[0]], op.attrs["factor"]
        self._in_place(op, op.inputs[0], op.outputs[0])
        buffers: dict[str, Tensor | None] = {"x": x, "factors": self.plan.vector(factor)}
        self._launch(
            scale.KERNEL, op.outputs[0].name, buffers, dim=op.inputs[0].width, stride=x.stride, factors=1
        )
        self._done(op.outputs[0])

    def _concat(self, op: Op) -> None:
        """The ops before have written its columns."""

    def _slice(self, op: Op) -> None:
        base = self.f32[op.inputs[0]]
        self._view(base, op.outputs[0], op.attrs["begin"])

    def _select_rows(self, op: Op) -> None:
        self.selected[op.outputs[0]] = op.inputs[0]  # the norm that follows reads these rows

    def _matmul(self, op: Op) -> None:
        matrices: list[Matrix] = op.attrs["matrices"]
        x, layout = op.inputs[0], self.plan.layouts[matrices[0].name]
        rows, columns = sum(m.rows for m in matrices), matrices[0].columns
        activation = op.attrs.get("activation")
        epilogue = GLU_EPILOGUES[activation] if activation else EPILOGUE_STORE
        out_q8 = False
        if activation:
            out, out_q8 = self._output(op.outputs[0])
        else:
            out = self._outputs(op)
        if self._is_for_host(op.outputs):
            self._host_tensor(out)
        biases = op.attrs["biases"]
        parts = [b or m.rows for b, m in zip(biases, matrices, strict=True)]
        x_tensor = self._quantised(x) if layout.activations == "q8" else self.f32[x]
        self._launch(
            matmul.BY_LAYOUT[layout.name],
            "+".join(v.name for v in op.outputs),
            {
                "x": x_tensor,
                "weights": self.plan.matrix(matrices, glu=bool(activation)),
                "bias": self.plan.vector(*parts) if any(biases) else None,
                "out": out,
            },
            format=LAYOUT_NAMES.index(layout.name),
            rows=rows,
            columns=columns,
            x_stride=x_tensor.stride,
            out_stride=out.stride,
            panels_per_item=matmul.panels_per_item(rows, bool(activation)),
            count=x.count == "rows",
            epilogue=epilogue,
            out_q8=out_q8,
            softcap=op.attrs["softcap"],
        )
        self._done(*op.outputs)

    def _outputs(self, op: Op) -> Tensor:
        """The tensor of a matmul's outputs, with a view for each.

        Query, key and value are columns of one tensor even if several matmuls make them, since their weights have
        different layouts: a GPU may then rotate and store them inside attention.
        """
        outputs, name = op.outputs, "+".join(v.name for v in op.outputs)
        if any(value not in self.f32 for value in outputs):  # one of them may have a place beside a query
            readers = self.consumers.get(outputs[0], [])
            if [reader.kind for reader in readers] == ["concat"] and len(outputs) == 1:
                return self._beside(outputs[0], readers[0])
            inputs = readers[0].inputs if readers and readers[0].kind == "heads" else []
            free = inputs[: len(outputs)] == outputs and not any(value in self.f32 for value in inputs)
            together = inputs if free else outputs
            if len(together) == 1:
                return self._rows(outputs[0])
            self._stack(together)
        first = self.f32[outputs[0]]
        if len(outputs) == 1:
            return first
        if first.root.name == name:
            return first.root
        size = rows_bytes(self.counts[outputs[0].count], sum(v.width for v in outputs), first.stride)
        return Tensor(name, first.arena, "f32", size, first.stride, first.offset, first.root)

    def _stack(self, values: list[Value]) -> None:
        """One tensor for several values, and a view for each."""
        whole = Value("+".join(v.name for v in values), sum(v.width for v in values), values[0].count)
        base, column = self._rows(whole), 0
        for value in values:
            self._view(base, value, column)
            column += value.width

    def _glu(self, op: Op) -> None:
        self._activation(op, op.attrs["activation"])

    def _clamp(self, op: Op) -> None:
        self._activation(op, "identity", op.attrs["limits"])

    def _activation(self, op: Op, activation: str, limits: Vector | None = None) -> None:
        gate, up = self.f32[op.inputs[0]], self.f32[op.inputs[1]] if len(op.inputs) > 1 else None
        out, out_q8 = self._output(op.outputs[0])
        self._launch(
            glu.KERNEL,
            op.outputs[0].name,
            {
                "gate": gate,
                "up": up,
                "limits": self.plan.vector(limits) if limits else None,
                "out": out,
            },
            dim=op.inputs[0].width,
            gate_stride=gate.stride,
            up_stride=up.stride if up else 0,
            out_stride=out.stride,
            activation=glu.ACTIVATIONS[activation],
            out_q8=out_q8,
            count_rows=op.inputs[0].count == "rows",
            erf=activation == "gelu_erf",
        )
        self._done(op.outputs[0])

    def _head_norm(self, op: Op) -> None:
        self._heads_launch(op, *op.inputs, weights=op.attrs["weights"], parts=PART_NORM)

    def _rope(self, op: Op) -> None:
        q, k = op.inputs
        if op.attrs["heads"].q_table:
            self._heads_launch(op, q, None, parts=PART_ROPE)
            self._heads_launch(op, None, k, parts=PART_ROPE)
        else:
            self._heads_launch(op, q, k, parts=PART_ROPE)

    def _rope_query(self, op: Op) -> None:
        self._heads_launch(op, op.inputs[0], None, parts=PART_ROPE)

    def _norm_heads(self, op: Op) -> None:
        x, weight = self.f32[op.inputs[0]], op.attrs["weight"]
        self._in_place(op, op.inputs[0], op.outputs[0])
        self._launch(
            rope.KERNEL,
            op.outputs[0].name,
            {"q": x, "vectors": self.plan.vector(weight, weight.size), "tokens": self.step.tokens},
            q_heads=op.inputs[0].width // weight.size,
            head_dim=weight.size,
            q_stride=x.stride,
            eps=op.attrs["eps"],
            parts=PART_NORM,
        )
        self._done(op.outputs[0])

    def _store(self, op: Op) -> None:
        self._heads_launch(op, None, *op.inputs, parts=PART_STORE)

    def _heads(self, op: Op) -> None:
        weights = op.attrs["norm"]
        parts = PART_NORM * bool(weights) + PART_ROPE * op.attrs["rope"] + PART_STORE * op.attrs["store"]
        self._heads_launch(op, *op.inputs, weights=weights, parts=parts)

    def _heads_launch(
        self,
        op: Op,
        q: Value | None,
        k: Value | None,
        v: Value | None = None,
        *,
        weights: tuple[Vector, ...] | None = None,
        parts: int,
    ) -> None:
        heads: Heads = op.attrs["heads"]
        tensors = {name: self.f32[value] for name, value in (("q", q), ("k", k), ("v", v)) if value}
        for value, output in zip(op.inputs, op.outputs, strict=False):
            self._in_place(op, value, output)
        vectors, table = weights, heads.table if k else heads.q_table or heads.table
        if self.kv.kv == "q8" and parts & PART_STORE and heads.key_mean and not weights:
            parts, vectors = parts | PART_SHIFT, (heads.key_mean,)
        self._launch(
            rope.KERNEL,
            f"kv.{heads.layer}" if parts & PART_STORE else op.outputs[1 if k else 0].name,
            {
                **tensors,
                "cache": self._cache(heads) if parts & PART_STORE else None,
                "table": self._angles(table) if parts & PART_ROPE else None,
                "vectors": self.plan.vector(*vectors) if vectors else None,
                "tokens": self.step.tokens,
            },
            q_heads=heads.q_heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            rot_dim=heads.rot_dim,
            q_stride=tensors["q"].stride if q else 0,
            k_stride=tensors["k"].stride if k else 0,
            v_stride=tensors["v"].stride if v else 0,
            eps=heads.eps,
            interleaved=heads.interleaved,
            slot_field=TOKEN_SLOT + heads.group,
            kv=self.kv.index,
            parts=parts,
            positions=self.step.limits.tokens
            if self.step.limits.angles
            else heads.table.size // max(1, heads.rot_dim),
            blocks=self.kv.blocks[heads.group],
        )
        self._done(*op.outputs)

    def _angles(self, table: Vector) -> Tensor:
        """Cosines and sines: of each position, or of each token, where the host gives those."""
        return self.step.angles if self.step.limits.angles else self.plan.vector(table)

    def _bidirectional(self, op: Op) -> None:
        """Stores keys and values in KV blocks that last until the attention: activations, not a cache."""
        _, k, v = op.inputs
        heads: Heads = op.attrs["heads"]
        name = f"{op.outputs[0].name}.kv"
        size = self.kv.blocks[heads.group] * self.kv.block_bytes(heads)
        self.caches[heads.layer] = Tensor(name, "activations", self.kv.kv, size)
        self._heads_launch(Op("store", [k, v], [], op.attrs), None, k, v, parts=PART_STORE)
        self._attention(op)
        del self.caches[heads.layer]

    def _attention(self, op: Op) -> None:
        heads: Heads = op.attrs["heads"]
        q = self.f32[op.inputs[0]]
        out, out_q8 = self._output(op.outputs[0], heads.head_dim)
        table = self.step.tables[heads.group]
        self._launch(
            attention.KERNEL,
            op.outputs[0].name,
            {
                "q": q,
                "cache": self._cache(heads),
                "tables": table,
                "work": self.step.second_work if heads.second_work else self.step.work,
                "out": out,
                "sinks": self.plan.vector(heads.sinks) if heads.sinks else None,
            },
            q_heads=heads.q_heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            q_stride=q.stride,
            out_stride=out.stride,
            table_stride=table.stride,
            window=heads.window,
            scale=heads.scale,
            softcap=heads.softcap,
            kv=self.kv.index,
            out_q8=out_q8,
            sequences=self.step.limits.sequences,
            blocks=self.kv.blocks[heads.group],
        )
        self._done(op.outputs[0])

    def _sample(self, op: Op) -> None:
        logits = self.f32[op.inputs[0]]
        self._launch(
            sample.KERNEL,
            "result",
            {
                "logits": logits,
                "params": self.step.params,
                "adjustments": self.step.adjustments,
                "masks": self.step.masks,
                "out": self.step.results,
            },
            vocab=op.inputs[0].width,
            stride=logits.stride,
            adjustments=self.step.limits.adjustments,
            mask_words=self.step.masks.stride,
        )
        self.values["result"] = (len(self.launches) - 1, self.step.results)
