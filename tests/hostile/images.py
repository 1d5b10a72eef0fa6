"""Generated image files: sound, damaged, and larger than they look. Each is made from its number alone."""

from __future__ import annotations

import io
import random
import struct
import zlib

from PIL import Image
from PIL.PngImagePlugin import PngInfo

MODES = {
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L", "P", "1"),
}
SIDES = (1, 2, 7, 64, 200, 201, 1000, 4000, 7000, 16383, 100_000)
ODD = (0, 1, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_that_claims(width: int, height: int, data: bytes = bytes(1000), colours: int = 2) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(data, 9)) + chunk(b"IEND", b"")


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def bombs() -> dict[str, bytes]:
    """Files of less than 400 KB whose pixels, texts or frames take hundreds of megabytes or seconds."""
    large, frames = (7000, 7000), [Image.new("P", (3000, 3000), i) for i in range(40)]
    texts = PngInfo()
    for i in range(60):
        texts.add_text(f"t{i}", "x" * 1_000_000, zip=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x9286] = b"x" * 60_000
    return {
        "a WebP of 50 million pixels": saved(Image.new("RGB", large), "WEBP", lossless=True),
        "a PNG of 50 million pixels": saved(Image.new("L", large), "PNG"),
        "a GIF of 50 million pixels": saved(Image.new("L", large), "GIF"),
        "a turned JPEG of 36 million pixels": saved(Image.new("L", (6000, 6000)), "JPEG", exif=exif),
        "a PNG of 100,000 x 500": saved(Image.new("1", (100_000, 500)), "PNG"),
        "100,000 x 1": saved(Image.new("L", (100_000, 1)), "PNG"),
        "a claim": png_that_claims(100_000, 100_000),
        "a claim below the limit": png_that_claims(7000, 7000),
        "an animation": saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "texts": saved(Image.new("L", (8, 8)), "PNG", pnginfo=texts),
        "a profile": saved(Image.new("RGB", (8, 8)), "PNG", icc_profile=bytes(20_000_000)),
    }


def generated(number: int) -> bytes:
    rng = random.Random(number)
    format = rng.choice(list(MODES))
    size = rng.choice(SIDES[:5]), rng.choice(SIDES[:5])
    if rng.random() < 0.03:
        size = rng.choice(SIDES), rng.choice(SIDES)
        if size[0] * size[1] > 16_000_000 or (format == "WEBP" and max(size) > 16_383):
            return png_that_claims(*size)
    image = Image.effect_noise(size, 60) if size[0] * size[1] < 50_000 else Image.new("L", size, 99)
    options: dict[str, object] = {}
    if rng.random() < 0.3:
        exif = Image.Exif()
        exif[0x0112] = rng.choice((*range(10), 2**16 - 1))
        options["exif"] = exif.tobytes() if rng.random() < 0.7 else b"Exif\0\0" + rng.randbytes(40)
    if format in ("GIF", "WEBP") and rng.random() < 0.3:
        frame = image.convert("RGB")
        options |= {"save_all": True, "append_images": [frame.rotate(90)] * rng.randrange(4)}
    mode = rng.choice(MODES[format])
    data = bytearray(saved(image if mode == "I;16" else image.convert(mode), format, **options))
    for _ in range(rng.choice((0, 1, 1, 3, 12))):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at : at + 4] = struct.pack(rng.choice("<>") + "I", rng.choice(ODD))
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            del data[at : at + rng.randrange(1, 40)]
        else:
            data[at:at] = data[rng.randrange(len(data)) :][: rng.randrange(1, 200)]
        if not data:
            break
    return bytes(data)
