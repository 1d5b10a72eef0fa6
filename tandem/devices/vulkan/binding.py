"""The part of Vulkan 1.2 that Tandem uses, through cffi and the system's loader.

Enums, flags and booleans are plain integers here, handles uint64_t (instances, devices, queues and command buffers:
void *). `new` makes a struct, fills it and keeps alive what its pointers point to; `Vulkan` calls functions by
their names without "vk" and raises a typed error for a VkResult below zero.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import cffi

from tandem.errors import DeviceError, DeviceLostError, DoesNotFitError

# Structs that begin with sType and pNext: name, sType, fields.
_CHAINED = """
ApplicationInfo 0: const char *pApplicationName; uint32_t applicationVersion; const char *pEngineName;
    uint32_t engineVersion, apiVersion;
InstanceCreateInfo 1: uint32_t flags; const VkApplicationInfo *pApplicationInfo; uint32_t enabledLayerCount;
    const char *const *ppEnabledLayerNames; uint32_t enabledExtensionCount; const char *const *ppEnabledExtensionNames;
DeviceQueueCreateInfo 2: uint32_t flags, queueFamilyIndex, queueCount; const float *pQueuePriorities;
DeviceCreateInfo 3: uint32_t flags, queueCreateInfoCount; const VkDeviceQueueCreateInfo *pQueueCreateInfos;
    uint32_t enabledLayerCount; const char *const *ppEnabledLayerNames; uint32_t enabledExtensionCount;
    const char *const *ppEnabledExtensionNames; const void *pEnabledFeatures;
SubmitInfo 4: uint32_t waitSemaphoreCount; const uint64_t *pWaitSemaphores; const uint32_t *pWaitDstStageMask;
    uint32_t commandBufferCount; void *const *pCommandBuffers; uint32_t signalSemaphoreCount;
    const uint64_t *pSignalSemaphores;
MemoryAllocateInfo 5: uint64_t allocationSize; uint32_t memoryTypeIndex;
SemaphoreCreateInfo 9: uint32_t flags;
QueryPoolCreateInfo 11: uint32_t flags, queryType, queryCount, pipelineStatistics;
BufferCreateInfo 12: uint32_t flags; uint64_t size; uint32_t usage, sharingMode, queueFamilyIndexCount;
    const uint32_t *pQueueFamilyIndices;
ShaderModuleCreateInfo 16: uint32_t flags; size_t codeSize; const uint32_t *pCode;
PipelineCacheCreateInfo 17: uint32_t flags; size_t initialDataSize; const void *pInitialData;
PipelineShaderStageCreateInfo 18: uint32_t flags, stage; uint64_t module; const char *pName;
    const VkSpecializationInfo *pSpecializationInfo;
ComputePipelineCreateInfo 29: uint32_t flags; VkPipelineShaderStageCreateInfo stage; uint64_t layout;
    uint64_t basePipelineHandle; int32_t basePipelineIndex;
PipelineLayoutCreateInfo 30: uint32_t flags, setLayoutCount; const uint64_t *pSetLayouts;
    uint32_t pushConstantRangeCount; const VkPushConstantRange *pPushConstantRanges;
CommandPoolCreateInfo 39: uint32_t flags, queueFamilyIndex;
CommandBufferAllocateInfo 40: uint64_t commandPool; uint32_t level, commandBufferCount;
CommandBufferBeginInfo 42: uint32_t flags; const void *pInheritanceInfo;
MemoryBarrier 46: uint32_t srcAccessMask, dstAccessMask;
PhysicalDeviceFeatures2 1000059000: VkPhysicalDeviceFeatures features;
PhysicalDeviceProperties2 1000059001: VkPhysicalDeviceProperties properties;
PhysicalDeviceMemoryProperties2 1000059006: VkPhysicalDeviceMemoryProperties memoryProperties;
MemoryAllocateFlagsInfo 1000060000: uint32_t flags, deviceMask;
PhysicalDeviceShaderFloat16Int8Features 1000082000: uint32_t shaderFloat16, shaderInt8;
PhysicalDevice16BitStorageFeatures 1000083000: uint32_t storageBuffer16BitAccess,
    uniformAndStorageBuffer16BitAccess, storagePushConstant16, storageInputOutput16;
PhysicalDeviceSubgroupProperties 1000094000: uint32_t subgroupSize, supportedStages, supportedOperations,
    quadOperationsInAllStages;
