"""A Program as command buffers: recorded once per bucket of counts, submitted again each step.

The step's own Program is recorded (fuse_launches.py), one dispatch per launch. Steps of the two step slots share
activations and KV: each recording begins with a barrier, which waits for all earlier submissions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tandem.devices.vulkan.binding import ffi, new
from tandem.devices.vulkan.capabilities import PUSH_BYTES
from tandem.devices.vulkan.fuse_launches import SINGLE, step_program
from tandem.devices.vulkan.pipelines import STAGE_COMPUTE
from tandem.devices.vulkan.queue import COMPUTE_READS_WRITES, COMPUTE_WRITES, HOST_READ_BARRIER, Submission
from tandem.errors import DeviceError
from tandem.kernels.abi import COUNTS, HEADER_SEQUENCES
from tandem.kernels.dispatch_table import dispatch
from tandem.kernels.kernel import AFTER_SCALARS, STEP_ADDRESS, Array, Counts
from tandem.program.program import Launch, Program, Tensor, arena_in

if TYPE_CHECKING:
    from tandem.devices.vulkan.device import VulkanDevice

MAX_SEGMENT_SECONDS = 0.2  # estimated time of a submission: drivers reset a GPU that seems to hang
# Bytes and operations per second that any device of its kind reaches.
RATES = {"discrete": (200e9, 4e12), "integrated": (40e9, 0.8e12)}
SLOW = (4e9, 10e9)
HEADER = struct.Struct("6i")
ADDRESS_BYTES = 64  # bytes of push constants before the scalars: eight addresses
TIMESTAMP_QUERY, WAIT_FOR_64_BITS, ALL_COMMANDS = 2, 3, 0x10000


def bucket(count: int, limit: int) -> int:
    """The recorded size for a count: the next power of two, or `limit`."""
    return min(1 << max(count - 1, 0).bit_length(), limit)


class Arena(Protocol):
    def address(self, start: int) -> int: ...


class Addresses(Protocol):
    """Where tensors lie in a GPU's memory."""

    @property
    def arenas(self) -> Mapping[str, Arena]: ...
    def address(self, tensor: Tensor, step_slot: int) -> int: ...


def push_constants(launch: Launch, device: Addresses, step_slot: int = 0) -> bytes:
    """The arguments of a shader: eight addresses, the scalars, and the addresses beyond the first eight."""
    addresses, more = [0] * 8, b""
    for index, name in launch.kernel.addresses:
        tensor = launch.buffers[name]
        address = device.address(tensor, step_slot) if tensor else 0
        if index == STEP_ADDRESS:
            raise DeviceError(f"the kernel {launch.kernel.name} binds more than {index} buffers: report this")
        if index == AFTER_SCALARS:
            more += struct.pack("<Q", address)
        else:
            addresses[index] = address
    addresses[STEP_ADDRESS] = device.arenas[arena_in(step_slot, "step")].address(0)
    values = (
        (kind, launch.scalars[name] if kind == "f" else int(launch.scalars[name]))
        for name, kind in launch.kernel.scalars
    )
    scalars = b"".join(struct.pack(f"<{kind}", value) for kind, value in values)
    return (struct.pack("<8Q", *addresses) + scalars + more).ljust(PUSH_BYTES, b"\0")


