"""A vision encoder agrees with transformers on a tiny model, in float32, on the CPU and on lavapipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem import LLM
from tandem.devices.backends import open_device
from tandem.engine import image_encoder
from tandem.engine.image_encoder import ImageEncoder
from tandem.engine.images import PLACEHOLDER, Image, ImageSpan, PromptIds
from tandem.errors import ModelFileError, UnsupportedModelError
from tandem.model.vision import VisionModel

pytestmark = pytest.mark.fast
GOLDENS = Path(__file__).parent / "goldens" / "vision"
MMPROJ = GOLDENS / "mmproj-gemma3.gguf"


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "gemma3.npz") as data:
        return dict(data)


def open_encoder(device: str, kv: str = "f32") -> ImageEncoder:
    with VisionModel.open(MMPROJ) as model:
        return ImageEncoder(model, open_device(device, threads=2), kv)


@pytest.mark.parametrize("kv", ["f32", "f16"])
def test_encoder_equals_transformers(
    golden: dict[str, np.ndarray], kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_encoder, "PART_SECONDS", 0.0)  # a launch a part
    encoder = open_encoder("cpu", kv)
    for pixels, expected in zip(golden["pixels"], golden["embeddings"], strict=True):
        found = encoder.encode(to_uint8(pixels))
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < (2e-5 if kv == "f32" else 1e-2)
        *waiting, again = encoder.encode_in_parts(to_uint8(pixels))
        assert set(waiting) == {None} and again is not None and (again == found).all()


def test_patches_of_an_embedding_are_neighbours() -> None:
    with VisionModel.open(MMPROJ) as model:
        c = replace(model.config, mean=(0.0,) * 3, std=(1 / 255,) * 3)
    pixels = np.random.default_rng(0).integers(0, 256, (c.image_size // 2, c.image_size, 3), np.uint8)
    places, columns = c.places(pixels), c.image_size // c.patch_size
    assert c.grid(pixels) == (1, 2) and c.tokens(pixels) == 2 and sorted(places) == list(range(8))
    assert places[: c.merge**2].tolist() == [
        row * columns + column for row in range(c.merge) for column in range(c.merge)
    ]
    place, size = places[5], c.patch_size
    row, column = place // columns * size, place % columns * size
    patch = pixels[row : row + size, column : column + size].transpose(2, 0, 1).ravel()
    assert np.abs(c.patches(pixels)[5] - patch).max() < 1e-4


def test_a_file_that_is_no_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="not a vision encoder"):
        VisionModel.open(GOLDENS / "gemma3.gguf")
    data = MMPROJ.read_bytes()
    for old, new, error in (
        (b"gemma3", b"gemma9", UnsupportedModelError),
        (b"v.post_ln.weight", b"v.post_ln.height", ModelFileError),
        (b"clip.vision.image_mean", b"clip.vision.image_seen", ModelFileError),
    ):
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(data.replace(old, new))
        with pytest.raises(error):
            VisionModel.open(bad)


def prompt_of(golden: dict[str, np.ndarray]) -> PromptIds:
    """The golden's prompt, with the golden's images."""
    ids, size = golden["ids"].tolist(), golden["embeddings"].shape[1]
    begins = [i for i in range(len(ids)) if ids[i] < 0 and ids[i - 1] >= 0]
    prompt = PromptIds(PLACEHOLDER if token < 0 else token for token in ids)
    prompt.images = [
        ImageSpan(begin, Image(to_uint8(pixels), size))
        for begin, pixels in zip(begins, golden["pixels"], strict=True)
    ]
    return prompt


def to_uint8(pixels: np.ndarray) -> np.ndarray:
    return np.round((pixels.transpose(1, 2, 0) + 1) * 127.5).astype(np.uint8)


def load(device: str = "cpu", **options: object) -> LLM:
    defaults = {"threads": 2, "context": 256, "kv": "f32", "batch": 48}
    return LLM(GOLDENS / "gemma3.gguf", device=device, mmproj=MMPROJ, **(defaults | options))


def test_logits_after_images_equal_transformers(golden: dict[str, np.ndarray]) -> None:
    with load() as llm:
        prompt = prompt_of(golden)
        assert np.abs(llm.engine.logits(prompt) - golden["logits"]).max() < 1e-4
        other = PromptIds(prompt)
        other.images = prompt.images[::-1]
        other.images = [ImageSpan(a.begin, b.image) for a, b in zip(prompt.images, other.images, strict=True)]
        assert np.abs(llm.engine.logits(other) - golden["logits"]).max() > 0.1