PhysicalDeviceShaderSMBuiltinsPropertiesNV 1000154001: uint32_t shaderSMCount, shaderWarpsPerSM;
PhysicalDeviceMaintenance3Properties 1000168000: uint32_t maxPerSetDescriptors; uint64_t maxMemoryAllocationSize;
PhysicalDeviceShaderSubgroupExtendedTypesFeatures 1000175000: uint32_t shaderSubgroupExtendedTypes;
PhysicalDevice8BitStorageFeatures 1000177000: uint32_t storageBuffer8BitAccess, uniformAndStorageBuffer8BitAccess,
    storagePushConstant8;
PipelineCreationFeedbackCreateInfo 1000192000: VkPipelineCreationFeedback *pPipelineCreationFeedback;
    uint32_t pipelineStageCreationFeedbackCount; VkPipelineCreationFeedback *pPipelineStageCreationFeedbacks;
PhysicalDeviceDriverProperties 1000196000: uint32_t driverID; char driverName[256], driverInfo[256];
    uint8_t conformanceVersion[4];
PhysicalDeviceTimelineSemaphoreFeatures 1000207000: uint32_t timelineSemaphore;
SemaphoreTypeCreateInfo 1000207002: uint32_t semaphoreType; uint64_t initialValue;
TimelineSemaphoreSubmitInfo 1000207003: uint32_t waitSemaphoreValueCount; const uint64_t *pWaitSemaphoreValues;
    uint32_t signalSemaphoreValueCount; const uint64_t *pSignalSemaphoreValues;
SemaphoreWaitInfo 1000207004: uint32_t flags, semaphoreCount; const uint64_t *pSemaphores, *pValues;
PhysicalDeviceVulkanMemoryModelFeatures 1000211000: uint32_t vulkanMemoryModel, vulkanMemoryModelDeviceScope,
    vulkanMemoryModelAvailabilityVisibilityChains;
PhysicalDeviceScalarBlockLayoutFeatures 1000221000: uint32_t scalarBlockLayout;
PhysicalDeviceSubgroupSizeControlProperties 1000225000: uint32_t minSubgroupSize, maxSubgroupSize,
    maxComputeWorkgroupSubgroups, requiredSubgroupSizeStages;
PipelineShaderStageRequiredSubgroupSizeCreateInfo 1000225001: uint32_t requiredSubgroupSize;
PhysicalDeviceSubgroupSizeControlFeatures 1000225002: uint32_t subgroupSizeControl, computeFullSubgroups;
PhysicalDeviceMemoryBudgetPropertiesEXT 1000237000: uint64_t heapBudget[16], heapUsage[16];
BufferDeviceAddressInfo 1000244001: uint64_t buffer;
PhysicalDeviceBufferDeviceAddressFeatures 1000257000: uint32_t bufferDeviceAddress, bufferDeviceAddressCaptureReplay,
    bufferDeviceAddressMultiDevice;
PhysicalDeviceShaderIntegerDotProductFeatures 1000280000: uint32_t shaderIntegerDotProduct;
PhysicalDeviceMaintenance4Features 1000413000: uint32_t maintenance4;
PhysicalDeviceCooperativeMatrixFeaturesKHR 1000506000: uint32_t cooperativeMatrix,
    cooperativeMatrixRobustBufferAccess;
CooperativeMatrixPropertiesKHR 1000506001: uint32_t MSize, NSize, KSize, AType, BType, CType, ResultType,
    saturatingAccumulation, scope;
"""

# What the fields above are made of. `skipped` fields are those nothing here reads.
_PLAIN = """
typedef struct { uint32_t stageFlags, offset, size; } VkPushConstantRange;
typedef struct { uint32_t constantID, offset; size_t size; } VkSpecializationMapEntry;
typedef struct { uint32_t mapEntryCount; const VkSpecializationMapEntry *pMapEntries; size_t dataSize;
                 const void *pData; } VkSpecializationInfo;
typedef struct { uint32_t flags; uint64_t duration; } VkPipelineCreationFeedback;
typedef struct { uint64_t srcOffset, dstOffset, size; } VkBufferCopy;
typedef struct { uint64_t size, alignment; uint32_t memoryTypeBits; } VkMemoryRequirements;
typedef struct { uint32_t queueFlags, queueCount, timestampValidBits, skipped[3]; } VkQueueFamilyProperties;
typedef struct { char extensionName[256]; uint32_t specVersion; } VkExtensionProperties;
typedef struct { uint32_t propertyFlags, heapIndex; } VkMemoryType;
typedef struct { uint64_t size; uint32_t flags; } VkMemoryHeap;
typedef struct { uint32_t memoryTypeCount; VkMemoryType memoryTypes[32]; uint32_t memoryHeapCount;
                 VkMemoryHeap memoryHeaps[16]; } VkPhysicalDeviceMemoryProperties;
