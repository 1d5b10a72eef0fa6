"""Which tensors of a folder become which of a GGUF file, and their values, a few rows at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import numpy as np

from tandem.convert.family import LAYER, Experts, Family, Latent, Rearranged, Stacked
from tandem.convert.hf_config import HFConfig
from tandem.convert.safetensors import Safetensors
from tandem.errors import ConversionError
from tandem.gguf.cursor import label
from tandem.gguf.formats import Format, by_name, quantise
from tandem.gguf.write import NewTensor
from tandem.kernels.kernel import Array

CHUNK_BYTES = 32 << 20  # of float32 values that are converted at once; never less than a row
Values = Callable[[], Iterator[Array]]  # float32 [rows, columns], in order
LAYER_NAME = re.compile(r"model\.layers\.(\d{1,4})\.(.+)")
EXPERT = re.compile(r"\.experts\.(\d{1,5})\.")
# Other models in the folder, draft heads, and buffers that are computed.
IGNORED = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|visual|vision_model|connector)\.|mtp\.|.*rotary_emb\.inv_freq$"
)
IN_FLOAT32 = (
    "ffn_gate_inp.weight",
    "position_embd.weight",
    "token_types.weight",
    "conv1d.weight",
    "conv.weight",
)
ORDER = ("token_embd", "output", "output_norm", "rope")  # before the layers


@dataclass(frozen=True)
class Output:
    """A tensor to write. `packed`: its rows are bytes of MXFP4, which stay as they are."""

    name: str
    shape: tuple[int, ...]
    values: Values
    packed: bool = False

    def tensor(self, type: Format, head: str) -> NewTensor:
        return NewTensor(self.name, self._format(type, head), self.shape)

    def _format(self, type: Format, head: str) -> Format:
        """Returns the format: vectors, biases, routers, short convolutions and BERT's positions have few values, and
        keep their precision.

        `head`: the tensor of the LM head. As in llama.cpp's Q4_0 files, it has 6 bits.
        """
        if self.packed:
            return by_name("MXFP4")
        if len(self.shape) == 1 or self.name.endswith((".bias", *IN_FLOAT32)):
            return by_name("F32")
        if type.name == "Q4_0" and self.name == head:
            type = by_name("Q8_0" if self.shape[-1] % 256 else "Q6_K")
        return by_name("F16") if self.shape[-1] % type.block else type

    def parts(self, format: Format) -> Iterator[bytes]:
        for values in self.values():
            yield (values if self.packed else quantise(format, values)).tobytes()


def outputs(weights: Safetensors, c: HFConfig, family: Family, folder: object) -> list[Output]:
    """Returns the tensors of the GGUF file, layer by layer."""
    plan = _Plan(weights, c, family, folder)
    for name in weights.tensors:
        plan.add(name)
    plan.stack()
    return sorted(plan.outputs.values(), key=_place)


def vector(name: str, values: Array) -> Output:
    return Output(name, values.shape, lambda: iter([values[None]]))


def _place(output: Output) -> tuple[int, int]:
    first, _, rest = output.name.partition(".")
    return (int(rest.split(".")[0]) + 1, 0) if first == "blk" else (0, _index(first))


def _index(first: str) -> int:
    return next((i for i, name in enumerate(ORDER) if first == name), len(ORDER))


class _Plan:
    def __init__(self, weights: Safetensors, c: HFConfig, family: Family, folder: object) -> None:
        self.weights, self.c, self.family, self.folder = weights, c, family, folder
        self.outputs: dict[str, Output] = {}
        self._experts: dict[str, dict[int, str]] = defaultdict(dict)  # name -> number of the expert -> tensor
        self._tied = bool(c.get("tie_word_embeddings"))

    def add(self, stored: str) -> None:
        """Adds the tensor, or tensors, that `stored` becomes."""
        name = re.sub(r"^(language_model\.model|model\.language_model|model\.text_model)\.", "model.", stored)
        name = name.removeprefix("language_model.")
        name = re.sub(r"^(bert\.)?encoder\.layers?\.", "model.layers.", name).removeprefix("bert.")
        name = re.sub(r"^(layers|embed_tokens|norm)\.", r"model.\1.", name)  # of a model without its head
        if IGNORED.match(name) or (name.startswith("pooler.") and "pooler.dense" not in self.family.model):
            return
        stem, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            stem, kind = name, "bias" if name.endswith("bias") else "weight"
        if stem == "lm_head" and self._tied:
            return  # the same as the embedding
        if stem in self.family.model:
            self._plain(f"{self.family.model[stem]}.{kind}", stored)
        elif (found := LAYER_NAME.fullmatch(stem)) is None:
            self._fail_unknown(stored)
        elif int(found[1]) < self.c.layers:  # layers at the end draft tokens; they are not run
            self._add_to_layer(f"blk.{int(found[1])}.", found[2], kind, stored)

    def _add_to_layer(self, layer: str, stem: str, kind: str, stored: str) -> None:
        expert = EXPERT.search(f".{stem}.")
        pattern = EXPERT.sub(".experts.*.", f"{stem}.").removesuffix(".")
        stacked, _, packed = pattern.partition("_proj_")
        pattern = f"{stacked}_proj" if packed in ("bias", "blocks", "scales") else pattern
        target = self.family.names.get(pattern) or LAYER.get(pattern)
        if target is None:
            self._fail_unknown(stored)
        if isinstance(target, Experts):
            assert expert
            self._experts[f"{layer}{target.name}.{kind}"][int(expert[1])] = stored
        elif isinstance(target, list):
            for part in target:
                self._add_rearranged(f"{layer}{part.name}", part, stored)
        elif isinstance(target, Stacked) and target.interleaved:
            self._add_interleaved(layer, target.names, kind, packed, stored)
        elif isinstance(target, Stacked):
            self._add_stacked(layer, target, kind, stored)
        elif isinstance(target, Latent):
            self._add_latent(layer, target, kind, stored)
        elif target in ("attn_q", "attn_k") and self.family.reordered:
            heads = self.c.heads if target == "attn_q" else self.c.kv_heads
            self._reordered(f"{layer}{target}.{kind}", stored, heads)
        else:
            self._plain(f"{layer}{target}.{kind}", stored)

    def _plain(self, name: str, stored: str) -> None:
        shape = tuple(size for size in self.weights.tensors[stored].shape)
        if len(shape) == 2 and shape[0] == 1:  # [1, n]: a gate of the shared expert, a bias of Ernie's router
            shape = shape[1:]
        offset = self.family.norm_offset if name.endswith("norm.weight") else 0.0
        self._set(Output(name, shape, partial(self._chunks, stored, offset=offset)))

    def _set(self, output: Output) -> None:
        if output.name in self.outputs:
            raise ConversionError(f"{self.folder}: two tensors become {output.name}: fetch the model again")
        self.outputs[output.name] = output

    def _chunks(
        self, stored: str, first: int = 0, rows: int | None = None, offset: float = 0.0
    ) -> Iterator[Array]:
        tensor = self.weights.tensors[stored]
        step = max(1, CHUNK_BYTES // (4 * tensor.columns))
        end = first + (tensor.rows if rows is None else rows)
        for row in range(first, end, step):
            values = self.weights.rows(stored, row, min(step, end - row))
            yield values + np.float32(offset) if offset else values

    def _reordered(self, name: str, stored: str, heads: int) -> None:
        """Rotated pairs of a head: halves become neighbours."""
        tensor = self.weights.tensors[stored]
        if not heads or tensor.shape[0] % (2 * heads):
            raise ConversionError(
                f"{self.folder}: {label(stored)} has {tensor.shape[0]} rows, which are not {heads} heads: "
                "fetch the model again"
            )

        def of_heads() -> Iterator[Array]:
            if len(tensor.shape) == 1:
                halves = self.weights.rows(stored, 0, 1).reshape(heads, 2, -1)
                yield halves.swapaxes(1, 2).reshape(1, -1)
                return
            size = tensor.rows // heads
            for head in range(heads):
                halves = self.weights.rows(stored, head * size, size).reshape(2, size // 2, -1)
                yield halves.swapaxes(0, 1).reshape(size, -1)

        self._set(Output(name, tensor.shape, of_heads))

    def _add_rearranged(self, name: str, part: Rearranged, stored: str) -> None:
        tensor, is_vector = self.weights.tensors[stored], len(self.weights.tensors[stored].shape) == 1
        count = tensor.columns if is_vector else tensor.rows
        rows = part.rows(self.c, count) if part.rows else np.arange(count)
        columns = part.columns(self.c, tensor.columns) if part.columns else None

        def values() -> Iterator[Array]:
            vector = [self.weights.rows(stored, 0, 1)[:, rows]] if is_vector else []
            for chunk in vector or self._runs(stored, rows):
                chunk = chunk if columns is None else chunk[:, columns]
                yield part.change(chunk) if part.change else chunk

        self._set(Output(name, (len(rows),) if is_vector else (len(rows), tensor.columns), values))

    def _runs(self, stored: str, rows: Array) -> Iterator[Array]:
        """Rows in any order; neighbours are read together."""
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            yield from self._chunks(stored, int(run[0]), len(run))

    def _add_stacked(self, layer: str, target: Stacked, kind: str, stored: str) -> None:
        """[experts, rows of gate and of up, columns]."""
        experts, rows, columns = self._stack_shape(stored)
        part = rows // len(target.names)
        for i, name in enumerate(target.names):

            def of_experts(begin: int = i * part) -> Iterator[Array]:
                for expert in range(experts):
                    yield from self._chunks(stored, expert * rows + begin, part)

            self._set(Output(f"{layer}{name}.{kind}", (experts, part, columns), of_experts))

    def _add_latent(self, layer: str, target: Latent, kind: str, stored: str) -> None:
        """[rows of a key and of a value for each head, columns of the latent]."""
        key, value = self.c.count("qk_nope_head_dim"), self.c.count("v_head_dim")
        shape, heads = self.weights.tensors[stored].shape, self.c.heads
        if len(shape) != 2 or shape[0] != heads * (key + value):
            raise ConversionError(
                f"{self.folder}: {label(stored)} has the shape {shape}, not that of {heads} heads: fetch it again"
            )

        def keys() -> Iterator[Array]:
            for head in range(heads):
                yield self.weights.rows(stored, head * (key + value), key).T

        def values() -> Iterator[Array]:
            for head in range(heads):
                yield self.weights.rows(stored, head * (key + value) + key, value)

        self._set(Output(f"{layer}{target.keys}.{kind}", (heads, shape[1], key), keys))
        self._set(Output(f"{layer}{target.values}.{kind}", (heads, value, shape[1]), values))

    def _stack_shape(self, stored: str) -> tuple[int, int, int]:
        shape = self.weights.tensors[stored].shape
        if len(shape) != 3:
            self._fail_shape(stored)
        return shape[0], shape[1], shape[2]

    def _add_interleaved(
        self, layer: str, names: tuple[str, ...], kind: str, packed: str, stored: str
    ) -> None:
        """Biases [experts, rows]; weights [experts, columns, rows], or MXFP4: blocks [experts, rows, columns / 32, 16]
        and scales [experts, rows, columns / 32]."""
        if packed == "scales":
            return  # come with the blocks
        every, shape = len(names), self.weights.tensors[stored].shape
        for i, name in enumerate(names):
            full = f"{layer}{name}.{kind}"
            if kind == "bias":
                values = partial(self._bias_rows, stored, i, every)
                self._set(Output(full, (shape[0], shape[-1] // every), values))
            elif packed == "blocks":
                scales = stored.removesuffix("blocks") + "scales"
                found = self.weights.tensors.get(scales)
                if len(shape) != 4 or shape[3] != 16 or found is None or found.shape != shape[:3]:
                    self._fail_shape(stored)
                values = partial(self._mxfp4, stored, scales, i, every)
                self._set(Output(full, (shape[0], shape[1] // every, 32 * shape[2]), values, packed=True))
            else:
                experts, columns, rows = self._stack_shape(stored)
                self._set(
                    Output(full, (experts, rows // every, columns), partial(self._turned, stored, i, every))
                )

    def _bias_rows(self, stored: str, first: int, every: int) -> Iterator[Array]:
        for rows in self._chunks(stored):
            yield rows[:, first::every]

    def _turned(self, stored: str, first: int, every: int) -> Iterator[Array]:
        experts, columns, _ = self.weights.tensors[stored].shape
        for expert in range(experts):
            yield self.weights.rows(stored, expert * columns, columns).T[first::every]

    def _mxfp4(self, blocks: str, scales: str, first: int, every: int) -> Iterator[Array]:
        """Byte i of a block has elements 2i and 2i + 1; in a GGUF file i and i + 16."""
        experts, rows, width, _ = self.weights.tensors[blocks].shape
        for expert in range(experts):
            pairs = self.weights.raw_rows(blocks, expert * rows * width, rows * width)
            nibbles = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(rows, width, 32)
            packed = nibbles[..., :16] | nibbles[..., 16:] << 4
            scale = self.weights.raw_rows(scales, expert * rows, rows)[..., None]
            yield np.concatenate([scale, packed], axis=-1)[first::every].reshape(-1, 17 * width)

    def stack(self) -> None:
        """Adds the stacks of matrices that the folder has one by one."""
        for name, parts in self._experts.items():
            stored = [parts.get(i) for i in range(len(parts))]
            names = [part for part in stored if part is not None]
            shapes = {self.weights.tensors[part].shape for part in names}
            if len(names) < len(stored):
                raise ConversionError(f"{self.folder}: {name} lacks an expert: fetch all files of the model")
            if len(shapes) != 1:
                raise ConversionError(
                    f"{self.folder}: experts of {name} have different shapes: fetch it again"
                )
            self._set(Output(name, (len(names), *shapes.pop()), partial(self._chain, names)))

    def _chain(self, names: list[str]) -> Iterator[Array]:
        for name in names:
            yield from self._chunks(name)

    def _fail_shape(self, stored: str) -> NoReturn:
        shape = self.weights.tensors[stored].shape
        raise ConversionError(
            f"{self.folder}: {label(stored)} has the shape {shape}, not that of experts: fetch it again"
        )

    def _fail_unknown(self, stored: str) -> NoReturn:
        raise ConversionError(
            f"{self.folder}: {label(stored)} is not a tensor of a {self.family.architecture} model: "
            "config.json may be another model's"
        )
