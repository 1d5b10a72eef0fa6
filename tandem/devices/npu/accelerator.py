"""The NPU as a helper in matmuls: its columns of each, in int8. Emulated; not yet run on a Phoenix.

Weights lie in the NPU's memory in chunks of CHUNK columns, so that few shapes serve all shares: a share takes the
chunks it touches. Sums come back in 32 bits; the host quantises activations and scales sums, as in hybrid/int8.py,
whose results are the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from tandem.devices.device import Bytes, Device
from tandem.devices.hybrid.cut import Gemm, Work
from tandem.devices.hybrid.device import HybridDevice, Mapped
from tandem.devices.hybrid.int8 import Int8Accelerator
from tandem.devices.npu.compile import Tools, compile_configuration, compile_instructions, find_tools
from tandem.devices.npu.operands import c_of_words, words_of_b
from tandem.devices.npu.plan import GemmPlan, plan_gemm, plan_resident
from tandem.devices.npu.runtime import Chain, Job, Npu, NpuBuffer
from tandem.devices.npu.tiling import ROWS, cut
from tandem.errors import DeviceError
from tandem.kernels.kernel import Array
from tandem.program.program import Program
from tandem.settings import read_settings

CHUNK = 2048  # columns of weights: a dispatch takes a tenth of what they take


class NpuAccelerator(Int8Accelerator):
    name = "npu"

    def __init__(self, tools: Tools, cache: Path, chunk: int = CHUNK) -> None:
        super().__init__(None)
        self._tools, self._cache, self._chunk = tools, cache, chunk
        self._npu: Npu | None = None
        self._plans: dict[tuple[int, int], GemmPlan] = {}  # by rows of tiles and columns of activations
        self._chunks: dict[int, list[NpuBuffer]] = {}  # of each work's weights
        self._chains: dict[tuple[int, int, int, int], Chain] = {}

    def describe(self) -> str:
        return "the NPU (int8, a scale for a row; emulated; not yet run on a Phoenix)"

    def place(self, works: Sequence[Work], program: Program, *, copies: bool) -> None:
        """One configuration for all works, and instructions for each depth and number of rows of tiles."""
        super().place(works, program, copies=copies)
        self.close_npu()
        tokens = int(program.max_counts["tokens"])
        depths = sorted({_columns(gemm) for gemm in self._works})
        plans = plan_resident([(tokens, self._chunk, depth) for depth in depths])
        t = plans[0].tiling
        self._tall = ROWS * t.m
        self._npu = Npu(compile_configuration(plans[0], self._tools, self._cache), plans[0])
        for depth in depths:
            for rows in range(1, t.rows + 1):
                shape = rows * self._tall, self._chunk, depth
                plan = plan_gemm(*shape, tiling=cut(*shape, (t.m, t.k, t.n)))
                self._npu.load(plan, compile_instructions(plan, self._tools, self._cache))
                self._plans[rows, depth] = plan
        most = [max(sizes) for sizes in zip(*(p.argument_bytes for p in self._plans.values()), strict=True)]
        count = max(-(-gemm.rows // self._chunk) for gemm in self._works)
        self._a = self._npu.allocate(most[0], 0)
        self._c = [self._npu.allocate(most[2], 2) for _ in range(count)]

    def load(self, work: int, operands: Mapping[str, Bytes]) -> None:
        """The host keeps the scales alone."""
        super().load(work, operands)
        assert self._npu is not None
        quants, scales = self._weights[work]
        plan = self._plans[1, quants.shape[1]]
        self._chunks[work] = []
        for begin in range(0, len(quants), self._chunk):
            part = np.zeros((quants.shape[1], self._chunk), np.int8)
            some = quants[begin : begin + self._chunk]
            part[:, : len(some)] = some.T
            buffer = self._npu.allocate(plan.argument_bytes[1], 1)
            buffer.bytes[:] = words_of_b(plan, part).view(np.uint8)
            buffer.sent()
            self._chunks[work].append(buffer)
        self._weights[work] = quants[:0], scales

    def product(self, work: int, x: tuple[Array, Array], rows: slice) -> Array:
        quants, scales = x
        height = -(-len(quants) // self._tall)
        plan = self._plans[height, quants.shape[1]]
        first, last = rows.start // self._chunk, -(-rows.stop // self._chunk)
        padded = self._a.bytes[: plan.argument_bytes[0]].view(np.int8).reshape(plan.M, -1)
        padded[: len(quants), : quants.shape[1]] = quants
        padded[len(quants) :] = 0
        padded[:, quants.shape[1] :] = 0
        self._a.sent()
        self._chain(work, height, first, last, plan).start().result()
        sums = []
        for buffer in self._c[first:last]:
            buffer.received()
            words = buffer.bytes[: plan.argument_bytes[2]].view(np.uint32)
            sums.append(c_of_words(plan, words)[: len(quants)])
        begin = rows.start - first * self._chunk
        found = np.concatenate(sums, axis=1)[:, begin : begin + rows.stop - rows.start]
        y: Array = (found * (scales * self._weights[work][1][rows, 0])).astype(np.float32)
        return y

    def _chain(self, work: int, height: int, first: int, last: int, plan: GemmPlan) -> Chain:
        """Prepared once for each share that has come up."""
        key = work, height, first, last
        if key not in self._chains:
            assert self._npu is not None
            jobs = [Job(plan, self._a, self._chunks[work][i], self._c[i]) for i in range(first, last)]
            self._chains[key] = self._npu.chain(jobs)
        return self._chains[key]

    def close_npu(self) -> None:
        """What was made with the configuration goes before it."""
        self._chains.clear()
        self._chunks.clear()
        self._plans.clear()
        if self._npu:
            del self._a, self._c
            self._npu.close()
            self._npu = None

    def close(self) -> None:
        super().close()
        self.close_npu()


def help_with_npu(device: Device) -> Device:
    """The device with the NPU as its helper; whether a step uses it is decided by measured times."""
    if not device.shares_memory:
        raise DeviceError(
            f"{device.name} has memory of its own, and the NPU has the host's: use cpu or an iGPU"
        )
    helper = NpuAccelerator(find_tools(), read_settings().pipelines / "npu")
    return HybridDevice(cast(Mapped, device), [helper])


def _columns(gemm: Gemm) -> int:
    return int(gemm.launch.scalars["columns"])
