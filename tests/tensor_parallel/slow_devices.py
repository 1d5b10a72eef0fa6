"""Devices that take their time, as if others did the work: so that fractions do not depend on how busy a machine is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

from tandem.devices.cpu.device import CPUDevice, CPURecording
from tandem.devices.device import Bytes, Device
from tandem.devices.tensor_parallel.accelerator import AcceleratorThread, DeviceAccelerator, Partition
from tandem.devices.tensor_parallel.cut import Gemm
from tandem.devices.tensor_parallel.device import TensorParallelDevice
from tandem.engine.engine import Engine
from tandem.model.model import open_model
from tandem.program.program import Program

PER_ROW = 20e-6  # seconds for a row of a matmul's weights


class SlowRecording(CPURecording):
    def replay(self, begin: int = 0, end: int | None = None) -> None:
        super().replay(begin, end)
        launches = self.program.launches[begin:end]
        rows = sum(launch.scalars["rows"] for launch in launches if launch.kernel.name.startswith("matmul"))
        time.sleep(PER_ROW * rows)


class SlowCPU(CPUDevice):
    def record(self, program: Program, step_slot: int = 0) -> CPURecording:
        return SlowRecording(self, program, step_slot)


class SlowHelper(DeviceAccelerator):
    """`times_as_long` as the slow CPU."""

    times_as_long = 1.0

    def run(self, partition: Partition) -> Sequence[Bytes]:
        found = super().run(partition)
        work = self._placed[partition.work].work
        rows = work.rows * partition.units / work.units if isinstance(work, Gemm) else 100
        time.sleep(self.times_as_long * PER_ROW * rows)
        return found


class Meeting:
    """Two devices that wait for each other: neither finishes a partition before the other has started its own."""

    def __init__(self) -> None:
        self.barrier = Barrier(2, timeout=120)

    def main(self) -> CPUDevice:
        device, wait = CPUDevice(1), self.barrier.wait

        class Meets(CPURecording):
            def replay(self, begin: int = 0, end: int | None = None) -> None:
                (first, *others) = self.program.launches
                if not others and first.kernel.name.startswith("matmul"):
                    wait()
                super().replay(begin, end)

        device.record = lambda program, step_slot=0: Meets(device, program, step_slot)  # type: ignore[method-assign]
        return device

    def accelerator(self, device: Device) -> DeviceAccelerator:
        accelerator, wait = DeviceAccelerator(device), self.barrier.wait
        run = accelerator.run

        def meets(partition: Partition) -> Sequence[Bytes]:
            wait()
            return run(partition)

        accelerator.run = meets  # type: ignore[method-assign]
        return accelerator


def at_once(device: TensorParallelDevice, accelerator: AcceleratorThread) -> float:
    """Of the main device's fractions, the part during which the accelerator had one, too."""
    spans = list(accelerator.times)
    both = [any(b < end and begin < e for b, e in spans) for begin, end in device.times]
    return sum(both) / len(both)


@contextmanager
def tensor_parallel_engine(
    path: Path, main: Device, accelerators: Sequence[Any], placement: str = "columns", *,
    fractions: Sequence[float] | None = None, **options: Any,
) -> Iterator[Engine]:  # fmt: skip
    model = open_model(path)
    device = TensorParallelDevice(main, accelerators, placement, fractions)  # type: ignore[arg-type]
    try:
        yield Engine.load(model, device, **{"context": 256, "batch": 8, **options})
    finally:
        device.close()
        model.gguf.close()


def check_both_work(path: Path, second: Device) -> None:
    """A CPU and another at one step, by when their fractions began and ended."""
    meeting = Meeting()
    accelerator = meeting.accelerator(second)
    with tensor_parallel_engine(path, meeting.main(), [accelerator], fractions=(1, 1)) as engine:
        engine.logits(list(range(8)))
        device = engine.device
        assert isinstance(device, TensorParallelDevice)
        assert len(device.times) == len(accelerator.times) == len(device.works)
        assert at_once(device, accelerator) == 1
