"""Vision encoders of `mmproj` files: from an image's patches to the embeddings of its tokens, as ops of a Program.

A step of an encoder has one image. Its tokens are the image's patches, in the order that makes the patches of one
embedding neighbours; the id of a token is the patch's place in the image, row by row.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from tandem.errors import UnsupportedModelError
from tandem.gguf import formats
from tandem.gguf.cursor import label
from tandem.gguf.file import GGUF
from tandem.kernels.abi import MAX_HEAD_DIM
from tandem.kernels.kernel import Array
from tandem.model.config import Metadata
from tandem.program.graph import Builder, Heads, Matrix, Op, Value, Vector

PROJECTORS = ("gemma3",)  # the values of clip.projector_type that this version runs
CHANNELS = 3
MAX_PATCHES = 1 << 14  # of an image: the encoder's activations grow with them
PROJECTION = "mm.input_projection.weight"
NO_TABLE = Vector("", 0)  # an encoder with learned positions has no RoPE
BEFORE_IMAGE, AFTER_IMAGE = "\n\n<start_of_image>", "<end_of_image>\n\n"  # in the prompt of Gemma 3
EMBEDDINGS = "embeddings"  # the value that an encoder computes


@dataclass(frozen=True)
class VisionConfig:
    image_size: int  # pixels of a side
    patch_size: int
    merge: int  # patches of a side that become one embedding
    dim: int
    ffn_dim: int
    layers: int
    heads: int
    eps: float
    mean: tuple[float, ...]  # of each channel, subtracted from pixels between 0 and 1
    std: tuple[float, ...]
    out_dim: int  # width of an embedding: that of the language model

    @property
    def side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        return self.side**2

    @property
    def patch_dim(self) -> int:
        return CHANNELS * self.patch_size**2

    @property
    def tokens(self) -> int:
        """The embeddings of an image."""
        return self.patches // self.merge**2

    @property
    def positions(self) -> Array:
        """The place in the image, row by row, of each patch in the order of the encoder's tokens."""
        blocks = self.side // self.merge
        places = np.arange(self.patches).reshape(blocks, self.merge, blocks, self.merge)
        return places.transpose(0, 2, 1, 3).ravel()

    def normalise(self, pixels: Array) -> Array:
        """uint8 [height, width, channels] -> float32 [channels, height, width]."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        scaled: Array = (pixels.astype(np.float32) * np.float32(1 / 255) - mean) / std
        return scaled.transpose(2, 0, 1)

    def to_patches(self, pixels: Array) -> Array:
        """float32 [channels, image_size, image_size] -> [patches, patch_dim], in the order of the encoder's tokens."""
        size, side = self.patch_size, self.side
        patches = pixels.reshape(CHANNELS, side, size, side, size).transpose(1, 3, 0, 2, 4)
        return patches.reshape(self.patches, self.patch_dim)[self.positions]