typedef struct { uint32_t skipped0[40], shaderInt64, shaderInt16, skipped1[13]; } VkPhysicalDeviceFeatures;
typedef struct {
    uint32_t skipped0[8], maxPushConstantsSize, skipped1[2]; uint64_t skipped2[2]; uint32_t skipped3[38];
    uint32_t maxComputeSharedMemorySize, maxComputeWorkGroupCount[3], maxComputeWorkGroupInvocations,
             maxComputeWorkGroupSize[3], skipped4[13]; uint64_t skipped5[4]; uint32_t skipped6[21];
    uint32_t timestampComputeAndGraphics; float timestampPeriod; uint32_t skipped7[12]; uint64_t skipped8[2];
    uint64_t nonCoherentAtomSize;
} VkPhysicalDeviceLimits;
typedef struct { uint32_t apiVersion, driverVersion, vendorID, deviceID, deviceType; char deviceName[256];
                 uint8_t pipelineCacheUUID[16]; VkPhysicalDeviceLimits limits; uint32_t skipped[5];
} VkPhysicalDeviceProperties;
"""

_FUNCTIONS = """
void *vkGetInstanceProcAddr(void *instance, const char *name);
int32_t vkEnumerateInstanceVersion(uint32_t *version);
int32_t vkCreateInstance(const VkInstanceCreateInfo *info, const void *allocator, void **instance);
void vkDestroyInstance(void *instance, const void *allocator);
int32_t vkEnumeratePhysicalDevices(void *instance, uint32_t *count, void **devices);
void vkGetPhysicalDeviceProperties2(void *physical, VkPhysicalDeviceProperties2 *properties);
void vkGetPhysicalDeviceFeatures2(void *physical, VkPhysicalDeviceFeatures2 *features);
void vkGetPhysicalDeviceMemoryProperties2(void *physical, VkPhysicalDeviceMemoryProperties2 *properties);
void vkGetPhysicalDeviceQueueFamilyProperties(void *physical, uint32_t *count, VkQueueFamilyProperties *families);
int32_t vkEnumerateDeviceExtensionProperties(void *physical, const char *layer, uint32_t *count,
                                             VkExtensionProperties *extensions);
int32_t vkCreateDevice(void *physical, const VkDeviceCreateInfo *info, const void *allocator, void **device);
void vkDestroyDevice(void *device, const void *allocator);
int32_t vkDeviceWaitIdle(void *device);
int32_t vkGetSemaphoreCounterValue(void *device, uint64_t semaphore, uint64_t *value);
void vkGetDeviceQueue(void *device, uint32_t family, uint32_t index, void **queue);
int32_t vkCreateBuffer(void *device, const VkBufferCreateInfo *info, const void *allocator, uint64_t *buffer);
void vkDestroyBuffer(void *device, uint64_t buffer, const void *allocator);
void vkGetBufferMemoryRequirements(void *device, uint64_t buffer, VkMemoryRequirements *requirements);
uint64_t vkGetBufferDeviceAddress(void *device, const VkBufferDeviceAddressInfo *info);
int32_t vkAllocateMemory(void *device, const VkMemoryAllocateInfo *info, const void *allocator, uint64_t *memory);
void vkFreeMemory(void *device, uint64_t memory, const void *allocator);
int32_t vkBindBufferMemory(void *device, uint64_t buffer, uint64_t memory, uint64_t offset);
int32_t vkMapMemory(void *device, uint64_t memory, uint64_t offset, uint64_t size, uint32_t flags, void **data);
int32_t vkCreateShaderModule(void *device, const VkShaderModuleCreateInfo *info, const void *allocator,
                             uint64_t *module);
void vkDestroyShaderModule(void *device, uint64_t module, const void *allocator);
int32_t vkCreatePipelineLayout(void *device, const VkPipelineLayoutCreateInfo *info, const void *allocator,
                               uint64_t *layout);
void vkDestroyPipelineLayout(void *device, uint64_t layout, const void *allocator);
int32_t vkCreatePipelineCache(void *device, const VkPipelineCacheCreateInfo *info, const void *allocator,
                              uint64_t *cache);
