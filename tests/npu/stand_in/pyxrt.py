"""A STAND-IN for XRT's Python module: there is no NPU behind it, only the emulator. For tests.

It is strict where XRT would crash, hang or be silently wrong. Host and NPU have their own copies of a buffer until it
is synchronised; runs are done in order, by a thread, some time after they were started; a wait for what is not done is
an error, since the real one would hold the interpreter's lock, and so is the start of a fifth run of a context, which
would wait in the driver; runs do not keep their buffers alive. There are no runlists, as on a Phoenix.
"""

from __future__ import annotations

import re
import threading
import weakref
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tandem.devices.npu.emit import emit, emit_configuration
from tandem.devices.npu.emulator import EmulatedArray
from tandem.devices.npu.plan import GemmPlan, plan_gemm
from tandem.devices.npu.tiling import tile_gemm

xclBOSyncDirection = IntEnum(
    "xclBOSyncDirection", ["XCL_BO_SYNC_BO_TO_DEVICE", "XCL_BO_SYNC_BO_FROM_DEVICE"], start=0
)
ert_cmd_state = IntEnum(
    "ert_cmd_state",
    [
        "ERT_CMD_STATE_NEW",
        "ERT_CMD_STATE_QUEUED",
        "ERT_CMD_STATE_RUNNING",
        "ERT_CMD_STATE_COMPLETED",
        "ERT_CMD_STATE_ERROR",
        "ERT_CMD_STATE_ABORT",
        "ERT_CMD_STATE_SUBMITTED",
        "ERT_CMD_STATE_TIMEOUT",
        "ERT_CMD_STATE_NORESPONSE",
    ],
    start=1,
)
xrt_info_device = IntEnum("xrt_info_device", ["bdf", "name"])
DONE = ert_cmd_state.ERT_CMD_STATE_COMPLETED
MAX_COMMANDS = 4  # of a context under way, in the driver

may_end = threading.Event()  # runs do not end before
may_end.set()
lost = False  # the driver has given the NPU up
weights_left = 10**9  # buffers of them that there is memory for
ends_as = DONE  # the state in which the next runs end
calls: list[str] = []  # what was asked of it, in order
exported: dict[int, bytearray] = {}  # dma-bufs of another driver, by file descriptor


def _alive() -> None:
    if lost:
        raise RuntimeError("No such device")


def _take_weights() -> None:
    global weights_left
    weights_left -= 1
    if weights_left < 0:
        raise RuntimeError("Cannot allocate memory")


def enumerate_devices() -> int:
    return 1


class uuid:
    def __init__(self, uuid_str: str) -> None:
        self.text = uuid_str

    def to_string(self) -> str:
        return self.text


class xclbin:
    def __init__(self, filename: str) -> None:
        self.image = Path(filename).read_bytes()
        if not self.image.startswith(b"xclbin2"):
            raise RuntimeError("not an xclbin")

    def get_uuid(self) -> uuid:
        return uuid(str(hash(self.image)))


class device:
    def __init__(self, index: int) -> None:
        calls.append("device")
        self.images: dict[str, bytes] = {}

    def register_xclbin(self, xclbin: xclbin) -> uuid:
        calls.append("register_xclbin")
        self.images[xclbin.get_uuid().text] = xclbin.image
        return xclbin.get_uuid()

    def get_info(self, key: Any) -> str:
        return "stand-in"


class hw_context:
    """The array, configured by the image. One thread does the runs of all its queues, in order."""

    def __init__(self, device: device, uuid: uuid) -> None:
        calls.append("hw_context")
        if uuid.text not in device.images:
            raise RuntimeError("this xclbin was not registered")
        text = device.images[uuid.text].removeprefix(b"xclbin2\0").decode()
        self.array = EmulatedArray(planned(text, (1, 1, 1), 0))
        self.condition = threading.Condition()
        self.queue: list[run] = []
        threading.Thread(
            target=_work, args=(weakref.ref(self), self.condition, self.queue), daemon=True
        ).start()

    def __del__(self) -> None:
        with self.condition:
            self.condition.notify_all()


def planned(text: str, shape: tuple[int, int, int], shift: int) -> GemmPlan:
    """The plan that a text was emitted for."""
    kind = re.search(r"int8 x (\w+) to (\w+), (\d+) x (\d+) x (\d+) a core, (\d) of C", text)
    assert kind
    rounding = re.search(r"@store_(\w+)\(", text)
    m, k, n, c_objects = map(int, kind.groups()[2:])
    return plan_gemm(
        *shape,
        kind[2],
        weights=kind[1],
        shift=shift,
        rounding=rounding[1].replace("_", " ") if rounding else "half even",
        tiling=tile_gemm(*shape, (m, k, n), c_objects),
    )


@lru_cache(maxsize=64)
def plan_of_instructions(data: bytes) -> GemmPlan:
    """The stand-in's instructions are the text itself."""
    text = data.rstrip(b"\0").decode()
    found = re.search(r"// C of (\d+) x (\d+), (\d+) deep, shift (\d+)", text)
    assert found
    M, N, K, shift = map(int, found.groups())
    plan = planned(text, (M, N, K), shift)
    assert emit(plan) == text and emit_configuration(plan)
    return plan


