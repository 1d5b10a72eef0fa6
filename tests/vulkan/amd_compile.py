"""Compiles shaders for an AMD GPU that is not there; on its own, as drivers read the environment and may crash.

`python -m tests.vulkan.amd_compile` under the environment of amd.py: a JSON list of [shader, constants, subgroup] on
stdin; on stdout one JSON line for the device and one for each shader as it is done.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from tandem.devices.vulkan import capabilities
from tandem.devices.vulkan.binding import STRUCTURE_TYPES, Vulkan, ffi, new
from tandem.devices.vulkan.capabilities import text
from tandem.devices.vulkan.device import create_device, create_instance, list_devices
from tandem.devices.vulkan.pipelines import Pipelines
from tandem.errors import DeviceError

EXTENSION = "VK_KHR_pipeline_executable_properties"
KEEP_STATISTICS, KEEP_TEXTS = 0x40, 0x80  # pipeline flags
BOOL, SIGNED, UNSIGNED, FLOAT = range(4)  # formats of a statistic

STRUCTURE_TYPES.update({
    "VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR": 1000269000,
    "VkPipelineExecutableInfoKHR": 1000269003,
    "VkPipelineExecutableStatisticKHR": 1000269004,
    "VkPipelineExecutableInternalRepresentationKHR": 1000269005,
})  # fmt: skip
ffi.cdef("""
typedef struct { uint32_t sType; void *pNext; uint32_t pipelineExecutableInfo;
} VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR;
typedef struct { uint32_t sType; void *pNext; uint64_t pipeline; uint32_t executableIndex;
} VkPipelineExecutableInfoKHR;
typedef struct { uint32_t sType; void *pNext; char name[256], description[256]; uint32_t format;
                 union { uint32_t b32; int64_t i64; uint64_t u64; double f64; } value;
} VkPipelineExecutableStatisticKHR;
typedef struct { uint32_t sType; void *pNext; char name[256], description[256]; uint32_t isText;
                 size_t dataSize; void *pData; } VkPipelineExecutableInternalRepresentationKHR;
typedef int32_t get_executable_parts(void *device, const VkPipelineExecutableInfoKHR *info, uint32_t *count,
                                     void *parts);
""")


def open_null_device(closing: ExitStack) -> tuple[Vulkan, Any, capabilities.Capabilities]:
    """The only device there is, with what tells about pipelines switched on."""
    vk = Vulkan()
    capabilities.FEATURES += (
        ("VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR", (9, 9), EXTENSION, ("pipelineExecutableInfo",)),
    )  # fmt: skip
    instance = create_instance(vk, closing)
    [(physical, device)] = list_devices(vk, instance)
    handle = create_device(vk, physical, device, closing)
    for name in ("Statistics", "InternalRepresentations"):
        pointer = vk.GetInstanceProcAddr(
            instance, ffi.new("char[]", f"vkGetPipelineExecutable{name}KHR".encode())
        )
        setattr(vk, f"GetPipelineExecutable{name}KHR", ffi.cast("get_executable_parts *", pointer))
    create = vk.CreateComputePipelines

    def create_and_keep(handle: Any, cache: int, count: int, info: Any, *rest: Any) -> int:
        info.flags |= KEEP_STATISTICS | KEEP_TEXTS
        return int(create(handle, cache, count, info, *rest))

    vk.CreateComputePipelines = create_and_keep
    return vk, handle, device


def statistics(vk: Vulkan, handle: Any, pipeline: int) -> dict[str, float]:
    info = new("VkPipelineExecutableInfoKHR", pipeline=pipeline)
    found = vk.listed("GetPipelineExecutableStatisticsKHR", "VkPipelineExecutableStatisticKHR", handle, info)
    fields = {BOOL: "b32", SIGNED: "i64", UNSIGNED: "u64", FLOAT: "f64"}
    return {text(s.name): getattr(s.value, fields[s.format]) for s in found}


def assembly(vk: Vulkan, handle: Any, pipeline: int) -> str:
    """The instructions of the GPU. Asked three times: for the count, for the lengths and for the texts."""
    info, count = new("VkPipelineExecutableInfoKHR", pipeline=pipeline), ffi.new("uint32_t *")
    get = vk.GetPipelineExecutableInternalRepresentationsKHR
    get(handle, info, count, ffi.NULL)
    kind = "VkPipelineExecutableInternalRepresentationKHR"
    parts = ffi.new(f"{kind}[]", [{"sType": STRUCTURE_TYPES[kind]}] * count[0])
    get(handle, info, count, parts)
    texts = [ffi.new("char[]", max(1, part.dataSize)) for part in parts]
    for part, room in zip(parts, texts, strict=True):
        part.pData = room
    get(handle, info, count, parts)
    return next(
        (text(room) for part, room in zip(parts, texts, strict=True) if text(part.name) == "Assembly"), ""
    )


def main() -> None:
    jobs = json.load(sys.stdin)
    with ExitStack() as closing:
        vk, handle, device = open_null_device(closing)
        print(
            json.dumps({"name": device.name, "driver": device.driver, "features": sorted(device.features)}),
            flush=True,
        )
        pipelines = Pipelines(vk, handle, device, None, closing)

        def compiled(job: tuple[str, list[int], int]) -> dict[str, Any]:
            shader, constants, subgroup = job
            try:
                pipeline = pipelines.get(shader, tuple(constants), subgroup)
            except DeviceError as error:
                return {"job": job, "error": str(error)}
            return {"job": job, "statistics": statistics(vk, handle, pipeline),
                    "assembly": assembly(vk, handle, pipeline)}  # fmt: skip

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for result in pool.map(compiled, jobs):
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
