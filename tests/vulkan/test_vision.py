"""A vision encoder on the Vulkan device, beside a language model's memory: as near to transformers as on the CPU."""

from __future__ import annotations

import numpy as np

from tandem.devices.vulkan.device import VulkanDevice
from tandem.engine.image_encoder import ImageEncoder
from tandem.model.vision import VisionModel
from tests.models.test_vision import GOLDENS, MMPROJ, to_uint8


def test_encoder_equals_transformers(lavapipe: str) -> None:
    device = VulkanDevice(lavapipe)
    try:
        with VisionModel.open(MMPROJ) as model, np.load(GOLDENS / "gemma3.npz") as golden:
            encoder = ImageEncoder(model, device, "f32")
            for pixels, expected in zip(golden["pixels"], golden["embeddings"], strict=True):
                assert np.abs(encoder.encode(to_uint8(pixels)) - expected).max() < 1e-4
        assert not device.arenas, "the encoder has memory of its own"
    finally:
        device.close()
