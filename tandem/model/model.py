"""A model that was opened from its file and checked, before its weights are loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Self

import numpy as np

from tandem.devices.device import Device
from tandem.errors import UnsupportedModelError
from tandem.gguf.cursor import label
from tandem.gguf.file import GGUF
from tandem.kernels.kernel import Array
from tandem.kernels.layout import ChooseLayout, Layout
from tandem.kernels.rope import rotate
from tandem.model.architectures import ARCHITECTURES, missing
from tandem.model.architectures.blocks import draft_head
from tandem.model.config import NO_ROPE, QUERIES, SCALED_NORM, Metadata, ModelConfig, key_mean_name
from tandem.model.weights import load_weights, vector
from tandem.program.graph import Builder, Op
from tandem.program.weight_plan import WeightPlan

# The key of a file without weights that names a synthetic model (synthetic_file.py), and the files in which it counts:
# those that this process wrote. Any other file of a few bytes could take all memory with it.
SYNTHETIC, SYNTHETIC_FILES = "tandem.synthetic", set[Path]()
# Biases of experts, taps of convolutions, and what layers of Mamba-2 have for each head or group of heads.
VECTORS = (".bias", "conv1d.weight", "shortconv.conv.weight", ".ssm_a", ".ssm_d", "ssm_norm.weight")
GATE_OF_EXPERTS, MIXED = ".ffn_gate_exps.weight", "mixed"
# Positions over which the rotated key bias is averaged. Independent of the context, so that a saved conversation can be
# restored with another one. Pairs that RoPE rotates fast average to nearly 0; pairs with large biases rotate slowly.
MEAN_POSITIONS = 4096


@dataclass
class Model:
    gguf: GGUF
    config: ModelConfig
    architecture: ModuleType

    def ops(self, context: int) -> list[Op]:
        """Returns the model's op list, for contexts up to `context`."""
        builder = Builder()
        self.architecture.build(builder, self.config, context)
        return builder.ops

    def draft_ops(self, context: int) -> list[Op]:
        """Returns the op list of the model's own draft head (`ModelConfig.draft_layers`)."""
        builder = Builder()
        draft_head(builder, self.config, context, self.architecture.draft_layer)
        return builder.ops

    def tables(self, context: int) -> dict[str, Array]:
        """Returns the constants that ops use but the file does not have."""
        c, tables = self.config, dict[str, Array]()
        used = {*c.layer_rope, *range(c.draft_layers)}  # a layer that drafts uses the first
        for i, rope in enumerate(c.ropes):
            if i in used:
                tables[f"rope.{i}"] = rope.table(context)
            if i in used and rope.grows(context):
                tables[f"rope.{i}{QUERIES}"] = rope.query_table(context)
        if (scale := self.config.logit_scale) != 1.0:
            tables[SCALED_NORM] = np.float32(scale) * self._vector("output_norm.weight")
        if own := getattr(self.architecture, "tables", None):
            tables |= own(self.config, self._vector)
        return tables

    def _vector(self, name: str) -> Array:
        return vector(self.gguf, name)

    def matrices(self) -> dict[str, tuple[str, int, int]]:
        """Returns the GGUF format in lower case, rows and columns of each matrix. Gate and up of experts are one
        matrix in memory: if their formats differ, MIXED, which is converted, or one would get the other's precision."""
        tensors = self.gguf.tensors.items()
        found = {
            name: (i.format.name.lower(), *as_matrix(i.shape))
            for name, i in tensors
            if is_matrix(name, i.shape)
        }
        for gate in [name for name in found if name.endswith(GATE_OF_EXPERTS)]:
            up = gate.replace("gate", "up")
            if up in found and found[up][0] != found[gate][0]:
                found[gate], found[up] = (MIXED, *found[gate][1:]), (MIXED, *found[up][1:])
        return found

    def layouts(self, choose: ChooseLayout) -> dict[str, Layout]:
        """Returns the layout of each matrix by name. `choose`: a device's `weight_layout`."""
        return {name: choose(*matrix) for name, matrix in self.matrices().items()}

    def nbytes(self, choose: ChooseLayout) -> int:
        """Returns the bytes of the weights on a device; may be more than in the file, since formats are converted."""
        matrices = self.matrices()
        vectors = sum(4 * math.prod(i.shape) for name, i in self.gguf.tensors.items() if name not in matrices)
        return vectors + sum(choose(*matrix).matrix_bytes(*matrix[1:]) for matrix in matrices.values())

    def load(self, plan: WeightPlan, device: Device, context: int) -> None:
        """Fills the device's "weights" arena."""
        load_weights(self.gguf, plan, device, self.tables(context) | self._key_means(plan))

    def _key_means(self, plan: WeightPlan) -> dict[str, Array]:
        """Returns the mean over positions of each layer's rotated key bias, for the layers whose plan has it."""
        c, wanted = self.config, plan.vector_names()
        layers = [layer for layer in range(c.layers) if key_mean_name(layer) in wanted]
        rotations = [rope.table(MEAN_POSITIONS).mean(axis=0) for rope in c.ropes] if layers else []
        means = {}
        for layer in layers:
            bias = vector(self.gguf, f"blk.{layer}.attn_k.bias").reshape(1, c.kv_heads, c.head_dim)
            rope = c.layer_rope[layer]
            means[key_mean_name(layer)] = (
                bias if rope == NO_ROPE else rotate(bias, rotations[rope][None], c.interleaved)
            )
        return means

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.gguf.close()


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Some vectors have two dimensions, and a shared expert's gate is a matrix of one row."""
    return (len(shape) > 1 and not name.endswith(VECTORS)) or name.endswith("gate_inp_shexp.weight")


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns: the matrices of experts are stacked."""
    return math.prod(shape[:-1]), shape[-1]


def open_model(path: str | Path) -> Model:
    gguf = GGUF.open(path)
    if name := gguf.get(SYNTHETIC, ""):
        if gguf.path.resolve() not in SYNTHETIC_FILES:
            gguf.fail(
                SYNTHETIC, "a file without weights is valid in its own server only: use serve --synthetic"
            )
        from tandem.model.synthetic import SyntheticModel

        return SyntheticModel(name, gguf=gguf)
    metadata = Metadata(gguf)
    if metadata.architecture not in ARCHITECTURES:
        known, lacks = ", ".join(sorted(ARCHITECTURES)), missing(metadata.architecture)
        raise UnsupportedModelError(
            f"{gguf.path.name} is a {label(metadata.architecture)!r} model, which this version does not run"
            f"{f' (it lacks {lacks})' if lacks else ''}; it runs {known}"
        )
    architecture = ARCHITECTURES[metadata.architecture]
    config = architecture.config(metadata)
    for name, shape in architecture.tensors(config).items():
        stored = gguf.tensor(name).shape
        if stored != shape:
            gguf.fail(
                name, f"shape is {stored}, the metadata asks for {shape}: fetch or convert the file again"
            )
    return Model(gguf, config, architecture)
