"""An open mmproj file: the vision encoder of a language model. encoders/ has a module for each kind."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from tandem.devices.device import Device
from tandem.errors import TandemError, UnsupportedModelError
from tandem.gguf import formats
from tandem.gguf.cursor import StringArray, label
from tandem.gguf.file import GGUF
from tandem.kernels.kernel import Array
from tandem.model.encoders import ENCODERS, blocks
from tandem.model.encoders.config import CHANNELS, VisionConfig, VisionMetadata
from tandem.model.model_files import find_mmproj
from tandem.model.weights import load_weights
from tandem.program.graph import Builder, Op
from tandem.program.weight_plan import WeightPlan

if TYPE_CHECKING:
    from PIL.Image import Image

FLOATS = ("F32", "F16", "BF16")
BLOCK = 32  # columns of a matrix that kernels read together
ABSENT = -1  # the place of a row or column of zeros


class _Moved(NamedTuple):
    """The places in the file of a matrix's rows and columns, or ABSENT."""

    rows: Array
    columns: Array | None  # None: as in the file


class VisionModel(GGUF):
    config: VisionConfig
    encoder: ModuleType
    tables: dict[str, Array]  # vectors that a Program uses but the file does not have
    _derived: dict[str, Array]  # matrices in another form than the file's: float32 [rows, columns]
    _moved: dict[str, _Moved]  # matrices whose rows and columns are elsewhere in the file

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        model = super().open(path)
        try:
            model.tables, model._derived, model._moved = {}, {}, {}
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
        if make := getattr(self.encoder, "tables", None):
            self.tables = make(self)

    def check_model(self, model: GGUF) -> None:
        """Checks that this is the encoder of a language model."""
        name, architecture = self.path.name, model.get("general.architecture", "")
        if not fits_family(self.encoder, model):
            raise UnsupportedModelError(
                f"{name} is the vision encoder of another kind of model ({self.config.projector}): use the mmproj file "
                "that was published with the model"
            )
        width = model.get(f"{architecture}.embedding_length", 0)
        width *= 1 + model.get(f"{architecture}.n_deepstack_layers", 0)
        if self.config.out_dim != width:
            raise UnsupportedModelError(
                f"{name} makes embeddings of {self.config.out_dim} numbers, the model's have {width}: use the mmproj "
                "file that was published with the model"
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
        if info.shape[1:] == (self.config.patch_dim,):
            return
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

    def reorder(self, name: str, order: Array) -> None:
        """Changes the order of a matrix's rows."""
        if self.tensor(name).shape[:1] == order.shape:  # the shape is checked later
            self._move(name, order, None)

    def widen(self, head_dim: int) -> None:
        """Appends zeros to heads, up to `head_dim` columns, and to what feed-forwards hide, up to a multiple of BLOCK
        columns: shapes that devices are fast with. The results stay the same."""
        c = self.config
        inner = -(-c.ffn_dim // BLOCK) * BLOCK
        parts = [f"v.blk.{i}.{part}" for i in range(c.layers) for part in ("attn_out", "ffn_down")]
        if inner > c.ffn_dim and all(self._is_float(f"{name}.weight") for name in parts[1::2]):
            hidden = np.where(np.arange(inner) < c.ffn_dim, np.arange(inner), ABSENT)
            for i in range(c.layers):
                for part in ("ffn_up", "ffn_gate"):
                    self._move_rows(f"v.blk.{i}.{part}", hidden)
                self._move(f"v.blk.{i}.ffn_down.weight", None, hidden)
            self.config = replace(self.config, ffn_dim=inner)
        may = (
            c.layers
            and head_dim > c.head_dim
            and not c.head_width
            and getattr(self.encoder, "WIDENS_HEADS", True)
        )
        if may and all(self._is_float(f"{name}.weight") for name in parts[::2]):
            own = np.arange(c.heads)[:, None] * c.head_dim + np.arange(head_dim)
            columns = np.where(np.arange(head_dim) < c.head_dim, own, ABSENT).ravel()
            for i in range(c.layers):
                for part in ("attn_q", "attn_k", "attn_v"):
                    self._move_rows(f"v.blk.{i}.{part}", columns)
                self._move(f"v.blk.{i}.attn_out.weight", None, columns)
            self.config = replace(self.config, head_width=head_dim)

    def _is_float(self, name: str) -> bool:
        return self.tensor(name).format.name in FLOATS

    def _move_rows(self, name: str, rows: Array) -> None:
        """Of a matrix and its bias, if there are such."""
        if f"{name}.weight" in self.tensors:
            self._move(f"{name}.weight", rows, None)
        if (bias := f"{name}.bias") in self.tensors:
            self.tables[bias] = np.append(self.values(bias), np.float32(0))[rows]

    def _move(self, name: str, rows: Array | None, columns: Array | None) -> None:
        info = self.tensor(name)
        self.tensors[f"{name}.file"] = info
        shape = tuple(
            size if places is None else len(places)
            for size, places in zip(info.shape, (rows, columns), strict=True)
        )
        nbytes = shape[0] * info.format.row_bytes(shape[1])
        self.tensors[name] = info._replace(shape=shape, nbytes=nbytes)
        self._moved[name] = _Moved(np.arange(shape[0]) if rows is None else rows, columns)

    def values(self, name: str) -> Array:
        if name in self._derived:
            return self._derived[name]
        info = self.tensor(name)
        return formats.dequantise(info.format, self.raw(name)).reshape(info.shape)

    def read_rows(self, name: str, first: int, out: Array) -> None:
        if name in self._derived:
            out[:] = self._derived[name][first : first + len(out)].view(np.uint8)
        elif name in self._moved:
            self._read_moved(name, first, out)
        else:
            super().read_rows(name, first, out)

    def _read_moved(self, name: str, first: int, out: Array) -> None:
        source, (places, columns) = f"{name}.file", self._moved[name]
        rows, info = places[first : first + len(out)], self.tensor(source)
        low = max(0, rows.min())
        read = np.zeros((max(0, rows.max() + 1 - low) + 1, info.row_bytes), np.uint8)  # the last row stays 0
        super().read_rows(source, low, read[:-1])
        found = read[np.where(rows == ABSENT, len(read) - 1, rows - low)]
        if columns is None:
            out[:] = found
            return
        element = np.uint32 if info.format.name == "F32" else np.uint16
        values: Array = np.zeros((len(out), len(columns)), element)
        given = columns != ABSENT
        values[:, given] = found.view(element)[:, columns[given]]
        out[:] = values.view(np.uint8)

    # ---- the Program

    def matrices(self) -> dict[str, tuple[str, int, int]]:
        """Returns the GGUF format in lower case, rows and columns of each matrix."""
        return {
            name: (self.tensor(name).format.name.lower(), *shape)
            for name, shape in self.encoder.tensors(self.config).items()
            if len(shape) == 2
        }

    def load(self, plan: WeightPlan, device: Device) -> None:
        """Fills the device's "weights" arena."""
        load_weights(self, plan, device, self.tables)

    def ops(self) -> list[Op]:
        builder = Builder()
        self.encoder.build(builder, self.config)
        return builder.ops


def open_beside(model: Path) -> VisionModel | None:
    """Opens the vision encoder for a model beside it; None if there is none."""
    for found in find_mmproj(model):
        with suppress(TandemError), ExitStack() as opened:
            vision = opened.enter_context(VisionModel.open(found))
            with closing(GGUF.open(model)) as gguf:
                vision.check_model(gguf)
            opened.pop_all()
            return vision
    return None


def sees(model: Path) -> bool:
    """Whether there is a vision encoder for a model beside it."""
    if vision := open_beside(model):
        vision.close()
    return vision is not None


def takes_images(model: Path) -> bool:
    """Whether there are vision encoders for models like this one."""
    with suppress(TandemError), closing(GGUF.open(model)) as gguf:  # who loads it is told what is wrong
        return any(fits_family(encoder, gguf) for encoder in ENCODERS.values())
    return False


def fits_family(encoder: ModuleType, model: GGUF) -> bool:
    """Whether a language model is of a family that the encoder makes embeddings for."""
    architecture, tokens = model.get("general.architecture", ""), model.get("tokenizer.ggml.tokens")
    return (
        architecture in encoder.ARCHITECTURES and isinstance(tokens, StringArray) and encoder.MARK in tokens
    )
