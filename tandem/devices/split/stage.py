"""One device of several and its part of the model, with a thread that runs steps on it, one after the other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Event, Thread

from tandem.devices.device import Bytes, Device
from tandem.devices.split.cut import Part
from tandem.kernels.panels import q8_bytes
from tandem.program.program import Tensor
from tandem.program.step_inputs import HEADER_INTS, RESULT_INTS, Ints, bytes_in_use

KEPT = 4096  # steps of which a stage knows when it ran


@dataclass(eq=False)
class Carrier:
    """What a step takes from stage to stage, in memory of the host."""

    step: Bytes  # StepInputs
    results: Bytes
    crossing: Bytes  # activations between two stages

    @property
    def header(self) -> Ints:
        return self.step[: 4 * HEADER_INTS].view("i4")


@dataclass(eq=False)
class Trip:
    """A step on its way through the stages."""

    carrier: Carrier
    error: BaseException | None = None  # of the stage that failed: those after it do nothing
    done: Event = field(default_factory=Event)


class Stage:
    def __init__(self, device: Device, part: Part) -> None:
        self.device, self.part = device, part
        self.recording = device.record(part.program)
        self.times: deque[tuple[float, float]] = deque(maxlen=KEPT)  # when it began and ended a step
        self.inbox: SimpleQueue[Trip | None] = SimpleQueue()
        tensors = {t for launch in part.program.launches for t in launch.buffers.values() if t is not None}
        self._tables = [tensor for tensor in tensors if tensor.arena == "step"]
        self._samples = any(tensor.arena == "results" for tensor in tensors)
        self._thread: Thread | None = None

    def start(self, onward: Callable[[Trip], None]) -> None:
        self._thread = Thread(
            target=self._work, args=(onward,), name=f"tandem {self.device.name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """After the steps that it has been given."""
        self.inbox.put(None)
        if self._thread:
            self._thread.join()

    def _work(self, onward: Callable[[Trip], None]) -> None:
        while (trip := self.inbox.get()) is not None:
            if trip.error is None:
                begun = time.perf_counter()
                try:
                    self.enter(trip.carrier)
                    self.recording.start()
                    self.recording.finish()
                    self.leave(trip.carrier)
                except BaseException as error:  # whoever waits for the step hears of it
                    trip.error = error
                self.times.append((begun, time.perf_counter()))
            onward(trip)

    def enter(self, carrier: Carrier) -> None:
        """Gives the device what the step needs from outside."""
        step, header = self.device.memory("step"), carrier.header
        step[: header.nbytes] = carrier.step[: header.nbytes]
        for table in self._tables:
            begin, end = table.start, table.start + bytes_in_use(table, header)
            step[begin:end] = carrier.step[begin:end]
        at = 0
        for tensor in self.part.entering:
            nbytes = _used(tensor, int(header[0]))
            self.device.write(tensor, carrier.crossing[at : at + nbytes])
            at += nbytes

    def leave(self, carrier: Carrier) -> None:
        """Takes from it what others need."""
        at = 0
        for tensor in self.part.leaving:
            nbytes = _used(tensor, int(carrier.header[0]))
            carrier.crossing[at : at + nbytes] = self.device.read(replace(tensor, nbytes=nbytes))
            at += nbytes
        if self._samples:
            nbytes = 4 * RESULT_INTS * int(carrier.header[1])
            carrier.results[:nbytes] = self.device.memory("results")[:nbytes]


def _used(tensor: Tensor, tokens: int) -> int:
    """Bytes of the rows of so many tokens."""
    size = q8_bytes(tokens, tensor.stride) if tensor.dtype == "q8" else 4 * tokens * tensor.stride
    return min(size, tensor.nbytes)
