"""Vision encoders agree with transformers on tiny models, in float32: prepared pixels, embeddings and logits."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem import LLM
from tandem.devices.backends import open_device
from tandem.devices.cpu.device import CPUDevice
from tandem.engine import image_encoder
from tandem.engine.image_encoder import ImageEncoder
from tandem.engine.images import PLACEHOLDER, Image, ImageSpan, PromptIds
from tandem.errors import ModelFileError, RequestError, UnsupportedModelError
from tandem.model.vision import VisionModel
from tests.models.pictures import COUNT, picture_of

pytestmark = pytest.mark.fast
GOLDENS = Path(__file__).parent / "goldens" / "vision"
MMPROJ = GOLDENS / "mmproj-gemma3.gguf"
NAMES = ("gemma3", "smolvlm", "qwen3vl", "qwen35", "qwen25vl", "gemma4", "gemma4-shared", "gemma4u")


def golden_of(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / f"{name}.npz") as data:
        return dict(data)


def images_of(golden: dict[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pixels and embeddings of the images, which may have different sizes."""
    if "pixels" in golden:
        return list(zip(golden["pixels"], golden["embeddings"], strict=True))
    count = sum(name.startswith("pixels") for name in golden)
    return [(golden[f"pixels{i}"], golden[f"embeddings{i}"]) for i in range(count)]


def open_encoder(device: str, kv: str = "f32", name: str = "gemma3") -> ImageEncoder:
    with VisionModel.open(GOLDENS / f"mmproj-{name}.gguf") as model:
        return ImageEncoder(model, open_device(device, threads=2), kv)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv", ["f32", "f16"])
def test_encoder_equals_transformers(name: str, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_encoder, "PART_SECONDS", 0.0)  # a launch a part
    encoder, golden = open_encoder("cpu", kv, name), golden_of(name)
    for pixels, expected in images_of(golden):
        found = encoder.encode(pixels)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < (2e-5 if kv == "f32" else 1e-2)
        *waiting, again = encoder.encode_in_parts(pixels)
        assert set(waiting) == {None} and again is not None and (again == found).all()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_at_the_end_of_heads_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUDevice, "fast_head_dim", lambda self, head_dim: 64)
    encoder = open_encoder("cpu", "f32", name)
    widened = name not in ("gemma4", "gemma4-shared", "gemma4u")
    assert (encoder.config.head_width == 64) == widened and encoder.config.ffn_dim % 32 == 0
    for pixels, expected in images_of(golden_of(name)):
        assert np.abs(encoder.encode(pixels) - expected).max() < 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_pixels_equal_those_of_the_models_own_processor(name: str) -> None:
    """Every byte of every tile of 200 pictures of all sizes and modes."""
    with (
        VisionModel.open(GOLDENS / f"mmproj-{name}.gguf") as model,
        np.load(GOLDENS / f"{name}-processed.npz") as data,
    ):
        for index in range(COUNT):
            *shape, _, _, checksum = data["found"][index].tolist()
            if not any(shape):
                with pytest.raises(RequestError, match="times as long"):
                    model.parts(picture_of(index).convert("RGB"))
                continue
            parts = model.parts(picture_of(index).convert("RGB"))
            pixels = np.stack([part for part in parts if isinstance(part, np.ndarray)])
            assert list(pixels.shape[:3]) == shape, index
            assert zlib.crc32(pixels.tobytes()) == checksum, index


def test_the_tiles_of_smolvlm_are_in_a_prompt_as_its_processor_writes_them() -> None:
    with (
        VisionModel.open(GOLDENS / "mmproj-smolvlm.gguf") as model,
        np.load(GOLDENS / "smolvlm-processed.npz") as data,
    ):
        for index in range(COUNT):
            *_, rows, columns, _ = data["found"][index].tolist()
            parts = model.parts(picture_of(index).convert("RGB"))
            written = "".join(part if isinstance(part, str) else "#" for part in parts)
            tiles = "".join(
                "".join(f"<fake_token_around_image><row_{y + 1}_col_{x + 1}>#" for x in range(columns)) + "\n"
                for y in range(rows)
            )
            whole = "<fake_token_around_image><global-img>#<fake_token_around_image>"
            assert written == (f"{tiles}\n{whole}" if rows else whole), index


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


def prompt_of(golden: dict[str, np.ndarray], llm: LLM) -> PromptIds:
    """The golden's prompt, with the golden's images."""
    ids = golden["ids"].tolist()
    begins = [i for i in range(len(ids)) if ids[i] < 0 and ids[i - 1] >= 0]
    is_whole, encoder = llm.engine.model.config.whole_images, llm.engine.encoder
    assert encoder
    prompt = PromptIds(PLACEHOLDER if token < 0 else token for token in ids)
    prompt.images = [
        ImageSpan(begin, Image(pixels, len(expected), is_whole=is_whole, grid=encoder.config.grid(pixels)))
        for begin, (pixels, expected) in zip(begins, images_of(golden), strict=True)
    ]
    return prompt


def load(device: str = "cpu", name: str = "gemma3", **options: object) -> LLM:
    defaults = {"threads": 2, "context": 256, "kv": "f32", "batch": 48}
    mmproj = GOLDENS / f"mmproj-{name}.gguf"
    return LLM(GOLDENS / f"{name}.gguf", device=device, mmproj=mmproj, **(defaults | options))


@pytest.mark.parametrize("name", NAMES)
def test_logits_after_images_equal_transformers(name: str) -> None:
    golden = golden_of(name)
    with load(name=name) as llm:
        prompt = prompt_of(golden, llm)
        assert np.abs(llm.engine.logits(prompt) - golden["logits"]).max() < 1e-4
        inverted = {name: 255 - a if name.startswith("pixels") else a for name, a in golden.items()}
        other = prompt_of(inverted, llm)
        assert np.abs(llm.engine.logits(other) - golden["logits"]).max() > 0.1
