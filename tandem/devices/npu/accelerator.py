"""The NPU as an accelerator: it computes some columns of each matmul in int8. Emulated; not yet run on a Phoenix.

Weights lie in the NPU's memory in chunks of CHUNK columns, so that few shapes serve all partitions: a partition uses
the chunks it touches. Sums come back in 32 bits; the host quantises activations and scales sums, as in
tensor_parallel/int8.py, whose results are the same, bit by bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np

from tandem.devices.device import Bytes, Device
from tandem.devices.npu.compile import Tools, compile_configuration, compile_instructions, find_tools
from tandem.devices.npu.int8_matmuls import ALL, NOTHING, Int8Matmuls, int8_matmuls
from tandem.devices.npu.operands import c_of_words, words_of_b, write_a
from tandem.devices.npu.plan import GemmPlan, plan_gemm, plan_resident
from tandem.devices.npu.runtime import Chain, GemmJob, Npu, NpuBuffer
from tandem.devices.npu.tiling import ROWS, tile_gemm
from tandem.devices.tensor_parallel.cut import Gemm, Work
from tandem.devices.tensor_parallel.device import Mapped, TensorParallelDevice
from tandem.devices.tensor_parallel.int8 import Int8Accelerator, blocks
from tandem.errors import DeviceError, TandemError
from tandem.kernels.kernel import Array
from tandem.program.program import Program
from tandem.settings import read_settings

CHUNK = 2048  # columns of weights: a dispatch takes a tenth of what they take


class NpuAccelerator(Int8Accelerator):
    name = "npu"

    def __init__(
        self,
        tools: Tools,
        cache: Path,
        block: int | None = None,
        chunk: int = CHUNK,
        allowed: Int8Matmuls = ALL,
        *,
        required: bool = True,
    ) -> None:
        """`block`: columns of activations with a scale of their own, whose sums come back by themselves; None: all.
        `required`: fail if the NPU cannot be set up; otherwise warn and compute nothing."""
        super().__init__(block)
        self._tools, self._cache, self._chunk, self._allowed = tools, cache, chunk, allowed
        self._required = required
        self._npu: Npu | None = None
        self._plans: dict[tuple[int, int], GemmPlan] = {}  # by rows of tiles and columns of activations
        self._chunks: dict[tuple[int, int, int], NpuBuffer] = {}  # weights of a work's chunk and block
        self._a: list[NpuBuffer] = []  # one for each block of activations
        self._c: list[NpuBuffer] = []  # one for each chunk and block
        self._chains: dict[tuple[int, int, int, int], Chain] = {}

    def describe(self) -> str:
        scales = f"{self.block} columns" if self.block else "a row"
        use = "" if self._allowed != NOTHING else "; not in use"
        return f"the NPU (int8, a scale for {scales}; emulated; not yet run on a Phoenix{use})"

    def supports(self, gemm: Gemm) -> bool:
        return self._allowed.includes(gemm)

    def allocate(self, works: Sequence[Work], program: Program, *, copies: bool) -> None:
        """One configuration for all works, and instructions for each depth and number of rows of tiles."""
        super().allocate(works, program, copies=copies)
        self.close_npu()
        with self._made_ready():
            self._configure(int(program.max_counts["tokens"]))

    def _configure(self, tokens: int) -> None:
        mine = [gemm for gemm in self._works if self.supports(gemm)]
        if not mine:
            raise DeviceError(
                "none of this file's matmuls, as they are fused, was measured in int8: use --npu off"
            )
        parts = [self._parts(gemm) for gemm in mine]
        depths = sorted({part.stop - part.start for each in parts for part in each})
        plans = plan_resident([(tokens, self._chunk, depth) for depth in depths])
        t = plans[0].tiling
        self._tall = ROWS * t.m
        self._npu = Npu(compile_configuration(plans[0], self._tools, self._cache), plans[0])
        for depth in depths:
            for rows in range(1, t.rows + 1):
                shape = rows * self._tall, self._chunk, depth
                plan = plan_gemm(*shape, tiling=tile_gemm(*shape, (t.m, t.k, t.n), t.c_objects))
                self._npu.load(plan, compile_instructions(plan, self._tools, self._cache))
                self._plans[rows, depth] = plan
        most = [max(sizes) for sizes in zip(*(p.argument_bytes for p in self._plans.values()), strict=True)]
        sums = max(-(-gemm.rows // self._chunk) * len(each) for gemm, each in zip(mine, parts, strict=True))
        self._a = [self._npu.allocate(most[0], 0) for _ in range(max(map(len, parts)))]
        self._c = [self._npu.allocate(most[2], 2) for _ in range(sums)]

    def load(self, work: int, operands: Mapping[str, Bytes]) -> None:
        """The host keeps only the scales."""
        super().load(work, operands)
        quants, scales = self._weights[work]
        with self._made_ready():
            self._send(work, quants)
        self._weights[work] = quants[:0], scales

    def _send(self, work: int, quants: Array) -> None:
        assert self._npu is not None
        for number, begin in enumerate(range(0, len(quants), self._chunk)):
            for i, part in enumerate(self._parts(self._works[work])):
                some = quants[begin : begin + self._chunk, part].T
                plan = self._plans[1, len(some)]
                padded = np.zeros((len(some), self._chunk), np.int8)
                padded[:, : some.shape[1]] = some
                buffer = self._npu.allocate(plan.argument_bytes[1], 1)
                buffer.bytes[:] = words_of_b(plan, padded).view(np.uint8)
                buffer.sync_to_device()
                self._chunks[work, number, i] = buffer

    @contextmanager
    def _made_ready(self) -> Iterator[None]:
        try:
            yield
        except TandemError as error:
            if self._required:
                raise
            warnings.warn(f"going on without the NPU: {error}", stacklevel=2)
            self._allowed = NOTHING
            self.close_npu()

    def matmul(self, work: int, x: tuple[Array, Array], rows: slice) -> Array:
        (quants, x_scales), w_scales = x, self._weights[work][1][rows]
        height = -(-len(quants) // self._tall)
        first, last = rows.start // self._chunk, -(-rows.stop // self._chunk)
        parts = self._parts(self._works[work])
        plans = [self._plans[height, part.stop - part.start] for part in parts]
        for buffer, plan, part in zip(self._a, plans, parts, strict=False):
            padded = np.zeros((plan.M, plan.K), np.int8)
            padded[: len(quants)] = quants[:, part]
            write_a(plan, padded, buffer.bytes[: plan.argument_bytes[0]])
            buffer.sync_to_device()
        self._chain(work, height, first, last, plans).start().result()
        y = np.zeros((len(quants), rows.stop - rows.start), np.float32)
        begin = rows.start - first * self._chunk
        for i, plan in enumerate(plans):
            sums = [self._sums(plan, self._c[chunk * len(plans) + i]) for chunk in range(first, last)]
            found = np.concatenate(sums, axis=1)[: len(quants)][:, begin : begin + y.shape[1]]
            y += found * (x_scales[:, i : i + 1] * w_scales[:, i])
        return y

    def _parts(self, gemm: Gemm) -> list[slice]:
        return list(blocks(int(gemm.launch.scalars["columns"]), self.block))

    def _sums(self, plan: GemmPlan, buffer: NpuBuffer) -> Array:
        buffer.sync_from_device()
        return c_of_words(plan, buffer.bytes[: plan.argument_bytes[2]].view(np.uint32))

    def _chain(self, work: int, height: int, first: int, last: int, plans: Sequence[GemmPlan]) -> Chain:
        """The chain of a partition; made at its first use."""
        key = work, height, first, last
        if key not in self._chains:
            assert self._npu is not None
            self._chains[key] = self._npu.chain(
                [
                    GemmJob(plan, self._a[i], self._chunks[work, chunk, i], self._c[chunk * len(plans) + i])
                    for chunk in range(first, last)
                    for i, plan in enumerate(plans)
                ]
            )
        return self._chains[key]

    def close_npu(self) -> None:
        """What was made with the configuration goes before it."""
        self._chains.clear()
        self._chunks.clear()
        self._plans.clear()
        self._a, self._c = [], []
        if self._npu:
            self._npu.close()
            self._npu = None

    def close(self) -> None:
        super().close()
        self.close_npu()


def attach_npu(device: Device, shape: str | None, *, required: bool) -> Device:
    """The device with the NPU as its accelerator; measured times decide whether a step uses it."""
    if not device.shares_memory:
        raise DeviceError(
            f"{device.name} has memory of its own, and the NPU has the host's: use cpu or an iGPU"
        )
    cache = read_settings().pipelines / "npu"
    allowed = int8_matmuls(shape, cache) if shape else ALL
    accelerator = NpuAccelerator(find_tools(), cache, allowed.block, allowed=allowed, required=required)
    if isinstance(device, TensorParallelDevice):
        return device.with_accelerator(accelerator)
    return TensorParallelDevice(cast(Mapped, device), [accelerator])
