"""Pictures of all sizes and modes, the same on every machine: to compare with the processors of transformers."""

from __future__ import annotations

import numpy as np
from PIL import Image

MODES = ("RGB", "RGB", "L", "P", "1", "CMYK", "RGBA", "LA")  # those with transparency are opaque
COUNT = 200


def picture_of(index: int) -> Image.Image:
    """Stripes and noise. Sides are up to 320 pixels; some pictures are a hundred times as long as they are high."""
    a, b = (index * 2654435761) % 2**32, (index * 40503 + 977) % 2**16
    width, height = 1 + a % (320 if index % 3 else 60), 1 + b % (320 if index % 4 else 60)
    if index % 10 == 7:
        width, height = (1 + a % 4, 300) if index % 20 == 7 else (300, 1 + b % 4)
    y, x = np.mgrid[:height, :width].astype(np.int64)
    layers = [(x * (3 + c) + y * (7 - c) + (x * y * (index + c) >> 3)) % (251 - c) for c in range(3)]
    picture = Image.fromarray(np.stack(layers, axis=-1).astype(np.uint8))
    return picture.convert(MODES[index % len(MODES)])
