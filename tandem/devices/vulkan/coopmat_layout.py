"""Whether a device spreads a cooperative matrix over the lanes of a subgroup as register kernels expect.

Register kernels are matmul_coopmat_reg.slang and the modules that import attention_coopmat_common.slang. Vulkan
does not specify which lane holds which element, so a shader tests it once when the device is opened. NVIDIA's GPUs have
this layout; on others, matrices go through shared memory (matmul_coopmat.slang).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tandem.devices.vulkan.binding import ffi
from tandem.devices.vulkan.capabilities import PUSH_BYTES, Capabilities
from tandem.devices.vulkan.pipelines import STAGE_COMPUTE
from tandem.devices.vulkan.staging import Staging
from tandem.kernels.kernel import Array

if TYPE_CHECKING:
    from tandem.devices.vulkan.device import VulkanDevice

LANES = 32
SHAPE = (16, 8, 16, "f16", "f16", "f32")


def expected() -> Array:
    """int32 [lane][8 of weights 16 x 16, 4 of tokens 16 x 8, 4 of sums 16 x 8]: 16 * row + column of each element."""
    lane = np.arange(LANES)[:, None]
    g, t = lane // 4, lane % 4
    two, four = np.array([0, 1]), np.array([0, 1, 8, 9])
    weights = np.hstack([(g + row) * 16 + 2 * t + four for row in (0, 8)])
    tokens = (2 * t + four) * 16 + g
    sums = np.hstack([(g + row) * 16 + 2 * t + two for row in (0, 8)])
    return np.hstack([weights, tokens, sums]).astype(np.int32)


def supports_shape(device: Capabilities) -> bool:
    shapes = {(s.m, s.n, s.k, s.a, s.b, s.c) for s in device.matrix_shapes}
    sizes = device.subgroup_min <= LANES <= device.subgroup_max
    return SHAPE in shapes and sizes and device.shared_memory >= 48 << 10


def has_expected_layout(device: VulkanDevice, staging: Staging) -> bool:
    """Runs coopmat_probe.slang on the device, which writes the layout to scratch memory, and compares it."""
    if not supports_shape(device.capabilities):
        return False
    vk, want = device.vk, expected()
    push = np.zeros(PUSH_BYTES // 8, np.uint64)
    push[0] = device.scratch.address
    with device.queue.once() as commands:
        vk.CmdBindPipeline(commands, 1, device.pipelines.get("coopmat_probe", (), LANES))
        vk.CmdPushConstants(
            commands, device.pipelines.layout, STAGE_COMPUTE, 0, PUSH_BYTES, ffi.from_buffer(push)
        )
        vk.CmdDispatch(commands, 1, 1, 1)
    have = staging.download(device.scratch, 0, want.nbytes).view(np.int32).reshape(want.shape)
    return np.array_equal(have, want)
