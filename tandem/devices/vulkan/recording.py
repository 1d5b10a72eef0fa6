"""A Program as command buffers: recorded once per bucket of counts, submitted again each step.

Steps of the two step_slots share activations and KV: each recording begins with a barrier, which waits for all that was
submitted before it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.devices.vulkan.binding import ffi, new
from tandem.devices.vulkan.capabilities import PUSH_BYTES
from tandem.devices.vulkan.grids import GRIDS, Dispatch
from tandem.devices.vulkan.joining import SINGLE, STEP_BUFFER, find_joints, push_constants
from tandem.devices.vulkan.pipelines import STAGE_COMPUTE
from tandem.devices.vulkan.queue import COMPUTE_TOUCHES, COMPUTE_WRITES, HOST_READS, Submission
from tandem.errors import DeviceError
from tandem.kernels.abi import COUNTS, HEADER_SEQUENCES
from tandem.kernels.kernel import Array, Counts
from tandem.program.program import Launch, Program, arena_in

if TYPE_CHECKING:
    from tandem.devices.vulkan.device import VulkanDevice

SEGMENT_SECONDS = 0.2  # of a submission at most, by estimate: drivers reset a GPU that seems to hang
# Bytes and operations a second that any device of its kind reaches.
RATES = {"discrete": (200e9, 4e12), "integrated": (40e9, 0.8e12)}
SLOW = (4e9, 10e9)
HEADER = struct.Struct("6i")
ADDRESS_BYTES = 64  # of push constants: eight, before the scalars
TIMESTAMP_QUERY, WAIT_FOR_64_BITS, ALL_COMMANDS = 2, 3, 0x10000


def bucket(count: int, most: int) -> int:
    """The recorded size for a count: the next power of two, or the most there can be."""
    return min(1 << max(count - 1, 0).bit_length(), most)


class Recording:
    def __init__(self, device: VulkanDevice, program: Program, step_slot: int = 0) -> None:
        self.device, self.program = device, program
        for launch in program.launches:
            if len(launch.kernel.buffers) > STEP_BUFFER:
                raise DeviceError(
                    f"the kernel {launch.kernel.name} binds more than {STEP_BUFFER} buffers: report this"
                )
        self._constants = [
            ffi.from_buffer(push_constants(launch, device, step_slot)) for launch in program.launches
        ]
        self._joints = find_joints(program, device, step_slot)
        self._header = device.memory(arena_in(step_slot, "step"))[: HEADER.size].data
        self._most = [program.max_counts[name] for name in COUNTS]
        self._recorded: dict[tuple[int, ...], Submission] = {}
        self._done = 0  # the timeline's value at the end of the step that was started last
        self._stamps = 0  # a pool of two timestamps, while steps are watched

    def start(self) -> None:
        """Submits a step, recorded when its bucket is new."""
        key = self._sizes()
        submission = self._recorded.get(key)
        if submission is None:
            commands = self._segments(self._bucket(), 0, len(self.program.launches))
            submission = self._recorded[key] = Submission(commands, self.device.queue.semaphore)
            self.device.pipelines.save()
        self._done = self.device.queue.submit(submission)

    def finish(self) -> None:
        self.device.queue.wait(self._done)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Steps started inside are timed on the device: see `times`."""
        vk, device = self.device.vk, self.device.handle
        self._stamps = self._query_pool(2)
        kept, self._recorded = self._recorded, {}
        try:
            yield
        finally:
            self.finish()
            for submission in self._recorded.values():
                self.device.queue.free(submission.commands)
            vk.DestroyQueryPool(device, self._stamps, ffi.NULL)
            self._recorded, self._stamps = kept, 0

    def times(self) -> tuple[float, float]:
        """When the watched step that was finished last began and ended: seconds on the device's clock."""
        begin, end = self._seconds(self._stamps, 2)
        return float(begin), float(end)

    def replay(self, begin: int = 0, end: int | None = None) -> None:
        """Runs launches [begin, end) with the StepInputs as they are now."""
        if (begin, end) == (0, None):
            self.start()
            self.finish()
            return
        commands = self._segments(self._bucket(), begin, len(self.program.launches) if end is None else end)
        queue = self.device.queue
        queue.wait(queue.submit(Submission(commands, queue.semaphore)))
        queue.free(commands)

    def replay_timed(self) -> list[float]:
        """Seconds of each launch, run one at a time."""
        device, launches = self.device, self.program.launches
        count = len(launches) + 1
        pool = self._query_pool(count)
        try:
            with device.queue.once() as commands:
                device.vk.CmdResetQueryPool(commands, pool, 0, count)
                device.vk.CmdWriteTimestamp(commands, ALL_COMMANDS, pool, 0)
                for i in range(len(launches)):
                    self._launch(commands, i, self._bucket(), barrier=True, within=(0, len(launches)))
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
        """Of each of COUNTS, and SINGLE. The header is read in one go, for it may lie behind a slow bus."""
        header = HEADER.unpack(self._header.tobytes())
        tokens, rows, work = header[: len(COUNTS)]
        most, single = self._most, int(tokens == work == header[HEADER_SEQUENCES])
        return bucket(tokens, most[0]), bucket(rows, most[1]), bucket(work, most[2]), single

    def _segments(self, counts: Counts, begin: int, end: int) -> list[Any]:
        """Command buffers for launches [begin, end), none of them long enough to look like a hang."""
        vk, queue = self.device.vk, self.device.queue
        bounds = self._cut(counts, begin, end)
        buffers = queue.allocate(len(bounds))
        for commands, (first, last) in zip(buffers, bounds, strict=True):
            vk.BeginCommandBuffer(commands, new("VkCommandBufferBeginInfo"))
            if self._stamps and first == begin:
                vk.CmdResetQueryPool(commands, self._stamps, 0, 2)
                vk.CmdWriteTimestamp(commands, ALL_COMMANDS, self._stamps, 0)
            for i in range(first, last):
                barrier = self.program.launches[i].barrier or i == begin
                self._launch(commands, i, counts, barrier, within=(first, last))
            if last == end:
                queue.barrier(commands, COMPUTE_WRITES, HOST_READS)
                if self._stamps:
                    vk.CmdWriteTimestamp(commands, ALL_COMMANDS, self._stamps, 1)
            vk.EndCommandBuffer(commands)
        return buffers

    def _cut(self, counts: Counts, begin: int, end: int) -> list[tuple[int, int]]:
        byte_rate, op_rate = RATES.get(self.device.capabilities.kind, SLOW)
        bounds, first, seconds = [], begin, 0.0
        for i in range(begin, end):
            cost = self.program.launches[i].cost(counts)
            estimate = max(cost.bytes / byte_rate, cost.ops / op_rate)
            if i > first and seconds + estimate > SEGMENT_SECONDS:
                bounds.append((first, i))
                first, seconds = i, 0.0
            seconds += estimate
        return [*bounds, (first, end)]

    def _launch(self, commands: Any, i: int, counts: Counts, barrier: bool, within: tuple[int, int]) -> None:
        """`within`: the launches that are recorded together, as those that join must be."""
        device = self.device
        dispatch, constants = self._joined(i, counts, within)
        if dispatch is None:
            return
        joined = constants is not self._constants[i]
        beside = dispatch.beside and i > within[0]
        # Also before a launch with nothing to do: those that follow rely on it.
        if (barrier or dispatch.scratch or joined) and not beside:
            device.queue.barrier(commands, COMPUTE_WRITES, COMPUTE_TOUCHES)
        if min(dispatch.x, dispatch.y, dispatch.z) == 0:
            return
        if dispatch.before and not self._expanded(i, counts):
            self._record(commands, i, dispatch.before, constants)
            device.queue.barrier(commands, COMPUTE_WRITES, COMPUTE_TOUCHES)
        self._record(commands, i, dispatch, constants)

    def _joined(self, i: int, counts: Counts, within: tuple[int, int]) -> tuple[Dispatch | None, Any]:
        """A launch's dispatch and push constants, as it is or joined with the one after or before it."""
        for first in (i, i - 1):
            joint = self._joints.get(first) if within[0] <= first < within[1] - 1 else None
            if joint and (both := joint.dispatches(counts, self.device.capabilities)):
                return both[i - first], joint.constants[i - first]
        return self._dispatch(self.program.launches[i], counts), self._constants[i]

    def _expanded(self, i: int, counts: Counts) -> bool:
        """Whether the launch before has left what launch i reads in scratch memory."""
        if i == 0:
            return False
        source, launch = self.program.launches[i - 1], self.program.launches[i]
        return self._dispatch(source, counts).expands and source.buffers["out"] is launch.buffers["x"]

    def _record(self, commands: Any, i: int, dispatch: Dispatch, constants: Any) -> None:
        device, name = self.device, dispatch.shader or self.program.launches[i].kernel.name
        scalars = struct.unpack_from(f"<{dispatch.known}I", ffi.buffer(constants), ADDRESS_BYTES)
        pipeline = device.pipelines.get(name, dispatch.constants, dispatch.subgroup, scalars)
        device.vk.CmdBindPipeline(commands, 1, pipeline)
        device.vk.CmdPushConstants(commands, device.pipelines.layout, STAGE_COMPUTE, 0, PUSH_BYTES, constants)
        device.vk.CmdDispatch(commands, dispatch.x, dispatch.y, dispatch.z)

    def _dispatch(self, launch: Launch, counts: Counts) -> Dispatch:
        grid = GRIDS.get(launch.kernel.name)
        if grid is None:
            raise DeviceError(f"the kernel {launch.kernel.name} has no Vulkan version: use the device cpu")
        dispatch = grid(launch.scalars, counts, self.device.capabilities)
        for size, most in zip(
            (dispatch.x, dispatch.y, dispatch.z), self.device.capabilities.workgroup_count, strict=True
        ):
            if size > most:
                raise DeviceError(
                    f"{launch.kernel.name} needs {size} workgroups, {self.device.name} has {most}: report this"
                )
        return dispatch
