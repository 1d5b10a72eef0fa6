"""Gemma 3: SigLIP, then the mean of each square of patches, an RMS norm and the projection.

An image is always a square of the same size. Its tokens see each other in the language model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tandem.kernels.kernel import Array
from tandem.model.encoders import blocks
from tandem.model.encoders.config import VisionConfig, VisionMetadata
from tandem.program.graph import Builder, Matrix, Vector

if TYPE_CHECKING:
    from PIL.Image import Image

    from tandem.model.vision import VisionModel

ARCHITECTURES = ("gemma3",)
MARK = ALONE = "<start_of_image>"
PROJECTION, NORM = "mm.input_projection.weight", "mm.soft_emb_norm.weight"


def config(m: VisionMetadata) -> VisionConfig:
    merge = m.count("projector.scale_factor", 4, maximum=64)
    image_size, patches = m.square(merge)
    _, out_dim = m.matrix_shape(PROJECTION)  # the file has inputs by outputs
    return m.vision_config(merge=merge, max_patches=patches, out_dim=out_dim, image_size=image_size)


def prepare(model: VisionModel) -> None:
    model.derive(PROJECTION, model.values(PROJECTION).T)


def tensors(c: VisionConfig) -> blocks.Shapes:
    return blocks.siglip_tensors(c) | {NORM: (c.dim,), PROJECTION: (c.out_dim, c.dim)}


def build(b: Builder, c: VisionConfig) -> None:
    pooled = b.pool(blocks.siglip(b, c), c.merge**2, "v.pooled")
    normed = b.norm(pooled, Vector(NORM, c.dim), c.eps, "mm.soft_emb_norm")
    b.matmul(normed, Matrix(PROJECTION, c.out_dim, c.dim), blocks.EMBEDDINGS)


def parts(c: VisionConfig, image: Image) -> list[str | Array]:
    """The whole image, resized with a bilinear filter over all pixels that each new pixel covers."""
    from PIL import Image as pillow

    resized = image.resize((c.image_size, c.image_size), pillow.Resampling.BILINEAR)
    return ["\n\n<start_of_image>", np.asarray(resized, np.uint8), "<end_of_image>\n\n"]
