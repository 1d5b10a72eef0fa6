"""The Recording of a TensorParallelDevice, and the main device's Recordings that its segments replay."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tandem.devices import device as devices
from tandem.devices.tensor_parallel.cut import Gemm, TensorMap
from tandem.devices.tensor_parallel.segments import SegmentedStep
from tandem.errors import DeviceError
from tandem.interrupts import deferred
from tandem.program.program import Program, Tensor

if TYPE_CHECKING:
    from tandem.devices.tensor_parallel.device import TensorParallelDevice


class SlotRecordings:
    """The main device's Recordings for one step slot: between partitioned launches, and of its own partitions."""

    def __init__(
        self,
        device: TensorParallelDevice,
        program: Program,
        step_slot: int,
        tensor_map: TensorMap,
        scratch: Tensor | None,
    ) -> None:
        self.device, self.step_slot, self._tensor_map, self._scratch = device, step_slot, tensor_map, scratch
        self.program = Program(
            [tensor_map.launch(launch) for launch in program.launches],
            program.max_counts,
            program.arena_bytes,
        )
        self.alone = device.record_main(self.program.launches, step_slot) if device.whole else None
        ends = [*(work.begin for work in device.works), len(program.launches)]
        begins = [0, *(work.end for work in device.works)]
        self.between = [
            device.record_main(self.program.launches[begin:end], step_slot) if begin < end else None
            for begin, end in zip(begins, ends, strict=True)
        ]
        self._partitions: dict[tuple[int, int], tuple[devices.Recording, Tensor]] = {}
        self._cuts: set[tuple[int, tuple[int, ...]]] = set()

    def mapped(self, tensor: Tensor) -> Tensor:
        return self._tensor_map.mapped(tensor)

    def is_new(self, index: int, cut: tuple[int, ...]) -> bool:
        """Whether this division of a Work is new, so that devices must record their partitions."""
        new = (index, cut) not in self._cuts
        self._cuts.add((index, cut))
        return new

    def partition(self, index: int, count: int) -> tuple[devices.Recording, Tensor]:
        """Records the main device's partition of a matmul (its first `count` units) once; returns the Recording and its
        output tensor: the columns in place, or, for int8 tiles, a packed scratch tensor."""
        if (index, count) not in self._partitions:
            gemm = self.device.works[index]
            assert isinstance(gemm, Gemm)
            whole, out = self.program.launches[gemm.begin], self.mapped(gemm.out)
            if gemm.out.dtype == "q8" and count < gemm.units:
                assert self._scratch is not None
                out = replace(self._scratch, stride=gemm.columns(0, count)[1])
            launch = gemm.partition(0, count, dict(whole.buffers), out) if count < gemm.units else whole
            self._partitions[index, count] = self.device.record_main([launch], self.step_slot), out
        return self._partitions[index, count]


class TensorParallelRecording:
    """Runs the steps of one step slot. A step for the main device alone skips the segment thread if that is idle."""

    def __init__(self, device: TensorParallelDevice, recordings: SlotRecordings) -> None:
        self.device, self.recordings = device, recordings
        self._in_flight: SegmentedStep | None = None

    def start(self) -> None:
        device, tokens = self.device, self.device.tokens(self.recordings.step_slot)
        runner = device.runner
        if runner is None:
            raise DeviceError("the devices are closed: open the model again")
        kind = device.balance(tokens).next()
        if kind == "off" and runner.idle:
            self._in_flight = None
            assert self.recordings.alone is not None
            self.recordings.alone.start()
            return
        step = SegmentedStep(self.recordings.step_slot, tokens, kind)
        try:
            self._in_flight = step
            runner.add(step)
        except BaseException:  # an interrupt, before or after it was added
            runner.withdraw(step)
            raise

    def finish(self) -> None:
        if self._in_flight is None:
            if self.recordings.alone:
                self.recordings.alone.finish()
            return
        with deferred():  # the next step would overwrite the inputs of this one
            self._in_flight.done.wait()
        if self._in_flight.error:
            raise self._in_flight.error

    def replay(self, begin: int = 0, end: int | None = None) -> None:
        if (begin, end) == (0, None):
            with deferred():
                self.start()
                self.finish()
        elif self.recordings.alone:
            self.recordings.alone.replay(begin, end)
        else:
            raise DeviceError("--placement npu-attention cannot capture intermediates: use another placement")

    def replay_timed(self) -> list[float]:
        if self.recordings.alone:
            return self.recordings.alone.replay_timed()
        raise DeviceError("--placement npu-attention cannot time single launches: use another placement")