int32_t vkGetPipelineCacheData(void *device, uint64_t cache, size_t *size, void *data);
void vkDestroyPipelineCache(void *device, uint64_t cache, const void *allocator);
int32_t vkCreateComputePipelines(void *device, uint64_t cache, uint32_t count, const VkComputePipelineCreateInfo *infos,
                                 const void *allocator, uint64_t *pipelines);
void vkDestroyPipeline(void *device, uint64_t pipeline, const void *allocator);
int32_t vkCreateCommandPool(void *device, const VkCommandPoolCreateInfo *info, const void *allocator, uint64_t *pool);
void vkDestroyCommandPool(void *device, uint64_t pool, const void *allocator);
int32_t vkAllocateCommandBuffers(void *device, const VkCommandBufferAllocateInfo *info, void **commands);
void vkFreeCommandBuffers(void *device, uint64_t pool, uint32_t count, void *const *commands);
int32_t vkBeginCommandBuffer(void *commands, const VkCommandBufferBeginInfo *info);
int32_t vkEndCommandBuffer(void *commands);
void vkCmdBindPipeline(void *commands, uint32_t bind_point, uint64_t pipeline);
void vkCmdPushConstants(void *commands, uint64_t layout, uint32_t stages, uint32_t offset, uint32_t size,
                        const void *values);
void vkCmdDispatch(void *commands, uint32_t x, uint32_t y, uint32_t z);
void vkCmdPipelineBarrier(void *commands, uint32_t from, uint32_t to, uint32_t flags, uint32_t memory_count,
                          const VkMemoryBarrier *memory, uint32_t buffer_count, const void *buffers,
                          uint32_t image_count, const void *images);
void vkCmdCopyBuffer(void *commands, uint64_t from, uint64_t to, uint32_t count, const VkBufferCopy *regions);
void vkCmdFillBuffer(void *commands, uint64_t buffer, uint64_t offset, uint64_t size, uint32_t value);
int32_t vkCreateQueryPool(void *device, const VkQueryPoolCreateInfo *info, const void *allocator, uint64_t *pool);
void vkDestroyQueryPool(void *device, uint64_t pool, const void *allocator);
void vkCmdResetQueryPool(void *commands, uint64_t pool, uint32_t first, uint32_t count);
void vkCmdWriteTimestamp(void *commands, uint32_t stage, uint64_t pool, uint32_t query);
int32_t vkGetQueryPoolResults(void *device, uint64_t pool, uint32_t first, uint32_t count, size_t size, void *data,
                              uint64_t stride, uint32_t flags);
int32_t vkCreateSemaphore(void *device, const VkSemaphoreCreateInfo *info, const void *allocator, uint64_t *semaphore);
void vkDestroySemaphore(void *device, uint64_t semaphore, const void *allocator);
int32_t vkWaitSemaphores(void *device, const VkSemaphoreWaitInfo *info, uint64_t nanoseconds);
int32_t vkQueueSubmit(void *queue, uint32_t count, const VkSubmitInfo *submits, uint64_t fence);
typedef int32_t get_cooperative_matrix_properties(void *physical, uint32_t *count,
                                                  VkCooperativeMatrixPropertiesKHR *properties);
