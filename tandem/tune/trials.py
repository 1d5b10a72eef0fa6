"""Runs a kernel on a case with any choice of its tunable parameters: its results, and its time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Protocol, TypeGuard, cast

import numpy as np

from tandem.bench.kernel_checks import STEP_BYTES, AnyDevice, set_counts
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.device import Recording
from tandem.devices.tuned_choices import NOTHING, Choice
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.recording import VulkanRecording
from tandem.errors import DoesNotFitError
from tandem.kernels.abi import COUNTS
from tandem.kernels.kernel import Array, Case, Counts, Kernel
from tandem.program.program import Launch, Program, Tensor

ARENA = "trials"
MAX_BYTES = 2 << 30  # of the arrays of all cases
COLD_BYTES = 256 << 20  # bytes to read before the same bytes again, so that no cache still holds them
MAX_COPIES = 32
ALIGNMENT = 256
MAX_COUNT = 4096


def is_gpu(device: AnyDevice) -> TypeGuard[VulkanDevice]:
    return isinstance(device, VulkanDevice) and device.capabilities.kind != "software"


class TrialMemory:
    """An arena of a device for the arrays of cases. `max_array_bytes`: for the arrays of one case."""

    def __init__(self, device: AnyDevice, *, quick: bool = False) -> None:
        self.device, self._at = device, 0
        few = quick or (isinstance(device, VulkanDevice) and not is_gpu(device))
        end = min(MAX_BYTES // (4 if few else 1), int(device.free_memory()[0]) // 4) + 2 * COLD_BYTES
        if isinstance(device, VulkanDevice):
            end = min(end, device.capabilities.largest_allocation)
        self.max_array_bytes, self._end = end // 2, end
        device.allocate_arena(ARENA, end)
        device.allocate_arena("step", STEP_BYTES)

    def clear(self) -> None:
        self._at = 0

    def copies(self, nbytes: int) -> int:
        """Further copies of `nbytes`, as far as they fit, with which reading them in turn always misses the cache."""
        room = (self._end - self._at) // (nbytes + ALIGNMENT)
        return max(0, min(COLD_BYTES // max(1, nbytes), MAX_COPIES, room) - 1)

    def place(self, name: str, array: Array) -> Tensor:
        tensor = Tensor(name, ARENA, str(array.dtype), array.nbytes, offset=self._at)
        self._at += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if self._at > self._end:
            raise DoesNotFitError(f"{name} of {array.nbytes} bytes is too large to tune: use a smaller model")
        self.device.write(tensor, array.reshape(-1).view(np.uint8))
        return tensor


class Trial(Protocol):
    """Something to time with different choices, which must all give the same results."""

    def results(self, counts: Counts, choice: Choice = NOTHING) -> dict[str, Array]:
        """The declared outputs of a launch."""

    def seconds(self, counts: Counts, launches: int, choice: Choice = NOTHING) -> float:
        """The mean seconds of a launch, over `launches` in a row."""

    def free(self) -> None:
        """Frees the recordings that are kept for further timing."""


class KernelTrial:
    """A kernel with a case's arrays on a device. `cold`: the array that a step reads from memory, such as weights; it
    is copied so often that no cache holds it."""

    def __init__(self, space: TrialMemory, kernel: Kernel, case: Case, cold: str) -> None:
        self.device, self.kernel, self.case = space.device, kernel, case
        self._tensors = {name: space.place(name, array) for name, array in case.arrays.items()}
        copies = space.copies(case.arrays[cold].nbytes)
        more = [space.place(cold, case.arrays[cold]) for _ in range(copies)]
        self._cold = [{**self._tensors, cold: tensor} for tensor in [self._tensors[cold], *more]]
        self._next = 0  # index of the next copy
        self._kept: dict[object, tuple[VulkanRecording, ExitStack]] = {}

    def results(self, counts: Counts, choice: Choice = NOTHING) -> dict[str, Array]:
        written = [b.name for b in self.kernel.buffers if "w" in b.access and b.name in self._tensors]
        for name in written:
            self.device.write(self._tensors[name], self.case.arrays[name].reshape(-1).view(np.uint8))
        self._count(counts)
        with self.device.choices.trying(choice):
            self._record(self._cold[:1]).replay(0, 1)
        extents = self.kernel.extents(self.case.scalars, counts)
        found = {}
        for name in written:
            tensor, array = self._tensors[name], self.case.arrays[name]
            row = array.nbytes // len(array)
            rows = min(len(array), -(-extents[name] // row))
            part = Tensor(name, ARENA, tensor.dtype, rows * row, offset=tensor.offset)
            found[name] = self.device.read(part).copy().view(array.dtype).reshape(rows, *array.shape[1:])
        return found

    def seconds(self, counts: Counts, launches: int, choice: Choice = NOTHING) -> float:
        self._count(counts)
        if is_gpu(self.device) and self.device.capabilities.timestamp_ns:
            return self._seconds_again(counts, launches, choice)
        over = [self._cold[(self._next + i) % len(self._cold)] for i in range(launches)]
        self._next = (self._next + launches) % len(self._cold)
        with self.device.choices.trying(choice):
            recording = self._record(over)
            if isinstance(self.device, CPUDevice) or self.device.capabilities.timestamp_ns:
                return sum(recording.replay_timed()) / launches  # a GPU may run several launches for one
            begun = time.perf_counter()
            recording.replay(0, launches)
            return (time.perf_counter() - begun) / launches

    def _seconds_again(self, counts: Counts, launches: int, choice: Choice) -> float:
        """For a GPU: records once and reuses the recording, since a GPU that waits for the host lowers its clock."""
        launches = -(-launches // len(self._cold)) * len(self._cold)
        key = (launches, *sorted(counts.items()), *sorted(choice.items()))
        with self.device.choices.trying(choice):
            if key not in self._kept:
                recording = cast(VulkanRecording, self._record(self._cold * (launches // len(self._cold))))
                closing = ExitStack()
                closing.enter_context(recording.timed())
                self._kept[key] = recording, closing
            recording = self._kept[key][0]
            recording.start()
        recording.finish()
        begin, end = recording.times()
        return (end - begin) / launches

    def free(self) -> None:
        for _, closing in self._kept.values():
            closing.close()
        self._kept.clear()

    def _count(self, counts: Counts) -> None:
        set_counts(self.device, Case("", {}, {}, counts))

    def _record(self, over: list[dict[str, Tensor]]) -> Recording:
        launches = [
            Launch(self.kernel, self._bound(tensors), self.case.scalars, self.kernel.name, barrier=True)
            for tensors in over
        ]
        most = dict.fromkeys(COUNTS, MAX_COUNT)
        return cast(Recording, self.device.record(Program(launches, most, {})))

    def _bound(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        return {b.name: tensors.get(b.name) for b in self.kernel.buffers}


class ThreadsTrial:
    """The same kernel and case on CPU devices with different numbers of threads."""

    def __init__(self, trials: Mapping[int, KernelTrial], rule: int) -> None:
        self._trials, self._rule = trials, rule

    def results(self, counts: Counts, choice: Choice = NOTHING) -> dict[str, Array]:
        return self._trials[choice.get("threads", self._rule)].results(counts)

    def seconds(self, counts: Counts, launches: int, choice: Choice = NOTHING) -> float:
        return self._trials[choice.get("threads", self._rule)].seconds(counts, launches)

    def free(self) -> None:
        pass
