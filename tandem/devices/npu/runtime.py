"""Runs GEMM plans on a Phoenix through XRT's Python module. Emulated; not yet run on a Phoenix.

Import this only where detect() is content: it needs `pyxrt`. The array is configured once, by the hardware context;
each shape has its own instructions, which set the cores' parameters and send the data. Buffers, instructions and runs
are made once and used again at each step.

No call of pyxrt lets other Python threads run while it waits. So a thread looks at the state of a run, a word of
memory, and sleeps in between; and no more runs are started than the driver takes without a wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import pyxrt

from tandem.devices.npu.plan import GemmPlan
from tandem.errors import DeviceError, DeviceLostError

KERNEL = "MLIR_AIE"  # what aiecc calls it
EXECUTE = 3  # the firmware's word for: run these instructions
# The first arguments are EXECUTE, the instructions and their bytes; then A, B and C.
INSTRUCTIONS, ARGUMENTS = 1, 3
# Commands of a context that amdxdna takes (HWCTX_MAX_CMDS); the start of a fifth waits in it.
MAX_IN_FLIGHT = 4
PAUSE = 100e-6  # seconds between looks at a run
TIMEOUT_SECONDS = 10.0  # seconds until a run counts as lost; the largest GEMM takes a tenth of one
DONE = pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
ENDED = {  # others, one of which has no name in pyxrt, are of runs under way
    DONE,
    pyxrt.ert_cmd_state.ERT_CMD_STATE_ERROR,
    pyxrt.ert_cmd_state.ERT_CMD_STATE_ABORT,
    pyxrt.ert_cmd_state.ERT_CMD_STATE_TIMEOUT,
    pyxrt.ert_cmd_state.ERT_CMD_STATE_NORESPONSE,
}
TO_NPU = pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE
FROM_NPU = pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE


@contextmanager
def translate_xrt_errors(
    problem: str, kind: type[DeviceError] = DeviceLostError, fix: str = "open it again"
) -> Iterator[None]:
    """Raises XRT's errors, which are all RuntimeErrors, as `kind`."""
    try:
        yield
    except RuntimeError as error:
        raise kind(f"{problem} ({error}): {fix}") from None


class NpuBuffer:
    """Memory that the NPU and the host (or the iGPU) share. Caches are not: call `sync_to_device`
    after the host writes and before a run, and `sync_from_device` before the host reads."""

    def __init__(self, bo: pyxrt.bo) -> None:
        self.bo = bo
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(bo.map(), np.uint8)

    def sub_buffer(self, offset: int, size: int) -> NpuBuffer:
        """A range of it, as an argument by itself."""
        return NpuBuffer(pyxrt.bo(self.bo, size, offset))

    def sync_to_device(self) -> None:
        with translate_xrt_errors("a buffer cannot be sent to the NPU"):
            self.bo.sync(TO_NPU)

    def sync_from_device(self) -> None:
        with translate_xrt_errors("a buffer cannot be received from the NPU"):
            self.bo.sync(FROM_NPU)


@dataclass(frozen=True)
class GemmJob:
    """One GEMM of a chain: a plan and where its A, B and C lie."""

    plan: GemmPlan
    a: NpuBuffer
    b: NpuBuffer
    c: NpuBuffer


