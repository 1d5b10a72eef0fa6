"""The interface between the engine and a device. devices/backends.py lists the devices that implement it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tandem.devices.host_memory import host_memory as host_memory  # used by all devices
from tandem.kernels.abi import COUNTS
from tandem.kernels.kernel import Counts
from tandem.kernels.layout import Layout
from tandem.program.program import Program, Tensor
from tandem.program.validate import validate

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class WeightRows(NamedTuple):
    """Rows of a weight matrix to repack: row group g becomes group g // run * period + g % run of a tensor."""

    tensor: Tensor
    begin: int  # byte of the tensor at which place 0 begins
    rows: Bytes  # [rows, row bytes]: GGUF blocks of the tensor's layout
    columns: int
    first: int  # group of the first row
    run: int
    period: int


class Recording(Protocol):
    """A Program that is ready to run in one step slot. Replaying it allocates nothing."""

    def start(self) -> None:
        """Runs all launches with the current StepInputs, after the launches of earlier steps. May return before they
        are done: do not change StepInputs and do not start this Recording again before `finish`."""

    def finish(self) -> None:
        """Waits for the step that `start` began. Its results may be read afterwards."""

    def replay(self, begin: int = 0, end: int | None = None) -> None:
        """Runs launches [begin, end) with the current StepInputs, and waits for them."""

    def replay_timed(self) -> list[float]:
        """Runs the launches of the step's Program (Device.step_program) one at a time; returns the seconds of each."""


class Device(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def step_slots(self) -> int:
        """Steps that may be in flight at a time: 1 if a second one would not make the host faster."""

    @property
    def stages(self) -> int:
        """Devices that a step passes through one after the other (pipeline parallelism, devices/split/); else 1."""

    @property
    def shares_memory(self) -> bool:
        """Whether the device uses the host's memory."""

    @property
    def loaders(self) -> int:
        """Threads that may call `repack` at the same time."""

    @property
    def workers(self) -> int:
        """Work items that run at a time, if a launch with fewer items should be cut finer to use them all; else 1."""

    def describe(self) -> str:
        """Describes the device and the code path in use, for people."""

    def weight_layout(self, format: str, rows: int, columns: int) -> Layout:
        """Returns the layout in which the device stores a matrix of a GGUF format (in lower case), and with it the data
        type of the activations that it multiplies. Asked before anything is allocated."""

    def fast_head_dim(self, head_dim: int) -> int:
        """Returns the head size with which attention of many tokens is fastest: this one, or a larger one that is
        filled up with zeros."""

    def free_memory(self) -> tuple[float, float]:
        """Returns the bytes that can be allocated: (in the device's fastest memory, in all)."""

    def allocate(self, program: Program) -> None:
        """Allocates and clears all arenas of a Program, or none of them."""

    def memory(self, arena: str) -> Bytes:
        """Returns the bytes of "step" or "results", of either step slot, for the host to write and read."""

    def read(self, tensor: Tensor) -> Bytes:
        """Returns the bytes of any tensor. May be a view: use it before the next replay."""

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Writes bytes to the beginning of a tensor."""

    def repack(self, rows: Sequence[WeightRows]) -> None:
        """Writes rows of GGUF blocks to their tensors, in the layout that `weight_layout` chose."""

    def step_program(self, program: Program, counts: Counts, single: bool) -> Program:
        """Returns the launches that a step of these counts runs. `single`: every sequence of the step has one token. A
        device may fuse launches then; one with no passes of its own returns the Program itself."""

    def record(self, program: Program, step_slot: int = 0) -> Recording:
        """Prepares a Program whose arenas are allocated for replay in a step slot."""

    @property
    def holds_several_programs(self) -> bool:
        """Whether there may be devices `beside` this one."""

    def beside(self) -> Device:
        """Returns a device with memory of its own for another Program, which runs on the same hardware, in turn with
        those of this one. It is closed with this one."""

    def close(self) -> None: ...


def validate_on(device: Device, program: Program, given: Iterable[Tensor] = ()) -> None:
    """Validates a Program and what the device's own passes make of it: for one token, for a token of each of two
    sequences, and for the largest step. `given`: activations that are there before the first launch."""
    given = list(given)
    validate(program, given)
    for counts, single in ((_count(1), True), (_count(2), True), (program.max_counts, False)):
        step = device.step_program(program, counts, single)
        if step is not program:
            validate(step, given)


def _count(tokens: int) -> Counts:
    return dict.fromkeys(COUNTS, tokens)
