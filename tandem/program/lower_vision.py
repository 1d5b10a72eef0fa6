"""Lowering of what images need: pooling, and rows of the host that are added to those of tokens."""

from __future__ import annotations

from tandem.kernels import add_input, pool
from tandem.kernels.rows import rows_bytes
from tandem.program.graph import Op
from tandem.program.lowering_base import LoweringBase


class VisionLowering(LoweringBase):
    def _pool(self, op: Op) -> None:
        x, out = self.f32[op.inputs[0]], self._rows(op.outputs[0])
        weight, bias = map(self.plan.vector, op.attrs["affine"]) if op.attrs["affine"] else (None, None)
        # A norm may follow, which picks its rows among as many as there are tokens.
        if not op.attrs["concatenate"]:
            out.nbytes = rows_bytes(self.counts["tokens"], op.outputs[0].width, out.stride)
        self._launch(
            pool.KERNEL,
            op.outputs[0].name,
            {"x": x, "weight": weight, "bias": bias, "out": out},
            dim=op.inputs[0].width,
            group=op.attrs["group"],
            concatenate=op.attrs["concatenate"],
            x_stride=x.stride,
            out_stride=out.stride,
        )
        self._done(op.outputs[0])

    def _add_input(self, op: Op) -> None:
        x = self.f32[op.inputs[0]]
        self._in_place(op, op.inputs[0], op.outputs[0])
        if self.step.limits.input_width:  # else no token is of an image
            self._launch(
                add_input.KERNEL,
                op.outputs[0].name,
                {"x": x, "inputs": self.step.inputs, "tokens": self.step.tokens},
                dim=op.inputs[0].width,
                stride=x.stride,
                first=op.attrs["first"],
                input_stride=self.step.inputs.stride,
            )
        self._done(op.outputs[0])
