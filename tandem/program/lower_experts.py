"""Lowering of mixtures of experts: routing, matmuls of the experts in use, and their weighted sum."""

from __future__ import annotations

from tandem.kernels import (
    activate_slots,
    combine,
    expert_matmul,
    gather_tokens,
    glu,
    group_tokens,
    matmul,
    route,
    scale,
)
from tandem.kernels.abi import EPILOGUE_STORE, SCORE_SIGMOID, SCORE_SOFTMAX
from tandem.kernels.experts import chosen_bytes, groups_bytes, max_slots
from tandem.kernels.panels import LAYOUT_NAMES
from tandem.kernels.q8_tiles import q8_bytes
from tandem.kernels.rows import rows_bytes
from tandem.program.graph import Op, Routing, Value
from tandem.program.lowering_base import GLU_EPILOGUES, LoweringBase, Routes
from tandem.program.program import Tensor


class ExpertLowering(LoweringBase):
    def _route(self, op: Op) -> None:
        routing: Routing = op.attrs["routing"]
        logits, name, tokens = self.f32[op.inputs[0]], op.outputs[0].name, self.counts["tokens"]
        sizes = {"experts": routing.experts, "used": routing.used}
        self.counts["slots"] = max(self.counts["slots"], max_slots(tokens, sizes))
        nbytes = chosen_bytes(tokens, sizes)
        found = self.routes[op.outputs[0]] = Routes(
            Tensor(f"{name}.chosen", "activations", "i32", nbytes),
            Tensor(f"{name}.weights", "activations", "f32", nbytes),
            Tensor(f"{name}.groups", "activations", "i32", groups_bytes(tokens, sizes)),
            sizes,
        )
        self._launch(
            route.KERNEL,
            name,
            {
                "logits": logits,
                "bias": self.plan.vector(routing.bias) if routing.bias else None,
                "chosen": found.chosen,
                "weights": found.weights,
            },
            stride=logits.stride,
            score=SCORE_SIGMOID if routing.sigmoid else SCORE_SOFTMAX,
            normalise=routing.normalise,
            scale=routing.scale,
            sets=routing.expert_groups,
            sets_used=routing.groups_used,
            set_top=routing.group_top,
            **sizes,
        )
        tables: dict[str, Tensor | None] = {"chosen": found.chosen, "groups": found.groups}
        self._launch(group_tokens.KERNEL, found.groups.name, tables, **sizes)
        if scales := routing.expert_scales:
            buffers: dict[str, Tensor | None] = {
                "x": found.weights,
                "factors": self.plan.vector(scales),
                "chosen": found.chosen,
            }
            self._launch(
                scale.KERNEL,
                f"{name}.scaled",
                buffers,
                dim=routing.used,
                stride=routing.used,
                factors=routing.experts,
            )

    def _expert_matmul(self, op: Op) -> None:
        x, routes = op.inputs
        found, matrices, output = self.routes[routes], op.attrs["matrices"], op.outputs[0]
        layout, activation, biases = (
            self.plan.layouts[matrices[0].name],
            op.attrs["activation"],
            op.attrs["biases"],
        )
        rows = sum(m.rows for m in matrices) // op.attrs["routing"].experts
        x_tensor = self._in_slots(x, routes, layout.activations == "q8")
        out, out_q8 = self._output(output, layout.glu_rows if activation else 1)
        self._launch(
            expert_matmul.BY_LAYOUT[layout.name],
            output.name,
            {
                "x": x_tensor,
                "weights": self.plan.matrix(matrices, glu=bool(activation)),
                "bias": self.plan.vector(*biases) if any(biases) else None,
                "groups": found.groups,
                "out": out,
            },
            format=LAYOUT_NAMES.index(layout.name),
            rows=rows,
            columns=x.width,
            x_stride=x_tensor.stride,
            out_stride=out.stride,
            panels_per_item=matmul.panels_per_item(rows, bool(activation)),
            epilogue=GLU_EPILOGUES[activation] if activation else EPILOGUE_STORE,
            out_q8=out_q8,
            **found.scalars,
        )
        self._done(output)

    def _in_slots(self, x: Value, routes: Value, q8: bool) -> Tensor:
        """The rows of a value in the order of experts: it has that order, or is copied."""
        if x.count == "slots":
            return self.q8[x] if q8 else self.f32[x]
        if (x, routes) not in self.slots:
            found, source, slots = (
                self.routes[routes],
                self._quantised(x) if q8 else self.f32[x],
                self.counts["slots"],
            )
            stride = x.width if q8 else source.stride
            nbytes = q8_bytes(slots, x.width) if q8 else rows_bytes(slots, x.width, stride)
            out = Tensor(f"{x.name}.slots", "activations", source.dtype, nbytes, stride)
            self.slots[x, routes] = out
            self._launch(
                gather_tokens.KERNEL,
                out.name,
                {"x": source, "groups": found.groups, "out": out},
                dim=x.width,
                x_stride=source.stride,
                out_stride=stride,
                q8=q8,
                **found.scalars,
            )
        return self.slots[x, routes]

    def _activate_slots(self, op: Op) -> None:
        x, routes = op.inputs
        found, x_tensor = self.routes[routes], self.f32[x]
        out, out_q8 = self._output(op.outputs[0])
        self._launch(
            activate_slots.KERNEL,
            op.outputs[0].name,
            {"x": x_tensor, "groups": found.groups, "out": out},
            dim=x.width,
            x_stride=x_tensor.stride,
            out_stride=out.stride,
            activation=glu.ACTIVATIONS[op.attrs["activation"]],
            out_q8=out_q8,
            **found.scalars,
        )
        self._done(op.outputs[0])

    def _combine(self, op: Op) -> None:
        x, routes, *more = op.inputs
        found, x_tensor, out = self.routes[routes], self.f32[x], self._rows(op.outputs[0])
        shared, gate = (*(self.f32[value] for value in more), None, None)[:2]
        self._launch(
            combine.KERNEL,
            op.outputs[0].name,
            {
                "x": x_tensor,
                "weights": found.weights,
                "groups": found.groups,
                "shared": shared,
                "gate": gate,
                "out": out,
            },
            dim=x.width,
            x_stride=x_tensor.stride,
            shared_stride=shared.stride if shared else 0,
            gate_stride=gate.stride if gate else 0,
            out_stride=out.stride,
            **found.scalars,
        )
        self._done(op.outputs[0])
