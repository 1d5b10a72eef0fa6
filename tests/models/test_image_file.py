"""Images that users give: every mode becomes the same RGB pixels; damaged or hostile files are refused."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tandem.errors import RequestError
from tandem.model.encoders import gemma3
from tandem.model.image_file import MAX_BYTES, MAX_PIXELS, read_image

SIZE = 32
GRADIENT = np.add.outer(np.arange(48) * 3, np.arange(64) * 1).astype(np.uint8)


def read_resized(source: Any, size: int) -> np.ndarray:
    """As Gemma 3 takes it."""
    config: Any = SimpleNamespace(image_size=size)
    [_, pixels, _] = gemma3.parts(config, read_image(source))
    assert isinstance(pixels, np.ndarray)
    return pixels


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def close(found: np.ndarray, expected: np.ndarray, within: int = 1) -> bool:
    return bool(np.abs(found.astype(int) - expected.astype(int)).max() <= within)


@pytest.mark.fast
def test_a_whole_image_is_resized_as_the_reference_does() -> None:
    """The processor of Gemma 3: RGB, then a bilinear resize over all pixels that each new pixel covers."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        height, width = rng.integers(1, 120, 2)
        source = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        expected = np.asarray(source.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
        found = read_resized(source, SIZE)
        assert found.shape == (SIZE, SIZE, 3) and found.dtype == np.uint8 and (found == expected).all()


@pytest.mark.fast
def test_every_mode_gives_the_same_pixels() -> None:
    grey = Image.fromarray(GRADIENT)
    rgb = grey.convert("RGB")
    expected = read_resized(rgb, SIZE)
    deep = Image.fromarray(GRADIENT.astype(np.uint16) * 257)
    opaque = rgb.copy()
    opaque.putalpha(255)
    for label, data, within in (
        ("grey", saved(grey, "PNG"), 0),
        ("grey and alpha", saved(grey.convert("LA"), "PNG"), 0),
        ("16 bits", saved(deep, "PNG"), 1),
        ("alpha", saved(opaque, "PNG"), 0),
        ("palette", saved(grey.convert("P"), "PNG"), 0),
        ("palette GIF", saved(grey, "GIF"), 0),
        ("BMP", saved(rgb, "BMP"), 0),
        ("WebP", saved(rgb, "WEBP", lossless=True), 0),
        ("JPEG", saved(rgb, "JPEG", quality=98), 8),
        ("CMYK", saved(rgb.convert("CMYK"), "JPEG", quality=98), 8),
    ):
        assert close(read_resized(data, SIZE), expected, within), label
    for mode in ("1", "HSV", "LAB", "YCbCr", "F", "I", "RGBa"):
        made = Image.new(mode, (9, 5)) if mode != "LAB" else Image.new("LAB", (9, 5))
        try:
            assert read_resized(made, SIZE).shape == (SIZE, SIZE, 3), mode
        except RequestError as error:
            assert "cannot be read" in str(error)


@pytest.mark.fast
def test_transparent_parts_are_white_and_exif_is_obeyed() -> None:
    clear = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    assert (read_resized(saved(clear, "PNG"), SIZE) == 255).all()
    turned = Image.Exif()
    turned[0x0112] = 6  # 90 degrees
    data = saved(Image.fromarray(GRADIENT).convert("RGB"), "JPEG", exif=turned, quality=98)
    expected = read_resized(Image.fromarray(np.rot90(GRADIENT, -1)).convert("RGB"), SIZE)
    assert close(read_resized(data, SIZE), expected, 8)


@pytest.mark.fast
def test_an_animation_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    for format in ("GIF", "WEBP", "PNG"):
        data = saved(frames[0], format, save_all=True, append_images=frames[1:])
        assert close(read_resized(data, SIZE), np.full((SIZE, SIZE, 3), (255, 0, 0)), 4), format


def png_that_claims(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.fast
def test_hostile_files_are_refused(tmp_path: Path) -> None:
    whole = saved(Image.fromarray(GRADIENT), "PNG")
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    large = tmp_path / "large.png"
    with open(large, "wb") as file:
        file.truncate(MAX_BYTES + 1)
    for bad, said in (
        (b"", "no known format"),
        (b"not an image", "no known format"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "no known format"),
        (whole[: len(whole) // 2], "cannot be read"),
        (b"\xff\xd8\xff\xe0" + whole, "image"),
        (png_that_claims(100_000, 100_000), "pixels"),
        (png_that_claims(MAX_PIXELS + 1, 1), "at most"),
        (png_that_claims(100_000, 1), "factor of"),
        (png_that_claims(1, 100_000), "factor of"),
        (png_that_claims(0, 10), "image"),
        (bytes(MAX_BYTES + 1), "MB"),
        (large, "larger than"),
        (tmp_path, "cannot be read"),
        (tmp_path / "missing.png", "cannot be read"),
        (pipe, "cannot be read"),
        ("\0", "image"),
        (None, "not NoneType"),
        (12, "not int"),
    ):
        with pytest.raises(RequestError, match=said):
            read_resized(bad, SIZE)


def read_mutated(count: int) -> None:
    """Changes, cuts and repeats bytes: each file gives pixels or a RequestError."""
    rng = np.random.default_rng(count)
    rgb = Image.fromarray(GRADIENT).convert("RGB")
    files = [saved(rgb, format) for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    files.append(saved(rgb, "GIF", save_all=True, append_images=[rgb.rotate(90)]))
    for _ in range(count):
        data = bytearray(files[rng.integers(len(files))])
        for _ in range(rng.integers(1, 12)):
            data[rng.integers(len(data))] = rng.integers(256)
        begin = rng.integers(len(data))
        if rng.random() < 0.2:
            del data[begin : begin + rng.integers(1, 40)]
        elif rng.random() < 0.2:
            data[begin:begin] = data[: rng.integers(1, 40)]
        try:
            assert read_resized(bytes(data), SIZE).shape == (SIZE, SIZE, 3)
        except RequestError as error:
            assert len(str(error)) < 300 and "\n" not in str(error)


@pytest.mark.fast
def test_mutated_files() -> None:
    read_mutated(150)


@pytest.mark.soak
def test_many_mutated_files() -> None:
    read_mutated(5000)
