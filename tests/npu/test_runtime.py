"""The runtime over a STAND-IN for pyxrt: order of calls, buffers, lifetimes. No NPU is here: the emulator runs."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tandem.devices.npu.emit import emit, emit_configuration
from tandem.devices.npu.operands import c_of_words, words_of_a, words_of_b
from tandem.devices.npu.plan import GemmPlan, plan_gemm, plan_resident
from tandem.errors import DeviceError, DeviceLostError
from tests.npu.test_emulator import inputs, matmul

pytestmark = pytest.mark.fast

HERE = Path(__file__).parent
PLANS = plan_resident([(40, 90, 50), (9, 70, 120)])


@pytest.fixture
def npu(xrt: ModuleType, tmp_path: Path) -> Iterator[Any]:
    runtime = importlib.import_module("tandem.devices.npu.runtime")
    with runtime.Npu(image(tmp_path, PLANS[0]), PLANS[0]) as opened:
        for plan in PLANS:
            opened.load(plan, instructions(plan))
        yield opened


def image(folder: Path, plan: GemmPlan) -> Path:
    """What the stand-in takes for an xclbin."""
    (folder / "gemm.xclbin").write_bytes(b"xclbin2\0" + emit_configuration(plan).encode())
    return folder / "gemm.xclbin"


def instructions(plan: GemmPlan) -> bytes:
    text = emit(plan).encode()
    return text + b"\0" * (-len(text) % 4)


def job(npu: Any, plan: GemmPlan, seed: int = 0) -> tuple[Any, np.ndarray[Any, Any]]:
    """A job with its inputs sent, and the result it must have."""
    runtime = sys.modules["tandem.devices.npu.runtime"]
    a, b = inputs(plan, seed)
    buffers = [npu.allocate(size, i) for i, size in enumerate(plan.argument_bytes)]
    for buffer, words in zip(buffers, (words_of_a(plan, a), words_of_b(plan, b)), strict=False):
        buffer.bytes[:] = words.view(np.uint8)
        buffer.sync_to_device()
    return runtime.GemmJob(plan, *buffers), matmul(a, b)


def result(item: Any) -> np.ndarray[Any, Any]:
    item.c.sync_from_device()
    return c_of_words(item.plan, item.c.bytes.view(np.uint32))


def test_one_gemm_again_and_again(npu: Any, xrt: Any) -> None:
    item, want = job(npu, PLANS[0])
    chain = npu.chain([item])
    for _ in range(3):
        item.c.bytes[:] = 0
        item.c.sync_to_device()
        assert chain.start().result(60) > 0
        assert np.array_equal(result(item), want)
    made = ["device", "register_xclbin", "hw_context", "kernel", *["bo"] * 5, "run"]
    assert xrt.calls == [*made, "start", "start", "start"]  # nothing is made at a start


def test_a_chain_of_shapes(npu: Any, xrt: Any) -> None:
    """Several shapes in one configuration, each started by itself: a Phoenix has no runlists."""
    items = [job(npu, PLANS[i % 2], i) for i in range(5)]
    chain = npu.chain([item for item, _ in items])
    for _ in range(2):
        chain.start().result(60)
        for item, want in items:
            assert np.array_equal(result(item), want)
    assert xrt.calls.count("hw_context") == 1 and xrt.calls.count("start") == 2 * 5
    assert not [call for call in xrt.calls if call.startswith("failed")]


def test_no_start_waits_in_the_driver(npu: Any, xrt: Any) -> None:
    """It keeps four commands of a context; the start of a fifth would stop every Python thread until one is done."""
    items = [job(npu, PLANS[i % 2], i) for i in range(11)]
    xrt.may_end.clear()
    pending = npu.chain([item for item, _ in items]).start()
    time.sleep(0.02)
    assert xrt.calls.count("start") == xrt.MAX_COMMANDS and not pending.done()
    other = npu.chain([items[0][0]])
    with pytest.raises(DeviceError, match="still running"):
        other.start()
    xrt.may_end.set()
    pending.result(60)
    for item, want in items:
        assert np.array_equal(result(item), want)
    assert xrt.calls.count("start") == 11
    assert not [call for call in xrt.calls if call.startswith("failed")]


def test_python_goes_on_while_the_npu_works(npu: Any, xrt: Any) -> None:
    item, want = job(npu, PLANS[0])
    xrt.may_end.clear()
    pending = npu.chain([item]).start()
    for _ in range(20):
        time.sleep(0.001)
    assert not pending.done()
    xrt.may_end.set()
    assert pending.result(60) > 0.02
    assert np.array_equal(result(item), want)


def test_buffers_live_as_long_as_their_chain(npu: Any, xrt: Any) -> None:
    chain = npu.chain([job(npu, PLANS[0])[0]])
    gc.collect()
    chain.start().result(60)


def test_unsent_data_is_not_seen(npu: Any) -> None:
    """Of the stand-in: it would catch a runtime that forgets to synchronise."""
    item, want = job(npu, PLANS[0])
    item.a.bytes[:] = 0
    npu.chain([item]).start().result(60)
    assert np.array_equal(result(item), want)
    item.a.sync_to_device()
    npu.chain([item]).start().result(60)
    assert not result(item).any()


def test_weights_in_one_allocation(npu: Any) -> None:
    """A part of a buffer is an argument by itself."""
    runtime = sys.modules["tandem.devices.npu.runtime"]
    item, want = job(npu, PLANS[0])
    size = PLANS[0].argument_bytes[1]
    whole = npu.allocate(4096 + size, 1)
    part = whole.sub_buffer(4096, size)
    part.bytes[:] = item.b.bytes
    whole.sync_to_device()
    item = runtime.GemmJob(item.plan, item.a, part, item.c)
    npu.chain([item]).start().result(60)
    assert np.array_equal(result(item), want)


def test_a_dma_buf_of_another_driver(npu: Any, xrt: Any) -> None:
    runtime = sys.modules["tandem.devices.npu.runtime"]
    item, want = job(npu, PLANS[0])
    xrt.exported[77] = bytearray(item.a.bytes.tobytes())
    item = runtime.GemmJob(item.plan, npu.import_dma_buf(77), item.b, item.c)
    npu.chain([item]).start().result(60)
    assert np.array_equal(result(item), want)
    with pytest.raises(DeviceError, match="copy instead"):
        npu.import_dma_buf(78)


def test_what_is_wrong_is_refused(npu: Any, xrt: Any, tmp_path: Path) -> None:
    runtime = sys.modules["tandem.devices.npu.runtime"]
    item, _ = job(npu, PLANS[0])
    with pytest.raises(DeviceError, match="B has 4096 bytes where the plan needs"):
        npu.chain([runtime.GemmJob(item.plan, item.a, npu.allocate(4096, 1), item.c)])
    other = plan_gemm(8, 8, 8)
    with pytest.raises(DeviceError, match="another configuration"):
        npu.load(other, instructions(other))
    with pytest.raises(DeviceError, match="not loaded"):
        npu.chain([runtime.GemmJob(plan_resident([(40, 90, 50), (9, 70, 121)])[1], item.a, item.b, item.c)])
    (tmp_path / "bad").write_bytes(b"?")
    with pytest.raises(DeviceError, match="does not take its configuration"):
        runtime.Npu(tmp_path / "bad", PLANS[0])


def test_a_second_start_waits_for_the_first(npu: Any, xrt: Any) -> None:
    chain = npu.chain([job(npu, PLANS[0])[0]])
    xrt.may_end.clear()
    pending = chain.start()
    with pytest.raises(DeviceError, match="still running"):
        chain.start()
    xrt.may_end.set()
    pending.result(60)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_failed_run(npu: Any, xrt: Any, count: int) -> None:
    """Behind it no more are started."""
    chain = npu.chain([job(npu, PLANS[0])[0] for _ in range(count)])
    xrt.ends_as = xrt.ert_cmd_state.ERT_CMD_STATE_ABORT
    with pytest.raises(DeviceLostError, match="failed on the NPU"):
        chain.start().result(60)
    assert xrt.calls.count("start") == min(count, xrt.MAX_COMMANDS)
    with pytest.raises(DeviceLostError, match="failed before: open it again"):
        chain.start()  # others may still be under way: one more could wait in the driver


def test_an_npu_that_does_not_answer(npu: Any, xrt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tandem.devices.npu.runtime"], "TIMEOUT_SECONDS", 0.05)
    xrt.may_end.clear()
    with pytest.raises(DeviceLostError, match="has not answered"):
        npu.chain([job(npu, PLANS[0])[0]]).start().result(60)
    xrt.may_end.set()


def test_an_npu_that_is_lost(npu: Any, xrt: Any) -> None:
    """Whatever XRT is asked then, the error says what to do."""
    item, _ = job(npu, PLANS[0])
    chain = npu.chain([item])
    xrt.lost = True
    for asked in (
        chain.start,
        item.a.sync_to_device,
        item.c.sync_from_device,
        lambda: npu.load(PLANS[0], instructions(PLANS[0])),
    ):
        with pytest.raises(DeviceLostError, match=r"the NPU \(No such device\): open it again"):
            asked()


def test_close_waits_and_leaves_no_thread(xrt: Any, tmp_path: Path) -> None:
    runtime = importlib.import_module("tandem.devices.npu.runtime")
    npu = runtime.Npu(image(tmp_path, PLANS[0]), PLANS[0])
    npu.load(PLANS[0], instructions(PLANS[0]))
    xrt.may_end.clear()
    pending = npu.chain([job(npu, PLANS[0])[0]]).start()
    threading.Timer(0.05, xrt.may_end.set).start()
    npu.close()
    assert pending.done() and pending.result() > 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("npu-waits")]
    npu.close()


def test_the_stand_in_has_the_interface_that_types_are_checked_by(xrt: ModuleType) -> None:
    """Each class, method and function of typings/pyxrt.pyi is in the stand-in, with as many arguments."""
    declared = ast.parse((HERE / "typings" / "pyxrt.pyi").read_text())
    for node in declared.body:
        if isinstance(node, ast.FunctionDef):
            assert callable(getattr(xrt, node.name))
        elif isinstance(node, ast.ClassDef) and node.name != "_ext_bo":
            found = getattr(xrt, node.name)
            for item in node.body:
                if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                    assert hasattr(found, item.targets[0].id), f"{node.name}.{item.targets[0].id}"
                elif isinstance(item, ast.FunctionDef) and item.name != "__init__":
                    ours = inspect.signature(getattr(found, item.name)).parameters
                    assert len(ours) == len(item.args.args), f"{node.name}.{item.name}"
