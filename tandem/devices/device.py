"""What the engine asks of a device; devices/cpu and devices/vulkan obey it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tandem.devices.host_memory import host_memory as host_memory  # all devices ask for it
from tandem.kernels.abi import COUNTS
from tandem.kernels.kernel import Counts
from tandem.program.program import Program, Tensor
from tandem.program.validate import validate

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Piece(NamedTuple):
    """Rows of a matrix of the file, on their way to panels: panel p goes to place p // run * period + p % run."""

    tensor: Tensor  # where they go
    begin: int  # bytes into it, to place 0
    rows: Bytes  # [rows, row bytes]: blocks of the tensor's layout
    columns: int
    first: int  # which panel of the matrix the rows begin
    run: int
    period: int


class Recording(Protocol):
    """A Program made ready to run in one step slot. Replaying it allocates nothing."""

    def start(self) -> None:
        """Runs all launches, after those of earlier steps, with the StepInputs as they are now. May return before
        they are done: StepInputs must not change, nor this Recording start again, before `finish`."""

    def finish(self) -> None:
        """Waits for the step that `start` began; its results may be read then."""

    def replay(self, begin: int = 0, end: int | None = None) -> None:
        """Runs launches [begin, end) with the StepInputs as they are now, and waits for them."""

    def replay_timed(self) -> list[float]:
        """Seconds of each launch of the step's Program (Device.step_program), run one at a time."""


class Device(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def step_slots(self) -> int:
        """Steps that may be in flight at a time: 1 where the host has nothing to gain from a second."""

    @property
    def stages(self) -> int:
        """Devices that a step goes through one after the other, so that as many steps are in flight: 1 but for a model
        that is split (devices/split/)."""

    @property
    def shares_memory(self) -> bool:
        """Whether its memory is the host's."""

    @property
    def loaders(self) -> int:
        """Threads that may call `repack` at a time."""

    @property
    def workers(self) -> int:
        """Items that run at a time, where a launch of fewer would leave some idle and may be cut finer; else 1."""

    def describe(self) -> str:
        """For people: the device, and which of its paths is in use."""

    def free_memory(self) -> tuple[float, float]:
        """Bytes that can be allocated: (in memory of the device's own speed, in all)."""

    def place(self, program: Program) -> None:
        """Allocates all arenas of a Program, zeroed, or none of them."""

    def memory(self, arena: str) -> Bytes:
        """The bytes of "step" and "results", of either step slot, for the host to write and read."""

    def read(self, tensor: Tensor) -> Bytes:
        """The bytes of any tensor as they are now; a view or a copy, so use it before the next replay."""

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Bytes to the begin of a tensor."""

    def repack(self, pieces: Sequence[Piece]) -> None:
        """Rows of the file into panels."""

    def step_program(self, program: Program, counts: Counts, single: bool) -> Program:
        """The launches that a step of these counts runs. `single`: every sequence of the step has one token. A device
        may fuse launches then; one with no passes of its own returns the Program itself."""

    def record(self, program: Program, step_slot: int = 0) -> Recording: ...

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