class Npu:
    """The NPU with one configuration. Close it, or use it in a `with`."""

    def __init__(self, xclbin: Path, configured: GemmPlan) -> None:
        """`xclbin`: what `configured` was compiled to; it serves all plans of the same configuration."""
        self.configuration = configured.configuration
        self._instructions: dict[GemmPlan, tuple[pyxrt.bo, int]] = {}
        fix = "close what else uses it, look in `dmesg`"
        with translate_xrt_errors("the NPU does not take its configuration", DeviceError, fix):
            self._device = pyxrt.device(0)
            image = pyxrt.xclbin(str(xclbin))
            self._device.register_xclbin(image)
            self._context = pyxrt.hw_context(self._device, image.get_uuid())
            self._kernel = pyxrt.kernel(self._context, KERNEL)
        self._waits = ThreadPoolExecutor(1, "npu-waits")
        self._pending: Future[float] | None = None  # of the chain started last

    def __enter__(self) -> Npu:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """What runs comes to its end; what depends on the context goes before it."""
        self._waits.shutdown()
        self._instructions.clear()
        if hasattr(self, "_kernel"):
            del self._kernel, self._context, self._device

    def allocate(self, size: int, argument: int = 0) -> NpuBuffer:
        """Memory of the host, pinned; for A (0), B (1) or C (2)."""
        return NpuBuffer(self._bo(size, pyxrt.bo.flags.host_only, ARGUMENTS + argument))

    def _bo(self, size: int, flags: pyxrt.bo.flags, argument: int) -> pyxrt.bo:
        with translate_xrt_errors(
            f"no buffer of {size} bytes for the NPU", DeviceError, "`ulimit -l unlimited` may help"
        ):
            return pyxrt.bo(self._device, size, flags, self._kernel.group_id(argument))

    def import_dma_buf(self, descriptor: int) -> NpuBuffer:
        """Memory that another driver, such as the iGPU's, has exported as a dma-buf."""
        with translate_xrt_errors(
            "the NPU's driver does not import this dma-buf", DeviceError, "copy instead"
        ):
            return NpuBuffer(pyxrt.ext.bo(self._context, os.getpid(), descriptor))

    def load(self, plan: GemmPlan, instructions: bytes) -> None:
        """Keeps what `plan` was compiled to, so that chains can name the plan."""
        if plan.configuration != self.configuration:
            raise DeviceError("the plan is for another configuration: open the NPU with one of its own")
        bo = self._bo(len(instructions), pyxrt.bo.flags.cacheable, INSTRUCTIONS)
        with translate_xrt_errors("instructions cannot be sent to the NPU"):
            bo.write(instructions, 0)
            bo.sync(TO_NPU)
        self._instructions[plan] = bo, len(instructions)

    def chain(self, jobs: Sequence[GemmJob]) -> Chain:
        with translate_xrt_errors("GEMMs cannot be made ready on the NPU"):
            return Chain(self, jobs)

    def _run(self, job: GemmJob) -> pyxrt.run:
        """A run with its arguments, ready to start."""
        if job.plan not in self._instructions:
            raise DeviceError("a plan was not loaded: load it with its instructions first")
        bo, size = self._instructions[job.plan]
        run = pyxrt.run(self._kernel)
        run.set_arg(0, EXECUTE)
        run.set_arg(INSTRUCTIONS, bo)
        run.set_arg(2, size)
        needed = job.plan.argument_bytes
        for i, (buffer, least) in enumerate(zip((job.a, job.b, job.c), needed, strict=True)):
            if buffer.bo.size() < least:
                raise DeviceError(f"{'ABC'[i]} has {buffer.bo.size()} bytes where the plan needs {least}")
            run.set_arg(ARGUMENTS + i, buffer.bo)
        return run


class Chain:
    """GEMMs that run one after the other, prepared once. Each is started by itself, since XRT has no runlists on a
    Phoenix; the NPU does them in order."""

    def __init__(self, npu: Npu, jobs: Sequence[GemmJob]) -> None:
        self._npu, self._jobs = npu, tuple(jobs)  # the buffers live as long as this
        self._runs = [npu._run(job) for job in jobs]

    def start(self) -> Future[float]:
        """Starts all; the result, once all are done, is the seconds it took. One chain of an Npu at a time."""
        if before := self._npu._pending:
            if not before.done():
                raise DeviceError("a chain is still running on the NPU: wait for it")
            if before.exception():
                raise DeviceLostError("a GEMM on the NPU has failed before: open it again")
        begun = time.perf_counter()
        with translate_xrt_errors("a GEMM does not start on the NPU"):
            for run in self._runs[:MAX_IN_FLIGHT]:
                run.start()
        self._npu._pending = self._npu._waits.submit(self._finish, begun)
        return self._npu._pending

    def _finish(self, begun: float) -> float:
        """Waits for each run in order, and starts one of the rest for each that is done."""
        rest = iter(self._runs[MAX_IN_FLIGHT:])
        with translate_xrt_errors("a GEMM failed on the NPU"):
            for run in self._runs:
                _wait(run)
                if following := next(rest, None):
                    following.start()
        return time.perf_counter() - begun


def _wait(run: pyxrt.run) -> None:
    """Until the run is done; other Python threads go on."""
    begun = time.perf_counter()
    while (state := run.state()) not in ENDED:
        if time.perf_counter() - begun > TIMEOUT_SECONDS:
            raise DeviceLostError(f"the NPU has not answered for {TIMEOUT_SECONDS:.0f} s: open it again")
        time.sleep(PAUSE)
    if state != DONE:
        raise DeviceLostError(f"a GEMM failed on the NPU ({state.name}): open it again")
