"""Runs a vision encoder: a Program of its own, beside the language model's, on the same device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import numpy as np

from tandem.devices.device import Device, validate_on
from tandem.engine.images import Image, SectionedAngles
from tandem.errors import ContextError, DeviceError
from tandem.kernels.abi import (
    HEADER_INPUTS,
    HEADER_ROWS,
    HEADER_SEQUENCES,
    HEADER_TOKENS,
    HEADER_WORK,
    KV_BLOCK,
    TOKEN_ID,
    TOKEN_POSITION,
    TOKEN_SLOT,
    WORK_LAST,
)
from tandem.kernels.attention import KERNEL as ATTENTION
from tandem.kernels.attention import make_work_list
from tandem.kernels.kernel import Array
from tandem.kernels.layout import ChooseLayout
from tandem.model.config import Rope
from tandem.model.encoders.blocks import EMBEDDINGS, POSITIONS, further
from tandem.model.model import Model
from tandem.model.vision import VisionModel
from tandem.program.fuse import fuse
from tandem.program.lower import lower
from tandem.program.lowering_base import KVCacheShape
from tandem.program.program import Program
from tandem.program.step_inputs import StepInputs, StepLayout, StepLimits
from tandem.program.weight_plan import WeightPlan

ROWS_PER_ITEM = 16  # patches of an attention item
PART_SECONDS = 0.02  # other requests wait for so long, or for one launch
# An image that takes less than so many parts is encoded in one: a device has recorded all launches together.
WHOLE_PARTS = 2


def encoder_program(
    model: VisionModel, choose: ChooseLayout, kv: str = "f16"
) -> tuple[Program, StepLayout, WeightPlan]:
    """`choose`: a device's `weight_layout`."""
    c, blocks = model.config, -(-model.config.max_patches // KV_BLOCK)
    # Of a patch, the host gives pixels, learned positions if they are interpolated, and angles if it rotates.
    width, angles = c.patch_dim + (c.dim if c.position_side else 0), c.head_dim if c.rotates else 0
    kv_blocks = [blocks]
    if c.window:
        kv_blocks.append(blocks + c.max_windows)  # a window begins with a block
    limits = StepLimits(
        c.max_patches,
        c.max_tokens,
        c.max_windows,
        blocks,
        groups=len(kv_blocks),
        input_width=width,
        angles=angles,
        samples=False,
    )
    layout = StepLayout(limits)
    plan = WeightPlan({name: choose(*matrix) for name, matrix in model.matrices().items()})
    shape = KVCacheShape(tuple(kv_blocks), "f16" if kv == "q8" else kv)
    return lower(fuse(model.ops(), plan.layouts), plan, layout, shape), layout, plan


class ImageEncoder:
    """`device`: where the language model will run. The encoder's memory is apart from that of the model's Program."""

    def __init__(self, model: VisionModel, device: Device, kv: str = "f16") -> None:
        """`kv`: the type of keys and values."""
        self.model, self.device = model, device.beside()
        model.widen(device.fast_head_dim(model.config.head_dim))
        self.config = c = model.config
        self.program, layout, plan = encoder_program(model, device.weight_layout, kv)
        self._positions = model.values(POSITIONS) if c.position_side else None
        validate_on(self.device, self.program)
        self.device.allocate(self.program)
        model.load(plan, self.device)
        self._inputs = StepInputs(layout, self.device.memory("step"))
        self._recording = self.device.record(self.program)
        self._inputs.tables[0][:] = np.arange(layout.limits.blocks)
        self._groups = {i: c.group_of(layer) for i, layer in self._attention_layers()} if c.window else {}
        self._count = 1  # launches that are replayed together
        self._last_image = 1, float("inf")  # patches and seconds of the last image
        # By KV group, for each entry of the work list: the last position that it sees.
        self._last: list[Array] = []
        self._width = c.out_dim // (1 + len(c.deepstack_after))

    def _attention_layers(self) -> Iterator[tuple[int, int]]:
        """The launches of attention, and the layer of each."""
        for i, launch in enumerate(self.program.launches):
            if launch.kernel is ATTENTION:
                yield i, int(launch.name.split(".")[2])

    def _write_step(self, pixels: Array) -> None:
        c, inputs = self.config, self._inputs
        places, tokens = c.places(pixels), c.tokens(pixels)
        rows_of, columns_of = (side * c.merge for side in c.grid(pixels))
        count = len(places)
        rows = np.arange(count)
        sizes = c.window_sizes(pixels)  # one window, if there are none
        work = make_work_list([(0, size) for size in sizes], ROWS_PER_ITEM, bidirectional=True)
        self._last = [np.full(len(work), count - 1, np.int32), work[:, WORK_LAST].copy()]
        inputs.inputs[:count, : c.patch_dim] = c.patches(pixels)
        if self._positions is not None:
            learned = self.model.encoder.positions(c, self._positions, rows_of, columns_of)
            inputs.inputs[:count, c.patch_dim : c.patch_dim + c.dim] = learned[places]
        if c.rotates:
            table = Rope(c.rope_base, c.head_dim // 2).table(max(rows_of, columns_of))
            axes = np.repeat([0, 1], c.head_dim // 4)
            angles = SectionedAngles(np.concatenate([table, table], axis=1), axes.tolist())
            inputs.angles[:count] = angles.of(np.stack(np.divmod(places, columns_of), axis=1))
        inputs.tokens[:count, TOKEN_ID] = places
        inputs.tokens[:count, TOKEN_POSITION] = inputs.tokens[:count, TOKEN_SLOT] = rows
        if c.window:
            blocks = -(-np.array(sizes) // KV_BLOCK)
            first = np.cumsum(blocks) - blocks
            for window, (block, used) in enumerate(zip(first, blocks, strict=True)):
                inputs.tables[1][window, :used] = np.arange(block, block + used)
            inside = rows - np.repeat(np.cumsum(sizes) - sizes, sizes)
            inputs.tokens[:count, TOKEN_SLOT + 1] = np.repeat(first, sizes) * KV_BLOCK + inside
        inputs.work[: len(work)] = work
        inputs.rows[:tokens] = np.arange(tokens)
        header = {HEADER_TOKENS: count, HEADER_ROWS: tokens, HEADER_WORK: len(work)}
        for field, value in (header | {HEADER_SEQUENCES: len(sizes), HEADER_INPUTS: count}).items():
            inputs.header[field] = value

    def encode(self, pixels: Array) -> Array:
        """uint8 [height, width, channels], of a size that the encoder takes -> float32 [tokens, width]."""
        *_, embeddings = self.encode_in_parts(pixels)
        assert embeddings is not None
        return embeddings

    def encode_in_parts(self, pixels: Array) -> Iterator[Array | None]:
        """Like `encode`, a few launches at a time: yields None until the embeddings are there, so that steps of the
        language model may run in between."""
        self._write_step(pixels)
        launch, launches, waited, total = 0, len(self.program.launches), 0.0, 0.0
        patches, seconds = self._last_image
        count = int(self._inputs.header[HEADER_TOKENS])
        expected = seconds * max(1, count / patches) ** 2  # attention grows so
        if expected < WHOLE_PARTS * PART_SECONDS and not self._groups:
            begun = time.perf_counter()
            self._recording.replay()
            launch, total = launches, time.perf_counter() - begun
        while launch < launches:
            if waited > PART_SECONDS:
                yield None
                waited = 0.0
            if (group := self._groups.get(launch)) is not None:
                self._inputs.work[: len(self._last[group]), WORK_LAST] = self._last[group]
            end = min(launch + self._count, launches)
            end = next((i for i in self._groups if launch < i < end), end)
            begun = time.perf_counter()
            self._recording.replay(launch, end)
            seconds, launch = time.perf_counter() - begun, end
            waited, total = waited + seconds, total + seconds
            # Few calls if launches are short, as on a GPU; no part much longer than PART_SECONDS if they are long.
            self._count = 2 * self._count if 4 * seconds < PART_SECONDS else max(1, self._count // 2)
        self._last_image = count, total
        c = self.config
        tokens, results = c.tokens(pixels), [EMBEDDINGS, *map(further, range(len(c.deepstack_after)))]
        embeddings = np.concatenate([self._read(name, tokens) for name in results], axis=1)
        yield embeddings[np.argsort(c.order(pixels))]

    def _read(self, name: str, tokens: int) -> Array:
        tensor = self.program.values[name][1]
        rows = np.zeros(self.config.max_tokens * tensor.stride, np.float32)
        read = self.device.read(tensor).view(np.float32)
        rows[: len(read)] = read
        found: Array = rows.reshape(self.config.max_tokens, -1)[:tokens, : self._width]
        return found

    def encode_all(self, images: Iterable[Image]) -> None:
        """Encodes those that have no embeddings yet."""
        for image in images:
            if image.embeddings is None:
                image.set_embeddings(self.encode(image.pixels))

    def close(self) -> None:
        self.device.close()


def check_fits(vision: VisionModel, model: Model, device: Device, limits: StepLimits) -> None:
    """Checks that an encoder is one for this model, and that its images fit into a step."""
    vision.check_model(model.gguf)
    if not device.holds_several_programs:
        raise DeviceError("a vision encoder needs a single device: give one with --device")
    tokens = vision.config.max_tokens
    if model.config.whole_images and tokens >= limits.tokens:
        raise ContextError(
            f"an image has {tokens} tokens, and a step at most {limits.tokens}: use a larger context"
        )
