"""Lowering of recurrent layers, which read and write state slots."""

from __future__ import annotations

from tandem.kernels import delta_rule, gated_norm, group_norm, short_conv, ssm_scan
from tandem.program.graph import DeltaHeads, Op, ScanHeads, Vector
from tandem.program.lowering_base import LoweringBase
from tandem.program.program import Tensor
from tandem.program.weight_plan import align


class RecurrentLowering(LoweringBase):
    def _state(self, op: Op) -> Tensor:
        """The states of an op, one for each slot: float32 [slots, attrs["state"]]."""
        size = 4 * self.kv.states * op.attrs["state"]
        tensor = Tensor(f"state.{op.outputs[0].name}", "kv", "f32", size, op.attrs["state"], self.kv_bytes)
        self.kv_bytes += align(size)
        return tensor

    def _short_conv(self, op: Op) -> None:
        x, out, bias = self.f32[op.inputs[0]], self._rows(op.outputs[0]), op.attrs["bias"]
        self._launch(
            short_conv.KERNEL,
            op.outputs[0].name,
            {
                "x": x,
                "weight": self.plan.vector(op.attrs["weight"]),
                "bias": self.plan.vector(bias) if bias else None,
                "state": self._state(op),
                "chunks": self.step.chunks,
                "out": out,
            },
            channels=op.inputs[0].width,
            taps=op.attrs["taps"],
            x_stride=x.stride,
            out_stride=out.stride,
            silu=op.attrs["silu"],
            sequences=self.step.limits.sequences,
            slots=self.kv.states,
        )
        self._done(op.outputs[0])

    def _delta_rule(self, op: Op) -> None:
        heads: DeltaHeads = op.attrs["heads"]
        qkv, beta, alpha = (self.f32[value] for value in op.inputs)
        out = self._rows(op.outputs[0])
        self._launch(
            delta_rule.KERNEL,
            op.outputs[0].name,
            {
                "qkv": qkv,
                "beta": beta,
                "alpha": alpha,
                "vectors": self.plan.vector(*op.attrs["vectors"]),
                "state": self._state(op),
                "chunks": self.step.chunks,
                "out": out,
            },
            k_heads=heads.k_heads,
            v_heads=heads.v_heads,
            k_dim=heads.k_dim,
            v_dim=heads.v_dim,
            qkv_stride=qkv.stride,
            beta_stride=beta.stride,
            alpha_stride=alpha.stride,
            out_stride=out.stride,
            tiled=heads.tiled,
            sequences=self.step.limits.sequences,
            slots=self.kv.states,
        )
        self._done(op.outputs[0])

    def _ssm_scan(self, op: Op) -> None:
        heads: ScanHeads = op.attrs["heads"]
        xbc, dt = (self.f32[value] for value in op.inputs)
        out = self._rows(op.outputs[0])
        self._launch(
            ssm_scan.KERNEL,
            op.outputs[0].name,
            {
                "xbc": xbc,
                "dt": dt,
                "vectors": self.plan.vector(*op.attrs["vectors"]),
                "state": self._state(op),
                "chunks": self.step.chunks,
                "out": out,
            },
            heads=heads.heads,
            groups=heads.groups,
            head_dim=heads.head_dim,
            state_rows=heads.state_rows,
            xbc_stride=xbc.stride,
            dt_stride=dt.stride,
            out_stride=out.stride,
            sequences=self.step.limits.sequences,
            slots=self.kv.states,
        )
        self._done(op.outputs[0])

    def _group_norm(self, op: Op) -> None:
        x, groups = self.f32[op.inputs[0]], op.attrs["groups"]
        dim = op.inputs[0].width // groups
        out, out_q8 = self._output(op.outputs[0], dim)
        self._launch(
            group_norm.KERNEL,
            op.outputs[0].name,
            {"x": x, "weight": self.plan.vector(op.attrs["weight"]), "out": out},
            groups=groups,
            group_dim=dim,
            x_stride=x.stride,
            out_stride=out.stride,
            eps=op.attrs["eps"],
            out_q8=out_q8,
        )
        self._done(op.outputs[0])

    def _gated_norm(self, op: Op) -> None:
        x, gate = (self.f32[value] for value in op.inputs)
        weight: Vector = op.attrs["weight"]
        out, out_q8 = self._output(op.outputs[0], weight.size)
        self._launch(
            gated_norm.KERNEL,
            op.outputs[0].name,
            {"x": x, "gate": gate, "weight": self.plan.vector(weight), "out": out},
            heads=op.inputs[0].width // weight.size,
            head_dim=weight.size,
            x_stride=x.stride,
            gate_stride=gate.stride,
            out_stride=out.stride,
            eps=op.attrs["eps"],
            out_q8=out_q8,
        )
        self._done(op.outputs[0])