"""

TIMEOUT, INCOMPLETE = 2, 5  # VkResults that are no error
DEVICE_LOST, OUT_OF_HOST_MEMORY, OUT_OF_DEVICE_MEMORY, INCOMPATIBLE_DRIVER = -4, -1, -2, -9
_RESULTS = {
    OUT_OF_HOST_MEMORY: "VK_ERROR_OUT_OF_HOST_MEMORY",
    OUT_OF_DEVICE_MEMORY: "VK_ERROR_OUT_OF_DEVICE_MEMORY",
    -3: "VK_ERROR_INITIALIZATION_FAILED",
    DEVICE_LOST: "VK_ERROR_DEVICE_LOST",
    -5: "VK_ERROR_MEMORY_MAP_FAILED",
    -6: "VK_ERROR_LAYER_NOT_PRESENT",
    -7: "VK_ERROR_EXTENSION_NOT_PRESENT",
    -8: "VK_ERROR_FEATURE_NOT_PRESENT",
    INCOMPATIBLE_DRIVER: "VK_ERROR_INCOMPATIBLE_DRIVER",
    -10: "VK_ERROR_TOO_MANY_OBJECTS",
    -13: "VK_ERROR_UNKNOWN",
}

ffi: Any = cffi.FFI()
STRUCTURE_TYPES: dict[str, int] = {}
_kept: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()


def _declare() -> None:
    chained = []
    for name, number, fields in re.findall(r"^(\w+) (\d+): (.*?;)(?=\n\w|\s*\Z)", _CHAINED, re.S | re.M):
        STRUCTURE_TYPES[f"Vk{name}"] = int(number)
        chained.append(f"typedef struct {{ uint32_t sType; void *pNext; {fields} }} Vk{name};")
    ffi.cdef(_PLAIN + "\n".join(chained) + _FUNCTIONS)


_declare()


def new(kind: str, **fields: Any) -> Any:
    """A pointer to a filled struct. What the fields point to lives as long as it does."""
    struct = ffi.new(f"{kind} *")
    if kind in STRUCTURE_TYPES:
        struct.sType = STRUCTURE_TYPES[kind]
    for name, value in fields.items():
        setattr(struct, name, value)
    _kept[struct] = tuple(fields.values())
    return struct


def strings(texts: Sequence[str]) -> Any:
    """A `const char *const *`."""
    items = [ffi.new("char[]", text.encode()) for text in texts]
    array = ffi.new("char *[]", items)
    _kept[array] = tuple(items)
    return array


def result_error(call: str, code: int) -> DeviceError:
    what = f"{call} failed with {_RESULTS.get(code, f'VkResult {code}')}"
    if code == DEVICE_LOST:
        return DeviceLostError(
            f"the GPU stopped ({what}): load the model again; if it repeats, look for a GPU reset in the kernel log"
        )
    if code in (OUT_OF_DEVICE_MEMORY, OUT_OF_HOST_MEMORY):
        where = "device" if code == OUT_OF_DEVICE_MEMORY else "host"
        return DoesNotFitError(
            f"out of {where} memory ({what}): use a smaller model, context or batch, or close what else uses it"
        )
    if code == INCOMPATIBLE_DRIVER:
        return DeviceError(
            f"no Vulkan driver ({what}): install your GPU's (mesa-vulkan-drivers for AMD and Intel, NVIDIA's own for "
            "NVIDIA), or use the device cpu"
        )
    return DeviceError(f"{what}: update the Vulkan driver, or use another device")


class Vulkan:
    """Vulkan's functions by their names without "vk"; those that return a VkResult raise its error."""

    def __init__(self) -> None:
        try:
            self._library = ffi.dlopen("libvulkan.so.1")
        except OSError as error:
            raise DeviceError(
                "the Vulkan loader libvulkan.so.1 is not installed: install the package libvulkan1 (Debian, Ubuntu) or "
                "vulkan-loader (Fedora, Arch) and your GPU's Vulkan driver, or use the device cpu"
            ) from error

    def __getattr__(self, name: str) -> Any:
        try:
            function = getattr(self._library, f"vk{name}")
        except AttributeError as error:
            raise DeviceError(
                f"the Vulkan loader has no vk{name}: update libvulkan1 to 1.2 or newer"
            ) from error
        if ffi.typeof(function).result is ffi.typeof("int32_t"):
            function = _checked(f"vk{name}", function)
        setattr(self, name, function)
        return function

    def create(self, kind: str, device: Any, **fields: Any) -> int:
        """The handle that vkCreate<kind> makes from a Vk<kind>CreateInfo."""
        handle = ffi.new("uint64_t *")
        getattr(self, f"Create{kind}")(device, new(f"Vk{kind}CreateInfo", **fields), ffi.NULL, handle)
        return int(handle[0])

    def listed(self, function: str, kind: str, *before: Any) -> list[Any]:
        """The array that a counting function fills: called once for the count, once for the array."""
        count = ffi.new("uint32_t *")
        getattr(self, function)(*before, count, ffi.NULL)
        initial = {"sType": STRUCTURE_TYPES[kind]} if kind in STRUCTURE_TYPES else None
        array = ffi.new(f"{kind}[]", [initial] * count[0] if initial else count[0])
        getattr(self, function)(*before, count, array)
        items = [array[i] for i in range(count[0])]
        for item in items:
            if isinstance(item, ffi.CData) and ffi.typeof(item).kind == "struct":
                _kept[item] = (array,)
        return items


def _checked(name: str, function: Any) -> Any:
    def call(*args: Any) -> int:
        code = int(function(*args))
        if code < 0:
            raise result_error(name, code)
        return code

    return call