class VulkanRecording:
    def __init__(self, device: VulkanDevice, program: Program, step_slot: int = 0) -> None:
        self.device, self.program, self._step_slot = device, program, step_slot
        self._header = device.memory(arena_in(step_slot, "step"))[: HEADER.size].data
        self._limits = [program.max_counts[name] for name in COUNTS]
        self._recorded: dict[tuple[int, ...], Submission] = {}
        self._done = 0  # the timeline's value at the end of the step that was started last
        self._timestamps = 0  # a pool of two timestamps, while steps are timed

    def start(self) -> None:
        """Submits a step; records it if its bucket is new."""
        key = self._sizes()
        submission = self._recorded.get(key)
        if submission is None:
            commands = self._segments(self._bucket())
            submission = self._recorded[key] = Submission(commands, self.device.queue.semaphore)
            self.device.pipelines.save()
        self._done = self.device.queue.submit(submission)

    def finish(self) -> None:
        self.device.queue.wait(self._done)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Steps started inside are timed on the device: see `times`."""
        vk, device = self.device.vk, self.device.handle
        self._timestamps = self._query_pool(2)
        kept, self._recorded = self._recorded, {}
        try:
            yield
        finally:
            self.finish()
            for submission in self._recorded.values():
                self.device.queue.free(submission.commands)
            vk.DestroyQueryPool(device, self._timestamps, ffi.NULL)
            self._recorded, self._timestamps = kept, 0

    def times(self) -> tuple[float, float]:
        """Begin and end of the last timed step, in seconds on the device's clock."""
        begin, end = self._seconds(self._timestamps, 2)
        return float(begin), float(end)

    def replay(self, begin: int = 0, end: int | None = None) -> None:
        """Runs launches [begin, end) of the Program with the StepInputs as they are now."""
        if (begin, end) == (0, None):
            self.start()
            self.finish()
            return
        commands = self._segments(self._bucket(), begin, end)
        queue = self.device.queue
        queue.wait(queue.submit(Submission(commands, queue.semaphore)))
        queue.free(commands)

    def replay_timed(self) -> list[float]:
        """Seconds of each launch of the step's Program, run one at a time."""
        device, counts = self.device, self._bucket()
        launches = step_program(self.program, counts, device.capabilities).launches
        count = len(launches) + 1
        pool = self._query_pool(count)
        try:
            with device.queue.once() as commands:
                device.vk.CmdResetQueryPool(commands, pool, 0, count)
                device.vk.CmdWriteTimestamp(commands, ALL_COMMANDS, pool, 0)
                for i, launch in enumerate(launches):
                    self._record(commands, launch, counts, barrier=True)
                    device.vk.CmdWriteTimestamp(commands, ALL_COMMANDS, pool, i + 1)
            return [float(s) for s in np.diff(self._seconds(pool, count))]
        finally:
            device.vk.DestroyQueryPool(device.handle, pool, ffi.NULL)

    def _query_pool(self, count: int) -> int:
        device = self.device
        if not device.capabilities.timestamp_ns:
            raise DeviceError(f"{device.name} has no timestamps: time whole steps instead")
        return device.vk.create("QueryPool", device.handle, queryType=TIMESTAMP_QUERY, queryCount=count)

    def _seconds(self, pool: int, count: int) -> Array:
        ticks = np.zeros(count, np.uint64)
        into = ffi.from_buffer(ticks)
        self.device.vk.GetQueryPoolResults(
            self.device.handle, pool, 0, count, ticks.nbytes, into, ticks.itemsize, WAIT_FOR_64_BITS
        )
        return ticks * (self.device.capabilities.timestamp_ns * 1e-9)

    def _bucket(self) -> dict[str, int]:
        return dict(zip((*COUNTS, SINGLE), self._sizes(), strict=True))

    def _sizes(self) -> tuple[int, ...]:
        """The bucket of each of COUNTS, and SINGLE. One read of the header, which may lie behind a slow bus."""
        header = HEADER.unpack(self._header.tobytes())
        tokens, rows, work = header[: len(COUNTS)]
        limits, single = self._limits, int(tokens == work == header[HEADER_SEQUENCES])
        return bucket(tokens, limits[0]), bucket(rows, limits[1]), bucket(work, limits[2]), single

    def _segments(self, counts: Counts, begin: int = 0, end: int | None = None) -> list[Any]:
        """Command buffers for launches [begin, end), none of them long enough to look like a hang."""
        device, vk, queue = self.device, self.device.vk, self.device.queue
        program = step_program(self.program, counts, device.capabilities, begin, end)
        bounds = self._cut(program.launches, counts)
        buffers = queue.allocate(len(bounds))
        for commands, (first, last) in zip(buffers, bounds, strict=True):
            vk.BeginCommandBuffer(commands, new("VkCommandBufferBeginInfo"))
            if self._timestamps and first == 0:
                vk.CmdResetQueryPool(commands, self._timestamps, 0, 2)
                vk.CmdWriteTimestamp(commands, ALL_COMMANDS, self._timestamps, 0)
            for i, launch in enumerate(program.launches[first:last], first):
                self._record(commands, launch, counts, launch.barrier or i == 0)
            if last == len(program.launches):
                queue.barrier(commands, COMPUTE_WRITES, HOST_READ_BARRIER)
                if self._timestamps:
                    vk.CmdWriteTimestamp(commands, ALL_COMMANDS, self._timestamps, 1)
            vk.EndCommandBuffer(commands)
        return buffers

    def _cut(self, launches: Sequence[Launch], counts: Counts) -> list[tuple[int, int]]:
        byte_rate, op_rate = RATES.get(self.device.capabilities.kind, SLOW)
        bounds, first, seconds = [], 0, 0.0
        for i, launch in enumerate(launches):
            cost = launch.cost(counts)
            estimate = max(cost.bytes / byte_rate, cost.ops / op_rate)
            if i > first and seconds + estimate > MAX_SEGMENT_SECONDS:
                bounds.append((first, i))
                first, seconds = i, 0.0
            seconds += estimate
        return [*bounds, (first, len(launches))]

    def _record(self, commands: Any, launch: Launch, counts: Counts, barrier: bool) -> None:
        device, gpu = self.device, self.device.capabilities
        dispatch_ = dispatch(launch.kernel.name, launch.scalars, counts, gpu)
        sizes = dispatch_.x, dispatch_.y, dispatch_.z
        for size, limit in zip(sizes, gpu.workgroup_count, strict=True):
            if size > limit:
                raise DeviceError(
                    f"{launch.kernel.name} needs {size} workgroups, {device.name} has {limit}: report this"
                )
        if barrier:  # also before an empty launch: later launches rely on it
            device.queue.barrier(commands, COMPUTE_WRITES, COMPUTE_READS_WRITES)
        if min(sizes) == 0:
            return
        constants = push_constants(launch, device, self._step_slot)
        scalars = struct.unpack_from(f"<{dispatch_.compiled_scalars}I", constants, ADDRESS_BYTES)
        shader = dispatch_.shader or launch.kernel.name
        pipeline = device.pipelines.get(shader, dispatch_.constants, dispatch_.subgroup, scalars)
        device.vk.CmdBindPipeline(commands, 1, pipeline)
        device.vk.CmdPushConstants(
            commands, device.pipelines.layout, STAGE_COMPUTE, 0, PUSH_BYTES, ffi.from_buffer(constants)
        )
        device.vk.CmdDispatch(commands, *sizes)
