"""The CPU device: arenas in ordinary memory, launches in an array of C structs, a step in one C call."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np

from tandem import native
from tandem.devices.cpu.repacker import repack_all
from tandem.devices.device import Bytes, WeightRows, host_memory
from tandem.devices.host_memory import touched_memory
from tandem.devices.tuned_choices import Choices
from tandem.errors import DeviceError, DoesNotFitError
from tandem.kernels.abi import COUNTS
from tandem.kernels.kernel import Counts
from tandem.kernels.layout import Layout
from tandem.kernels.panels import panel_layout
from tandem.native import ffi
from tandem.program.program import Program, Tensor, arena_in

MAX_LAUNCHES = 4096


class CPUDevice:
    name = "cpu"
    step_slots = 1  # a step uses all cores: a host that works at the same time would only slow it down
    _open: ClassVar[WeakSet[CPUDevice]] = WeakSet()
    stages = 1
    shares_memory = True
    holds_several_programs = True

    def __init__(self, threads: int, choices: Choices | None = None) -> None:
        self.choices = choices or Choices()
        self._library = native.load()
        self.isa = native.best_isa()
        self.threads = self.loaders = self.workers = threads
        self._arenas: dict[str, tuple[mmap.mmap, Bytes]] = {}
        pool = self._library.tandem_pool_create(threads, MAX_LAUNCHES)
        if pool == ffi.NULL:
            raise DeviceError(f"cannot start {threads} threads: ask for between 1 and 256")
        self._pool = ffi.gc(pool, self._library.tandem_pool_destroy)
        self._owner: CPUDevice | None = None  # the device whose threads this one uses
        CPUDevice._open.add(self)

    def beside(self) -> CPUDevice:
        other = copy(self)
        other._arenas, other._owner = {}, self._owner or self
        CPUDevice._open.add(other)
        return other

    def describe(self) -> str:
        return f"the CPU: {self.isa}, {self.threads} thread{'s' * (self.threads > 1)}"

    def weight_layout(self, format: str, rows: int, columns: int) -> Layout:
        return panel_layout(format, rows, columns)

    def fast_head_dim(self, head_dim: int) -> int:
        return head_dim

    def free_memory(self) -> tuple[float, float]:
        """Without the memory that other models of this process have allocated but not touched yet."""
        given = sum(len(memory) for device in CPUDevice._open for memory, _ in device._arenas.values())
        free = host_memory() - (max(0, given - touched_memory()) if given else 0)
        return free, free

    def allocate(self, program: Program) -> None:
        self._arenas.clear()  # frees the arenas of the previous Program
        for arena, nbytes in program.arena_bytes.items():
            self.allocate_arena(arena, nbytes)

    def allocate_arena(self, arena: str, nbytes: int) -> Bytes:
        """Allocates zeroed memory for an arena. Its pages are not resident until they are touched."""
        try:
            memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise DoesNotFitError(
                f"{nbytes / 1e9:.1f} GB for {arena} is more than this machine has: use a smaller context or model"
            ) from error
        if arena == "weights":  # read in order at each step: huge pages need fewer TLB entries
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._arenas[arena] = memory, np.frombuffer(memory, np.uint8)
        return self._arenas[arena][1]

    def memory(self, arena: str) -> Bytes:
        return self._arenas[arena][1]

    def view(self, tensor: Tensor) -> Bytes:
        return self.memory(tensor.arena)[tensor.start : tensor.start + tensor.nbytes]

    def read(self, tensor: Tensor) -> Bytes:
        return self.view(tensor)

    def write(self, tensor: Tensor, data: Bytes) -> None:
        self.view(tensor)[: len(data)] = data

    def repack(self, rows: Sequence[WeightRows]) -> None:
        repack_all([(each, self.view(each.tensor)[each.begin :].ctypes.data) for each in rows])

    def step_program(self, program: Program, counts: Counts, single: bool) -> Program:
        return program

    def record(self, program: Program, step_slot: int = 0) -> CPURecording:
        if (count := len(program.launches)) > MAX_LAUNCHES:  # latent attention has some for each head
            raise DeviceError(
                f"the model's steps have {count} launches, and the CPU takes {MAX_LAUNCHES} at most: use a GPU"
            )
        return CPURecording(self, program, step_slot)

    def address(self, tensor: Tensor | None, step_slot: int = 0) -> Any:
        if tensor is None:
            return ffi.NULL
        return ffi.cast("void *", self.memory(arena_in(step_slot, tensor.arena)).ctypes.data + tensor.start)

    def run(self, launches: Any, count: int, step: Any, seconds: Any) -> None:
        pool = (self._owner or self)._pool
        if pool == ffi.NULL:
            raise DeviceError("the CPU device is closed: open the model again")
        if self._library.tandem_pool_run(pool, launches, count, step, seconds):
            raise DeviceError(
                f"a Program of {count} launches is more than {MAX_LAUNCHES}: report this as a bug"
            )

    def close(self) -> None:
        """Stops the threads and frees the memory; views of it read zeros afterwards."""
        if self._pool == ffi.NULL:
            return
        CPUDevice._open.discard(self)
        if self._owner is None:
            ffi.release(self._pool)
        self._pool = ffi.NULL
        for memory, _ in self._arenas.values():
            memory.madvise(mmap.MADV_DONTNEED)


class CPURecording:
    """The launches of a Program as C structs (launch.h)."""

    def __init__(self, device: CPUDevice, program: Program, step_slot: int = 0) -> None:
        self.device, self.program = device, program
        self._step = ffi.cast("int32_t *", device.memory(arena_in(step_slot, "step")).ctypes.data)
        self._launches = ffi.new("launch[]", max(1, len(program.launches)))
        self._seconds = ffi.new("double[]", max(1, len(program.launches)))
        for out, launch in zip(self._launches, program.launches, strict=False):
            choice = device.choices.of(launch.kernel.name.partition("_")[0], launch.scalars)
            scalars = {**launch.scalars, **choice}
            grid = launch.kernel.grid(scalars)
            isa = native.ISAS[choice["isa"]] if "isa" in choice else device.isa
            out.kernel = native.kernel(launch.kernel.name, isa)
            out.items, out.count_step, out.most = grid.items, grid.step, grid.most
            out.barrier = launch.barrier
            out.count = -1 if grid.count is None else COUNTS.index(grid.count)
            for i, buffer in enumerate(launch.kernel.buffers):
                out.args.buffer[i] = device.address(launch.buffers[buffer.name], step_slot)
            for i, (name, kind) in enumerate(launch.kernel.scalars):
                if kind == "f":
                    out.args.scalar[i].f = scalars[name]
                else:
                    out.args.scalar[i].i = int(scalars[name])

    def start(self) -> None:
        """Runs the step and waits for it: `finish` has nothing to do."""
        self.device.run(self._launches, len(self.program.launches), self._step, ffi.NULL)

    def finish(self) -> None:
        pass

    def replay(self, begin: int = 0, end: int | None = None) -> None:
        """Runs launches [begin, end) with the current StepInputs."""
        count = (len(self.program.launches) if end is None else end) - begin
        self.device.run(self._launches + begin, count, self._step, ffi.NULL)

    def replay_timed(self) -> list[float]:
        """Runs the launches one at a time; returns the seconds of each."""
        ffi.memmove(self._seconds, b"\0" * ffi.sizeof(self._seconds), ffi.sizeof(self._seconds))
        self.device.run(self._launches, len(self.program.launches), self._step, self._seconds)
        return list(self._seconds)
