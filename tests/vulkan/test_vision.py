"""Vision encoders on the Vulkan device, beside a language model's memory: as near to transformers as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.devices.vulkan.device import VulkanDevice
from tandem.engine.image_encoder import ImageEncoder
from tandem.model.vision import VisionModel
from tests.models.test_vision import GOLDENS, NAMES, golden_of, images_of, load, prompt_of


@pytest.mark.parametrize("name", NAMES)
def test_encoder_equals_transformers(lavapipe: str, name: str) -> None:
    device, golden = VulkanDevice(lavapipe), golden_of(name)
    try:
        with VisionModel.open(GOLDENS / f"mmproj-{name}.gguf") as model:
            encoder = ImageEncoder(model, device, "f32")
            for pixels, expected in images_of(golden):
                assert np.abs(encoder.encode(pixels) - expected).max() < 1e-4
        assert not device.arenas, "the encoder has memory of its own"
    finally:
        device.close()


@pytest.mark.parametrize("name", NAMES)
def test_logits_after_images_equal_transformers(lavapipe: str, name: str) -> None:
    golden = golden_of(name)
    with load(lavapipe, name, batch=golden["logits"].shape[0]) as llm:
        prompt = prompt_of(golden, llm)
        assert np.abs(llm.engine.logits(prompt) - golden["logits"]).max() < 1e-3
