"""Reads images that users give, with Pillow and within limits."""

from __future__ import annotations

import io
import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.errors import RequestError
from tandem.files import read_regular

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 32 << 20  # of a file
MAX_PIXELS = 50_000_000  # of an image; a file of a few bytes may claim billions
MAX_RATIO = 200  # of the longer side to the shorter
MAX_IMAGES = 64  # of a prompt
# Pixels that are converted at once: copies of a large image would take several times its memory.
STRIP_PIXELS = 1 << 20
ORIENTATION = 0x0112  # the EXIF tag; its values -> Pillow's transpose methods
TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


def read_image(source: Any) -> Image:
    """Returns an image as RGB. `source`: a path, the bytes of a file, or a Pillow image.

    The first frame of an animation; rotated as its EXIF data says; transparent parts over white."""
    try:
        from PIL import Image
    except ImportError:
        raise RequestError("images need Pillow: pip install pillow") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged metadata
            image = source if isinstance(source, Image.Image) else _open(source)
            _check_size(*image.size)
            if not isinstance(source, Image.Image):
                image.load()
            turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
            image = _as_rgb(image)
            return image if turn is None else image.transpose(Image.Transpose(turn))
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # Pillow's readers raise many kinds for damaged files
        kind = " ".join(str(error).split())[:100] or type(error).__name__
        raise RequestError(
            f"an image cannot be read ({kind}): give a whole {', '.join(FORMATS)} file"
        ) from None


def _open(source: Any) -> Image:
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, str | os.PathLike):
        try:
            source = read_regular(source, MAX_BYTES)
        except OSError as error:
            raise RequestError(
                f"{source} cannot be read ({error.strerror}): give the path of an image"
            ) from None
    if not isinstance(source, bytes | bytearray | memoryview):
        raise RequestError(f"an image is a path, bytes or a Pillow image, not {type(source).__name__}")
    if len(source) > MAX_BYTES:
        raise RequestError(f"an image has more than {MAX_BYTES >> 20} MB: give a smaller one")
    try:
        return Image.open(io.BytesIO(source), formats=FORMATS)
    except UnidentifiedImageError:
        raise RequestError(f"an image is of no known format: give one of {', '.join(FORMATS)}") from None


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise RequestError(
            f"an image has {width} x {height} pixels: give one of {MAX_PIXELS // 10**6} million at most"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise RequestError(
            f"an image has {width} x {height} pixels: give one whose sides differ by a factor of {MAX_RATIO} at most"
        )


def _as_rgb(image: Image) -> Image:
    from PIL import Image

    (width, height), rows = image.size, max(1, STRIP_PIXELS // image.width)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    rgb = Image.new("RGB", image.size)
    for begin in range(0, height, rows):
        rgb.paste(_strip_as_rgb(image.crop((0, begin, width, min(begin + rows, height)))), (0, begin))
    return rgb


def _strip_as_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits, which `convert` would clip
        values = np.asarray(image).astype(np.int64)
        return Image.fromarray(np.clip(values >> 8, 0, 255).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, "white")
        return Image.alpha_composite(white, coloured).convert("RGB")
    return image.convert("RGB")
