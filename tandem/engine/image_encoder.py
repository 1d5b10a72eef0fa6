"""Runs a vision encoder: a Program of its own, beside the language model's, on the same device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import numpy as np

from tandem.devices.device import Device, validate_on
from tandem.engine.images import Image
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
)
from tandem.kernels.attention import make_work_list
from tandem.kernels.kernel import Array
from tandem.model.encoders.blocks import EMBEDDINGS
from tandem.model.model import Model
from tandem.model.vision import VisionModel
from tandem.model.weights import load_weights
from tandem.program.fuse import fuse
from tandem.program.lower import lower
from tandem.program.lowering_base import KVCacheShape
from tandem.program.step_inputs import StepInputs, StepLayout, StepLimits
from tandem.program.weight_plan import WeightPlan

ROWS_PER_ITEM = 16  # patches of an attention item
PART_SECONDS = 0.02  # other requests wait for so long, or for one launch


class ImageEncoder:
    """`device`: where the language model will run. The encoder's memory is apart from that of the model's Program."""

    def __init__(self, model: VisionModel, device: Device, kv: str = "f16") -> None:
        """`kv`: the type of keys and values."""
        self.model, self.config, self.device = model, model.config, device.beside()
        c, blocks = model.config, -(-model.config.max_patches // KV_BLOCK)
        layout = StepLayout(StepLimits(c.max_patches, c.max_tokens, 1, blocks, input_width=c.patch_dim))
        plan = WeightPlan({name: device.weight_layout(*matrix) for name, matrix in model.matrices().items()})
        ops = fuse(model.ops(), plan.layouts)
        self.program = lower(ops, plan, layout, KVCacheShape((blocks,), "f16" if kv == "q8" else kv))
        validate_on(self.device, self.program)
        self.device.allocate(self.program)
        load_weights(model, plan, self.device, {})
        self._inputs = StepInputs(layout, self.device.memory("step"))
        self._recording = self.device.record(self.program)
        self._inputs.tables[0][0] = np.arange(blocks)

    def _write_step(self, pixels: Array) -> None:
        c, inputs = self.config, self._inputs
        places, tokens = c.places(pixels), c.tokens(pixels)
        count = len(places)
        rows = np.arange(count)
        work = make_work_list([(0, count)], ROWS_PER_ITEM, bidirectional=True)
        inputs.inputs[:count, : c.patch_dim] = c.patches(pixels)
        inputs.tokens[:count, TOKEN_ID] = places
        inputs.tokens[:count, TOKEN_POSITION] = inputs.tokens[:count, TOKEN_SLOT] = rows
        inputs.work[: len(work)] = work
        inputs.rows[:tokens] = np.arange(tokens)
        header = {HEADER_TOKENS: count, HEADER_ROWS: tokens, HEADER_WORK: len(work), HEADER_SEQUENCES: 1}
        for field, value in (header | {HEADER_INPUTS: count}).items():
            inputs.header[field] = value

    def encode(self, pixels: Array) -> Array:
        """uint8 [height, width, channels], of a size that the encoder takes -> float32 [tokens, width]."""
        *_, embeddings = self.encode_in_parts(pixels)
        assert embeddings is not None
        return embeddings

    def encode_in_parts(self, pixels: Array) -> Iterator[Array | None]:
        """Like `encode`, a few launches at a time: yields None until the embeddings are there, so that steps of the
        language model may run in between."""
        c = self.config
        self._write_step(pixels)
        begun = time.perf_counter()
        for launch in range(len(self.program.launches)):
            if time.perf_counter() - begun > PART_SECONDS:
                yield None
                begun = time.perf_counter()
            self._recording.replay(launch, launch + 1)
        tensor, tokens = self.program.values[EMBEDDINGS][1], c.tokens(pixels)
        rows = np.zeros(c.max_tokens * tensor.stride, np.float32)
        read = self.device.read(tensor).view(np.float32)
        rows[: len(read)] = read
        yield rows.reshape(c.max_tokens, -1)[:tokens, : c.out_dim].copy()

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
    if vision.encoder.WHOLE and tokens >= limits.tokens:
        raise ContextError(
            f"an image has {tokens} tokens, and a step at most {limits.tokens}: use a larger context"
        )
