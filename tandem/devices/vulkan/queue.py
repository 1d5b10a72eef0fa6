"""The device's queue: command buffers, submissions on one timeline semaphore, and waiting for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tandem.devices.vulkan.binding import TIMEOUT, Vulkan, ffi, new
from tandem.errors import DeviceLostError

RESETTABLE = 2  # command pool flag
GRACE_NS = 2_000_000_000  # last wait for a GPU that timed out, before its memory is abandoned
# Ends of a memory barrier: (pipeline stage, accesses).
BarrierScope = tuple[int, int]
COMPUTE_WRITES, COMPUTE_READS_WRITES = (0x800, 0x40), (0x800, 0x60)
TRANSFER_WRITES, TRANSFER_READS_WRITES = (0x1000, 0x1000), (0x1000, 0x1800)
HOST_READ_BARRIER = (0x4000, 0x2000)


class Submission:
    """Command buffers that are submitted repeatedly, each of which signals the timeline when it is done."""

    def __init__(self, commands: list[Any], semaphore: int) -> None:
        count = len(commands)
        self.count, self.commands = count, commands
        self.values = ffi.new("uint64_t[]", count)
        semaphores = ffi.new("uint64_t[]", [semaphore])
        self._buffers = ffi.new("void *[]", commands)
        self.infos = ffi.new("VkSubmitInfo[]", count)
        self._kept = [semaphores]
        for i in range(count):
            value = new(
                "VkTimelineSemaphoreSubmitInfo",
                signalSemaphoreValueCount=1,
                pSignalSemaphoreValues=self.values + i,
            )
            info = new(
                "VkSubmitInfo",
                pNext=value,
                commandBufferCount=1,
                pCommandBuffers=self._buffers + i,
                signalSemaphoreCount=1,
                pSignalSemaphores=semaphores,
            )
            self.infos[i] = info[0]
            self._kept += [value, info]


class Queue:
    def __init__(self, vk: Vulkan, device: Any, family: int, timeout: float, closing: ExitStack) -> None:
        self.vk, self.device = vk, device
        self._timeout_ns = int(timeout * 1e9)
        queue = ffi.new("void **")
        vk.GetDeviceQueue(device, family, 0, queue)
        self._queue = queue[0]
        self.pool = vk.create("CommandPool", device, flags=RESETTABLE, queueFamilyIndex=family)
        closing.callback(vk.DestroyCommandPool, device, self.pool, ffi.NULL)
        timeline = new("VkSemaphoreTypeCreateInfo", semaphoreType=1)
        self.semaphore = vk.create("Semaphore", device, pNext=timeline)
        closing.callback(vk.DestroySemaphore, device, self.semaphore, ffi.NULL)
        self._stuck = False  # a wait has timed out
        self._lost = ""  # the error with which the device stopped: later calls raise it too
        self.submitted = 0  # the timeline's value when all submissions are done
        self._wait_value = ffi.new("uint64_t[1]")
        self._wait = new(
            "VkSemaphoreWaitInfo",
            semaphoreCount=1,
            pSemaphores=ffi.new("uint64_t[]", [self.semaphore]),
            pValues=self._wait_value,
        )

    def allocate(self, count: int) -> list[Any]:
        buffers = ffi.new("void *[]", count)
        info = new("VkCommandBufferAllocateInfo", commandPool=self.pool, commandBufferCount=count)
        self.vk.AllocateCommandBuffers(self.device, info, buffers)
        return list(buffers)

    def free(self, commands: list[Any]) -> None:
        self.vk.FreeCommandBuffers(self.device, self.pool, len(commands), ffi.new("void *[]", commands))

    def submit(self, submission: Submission) -> int:
        """Submits all its command buffers in one call; returns the timeline value to wait for."""
        if self._lost:
            raise DeviceLostError(self._lost)
        for i in range(submission.count):
            submission.values[i] = self.submitted + 1 + i
        try:
            try:
                self.vk.QueueSubmit(self._queue, submission.count, submission.infos, 0)
                self.submitted += submission.count
            except KeyboardInterrupt:
                self._read_timeline()  # an interrupt arrives before the call or after it
                raise
        except DeviceLostError as error:
            self._lost = str(error)
            raise
        return self.submitted

    def _read_timeline(self) -> None:
        """Waits for all submissions, and sets `submitted` to the timeline's value."""
        self.vk.DeviceWaitIdle(self.device)
        value = ffi.new("uint64_t *")
        self.vk.GetSemaphoreCounterValue(self.device, self.semaphore, value)
        self.submitted = value[0]

    def wait(self, value: int) -> None:
        if self._lost:  # a later call fails at once
            raise DeviceLostError(self._lost)
        self._wait_value[0] = value
        try:
            if self.vk.WaitSemaphores(self.device, self._wait, self._timeout_ns) == TIMEOUT:
                self._stuck = True
                raise DeviceLostError(
                    f"the GPU has not answered for {self._timeout_ns / 1e9:.0f} s: load the model again; if it "
                    "repeats, look for a hang in the kernel log"
                )
        except DeviceLostError as error:
            self._lost = str(error)
            raise

    def idle(self) -> bool:
        """Waits for all submissions. False if the GPU timed out before and still does."""
        self._wait_value[0] = self.submitted
        try:
            again = GRACE_NS if self._stuck else self._timeout_ns
            return bool(self.vk.WaitSemaphores(self.device, self._wait, again) != TIMEOUT)
        except DeviceLostError:
            return True  # nothing runs on it any more

    @contextmanager
    def once(self) -> Iterator[Any]:
        """A command buffer to fill; at the end of the block it is submitted and waited for."""
        commands = self.allocate(1)
        self.vk.BeginCommandBuffer(commands[0], new("VkCommandBufferBeginInfo", flags=1))
        yield commands[0]
        self.vk.EndCommandBuffer(commands[0])
        self.wait(self.submit(Submission(commands, self.semaphore)))
        self.free(commands)  # not after a failure, when they may still run: the pool frees them

    def barrier(self, commands: Any, source: BarrierScope, target: BarrierScope) -> None:
        memory = new("VkMemoryBarrier", srcAccessMask=source[1], dstAccessMask=target[1])
        self.vk.CmdPipelineBarrier(commands, source[0], target[0], 0, 1, memory, 0, ffi.NULL, 0, ffi.NULL)
