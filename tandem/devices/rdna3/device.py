"""`vulkan:rdna3-emulated`: the Vulkan device with a Radeon 780M that is emulated. Right results, never to be timed.

The launches and shaders of devices/vulkan/device.py, but each launch runs RADV's machine code in the emulator. A launch
sees the buffers that it declares: if a result depends on anything outside of them, that is a Fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tandem.devices.backends import EMULATED as NAME
from tandem.devices.cpu.repacker import Repacker
from tandem.devices.device import Bytes, WeightRows, host_memory
from tandem.devices.rdna3.compiler import FAMILIES, Compiler, Job
from tandem.devices.rdna3.emulator import LIMIT, Access, MemoryRange, ShaderProgram
from tandem.devices.vulkan.capabilities import REQUIRED, Capabilities, MatrixShape
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.fuse_launches import SCRATCH, step_program
from tandem.devices.vulkan.recording import ADDRESS_BYTES, VulkanRecording, push_constants
from tandem.errors import DeviceError
from tandem.kernels.dispatch import SCRATCH_BYTES
from tandem.kernels.dispatch_table import dispatch
from tandem.kernels.kernel import Counts
from tandem.program.program import Launch, Program, Tensor, arena_in
from tandem.settings import read_settings

SPACE = 1 << 40  # bytes of addresses between arenas
PHOENIX = Capabilities(
    index=0, name="Radeon 780M, emulated", kind="integrated", vendor="AMD", driver="emulated", driver_version=0,
    api=(1, 3, 0), features=frozenset(REQUIRED), extensions=(), subgroup=64, subgroup_min=32, subgroup_max=64,
    matrix_shapes=(MatrixShape(16, 16, 16, "f16", "f16", "f32"),), heaps=(), memory_types=(),
    largest_allocation=4 << 30, shared_memory=65536, workgroup_invocations=1024, workgroup_count=(65535,) * 3,
    timestamp_ns=0.0, queue_family=0, cache_key="0",
)  # fmt: skip


class Arena(NamedTuple):
    base: int
    data: Bytes

    def address(self, offset: int) -> int:
        return self.base + offset


class LaunchMemory:
    """The memory of one launch: each tensor lies in an arena of its own, so that nothing but itself is near its end."""

    def __init__(self, device: EmulatedDevice, launch: Launch, step_slot: int) -> None:
        step, tensors = device.arenas[arena_in(step_slot, "step")], dict[Tensor, Arena]()
        self.arenas = {arena_in(step_slot, "step"): Arena(SPACE, step.data)}
        self.buffers = [MemoryRange("StepInputs", SPACE, step.data)]
        for buffer in launch.kernel.buffers:
            tensor = launch.buffers[buffer.name]
            if tensor is None:
                continue
            data = device.arenas[arena_in(step_slot, tensor.arena)].data
            arena = tensors.setdefault(tensor, Arena((len(tensors) + 2) * SPACE, data))
            own = data[tensor.start : tensor.start + tensor.nbytes]
            access = Access.WRITE if "w" in buffer.access else Access.READ
            self.buffers.append(MemoryRange(buffer.name, arena.address(tensor.start), own, access))
            self.buffers.append(MemoryRange(tensor.arena, arena.base, data, Access.OUTSIDE))
        self._tensors = tensors

    def address(self, tensor: Tensor, step_slot: int = 0) -> int:
        return self._tensors[tensor].address(tensor.start)


class Executed(NamedTuple):
    """A launch that ran."""

    launch: Launch
    program: ShaderProgram
    grid: tuple[int, int, int]
    instructions: int


class EmulatedDevice(VulkanDevice):
    def __init__(
        self, folder: Path | None = None, lanes: int = 64, seed: int = 1, family: str = FAMILIES[0]
    ) -> None:
        """`folder`, `family`: see Compiler. `lanes`: of waves whose size the engine leaves to the driver."""
        self.compiler, self.lanes, self.seed, self.counting = Compiler(folder, family), lanes, seed, False
        self.name, self.choices = NAME, PHOENIX.choices
        self.capabilities = replace(PHOENIX, driver=self.compiler.driver, features=self.compiler.features)
        self.limit = LIMIT
        self.q8_sums = True
        self.arenas: dict[str, Arena] = {}  # type: ignore[assignment]
        self.programs: dict[Job, ShaderProgram] = {}
        self.executed: Executed | None = None  # the last launch
        self._closing = ExitStack()
        self._closing.callback(self.compiler.close)
        self._repacker = Repacker(read_settings().threads)
        self._closing.callback(self._repacker.close)
        self.allocate_arena(SCRATCH, SCRATCH_BYTES)

    def describe(self) -> str:
        return f"{NAME}: machine code of {self.compiler.driver}, emulated on the CPU; not to be timed"

    # ---- memory

    def free_memory(self) -> tuple[float, float]:
        return (host_memory(),) * 2

    def allocate(self, program: Program) -> None:
        self.arenas = {SCRATCH: self.arenas[SCRATCH]}
        for arena, nbytes in program.arena_bytes.items():
            self.allocate_arena(arena, nbytes)

    def allocate_arena(self, arena: str, nbytes: int) -> None:
        self.arenas[arena] = Arena(0, np.zeros(nbytes, np.uint8))

    def memory(self, arena: str) -> Bytes:
        return self.arenas[arena].data

    def view(self, tensor: Tensor, step_slot: int = 0) -> Bytes:
        return self.memory(arena_in(step_slot, tensor.arena))[tensor.start : tensor.start + tensor.nbytes]

    def read(self, tensor: Tensor) -> Bytes:
        return self.view(tensor).copy()

    def write(self, tensor: Tensor, data: Bytes) -> None:
        self.memory(tensor.arena)[tensor.start : tensor.start + len(data)] = data

    def repack(self, rows: Sequence[WeightRows]) -> None:
        for tensor, begin, part, columns, first, run, period in rows:
            to = self.memory(tensor.arena)[tensor.start + begin :]
            self._repacker.repack(tensor.dtype, part, columns, to, first, run, period)

    # ---- running

    def record(self, program: Program, step_slot: int = 0) -> EmulatedRecording:
        return EmulatedRecording(self, program, step_slot)

    def launch(self, launch: Launch, counts: Counts, step_slot: int = 0, groups: int | None = None) -> None:
        """`groups`: the maximum number of workgroups along x that run; None: all."""
        chosen = dispatch(launch.kernel.name, launch.scalars, counts, self.capabilities)
        grid = min(chosen.x, groups or chosen.x), chosen.y, chosen.z
        if not min(grid):
            return
        memory = LaunchMemory(self, launch, step_slot)
        push = push_constants(launch, memory, step_slot)
        scalars = tuple(np.frombuffer(push, np.uint32, chosen.compiled_scalars, ADDRESS_BYTES).tolist())
        shader = chosen.shader or launch.kernel.name
        program = self.program(
            Job(shader, chosen.constants, chosen.subgroup or self.lanes, scalars, self.q8_sums)
        )
        done = program.run(grid, push, memory.buffers, self.seed, self.counting, self.limit)
        self.executed = Executed(launch, program, grid, done)

    def program(self, job: Job) -> ShaderProgram:
        if job not in self.programs:
            self.programs[job] = ShaderProgram(self.compiler.compile(job))
        return self.programs[job]

    def close(self) -> None:
        self._closing.close()


class EmulatedRecording(VulkanRecording):
    device: EmulatedDevice

    def start(self) -> None:
        self.replay()

    def finish(self) -> None:
        """`start` has run everything."""

    def replay(self, begin: int = 0, end: int | None = None) -> None:
        counts = self._bucket()
        for launch in step_program(self.program, counts, self.device.capabilities, begin, end).launches:
            self.device.launch(launch, counts, self._step_slot)

    def replay_timed(self) -> list[float]:
        raise DeviceError(f"{NAME} says nothing about time: choose another device")