class kernel:
    def __init__(self, ctx: hw_context, name: str) -> None:
        calls.append("kernel")
        assert name == "MLIR_AIE"
        self.ctx = ctx

    def group_id(self, index: int) -> int:
        assert 1 <= index <= 5 and index != 2, "scalars are in no memory"
        return 65536 + index


class bo:
    class flags(IntEnum):
        normal = 0
        cacheable = 1
        host_only = 2

    def __init__(self, first: Any, size: int, third: Any = None, fourth: int | None = None) -> None:
        assert size > 0 and size % 4 == 0
        self._size, self.parent = int(size), None
        if isinstance(first, bo):
            calls.append("sub-buffer")
            assert third + size <= first.size() and third % 4096 == 0
            self.parent = first
            self.host = first.host[third : third + size]
            self.npu = first.npu[third : third + size]
            self.flag, self.group = first.flag, first.group
            return
        calls.append("bo")
        if fourth == 65536 + 4:
            _take_weights()
        assert isinstance(first, device) and isinstance(third, bo.flags) and fourth
        self.host, self.npu = np.zeros(size, np.uint8), np.full(size, 0xA5, np.uint8)
        self.flag, self.group = third, fourth

    def write(self, data: Any, seek: int) -> None:
        new = np.frombuffer(data, np.uint8)
        self.host[seek : seek + len(new)] = new

    def sync(self, direction: Any) -> None:
        _alive()
        if direction is xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE:
            self.npu[:] = self.host
        else:
            self.host[:] = self.npu

    def map(self) -> memoryview:
        return memoryview(self.host)

    def size(self) -> int:
        return self._size


class ext:
    class bo(bo):
        def __init__(self, hwctx: hw_context, pid: int, export_handle: int) -> None:
            calls.append("import")
            if export_handle not in exported:
                raise RuntimeError("Bad file descriptor")
            shared = np.frombuffer(exported[export_handle], np.uint8)
            self._size, self.parent, self.host, self.npu = len(shared), None, shared, shared
            self.flag, self.group = bo.flags.host_only, 0


class run:
    def __init__(self, kernel: kernel) -> None:
        calls.append("run")
        self.kernel, self.args = kernel, {}  # type: ignore[var-annotated]
        self.now = ert_cmd_state.ERT_CMD_STATE_NEW

    def set_arg(self, index: int, value: Any) -> None:
        self.args[index] = weakref.ref(value) if isinstance(value, bo) else int(value)

    def start(self) -> None:
        if self.now in (ert_cmd_state.ERT_CMD_STATE_QUEUED, ert_cmd_state.ERT_CMD_STATE_RUNNING):
            raise RuntimeError("the run is under way already")
        _alive()
        calls.append("start")
        self.now = ert_cmd_state.ERT_CMD_STATE_QUEUED
        with self.kernel.ctx.condition:
            if sum(item.now < DONE for item in self.kernel.ctx.queue) == MAX_COMMANDS:
                calls.append("failed: a start that waits in the driver")
            self.kernel.ctx.queue.append(self)
            self.kernel.ctx.condition.notify_all()

    def state(self) -> Any:
        return self.now

    def wait(self) -> Any:
        assert self.now >= DONE, "this wait would hold the interpreter's lock"
        return self.now

    def execute(self) -> None:
        """By the context's thread."""
        self.now = ert_cmd_state.ERT_CMD_STATE_RUNNING
        may_end.wait(60)
        if ends_as == DONE:
            instructions, *data = (self.args[i]() for i in (1, 3, 4, 5))
            assert all(item is not None for item in (instructions, *data)), "a buffer was freed too early"
            assert self.args[0] == 3 and self.args[2] == instructions.size()
            assert instructions.flag is bo.flags.cacheable and instructions.group == 65536 + 1
            plan = plan_of_instructions(bytes(instructions.npu))
            for i, (item, size) in enumerate(zip(data, plan.argument_bytes, strict=True)):
                assert item.flag is bo.flags.host_only and item.size() >= size, "a buffer is too small"
                assert item.group in (0, 65536 + 3 + i)
            a, b, c = (item.npu[:size] for item, size in zip(data, plan.argument_bytes, strict=True))
            found = self.kernel.ctx.array.dispatch(plan, a.view(np.uint32), b.view(np.uint32))
            c[:] = found.view(np.uint8)
        self.now = ends_as


def _work(context: Any, condition: threading.Condition, queue: list[run]) -> None:
    while True:
        with condition:
            while not queue and context() is not None:
                condition.wait(0.5)
            if not queue:
                return
            item = queue[0]
        try:
            item.execute()
        except BaseException as error:  # a test must see it
            calls.append(f"failed: {error}")
            item.now = ert_cmd_state.ERT_CMD_STATE_ERROR
        with condition:
            queue.pop(0)
        del item
