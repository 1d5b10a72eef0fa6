"""The Vulkan device: a Program's arenas in the GPU's memory, its launches in command buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.devices.cpu.repacker import Repacker
from tandem.devices.device import Bytes, WeightRows, host_memory
from tandem.devices.tuned_choices import read_choices
from tandem.devices.vulkan import coopmat_layout
from tandem.devices.vulkan.binding import Vulkan, ffi, new, strings
from tandem.devices.vulkan.capabilities import (
    Capabilities,
    available_features,
    chain,
    choose,
    read_capabilities,
)
from tandem.devices.vulkan.fuse_launches import SCRATCH, SINGLE, step_program
from tandem.devices.vulkan.memory import (
    HOST_CACHED,
    HOST_READS,
    HOST_WRITES,
    HOT,
    MAX_PART_BYTES,
    Arena,
    ArenaPart,
    Block,
    PlacedPart,
    arena_parts,
    plan,
    usable,
)
from tandem.devices.vulkan.pipelines import Pipelines
from tandem.devices.vulkan.queue import COMPUTE_READS_WRITES, TRANSFER_WRITES, Queue
from tandem.devices.vulkan.recording import VulkanRecording, bucket
from tandem.devices.vulkan.staging import STAGING_BYTES, Staging
from tandem.devices.vulkan.tuned import tuned_file
from tandem.kernels.abi import PANEL_ROWS
from tandem.kernels.attention_dispatch import matrix_head_dim
from tandem.kernels.dispatch import PART_SUMS_BYTES, SCRATCH_BYTES
from tandem.kernels.kernel import Counts
from tandem.kernels.layout import Layout
from tandem.kernels.panels import LAYOUTS, panel_layout
from tandem.program.program import STEP_SLOTS, Program, Tensor, arena_in
from tandem.settings import read_settings

API_VERSION = 1 << 22 | 3 << 12  # 1.3: the newest this code knows
TIMEOUT = 30.0  # seconds without an answer, after which the GPU is considered lost
SOFTWARE_TIMEOUT = 900.0
ASSUMED_FREE = 0.9  # share of a heap, if the driver does not say how much of it is free


def create_instance(vk: Vulkan, closing: ExitStack) -> Any:
    application = new(
        "VkApplicationInfo", pApplicationName=ffi.new("char[]", b"tandem"), apiVersion=API_VERSION
    )
    instance = ffi.new("void **")
    vk.CreateInstance(new("VkInstanceCreateInfo", pApplicationInfo=application), ffi.NULL, instance)
    closing.callback(vk.DestroyInstance, instance[0], ffi.NULL)
    return instance[0]


def list_devices(vk: Vulkan, instance: Any) -> list[tuple[Any, Capabilities]]:
    handles = vk.listed("EnumeratePhysicalDevices", "void *", instance)
    return [(handle, read_capabilities(vk, instance, handle, i)) for i, handle in enumerate(handles)]


def devices() -> list[Capabilities]:
    """Every Vulkan device of this machine, software ones too."""
    vk = Vulkan()
    with ExitStack() as closing:
        return [capabilities for _, capabilities in list_devices(vk, create_instance(vk, closing))]


def create_device(vk: Vulkan, physical: Any, device: Capabilities, closing: ExitStack) -> Any:
    """A logical device with all features of `device` switched on."""
    known = available_features(device.api, set(device.extensions))
    structs = [
        new(struct, **{name: int(name in device.features) for name in fields}) for struct, _, fields in known
    ]
    features = new("VkPhysicalDeviceFeatures2", pNext=chain(structs))
    features.features.shaderInt64 = "shaderInt64" in device.features
    features.features.shaderInt16 = "shaderInt16" in device.features
    queue = new(
        "VkDeviceQueueCreateInfo",
        queueFamilyIndex=device.queue_family,
        queueCount=1,
        pQueuePriorities=ffi.new("float[]", [1.0]),
    )
    info = new(
        "VkDeviceCreateInfo",
        pNext=features,
        queueCreateInfoCount=1,
        pQueueCreateInfos=queue,
        enabledExtensionCount=len(device.extensions),
        ppEnabledExtensionNames=strings(device.extensions),
    )
    handle = ffi.new("void **")
    vk.CreateDevice(physical, info, ffi.NULL, handle)
    closing.callback(vk.DestroyDevice, handle[0], ffi.NULL)
    return handle[0]


def scatter(first: int, count: int, run: int, period: int) -> Iterator[tuple[int, int, int]]:
    """Where panels [first, first + count) of a matrix go: yields (source panel, target panel, count)."""
    at = first
    while at < first + count:
        n = min(run - at % run, first + count - at)
        yield at - first, at // run * period + at % run, n
        at += n


class VulkanDevice:
    step_slots = STEP_SLOTS
    stages = 1
    holds_several_programs = True
    loaders = 1  # there is one staging buffer
    workers = 1  # no finer cut: large items are faster even if some cores idle

    def __init__(
        self, device: str = "vulkan", *, gpu_memory: float | None = None, cache: Path | None = None
    ) -> None:
        """`device`: "vulkan", "vulkan:<index>" or "vulkan:<part of a name>". `gpu_memory`: bytes of the device's own
        memory to use at most. `cache`: the folder for compiled pipelines and tuned choices."""
        self._closing, self._open = ExitStack(), False
        try:
            self._start(device, gpu_memory, cache)
        except BaseException:
            self._closing.close()
            raise

    def _start(self, wanted: str, gpu_memory: float | None, cache: Path | None) -> None:
        vk = self.vk = Vulkan()
        closing = self._closing
        listed = list_devices(vk, create_instance(vk, closing))
        capabilities = self.capabilities = choose([c for _, c in listed], wanted)
        self._physical = listed[capabilities.index][0]
        self.name, self.gpu_memory = f"vulkan:{capabilities.index} {capabilities.name}", gpu_memory
        self.handle = create_device(vk, self._physical, capabilities, closing)
        timeout = SOFTWARE_TIMEOUT if capabilities.kind == "software" else TIMEOUT
        self.queue = Queue(vk, self.handle, capabilities.queue_family, timeout, closing)
        self.pipelines = Pipelines(vk, self.handle, capabilities, cache, closing)
        self.arenas: dict[str, Arena] = {}
        self.placed: list[PlacedPart] = []  # the parts of the Program's arenas, with their memory
        self._memory = closing.enter_context(ExitStack())
        staging = ArenaPart("staging", 0, STAGING_BYTES, HOST_READS)
        sums = PART_SUMS_BYTES if coopmat_layout.supports_shape(capabilities) else 0
        own = [staging, staging, ArenaPart("scratch", 0, SCRATCH_BYTES + sums)]
        *blocks, self.scratch = [
            self._block(placed, closing) for placed in plan(own, capabilities, self.heaps_free(), None)
        ]
        self._staging = Staging(self.queue, blocks)
        register_coopmat = coopmat_layout.has_expected_layout(self, self._staging)
        self.capabilities = replace(capabilities, register_coopmat=register_coopmat)
        self.choices = capabilities.choices
        if cache and read_settings().tune:
            self.choices = read_choices(tuned_file(cache, capabilities))
            self.capabilities = replace(self.capabilities, choices=self.choices)
        with self.queue.once() as commands:
            vk.CmdFillBuffer(commands, self.scratch.buffer, 0, 2**64 - 1, 0)
            self.queue.barrier(commands, TRANSFER_WRITES, COMPUTE_READS_WRITES)
        self._repacker = Repacker(read_settings().threads)
        closing.callback(self._repacker.close)
        self._open = True

    def describe(self) -> str:
        return self.capabilities.describe()

    @property
    def shares_memory(self) -> bool:
        return self.capabilities.kind in ("integrated", "software")

    # ---- memory

    def weight_layout(self, format: str, rows: int, columns: int) -> Layout:
        return panel_layout(format, rows, columns)

    def fast_head_dim(self, head_dim: int) -> int:
        return matrix_head_dim(head_dim, self.capabilities)

    def free_memory(self) -> tuple[float, float]:
        return usable(self.capabilities, self.heaps_free(), host_memory(), self.gpu_memory)

    def heaps_free(self) -> list[float]:
        """Bytes of each heap that can still be allocated."""
        if not self.capabilities.memory_budget:
            return [ASSUMED_FREE * heap.nbytes for heap in self.capabilities.heaps]
        budget = new("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
        self.vk.GetPhysicalDeviceMemoryProperties2(
            self._physical, new("VkPhysicalDeviceMemoryProperties2", pNext=budget)
        )
        heaps = range(len(self.capabilities.heaps))
        return [float(max(0, budget.heapBudget[i] - budget.heapUsage[i])) for i in heaps]

    def allocate(self, program: Program) -> None:
        """Like Device.allocate. One Program at a time: frees the memory of the previous one."""
        self._memory.close()
        self.arenas.clear()
        if any(launch.kernel.name.startswith("expert_matmul") for launch in program.launches):
            self.pipelines.q8_sums = True  # experts are multiplied a row a lane: that reads the sums
        max_bytes = min(MAX_PART_BYTES, self.capabilities.largest_allocation)
        self._allocate(arena_parts(program, max_bytes))

    def allocate_arena(self, arena: str, nbytes: int) -> None:
        """Allocates one arena in one part, zeroed."""
        self._allocate([ArenaPart(arena, 0, nbytes, HOST_WRITES if arena == "step" else HOT)])

    def _allocate(self, parts: Sequence[ArenaPart]) -> None:
        self.placed = plan(parts, self.capabilities, self.heaps_free(), self.gpu_memory)
        with ExitStack() as undo:
            blocks = [(placed.part, self._block(placed, undo)) for placed in self.placed]
            with self.queue.once() as commands:
                for _, block in blocks:
                    self.vk.CmdFillBuffer(commands, block.buffer, 0, 2**64 - 1, 0)
                self.queue.barrier(commands, TRANSFER_WRITES, COMPUTE_READS_WRITES)
            self._memory.enter_context(undo.pop_all())
        for arena in {part.arena for part in parts}:
            self.arenas[arena] = Arena(arena, [pair for pair in blocks if pair[0].arena == arena])

    def _block(self, placed: PlacedPart, closing: ExitStack) -> Block:
        return Block(self.vk, self.handle, placed.type, placed.part.nbytes, closing)

    def address(self, tensor: Tensor, step_slot: int = 0) -> int:
        if tensor.arena == SCRATCH:
            return self.scratch.address + tensor.start
        return self.arenas[arena_in(step_slot, tensor.arena)].address(tensor.start)

    def memory(self, arena: str) -> Bytes:
        return self.arenas[arena].bytes_at(0, self.arenas[arena].nbytes)

    def view(self, tensor: Tensor) -> Bytes:
        return self.arenas[tensor.arena].bytes_at(tensor.start, tensor.nbytes)

    def read(self, tensor: Tensor) -> Bytes:
        block, offset = self.arenas[tensor.arena].locate(tensor.start)
        if block.mapped is not None and block.flags & HOST_CACHED:
            return block.mapped[offset : offset + tensor.nbytes]
        return self._staging.download(block, offset, tensor.nbytes)

    def write(self, tensor: Tensor, data: Bytes) -> None:
        block, offset = self.arenas[tensor.arena].locate(tensor.start)
        if block.mapped is not None:
            block.mapped[offset : offset + len(data)] = data
            return
        for begin in range(0, len(data), STAGING_BYTES):
            part = data[begin : begin + STAGING_BYTES]
            self._staging.buffer()[: len(part)] = part
            self._staging.upload(block, [(0, offset + begin, len(part))])

    def repack(self, rows: Sequence[WeightRows]) -> None:
        for each in rows:
            self._repack(*each)

    def _repack(
        self, tensor: Tensor, begin: int, rows: Bytes, columns: int, first: int, run: int, period: int
    ) -> None:
        block, offset = self.arenas[tensor.arena].locate(tensor.start)
        offset += begin
        if block.mapped is not None:
            self._repacker.repack(tensor.dtype, rows, columns, block.mapped[offset:], first, run, period)
            return
        panel = LAYOUTS[tensor.dtype].matrix_bytes(PANEL_ROWS, columns)
        step = STAGING_BYTES // panel
        for done in range(0, -(-len(rows) // PANEL_ROWS), step):
            part = rows[done * PANEL_ROWS : (done + step) * PANEL_ROWS]
            count = -(-len(part) // PANEL_ROWS)
            self._repacker.repack(tensor.dtype, part, columns, self._staging.buffer(), 0, count, count)
            places = scatter(first + done, count, run, period)
            self._staging.upload(
                block, [(at * panel, offset + to * panel, n * panel) for at, to, n in places]
            )

    def beside(self) -> VulkanDevice:
        other = copy(self)
        other.arenas, other.placed, other._open = {}, [], False
        other._memory = self._closing.enter_context(ExitStack())
        other._closing = ExitStack()  # what this device opened, it closes
        return other

    # ---- running

    def step_program(self, program: Program, counts: Counts, single: bool) -> Program:
        sizes = {name: bucket(counts[name], limit) for name, limit in program.max_counts.items()}
        return step_program(program, {**sizes, SINGLE: int(single)}, self.capabilities)

    def record(self, program: Program, step_slot: int = 0) -> VulkanRecording:
        return VulkanRecording(self, program, step_slot)

    def close(self) -> None:
        """Frees everything, also after a failure. NumPy views of its memory must not be used any more."""
        closing, self._closing = self._closing, ExitStack()
        if self._open and not self.queue.idle():
            closing.pop_all()  # the GPU hangs, and freeing what it may still use would hang us too
        self._open = False
        closing.close()