class VisionModel(GGUF):
    """An open mmproj file."""

    config: VisionConfig
    _derived: dict[str, Array]  # matrices in another shape than the file's

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        model = super().open(path)
        try:
            model._derived = {}
            model.config = model._read_config()
            model._check_tensors()
        except BaseException:
            model.close()
            raise
        return model

    def _read_config(self) -> VisionConfig:
        m = Metadata(self)
        projector = self.get("clip.projector_type", "") or self.get("clip.vision.projector_type", "")
        if m.architecture != "clip" or projector not in PROJECTORS:
            raise UnsupportedModelError(
                f"{self.path.name} is not a vision encoder that this version runs ({label(m.architecture)!r}, "
                f"projector {label(projector)!r}); it runs {', '.join(PROJECTORS)}"
            )
        vision = "vision."
        merge = m.count(f"{vision}projector.scale_factor", 4, maximum=64)
        image, patch = (
            m.count(f"{vision}image_size", maximum=1 << 14),
            m.count(f"{vision}patch_size", maximum=1 << 10),
        )
        heads, dim = (
            m.count(f"{vision}attention.head_count", maximum=1 << 10),
            m.count(f"{vision}embedding_length"),
        )
        if image % (patch * merge) or (image // patch) ** 2 > MAX_PATCHES:
            self.fail(
                m.key("vision.image_size"),
                f"{image} pixels are not whole groups of patches: convert the model again",
            )
        if dim % heads or dim // heads > MAX_HEAD_DIM:
            self.fail(
                m.key("vision.attention.head_count"),
                f"{heads} heads do not divide {dim}: convert the model again",
            )
        return VisionConfig(
            image, patch, merge, dim,
            m.count(f"{vision}feed_forward_length"),
            m.count(f"{vision}block_count", maximum=1024),
            heads,
            m.number(f"{vision}attention.layer_norm_epsilon"),
            self._channels("clip.vision.image_mean"),
            self._channels("clip.vision.image_std"),
            self.tensor(PROJECTION).shape[-1],
        )  # fmt: skip

    def _channels(self, key: str) -> tuple[float, ...]:
        values = self.get(key)
        numbers = [] if values is None else np.asarray(values).ravel().tolist()
        if (
            len(numbers) != CHANNELS
            or not all(math.isfinite(x) for x in numbers)
            or ("std" in key and 0 in numbers)
        ):
            self.fail(key, "there is not a number for each of three channels: convert the model again")
        return tuple(map(float, numbers))

    def _check_tensors(self) -> None:
        """Checks shapes, and makes the two matrices that a Program wants in another shape than the file has."""
        c = self.config
        self._reshape(
            "v.patch_embd.weight", (c.dim, CHANNELS, c.patch_size, c.patch_size), (c.dim, c.patch_dim)
        )
        self._swap_legacy_names()
        for name, shape in _shapes(c).items():
            if self.tensor(name).shape != shape:
                self.fail(
                    name,
                    f"shape is {self.tensor(name).shape}, the metadata asks for {shape}: convert it again",
                )
        info = self.tensor(PROJECTION)  # the file has inputs by outputs
        values = formats.dequantise(info.format, self.raw(PROJECTION)).reshape(info.shape)
        self._derived[PROJECTION] = np.ascontiguousarray(values.T, np.float32)
        self.tensors[PROJECTION] = info._replace(
            format=formats.by_name("F32"), shape=info.shape[::-1], nbytes=values.size * 4
        )

    def _reshape(self, name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        info = self.tensor(name)
        if info.shape != stored or info.format.name not in ("F32", "F16", "BF16"):
            self.fail(name, f"shape is {info.shape}, the metadata asks for {stored} floats: convert it again")
        self.tensors[name] = info._replace(shape=wanted)

    def _swap_legacy_names(self) -> None:
        """Files of early converters have the names of a layer's two feed-forward matrices the wrong way round."""
        c = self.config
        for i in range(c.layers):
            up, down = f"v.blk.{i}.ffn_up", f"v.blk.{i}.ffn_down"
            if c.dim != c.ffn_dim and self.tensor(f"{down}.weight").shape == (c.ffn_dim, c.dim):
                for part in (".weight", ".bias"):
                    one, other = self.tensor(up + part), self.tensor(down + part)
                    self.tensors[up + part], self.tensors[down + part] = other, one

    def read_rows(self, name: str, first: int, out: Array) -> None:
        if name in self._derived:
            out[:] = self._derived[name][first : first + len(out)].view(np.uint8)
        else:
            super().read_rows(name, first, out)

    def matrices(self) -> dict[str, tuple[str, int, int]]:
        """Returns the GGUF format in lower case, rows and columns of each matrix."""
        return {
            name: (self.tensor(name).format.name.lower(), *shape)
            for name, shape in _shapes(self.config).items()
            if len(shape) == 2
        }

    def ops(self) -> list[Op]:
        builder = Builder()
        _build(builder, self.config)
        return builder.ops


def _shapes(c: VisionConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (c.dim, c.patch_dim),
        "v.patch_embd.bias": (c.dim,),
        "v.position_embd.weight": (c.patches, c.dim),
        "v.post_ln.weight": (c.dim,),
        "v.post_ln.bias": (c.dim,),
        "mm.soft_emb_norm.weight": (c.dim,),
        PROJECTION: (c.dim, c.out_dim),
    }
    for i in range(c.layers):
        shapes |= {
            f"v.blk.{i}.{norm}.{part}": (c.dim,) for norm in ("ln1", "ln2") for part in ("weight", "bias")
        }
        for name, rows, columns in _layer_matrices(c):
            shapes |= {f"v.blk.{i}.{name}.weight": (rows, columns), f"v.blk.{i}.{name}.bias": (rows,)}
    return shapes


def _layer_matrices(c: VisionConfig) -> list[tuple[str, int, int]]:
    square = [(name, c.dim, c.dim) for name in ("attn_q", "attn_k", "attn_v", "attn_out")]
    return [*square, ("ffn_up", c.ffn_dim, c.dim), ("ffn_down", c.dim, c.ffn_dim)]


def _build(b: Builder, c: VisionConfig) -> None:
    """SigLIP, then the mean of each square of patches, an RMS norm and the projection (Gemma 3)."""

    def linear(x: Value, name: str, rows: int) -> Value:
        return b.matmul(x, Matrix(f"{name}.weight", rows, x.width), name, bias=Vector(f"{name}.bias", rows))

    def layer_norm(x: Value, name: str) -> Value:
        return b.layer_norm(x, Vector(f"{name}.weight", c.dim), Vector(f"{name}.bias", c.dim), c.eps, name)

    x = linear(b.input(c.patch_dim, "patches"), "v.patch_embd", c.dim)
    x = b.add(x, b.embed(Matrix("v.position_embd.weight", c.patches, c.dim), "v.positions"), "v.embedding")
    for i in range(c.layers):
        at, head_dim = f"v.blk.{i}", c.dim // c.heads
        h = layer_norm(x, f"{at}.ln1")
        q, k, v = (linear(h, f"{at}.attn_{part}", c.dim) for part in "qkv")
        heads = Heads(i, 0, c.heads, c.heads, head_dim, 0, False, NO_TABLE, 0, head_dim**-0.5)
        attended = b.bidirectional_attention(q, k, v, heads, f"{at}.attn")
        x = b.add(x, linear(attended, f"{at}.attn_out", c.dim), f"{at}.attn_residual")
        h = linear(layer_norm(x, f"{at}.ln2"), f"{at}.ffn_up", c.ffn_dim)
        x = b.add(x, linear(b.activate(h, "gelu", f"{at}.ffn_gelu"), f"{at}.ffn_down", c.dim), f"{at}.out")
    pooled = b.pool(layer_norm(x, "v.post_ln"), c.merge**2, "v.pooled")
    normed = b.norm(pooled, Vector("mm.soft_emb_norm.weight", c.dim), c.eps, "mm.soft_emb_norm")
    b.matmul(normed, Matrix(PROJECTION, c.out_dim, c.dim), EMBEDDINGS)


def find_mmproj(model: Path) -> Path | None:
    """Returns the mmproj file beside a model, the one with float16 weights if there are several."""
    try:
        found = sorted(model.parent.glob("*mmproj*.gguf"))
    except OSError:
        return None
    return next(
        (path for path in found if re.search(r"(?<!b)f16", path.name.lower())), found[0] if found else None
    )
