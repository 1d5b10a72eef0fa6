"""The base of lowering (lower.py): the tensors of values, caches and launches, without the ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.errors import ProgramError
from tandem.kernels import quantise
from tandem.kernels.abi import EPILOGUE_CLAMPED_GLU, EPILOGUE_GELU_GLU, EPILOGUE_SILU_GLU, KV_TYPES
from tandem.kernels.kernel import Kernel, Scalars
from tandem.kernels.kv_layout import kv_bytes
from tandem.kernels.q8_tiles import q8_bytes
from tandem.kernels.rows import rows_bytes
from tandem.program.fuse import consumers
from tandem.program.graph import Heads, LatentHeads, Matrix, Op, Value
from tandem.program.program import Launch, Tensor
from tandem.program.step_inputs import StepLayout
from tandem.program.weight_plan import WeightPlan, align

GLU_EPILOGUES = {"silu": EPILOGUE_SILU_GLU, "gelu": EPILOGUE_GELU_GLU, "clamped": EPILOGUE_CLAMPED_GLU}


@dataclass(frozen=True)
class KVCacheShape:
    """The size of the KV cache: blocks of KV_BLOCK tokens for each KV group, and slots for recurrent states."""

    blocks: tuple[int, ...]  # per group
    kv: str = "f16"  # data type of keys and values, one of KV_TYPES
    states: int = 0  # state slots

    @property
    def index(self) -> int:
        """The scalar `kv` of kernels."""
        return KV_TYPES.index(self.kv)

    def block_bytes(self, heads: Heads | LatentHeads) -> int:
        return kv_bytes(1, heads.kv_heads, heads.head_dim, self.index)


class Routes(NamedTuple):
    """The tensors of a route op (kernels/experts.py)."""

    chosen: Tensor
    weights: Tensor
    groups: Tensor
    scalars: Scalars  # experts, used


class LoweringBase:
    def __init__(
        self, ops: list[Op], plan: WeightPlan, step: StepLayout, kv: KVCacheShape, fuse_quantise: bool
    ) -> None:
        self.plan, self.step, self.kv, self.fuse_quantise = plan, step, kv, fuse_quantise
        self.counts = {"tokens": step.limits.tokens, "rows": step.limits.logits_rows, "slots": 0}
        self.consumers = consumers(ops)
        self.launches: list[Launch] = []
        self.values: dict[str, tuple[int, Tensor]] = {}
        self.f32: dict[Value, Tensor] = {}
        self.q8: dict[Value, Tensor] = {}
        self.selected: dict[Value, Value] = {}  # selected rows -> the value they are selected from
        self.routes: dict[Value, Routes] = {}
        # (value, routes) -> its rows in the order of experts
        self.slots: dict[tuple[Value, Value], Tensor] = {}
        self.caches: dict[int, Tensor] = {}  # layer -> KV cache
        self.kv_bytes = self.output_bytes = 0

    def _rows(self, value: Value, arena: str = "activations") -> Tensor:
        """Makes a float32 tensor for a value; every row is aligned."""
        stride = align(4 * value.width) // 4
        size = rows_bytes(self.counts[value.count], value.width, stride)
        self.f32[value] = Tensor(value.name, arena, "f32", size, stride)
        return self._host_tensor(self.f32[value]) if value.exposed else self.f32[value]

    def _tiles(self, value: Value) -> Tensor:
        size = q8_bytes(self.counts[value.count], value.width)
        self.q8[value] = Tensor(f"{value.name}.q8", "activations", "q8", size, value.width)
        return self.q8[value]

    def _quantised(self, x: Value) -> Tensor:
        if x not in self.q8:
            source, out = self.f32[x], self._tiles(x)
            self._launch(
                quantise.KERNEL,
                out.name,
                {"x": source, "out": out},
                dim=x.width,
                x_stride=source.stride,
                count_rows=x.count == "rows",
            )
        return self.q8[x]

    def _output(self, value: Value, unit: int = 32) -> tuple[Tensor, bool]:
        """Makes the output tensor of a kernel that can quantise: int8 tiles if all readers are int8 matmuls.

        One work item writes `unit` columns; it must write all 32 that share a scale. Returns (tensor, is q8).
        """
        readers = self.consumers.get(value, [])
        if [op.kind for op in readers] == ["concat"]:
            return self._beside(value, readers[0]), False
        whole = value.width % 32 == 0 and unit % 32 == 0
        fuse = self.fuse_quantise or value.count == "slots"  # no kernel quantises slots alone
        if fuse and whole and readers and all(map(self._reads_q8, readers)):
            return self._tiles(value), True
        return self._rows(value), False

    def _beside(self, value: Value, concat: Op) -> Tensor:
        """Makes the tensor of a value as some of the columns of a concatenation."""
        whole, before = concat.outputs[0], concat.inputs[: concat.inputs.index(value)]
        base = self.f32.get(whole) or self._rows(whole)
        self._view(base, value, sum(each.width for each in before))
        return self.f32[value]

    def _reads_q8(self, op: Op) -> bool:
        matrices: list[Matrix] = op.attrs.get("matrices", [])
        return bool(matrices) and self.plan.layouts[matrices[0].name].activations == "q8"

    def _view(self, base: Tensor, value: Value, column: int) -> None:
        size = rows_bytes(self.counts[value.count], value.width, base.stride)
        self.f32[value] = Tensor(value.name, base.arena, "f32", size, base.stride, 4 * column, base)

    def _cache(self, heads: Heads | LatentHeads) -> Tensor:
        if heads.layer not in self.caches:
            size = self.kv.blocks[heads.group] * self.kv.block_bytes(heads)
            self.caches[heads.layer] = Tensor(
                f"kv.{heads.layer}", "kv", self.kv.kv, size, offset=self.kv_bytes
            )
            self.kv_bytes += align(size)
        return self.caches[heads.layer]

    def _host_tensor(self, tensor: Tensor) -> Tensor:
        """Moves a tensor to the arena that the host reads."""
        tensor.arena, tensor.offset = "output", self.output_bytes
        self.output_bytes += align(tensor.nbytes)
        return tensor

    def _is_for_host(self, values: list[Value]) -> bool:
        """Whether the host reads these values: logits, and what no op reads."""
        readers = [reader for value in values for reader in self.consumers.get(value, [])]
        return not readers or readers[0].kind == "sample"

    def _in_place(self, op: Op, value: Value, output: Value) -> None:
        """Gives an output the tensor of an input that no later op reads."""
        last = self.consumers[value][-1]
        if last is not op:
            raise ProgramError(f"{op} changes {value.name} in place, but {last} still reads it")
        self.f32[output] = self.f32[value]

    def _launch(self, kernel: Kernel, name: str, buffers: dict[str, Tensor | None], **scalars: float) -> None:
        bound = {b.name: buffers.get(b.name) for b in kernel.buffers}
        self.launches.append(
            Launch(kernel, bound, {key: scalars.get(key, 0) for key, _ in kernel.scalars}, name)
        )

    def _done(self, *values: Value) -> None:
        """Notes that the last launch completes these values, for `capture`."""
        for value in values:
            tensor = self.f32.get(value) or self.q8.get(value)
            if tensor is not None:
                self.values[value.name] = (len(self.launches) - 1, tensor)
