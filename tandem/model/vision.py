"""An open mmproj file: the vision encoder of a language model. encoders/ has a module for each kind."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Self

import numpy as np

from tandem.errors import UnsupportedModelError
from tandem.gguf import formats
from tandem.gguf.cursor import label
from tandem.gguf.file import GGUF
from tandem.kernels.kernel import Array
from tandem.model.encoders import ENCODERS, blocks
from tandem.model.encoders.config import CHANNELS, VisionConfig, VisionMetadata
from tandem.program.graph import Builder, Op

if TYPE_CHECKING:
    from PIL.Image import Image

FLOATS = ("F32", "F16", "BF16")


class VisionModel(GGUF):
    config: VisionConfig
    encoder: ModuleType
    _derived: dict[str, Array]  # matrices in another form than the file's: float32 [rows, columns]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        model = super().open(path)
        try:
            model._derived = {}
            model._read()
        except BaseException:
            model.close()
            raise
        return model

    def _read(self) -> None:
        architecture = self.require("general.architecture", str)
        projector = self.get("clip.projector_type", "") or self.get("clip.vision.projector_type", "")
        if architecture != "clip" or projector not in ENCODERS:
            raise UnsupportedModelError(
                f"{self.path.name} is not a vision encoder that this version runs ({label(architecture)!r}, "
                f"projector {label(projector)!r}); it runs {', '.join(ENCODERS)}"
            )
        self.encoder = ENCODERS[projector]
        self.config = self.encoder.config(VisionMetadata(self, projector))
        self._flatten_patches()
        self._swap_legacy_names()
        self.encoder.prepare(self)
        for name, shape in self.encoder.tensors(self.config).items():
            if self.tensor(name).shape != shape:
                self.fail(
                    name,
                    f"shape is {self.tensor(name).shape}, the metadata asks for {shape}: convert it again",
                )

    def parts(self, image: Image) -> list[str | Array]:
        """What stands in a prompt for an image: texts, and pixels, uint8 [height, width, channels]."""
        found: list[str | Array] = self.encoder.parts(self.config, image)
        return found

    # ---- tensors that a Program wants in another form than the file has

    def _flatten_patches(self) -> None:
        """The weights of the convolution become a matrix: [outputs, channels * size * size]."""
        name, size = f"{blocks.PATCH}.weight", self.config.patch_size
        info = self.tensor(name)
        if info.shape[1:] != (CHANNELS, size, size) or info.format.name not in FLOATS:
            self.fail(
                name, f"shape is {info.shape}, the metadata asks for patches of {size}: convert it again"
            )
        self.tensors[name] = info._replace(shape=(info.shape[0], self.config.patch_dim))

    def _swap_legacy_names(self) -> None:
        """Files of early converters have the names of a layer's two feed-forward matrices the wrong way round."""
        c = self.config
        for i in range(c.layers):
            up, down = f"v.blk.{i}.ffn_up", f"v.blk.{i}.ffn_down"
            if c.dim != c.ffn_dim and self.tensor(f"{down}.weight").shape == (c.ffn_dim, c.dim):
                for part in (".weight", ".bias"):
                    one, other = self.tensor(up + part), self.tensor(down + part)
                    self.tensors[up + part], self.tensors[down + part] = other, one

    def derive(self, name: str, values: Array) -> None:
        """Replaces a matrix of the file."""
        info = self.tensor(name)
        self._derived[name] = np.ascontiguousarray(values, np.float32)
        self.tensors[name] = info._replace(
            format=formats.by_name("F32"), shape=values.shape, nbytes=values.size * 4
        )

    def values(self, name: str) -> Array:
        info = self.tensor(name)
        return formats.dequantise(info.format, self.raw(name)).reshape(info.shape)

    def read_rows(self, name: str, first: int, out: Array) -> None:
        if name in self._derived:
            out[:] = self._derived[name][first : first + len(out)].view(np.uint8)
        else:
            super().read_rows(name, first, out)

    # ---- the Program

    def matrices(self) -> dict[str, tuple[str, int, int]]:
        """Returns the GGUF format in lower case, rows and columns of each matrix."""
        return {
            name: (self.tensor(name).format.name.lower(), *shape)
            for name, shape in self.encoder.tensors(self.config).items()
            if len(shape) == 2
        }

    def ops(self) -> list[Op]:
        builder = Builder()
        self.encoder.build(builder, self.config)
        return builder.ops


def find_mmproj(model: Path) -> Iterable[Path]:
    """Returns the mmproj files beside a model: first those with float16 weights."""
    try:
        found = sorted(model.parent.glob("*mmproj*.gguf"))
    except OSError:
        return []
    return sorted(found, key=lambda path: not re.search(r"(?<!b)f16", path.name.lower()))
