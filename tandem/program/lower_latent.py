"""Lowering of latent attention, whose cache has one row for all heads."""

from __future__ import annotations

from tandem.kernels import attention_latent, store_latent
from tandem.kernels.abi import TOKEN_SLOT
from tandem.program.graph import LatentHeads, Op
from tandem.program.lowering_base import LoweringBase


class LatentLowering(LoweringBase):
    def _store_latent(self, op: Op) -> None:
        heads: LatentHeads = op.attrs["heads"]
        latent, key = (self.f32[value] for value in op.inputs)
        self._launch(
            store_latent.KERNEL,
            f"kv.{heads.layer}",
            {"latent": latent, "key": key, "cache": self._cache(heads), "tokens": self.step.tokens},
            latent=heads.latent,
            rotated=heads.rotated,
            latent_stride=latent.stride,
            key_stride=key.stride,
            slot_field=TOKEN_SLOT + heads.group,
            kv=self.kv.index,
            blocks=self.kv.blocks[heads.group],
        )

    def _attention_latent(self, op: Op) -> None:
        heads: LatentHeads = op.attrs["heads"]
        q, rotated_q = (self.f32[value] for value in op.inputs)
        out, table = self._rows(op.outputs[0]), self.step.tables[heads.group]
        self._launch(
            attention_latent.KERNEL,
            op.outputs[0].name,
            {
                "q": q,
                "rotated_q": rotated_q,
                "cache": self._cache(heads),
                "tables": table,
                "tokens": self.step.tokens,
                "out": out,
            },
            q_heads=heads.q_heads,
            latent=heads.latent,
            rotated=heads.rotated,
            q_stride=q.stride,
            rotated_stride=rotated_q.stride,
            out_stride=out.stride,
            table_stride=table.stride,
            scale=heads.scale,
            kv=self.kv.index,
            sequences=self.step.limits.sequences,
            blocks=self.kv.blocks[heads.group],
        )
        self._done(op.outputs[0])
