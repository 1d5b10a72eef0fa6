"""Runs a vision encoder: a Program of its own, beside the language model's, on the same device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import numpy as np

from tandem.devices.device import Device, validate_on
from tandem.engine.images import Image
from tandem.errors import ContextError, UnsupportedModelError
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
from tandem.model.model import Model
from tandem.model.vision import EMBEDDINGS, VisionModel
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
        self.config, self.device = model.config, device.beside()
        c, blocks = model.config, -(-model.config.patches // KV_BLOCK)
        layout = StepLayout(StepLimits(c.patches, c.tokens, 1, blocks, input_width=c.patch_dim))
        plan = WeightPlan({name: device.weight_layout(*matrix) for name, matrix in model.matrices().items()})
        ops = fuse(model.ops(), plan.layouts)
        self.program = lower(ops, plan, layout, KVCacheShape((blocks,), "f16" if kv == "q8" else kv))
        validate_on(self.device, self.program)
        self.device.allocate(self.program)
        load_weights(model, plan, self.device, {})
        self._inputs = StepInputs(layout, self.device.memory("step"))
        self._recording = self.device.record(self.program)
        self._write_step()

    def _write_step(self) -> None:
        """Writes what is the same for every image."""
        c, inputs = self.config, self._inputs
        rows = np.arange(c.patches)
        work = make_work_list([(0, c.patches)], ROWS_PER_ITEM, bidirectional=True)
        inputs.tokens[:, TOKEN_ID] = c.positions
        inputs.tokens[:, TOKEN_POSITION] = inputs.tokens[:, TOKEN_SLOT] = rows
        inputs.work[: len(work)] = work
        inputs.rows[:] = np.arange(c.tokens)
        inputs.tables[0][0] = np.arange(len(inputs.tables[0][0]))
        header = {
            HEADER_TOKENS: c.patches,
            HEADER_ROWS: c.tokens,
            HEADER_WORK: len(work),
            HEADER_SEQUENCES: 1,
        }
        for field, value in (header | {HEADER_INPUTS: c.patches}).items():
            inputs.header[field] = value

    def encode(self, pixels: Array) -> Array:
        """uint8 [height, width, channels], or normalised float32 [channels, height, width] -> [tokens, width]."""
        *_, embeddings = self.encode_in_parts(pixels)
        assert embeddings is not None
        return embeddings

    def encode_in_parts(self, pixels: Array) -> Iterator[Array | None]:
        """Like `encode`, a few launches at a time: yields None until the embeddings are there, so that steps of the
        language model may run in between."""
        c = self.config
        self._inputs.inputs[: c.patches, : c.patch_dim] = c.to_patches(
            c.normalise(pixels) if pixels.dtype == np.uint8 else pixels
        )
        begun = time.perf_counter()
        for launch in range(len(self.program.launches)):
            if time.perf_counter() - begun > PART_SECONDS:
                yield None
                begun = time.perf_counter()
            self._recording.replay(launch, launch + 1)
        tensor = self.program.values[EMBEDDINGS][1]
        rows = np.zeros(c.tokens * tensor.stride, np.float32)
        read = self.device.read(tensor).view(np.float32)
        rows[: len(read)] = read
        yield rows.reshape(c.tokens, -1)[:, : c.out_dim].copy()

    def encode_all(self, images: Iterable[Image]) -> None:
        """Encodes those that have no embeddings yet."""
        for image in images:
            if image.embeddings is None:
                image.embeddings = self.encode(image.pixels)

    def close(self) -> None:
        self.device.close()


def check_fits(vision: VisionModel, model: Model, limits: StepLimits) -> None:
    """Checks that an encoder is one for this model, and that an image fits into a step."""
    if vision.config.out_dim != model.config.dim:
        raise UnsupportedModelError(
            f"{vision.path.name} makes embeddings of {vision.config.out_dim} numbers, the model's have "
            f"{model.config.dim}: use the mmproj file that was published with the model"
        )
    if vision.config.tokens >= limits.tokens:
        raise ContextError(
            f"an image has {vision.config.tokens} tokens, and a step at most {limits.tokens}: use a larger context"
        )
