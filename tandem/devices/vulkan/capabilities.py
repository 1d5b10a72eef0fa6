"""The capabilities of a Vulkan device, read once, and which of the machine's devices to open."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tandem.devices.tuned_choices import Choices
from tandem.devices.vulkan.binding import Vulkan, ffi, new
from tandem.errors import DeviceError
from tandem.kernels.abi import LAUNCH_BYTES

KINDS = {1: "integrated", 2: "discrete", 3: "virtual", 4: "software"}  # VkPhysicalDeviceType -> kind
PREFERENCE = ("discrete", "integrated", "virtual", "other")  # software is used only if it is named
VENDORS = {
    0x1002: "AMD",
    0x10DE: "NVIDIA",
    0x8086: "Intel",
    0x10005: "Mesa",
    0x13B5: "Arm",
    0x5143: "Qualcomm",
}
LAVAPIPE = 13  # VkDriverId
COMPUTE, GRAPHICS = 2, 1  # queue flags
PUSH_BYTES = LAUNCH_BYTES

# Feature structs: the Vulkan version whose core has them, else the extension, and the fields to switch on if available.
FEATURES: tuple[tuple[str, tuple[int, int], str, tuple[str, ...]], ...] = (
    ("VkPhysicalDevice16BitStorageFeatures", (1, 1), "", ("storageBuffer16BitAccess",)),
    ("VkPhysicalDevice8BitStorageFeatures", (1, 2), "", ("storageBuffer8BitAccess",)),
    ("VkPhysicalDeviceShaderFloat16Int8Features", (1, 2), "", ("shaderFloat16", "shaderInt8")),
    ("VkPhysicalDeviceTimelineSemaphoreFeatures", (1, 2), "", ("timelineSemaphore",)),
    ("VkPhysicalDeviceBufferDeviceAddressFeatures", (1, 2), "", ("bufferDeviceAddress",)),
    ("VkPhysicalDeviceVulkanMemoryModelFeatures", (1, 2), "", ("vulkanMemoryModel", "vulkanMemoryModelDeviceScope")),
    ("VkPhysicalDeviceScalarBlockLayoutFeatures", (1, 2), "", ("scalarBlockLayout",)),
    ("VkPhysicalDeviceShaderSubgroupExtendedTypesFeatures", (1, 2), "", ("shaderSubgroupExtendedTypes",)),
    ("VkPhysicalDeviceSubgroupSizeControlFeatures", (1, 3), "VK_EXT_subgroup_size_control",
     ("subgroupSizeControl", "computeFullSubgroups")),
    ("VkPhysicalDeviceShaderIntegerDotProductFeatures", (1, 3), "VK_KHR_shader_integer_dot_product",
     ("shaderIntegerDotProduct",)),
    ("VkPhysicalDeviceMaintenance4Features", (1, 3), "VK_KHR_maintenance4", ("maintenance4",)),
    ("VkPhysicalDeviceCooperativeMatrixFeaturesKHR", (9, 9), "VK_KHR_cooperative_matrix", ("cooperativeMatrix",)),
)  # fmt: skip
PLAIN_FEATURES = ("shaderInt64", "shaderInt16")  # fields of VkPhysicalDeviceFeatures
REQUIRED = ("bufferDeviceAddress", "timelineSemaphore", "shaderInt64", "maintenance4")
MEMORY_BUDGET, CORE_COUNT = "VK_EXT_memory_budget", "VK_NV_shader_sm_builtins"
COMPONENT_TYPES = {
    0: "f16",
    1: "f32",
    2: "f64",
    3: "i8",
    4: "i16",
    5: "i32",
    6: "i64",
    7: "u8",
    8: "u16",
    9: "u32",
}
SUBGROUP_SCOPE = 3


@dataclass(frozen=True)
class MemoryType:
    index: int
    heap: int
    flags: int


@dataclass(frozen=True)
class Heap:
    nbytes: int
    device_local: bool


@dataclass(frozen=True)
class MatrixShape:
    """A cooperative matrix multiplication that a subgroup can do: C [m, n] += A [m, k] B [k, n]."""

    m: int
    n: int
    k: int
    a: str
    b: str
    c: str


@dataclass(frozen=True)
class Capabilities:
    index: int  # index in the loader's order: vulkan:<index>
    name: str
    kind: str  # discrete, integrated, virtual, software, other
    vendor: str
    driver: str
    driver_version: int
    api: tuple[int, int, int]
    features: frozenset[str]  # fields of FEATURES and PLAIN_FEATURES that the device has; switched on
    extensions: tuple[str, ...]  # switched on
    subgroup: int  # invocations of a subgroup by default
    subgroup_min: int
    subgroup_max: int
    matrix_shapes: tuple[MatrixShape, ...]
    heaps: tuple[Heap, ...]
    memory_types: tuple[MemoryType, ...]
    largest_allocation: int
    shared_memory: int  # bytes per workgroup
    workgroup_invocations: int
    workgroup_count: tuple[int, int, int]
    timestamp_ns: float  # nanoseconds per tick; 0: no timestamps
    queue_family: int
    cache_key: str  # identifies the driver: pipeline caches are valid for one
    # Whether lanes hold a matrix's elements as coopmat_layout.py expects; tested when the device is opened.
    register_coopmat: bool = False
    cores: int = 0  # that run workgroups; 0: the driver does not say
    # Bytes that the firmware keeps for an integrated GPU; the host does not count them.
    reserved_vram: int = 0
    choices: Choices = field(default_factory=Choices, compare=False, repr=False)  # tuned parameters

    @property
    def int8_dot(self) -> bool:
        return "shaderIntegerDotProduct" in self.features

    @property
    def storage16(self) -> bool:
        return "storageBuffer16BitAccess" in self.features

    @property
    def storage8(self) -> bool:
        return "storageBuffer8BitAccess" in self.features

    @property
    def float16(self) -> bool:
        return "shaderFloat16" in self.features

    @property
    def subgroup_size_control(self) -> bool:
        return "subgroupSizeControl" in self.features

    @property
    def memory_budget(self) -> bool:
        return MEMORY_BUDGET in self.extensions

    def describe(self) -> str:
        """One line for people: the device, and the optional features that it has and lacks."""
        optional = {
            "int8 dot product": self.int8_dot,
            "float16": self.float16,
            "16-bit storage": self.storage16,
            "8-bit storage": self.storage8,
            "matrix units": bool(self.matrix_shapes),
            "memory budget": self.memory_budget,
        }
        has, lacks = (
            ", ".join(n for n, there in optional.items() if there is side) for side in (True, False)
        )
        size = max((h.nbytes for h in self.heaps if h.device_local), default=0) / 1e9
        api = ".".join(map(str, self.api))
        return (
            f"vulkan:{self.index} {self.name} ({self.kind}, {size:.1f} GB, Vulkan {api}, {self.driver}, subgroups of "
            f"{self.subgroup}): {has or 'no optional feature'}" + (f"; without {lacks}" if lacks else "")
        )


def text(chars: Any) -> str:
    return str(ffi.string(chars).decode(errors="replace"))


def version(number: int) -> tuple[int, int, int]:
    return (number >> 22) & 0x7F, (number >> 12) & 0x3FF, number & 0xFFF


def chain(structs: list[Any]) -> Any:
    """Links structs through pNext; returns the first, or NULL. The caller keeps the list."""
    for first, second in pairwise(structs):
        first.pNext = second
    return structs[0] if structs else ffi.NULL


def available_features(
    api: tuple[int, int, int], extensions: set[str]
) -> list[tuple[str, str, tuple[str, ...]]]:
    """(struct, extension to switch on or "", fields) of the feature structs this device knows."""
    core = [(struct, "", fields) for struct, since, _, fields in FEATURES if api[:2] >= since]
    extra = [(s, ext, fields) for s, since, ext, fields in FEATURES if api[:2] < since and ext in extensions]
    return core + extra


def read_capabilities(vk: Vulkan, instance: Any, physical: Any, index: int) -> Capabilities:
    extensions = {text(e.extensionName) for e in vk.listed(
        "EnumerateDeviceExtensionProperties", "VkExtensionProperties", physical, ffi.NULL)}  # fmt: skip
    properties = new("VkPhysicalDeviceProperties2")
    vk.GetPhysicalDeviceProperties2(physical, properties)
    api = version(properties.properties.apiVersion)
    known = available_features(api, extensions)
    sizes_known = any(struct == "VkPhysicalDeviceSubgroupSizeControlFeatures" for struct, _, _ in known)
    driver, subgroup, allocation, sizes = more = [
        new("VkPhysicalDeviceDriverProperties"), new("VkPhysicalDeviceSubgroupProperties"),
        new("VkPhysicalDeviceMaintenance3Properties"), new("VkPhysicalDeviceSubgroupSizeControlProperties"),
    ]  # fmt: skip
    cores = new("VkPhysicalDeviceShaderSMBuiltinsPropertiesNV")
    if api >= (1, 2):
        known_properties = more if sizes_known else more[:3]
        properties.pNext = chain(known_properties + [cores] * (CORE_COUNT in extensions))
        vk.GetPhysicalDeviceProperties2(physical, properties)
    features = read_features(vk, physical, known)
    memory = new("VkPhysicalDeviceMemoryProperties2")
    vk.GetPhysicalDeviceMemoryProperties2(physical, memory)
    heaps, types = memory.memoryProperties.memoryHeaps, memory.memoryProperties.memoryTypes
    family, ticks = compute_family(vk, physical)
    base, limits = properties.properties, properties.properties.limits
    wanted = [ext for _, ext, fields in known if ext and features & set(fields)]
    name, kind = text(base.deviceName), KINDS.get(base.deviceType, "other")
    return Capabilities(
        index=index,
        name=name,
        kind=kind,
        vendor=VENDORS.get(base.vendorID, f"{base.vendorID:#x}"),
        driver=f"{'lavapipe' if driver.driverID == LAVAPIPE else text(driver.driverName)} {text(driver.driverInfo)}",
        driver_version=base.driverVersion,
        api=api,
        features=frozenset(features),
        extensions=tuple(wanted + [MEMORY_BUDGET] * (MEMORY_BUDGET in extensions)),
        subgroup=subgroup.subgroupSize,
        subgroup_min=sizes.minSubgroupSize or subgroup.subgroupSize,
        subgroup_max=sizes.maxSubgroupSize or subgroup.subgroupSize,
        matrix_shapes=matrix_shapes(vk, instance, physical) if "cooperativeMatrix" in features else (),
        heaps=tuple(
            Heap(heaps[i].size, bool(heaps[i].flags & 1))
            for i in range(memory.memoryProperties.memoryHeapCount)
        ),
        memory_types=tuple(
            MemoryType(i, types[i].heapIndex, types[i].propertyFlags)
            for i in range(memory.memoryProperties.memoryTypeCount)
        ),
        largest_allocation=allocation.maxMemoryAllocationSize or 1 << 30,
        shared_memory=limits.maxComputeSharedMemorySize,
        workgroup_invocations=limits.maxComputeWorkGroupInvocations,
        workgroup_count=tuple(limits.maxComputeWorkGroupCount),
        timestamp_ns=limits.timestampPeriod if ticks else 0.0,
        queue_family=family,
        cache_key=bytes(base.pipelineCacheUUID).hex(),
        cores=cores.shaderSMCount,
        reserved_vram=reserved_vram(base.vendorID, base.deviceID) if kind == "integrated" else 0,
    )


def read_features(vk: Vulkan, physical: Any, known: list[tuple[str, str, tuple[str, ...]]]) -> set[str]:
    structs = [new(struct) for struct, _, _ in known]
    top = new("VkPhysicalDeviceFeatures2", pNext=chain(structs))
    vk.GetPhysicalDeviceFeatures2(physical, top)
    features = {name for name in PLAIN_FEATURES if getattr(top.features, name)}
    for struct, (_, _, fields) in zip(structs, known, strict=True):
        features |= {name for name in fields if getattr(struct, name)}
    return features


def compute_family(vk: Vulkan, physical: Any) -> tuple[int, int]:
    """(queue family, timestamp bits). Prefers a family without graphics, which leaves a desktop responsive."""
    families = vk.listed("GetPhysicalDeviceQueueFamilyProperties", "VkQueueFamilyProperties", physical)
    computing = [i for i, family in enumerate(families) if family.queueFlags & COMPUTE]
    if not computing:
        return -1, 0
    alone = [i for i in computing if not families[i].queueFlags & GRAPHICS]
    best = (alone or computing)[0]
    return best, families[best].timestampValidBits


def reserved_vram(vendor: int, device: int, cards: Path = Path("/sys/class/drm")) -> int:
    """Bytes that the firmware keeps for a GPU, if its kernel driver reports them (amdgpu does); else 0."""
    for card in cards.glob("card*/device"):
        try:
            ids = tuple(int((card / name).read_text(), 16) for name in ("vendor", "device"))
            if ids == (vendor, device):
                return int((card / "mem_info_vram_total").read_text())
        except (OSError, ValueError):
            continue  # a connector, or a driver that does not report it
    return 0


def matrix_shapes(vk: Vulkan, instance: Any, physical: Any) -> tuple[MatrixShape, ...]:
    name = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
    pointer = vk.GetInstanceProcAddr(instance, ffi.new("char[]", name.encode()))
    if pointer == ffi.NULL:
        return ()
    setattr(vk, name, ffi.cast("get_cooperative_matrix_properties *", pointer))
    shapes = vk.listed(name, "VkCooperativeMatrixPropertiesKHR", physical)
    kinds = [tuple(COMPONENT_TYPES.get(t, f"{t}") for t in (s.AType, s.BType, s.CType)) for s in shapes]
    return tuple(
        MatrixShape(s.MSize, s.NSize, s.KSize, *kind)
        for s, kind in zip(shapes, kinds, strict=True)
        if s.scope == SUBGROUP_SCOPE and s.CType == s.ResultType and not s.saturatingAccumulation
    )


def choose(devices: list[Capabilities], wanted: str) -> Capabilities:
    """The device that "vulkan", "vulkan:<index>" or "vulkan:<part of its name or driver>" asks for."""
    listing = "; ".join(f"vulkan:{d.index} is {d.name} ({d.kind})" for d in devices)
    _, _, which = wanted.partition(":")
    if not devices:
        raise DeviceError(
            "no Vulkan device: install your GPU's Vulkan driver (mesa-vulkan-drivers for AMD and Intel), check that "
            "/dev/dri is readable, or use the device cpu"
        )
    if which:
        matching = [
            d for d in devices
            if (int(which) == d.index if which.isdecimal() else which.lower() in f"{d.name} {d.driver}".lower())
        ]  # fmt: skip
        if not matching:
            raise DeviceError(f"no device {wanted!r}: {listing}")
    else:
        matching = sorted(
            (d for d in devices if d.kind in PREFERENCE), key=lambda d: (PREFERENCE.index(d.kind), d.index)
        )
        if not matching:
            raise DeviceError(
                f"no GPU with a Vulkan driver, only software ({listing}): name it to use it, install your "
                "GPU's Vulkan driver, or use the device cpu"
            )
    check_usable(matching[0])
    return matching[0]


def check_usable(device: Capabilities) -> None:
    missing = [name for name in REQUIRED if name not in device.features]
    if device.api < (1, 2) or missing or device.queue_family < 0:
        lacks = missing[0] if missing else "Vulkan 1.2" if device.api < (1, 2) else "a compute queue"
        raise DeviceError(f"{device.name} lacks {lacks}: update its driver, or use another device")
