"""A pipeline stage: one device, its layers, and a thread that runs steps on it in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Event, Thread

from tandem.devices.device import Bytes, Device
from tandem.devices.split.cut import ProgramPart
from tandem.kernels.abi import HEADER_INTS, RESULT_INTS
from tandem.kernels.q8_tiles import q8_bytes
from tandem.program.program import Tensor
from tandem.program.step_inputs import Ints, bytes_in_use

MAX_RECENT_TIMES = 4096  # recent steps whose times are kept


@dataclass(eq=False)
class StepBuffers:
    """The buffers of a step in host memory, passed from stage to stage."""

    step: Bytes  # StepInputs
    results: Bytes
    crossing: Bytes  # activations between two stages

    @property
    def header(self) -> Ints:
        return self.step[: 4 * HEADER_INTS].view("i4")


@dataclass(eq=False)
class StagedStep:
    """A step that passes through the stages."""

    buffers: StepBuffers
    error: BaseException | None = None  # raised by a stage; later stages skip the step
    done: Event = field(default_factory=Event)


class Stage:
    def __init__(self, device: Device, part: ProgramPart) -> None:
        self.device, self.part = device, part
        self.recording = device.record(part.program)
        # Begin and end of recent steps.
        self.times: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT_TIMES)
        self.inbox: SimpleQueue[StagedStep | None] = SimpleQueue()
        tensors = {t for launch in part.program.launches for t in launch.buffers.values() if t is not None}
        self._tables = [tensor for tensor in tensors if tensor.arena == "step"]
        self._samples = any(tensor.arena == "results" for tensor in tensors)
        self._thread: Thread | None = None

    def start(self, onward: Callable[[StagedStep], None]) -> None:
        self._thread = Thread(
            target=self._work, args=(onward,), name=f"tandem {self.device.name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stops after the steps in the inbox."""
        self.inbox.put(None)
        if self._thread:
            self._thread.join()

    def _work(self, onward: Callable[[StagedStep], None]) -> None:
        while (step := self.inbox.get()) is not None:
            if step.error is None:
                begun = time.perf_counter()
                try:
                    self.copy_in(step.buffers)
                    self.recording.start()
                    self.recording.finish()
                    self.copy_out(step.buffers)
                except BaseException as error:  # raised in `finish`
                    step.error = error
                self.times.append((begun, time.perf_counter()))
            onward(step)

    def copy_in(self, buffers: StepBuffers) -> None:
        """Copies StepInputs and incoming activations to the device."""
        step, header = self.device.memory("step"), buffers.header
        step[: header.nbytes] = buffers.step[: header.nbytes]
        for table in self._tables:
            begin, end = table.start, table.start + bytes_in_use(table, header)
            step[begin:end] = buffers.step[begin:end]
        at = 0
        for tensor in self.part.entering:
            nbytes = _used(tensor, int(header[0]))
            self.device.write(tensor, buffers.crossing[at : at + nbytes])
            at += nbytes

    def copy_out(self, buffers: StepBuffers) -> None:
        """Copies outgoing activations and results from the device."""
        at = 0
        for tensor in self.part.leaving:
            nbytes = _used(tensor, int(buffers.header[0]))
            buffers.crossing[at : at + nbytes] = self.device.read(replace(tensor, nbytes=nbytes))
            at += nbytes
        if self._samples:
            nbytes = 4 * RESULT_INTS * int(buffers.header[1])
            buffers.results[:nbytes] = self.device.memory("results")[:nbytes]


def _used(tensor: Tensor, tokens: int) -> int:
    """Returns the bytes of the first `tokens` rows."""
    size = q8_bytes(tokens, tensor.stride) if tensor.dtype == "q8" else 4 * tokens * tensor.stride
    return min(size, tensor.nbytes)
