"""Copies between the host and memory that it cannot map: one of two buffers is filled while the other is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.devices.device import Bytes
from tandem.devices.vulkan.binding import ffi, new
from tandem.devices.vulkan.memory import Block
from tandem.devices.vulkan.queue import (
    COMPUTE_READS_WRITES,
    COMPUTE_WRITES,
    HOST_READ_BARRIER,
    TRANSFER_READS_WRITES,
    TRANSFER_WRITES,
    Queue,
    Submission,
)

STAGING_BYTES = 32 << 20
Region = tuple[int, int, int]  # offset in the source, offset in the target, bytes


class Staging:
    def __init__(self, queue: Queue, blocks: Sequence[Block]) -> None:
        self.queue, self._blocks, self._next = queue, blocks, 0
        self._submissions = [
            Submission([commands], queue.semaphore) for commands in queue.allocate(len(blocks))
        ]
        self._commands = [submission.commands[0] for submission in self._submissions]
        self._values = [0] * len(blocks)

    def buffer(self) -> Bytes:
        """Memory to fill, then to `upload`; waits until its last copy is done."""
        self.queue.wait(self._values[self._next])
        mapped = self._blocks[self._next].mapped
        assert mapped is not None
        return mapped

    def upload(self, target: Block, regions: Sequence[Region]) -> None:
        """Copies from the buffer just filled. Returns at once; later submissions see the bytes."""
        index, self._next = self._next, (self._next + 1) % len(self._blocks)
        self._copy(index, self._blocks[index], target, regions)

    def download(self, source: Block, offset: int, nbytes: int) -> Bytes:
        """A copy of the device's bytes."""
        out = np.empty(nbytes, np.uint8)
        for begin in range(0, nbytes, STAGING_BYTES):
            count = min(STAGING_BYTES, nbytes - begin)
            memory, index = self.buffer(), self._next
            self._copy(index, source, self._blocks[index], [(offset + begin, 0, count)])
            self.queue.wait(self._values[index])
            out[begin : begin + count] = memory[:count]
        return out

    def _copy(self, index: int, source: Block, target: Block, regions: Sequence[Region]) -> None:
        commands, vk = self._commands[index], self.queue.vk
        vk.BeginCommandBuffer(commands, new("VkCommandBufferBeginInfo", flags=1))
        self.queue.barrier(commands, COMPUTE_WRITES, TRANSFER_READS_WRITES)
        copies: Any = ffi.new("VkBufferCopy[]", list(regions))
        vk.CmdCopyBuffer(commands, source.buffer, target.buffer, len(regions), copies)
        self.queue.barrier(commands, TRANSFER_WRITES, COMPUTE_READS_WRITES)
        self.queue.barrier(commands, TRANSFER_WRITES, HOST_READ_BARRIER)
        vk.EndCommandBuffer(commands)
        self._values[index] = self.queue.submit(self._submissions[index])
