"""Compute pipelines from the package's SPIR-V, compiled at first use and cached on disk.

The cache file is keyed by driver and by the sum of all shaders, so that another driver or version starts afresh.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tandem.devices.vulkan.binding import Vulkan, ffi, new
from tandem.devices.vulkan.capabilities import PUSH_BYTES, Capabilities
from tandem.devices.vulkan.shader_modules import find_module, shader_checksum
from tandem.errors import DeviceError
from tandem.files import read_regular, write_whole

STAGE_COMPUTE = 0x20
MAX_CACHE_BYTES = 256 << 20  # a cache has about 1 MB
FULL_SUBGROUPS = 2  # stage flag
CACHE_HIT = 2  # feedback flag
Q8_SUMS, KNOWN = 15, 31  # specialisation constants of common.slang; KNOWN is followed by a launch's scalars


class Pipelines:
    def __init__(
        self, vk: Vulkan, device: Any, capabilities: Capabilities, folder: Path | None, closing: ExitStack
    ) -> None:
        """`folder`: the folder of the cache file; None: no cache file."""
        self.vk, self.device, self.capabilities, self._closing = vk, device, capabilities, closing
        self.compiled = 0  # pipelines that were not in the cache
        self.q8_sums = True  # whether to store the sums of quantised activations: if anyone reads them
        self._pipelines: dict[tuple[object, ...], int] = {}
        push = new("VkPushConstantRange", stageFlags=STAGE_COMPUTE, size=PUSH_BYTES)
        self.layout = vk.create("PipelineLayout", device, pushConstantRangeCount=1, pPushConstantRanges=push)
        closing.callback(vk.DestroyPipelineLayout, device, self.layout, ffi.NULL)
        self._file = folder and folder / f"{capabilities.cache_key}-{shader_checksum()}.pipelines"
        known = b""
        if self._file:
            with suppress(OSError):  # what cannot be read costs the time to compile
                known = read_regular(self._file, MAX_CACHE_BYTES)
        # Damaged: drivers are not required to check the header.
        if known[16:32].hex() != capabilities.cache_key:
            known = b""
        self._known = len(known)
        data = ffi.new("char[]", known) if known else ffi.NULL
        self._cache = vk.create("PipelineCache", device, initialDataSize=len(known), pInitialData=data)
        closing.callback(vk.DestroyPipelineCache, device, self._cache, ffi.NULL)

    def get(
        self, shader: str, constants: tuple[int, ...] = (), subgroup: int = 0, scalars: tuple[int, ...] = ()
    ) -> int:
        """`scalars`: the first scalars of the launch, to be compiled in."""
        key = (shader, constants, subgroup, scalars, self.q8_sums)
        if key not in self._pipelines:
            self._pipelines[key] = self._create(shader, constants, subgroup, scalars)
        return self._pipelines[key]

    def _create(
        self, shader: str, constants: tuple[int, ...], subgroup: int, scalars: tuple[int, ...]
    ) -> int:
        source = find_module(shader)
        lacking = source.features - self.capabilities.features
        if lacking:
            raise DeviceError(
                f"{self.capabilities.name} lacks {lacking.pop()} for {shader}: update its driver"
            )
        code = source.extract(shader)
        words = ffi.new("uint32_t[]", len(code) // 4)
        ffi.memmove(words, code, len(code))
        module = self.vk.create("ShaderModule", self.device, codeSize=len(code), pCode=words)
        try:
            stage = new(
                "VkPipelineShaderStageCreateInfo",
                pNext=self._subgroup(subgroup),
                flags=FULL_SUBGROUPS
                if subgroup and "computeFullSubgroups" in self.capabilities.features
                else 0,
                stage=STAGE_COMPUTE,
                module=module,
                pName=ffi.new("char[]", shader.encode()),
                pSpecializationInfo=_specialisation(constants, self.q8_sums, scalars),
            )
            feedback = ffi.new("VkPipelineCreationFeedback[2]")  # for the pipeline, and for its one stage
            feedback_info = new(
                "VkPipelineCreationFeedbackCreateInfo",
                pPipelineCreationFeedback=feedback,
                pipelineStageCreationFeedbackCount=1,
                pPipelineStageCreationFeedbacks=feedback + 1,
            )
            info = new(
                "VkComputePipelineCreateInfo",
                pNext=feedback_info if self.capabilities.api >= (1, 3) else ffi.NULL,
                stage=stage[0],
                layout=self.layout,
            )
            pipeline = ffi.new("uint64_t *")
            self.vk.CreateComputePipelines(self.device, self._cache, 1, info, ffi.NULL, pipeline)
            self.compiled += not feedback[0].flags & CACHE_HIT
            del stage, feedback_info  # alive until here: `info` holds copies with their pointers
        except DeviceError as error:
            raise DeviceError(f"the driver refuses the shader {shader} {constants}: {error}") from error
        finally:
            self.vk.DestroyShaderModule(self.device, module, ffi.NULL)
        self._closing.callback(self.vk.DestroyPipeline, self.device, pipeline[0], ffi.NULL)
        return int(pipeline[0])

    def _subgroup(self, size: int) -> Any:
        if not size or not self.capabilities.subgroup_size_control:
            return ffi.NULL
        return new("VkPipelineShaderStageRequiredSubgroupSizeCreateInfo", requiredSubgroupSize=size)

    def cache_data(self) -> bytes:
        size = ffi.new("size_t *")
        self.vk.GetPipelineCacheData(self.device, self._cache, size, ffi.NULL)
        data = ffi.new("char[]", size[0])
        self.vk.GetPipelineCacheData(self.device, self._cache, size, data)
        return bytes(ffi.buffer(data, size[0]))

    def save(self) -> None:
        """Writes the cache if it has grown; a folder that cannot be written costs time at the next start only."""
        if self._file is None:
            return
        data = self.cache_data()
        if len(data) <= self._known:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, data)
            for other in self._file.parent.glob(f"{self.capabilities.cache_key}-*.pipelines"):
                if other != self._file:  # caches of older shaders
                    other.unlink(missing_ok=True)
        except OSError:
            return
        self._known = len(data)


def _specialisation(constants: tuple[int, ...], q8_sums: bool, scalars: tuple[int, ...]) -> Any:
    values = {**dict(enumerate(constants)), Q8_SUMS: int(q8_sums)}
    if scalars:
        values |= {KNOWN: len(scalars), **{KNOWN + 1 + i: scalar for i, scalar in enumerate(scalars)}}
    entries = ffi.new("VkSpecializationMapEntry[]", [(id, 4 * i, 4) for i, id in enumerate(values)])
    data = ffi.new("uint32_t[]", [value & 0xFFFFFFFF for value in values.values()])
    return new(
        "VkSpecializationInfo",
        mapEntryCount=len(values),
        pMapEntries=entries,
        dataSize=4 * len(values),
        pData=data,
    )
