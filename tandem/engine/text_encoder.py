"""Runs a model that embeds and ranks texts: each token sees all of its text, and nothing is cached between steps.

A step has as many texts as fit, one after the other without padding. The host gives it a token's vectors of position
and type, and pools its results: both are small beside the layers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import numpy as np

from tandem.devices.device import Device, validate_on
from tandem.engine.kv_size import HEADROOM
from tandem.engine.params import NO_RANKER, TextTokens
from tandem.errors import DeviceError, DoesNotFitError, RequestError
from tandem.gguf.file import GGUF
from tandem.kernels.abi import (
    HEADER_INPUTS,
    HEADER_ROWS,
    HEADER_SEQUENCES,
    HEADER_TOKENS,
    HEADER_WORK,
    KV_BLOCK,
    TOKEN_ID,
    TOKEN_POSITION,
    TOKEN_SEQUENCE,
    TOKEN_SLOT,
    WORK_LAST,
    WORK_POSITION,
)
from tandem.kernels.attention import make_work_list
from tandem.kernels.kernel import Array
from tandem.kernels.rows import rows_bytes
from tandem.model.config import POSITIONS, TYPES
from tandem.model.model import Model
from tandem.model.weights import rows, vector
from tandem.program.fuse import fuse
from tandem.program.graph import HIDDEN
from tandem.program.lower import lower
from tandem.program.lowering_base import KVCacheShape
from tandem.program.program import Tensor
from tandem.program.step_inputs import StepInputs, StepLayout, StepLimits
from tandem.program.weight_plan import WeightPlan

STEP_TOKENS, STEP_TEXTS = 512, 128  # most of a step; a longer text is a step of its own
ROWS_PER_ITEM = 64  # tokens of an attention item
SCORE = ("cls", "cls.output")  # the layers after the first token of a model that ranks


class TextEncoder:
    def __init__(self, model: Model, device: Device, context: int, kv: str = "f16") -> None:
        """Compiles a model for a device and loads its weights. `context`: most tokens of a text. `kv`: the type of
        keys and values."""
        if not device.holds_several_programs:
            raise DeviceError("a model that embeds texts needs a single device: give one with --device")
        c, tokens = model.config, max(context, STEP_TOKENS)
        self.model, self.config, self.device, self.context = model, c, device, context
        width = c.dim if c.learned_positions or c.token_types else 0
        limits = StepLimits(
            tokens,
            1,
            STEP_TEXTS,
            -(-context // KV_BLOCK),
            len(c.windows),
            input_width=width,
            second_work=any(map(c.sees_near_tokens, range(c.layers))),
        )
        layout, blocks = StepLayout(limits), -(-tokens // KV_BLOCK) + STEP_TEXTS
        plan = WeightPlan(model.layouts(device.weight_layout))
        kv_shape = KVCacheShape((blocks,) * limits.groups, "f16" if kv == "q8" else kv)
        self.program = lower(fuse(model.ops(context), plan.layouts), plan, layout, kv_shape)
        validate_on(device, self.program)
        needed, free = sum(self.program.arena_bytes.values()) + HEADROOM, device.free_memory()[1]
        if needed > free:
            raise DoesNotFitError(
                f"the model and its steps ({needed / 1e9:.1f} GB) do not fit in the {free / 1e9:.1f} GB that are free: "
                "use a smaller context",
                missing=int(needed - free),
            )
        device.allocate(self.program)
        model.load(plan, device, context)
        self._inputs = StepInputs(layout, device.memory("step"))
        self._recording = device.record(self.program)
        self._positions = rows(model.gguf, POSITIONS, c.dim) if c.learned_positions else None
        self._types = rows(model.gguf, TYPES, c.dim) if c.token_types else None
        self._scoring = list(_scoring(model.gguf, c.dim))

    @property
    def ranks(self) -> bool:
        """Whether the model has a score for a pair of texts."""
        return bool(self._scoring)

    def embed(self, texts: Sequence[TextTokens], pooling: str) -> Generator[Array | None]:
        """Yields None after each step but the last, then the vectors, of length 1: float32 [texts, width]."""
        vectors = np.empty((len(texts), self.config.dim), np.float32)
        for first, hidden, lengths in self._steps(texts):
            starts = np.cumsum(lengths) - lengths
            if pooling == "mean":
                pooled = np.add.reduceat(hidden, starts, axis=0)
            else:
                pooled = hidden[starts if pooling == "cls" else starts + lengths - 1]
            norms = np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
            vectors[first : first + len(lengths)] = pooled / norms
            if first + len(lengths) < len(texts):
                yield None
        yield vectors

    def score(self, texts: Sequence[TextTokens]) -> Generator[Array | None]:
        """Yields None after each step but the last, then the scores of pairs: float32 [texts]."""
        if not self.ranks:
            raise RequestError(NO_RANKER)
        scores = np.empty(len(texts), np.float32)
        for first, hidden, lengths in self._steps(texts):
            x = hidden[np.cumsum(lengths) - lengths]
            for i, (weight, bias) in enumerate(self._scoring):
                x = (np.tanh(x) if i else x) @ weight.T + bias
            # Of two classes, the second one is that of relevant documents.
            scores[first : first + len(lengths)] = x[:, 0] if x.shape[1] == 1 else x[:, 1] - x[:, 0]
            if first + len(lengths) < len(texts):
                yield None
        yield scores

    def _steps(self, texts: Sequence[TextTokens]) -> Iterator[tuple[int, Array, Array]]:
        """Runs steps; yields the number of the first text, all hidden states, and the tokens of each text."""
        _, tensor = self.program.values[HIDDEN]
        first = 0
        while first < len(texts):
            end, tokens = first + 1, len(texts[first].ids)
            while end < len(texts) and end - first < STEP_TEXTS:
                tokens += len(texts[end].ids)
                if tokens > STEP_TOKENS:
                    break
                end += 1
            lengths = self._write_step(texts[first:end])
            self._recording.replay()
            yield first, self._read(tensor, int(lengths.sum())), lengths
            first = end

    def _read(self, tensor: Tensor, count: int) -> Array:
        nbytes = rows_bytes(count, self.config.dim, tensor.stride)
        memory = self.device.read(Tensor(HIDDEN, tensor.arena, "f32", nbytes, tensor.stride, 0, tensor))
        shape, strides = (count, self.config.dim), (4 * tensor.stride, 4)
        return np.ndarray(shape, np.float32, memory, strides=strides).copy()

    def _write_step(self, texts: Sequence[TextTokens]) -> Array:
        inputs, lengths = self._inputs, np.array([len(text.ids) for text in texts])
        count, blocks = int(lengths.sum()), -(-lengths // KV_BLOCK)
        first_blocks = np.cumsum(blocks) - blocks
        positions = np.arange(count) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        tokens = inputs.tokens[:count]
        tokens[:, TOKEN_ID] = np.concatenate([text.ids for text in texts])
        tokens[:, TOKEN_POSITION] = positions
        tokens[:, TOKEN_SEQUENCE] = np.repeat(np.arange(len(texts)), lengths)
        for group, table in enumerate(inputs.tables):
            tokens[:, TOKEN_SLOT + group] = np.repeat(first_blocks * KV_BLOCK, lengths) + positions
            table[: len(texts)] = first_blocks[:, None] + np.minimum(
                np.arange(table.shape[1]), blocks[:, None] - 1
            )
        if self._positions is not None:
            inputs.inputs[:count, : self.config.dim] = self._positions[positions]
        if self._types is not None:
            ends = [len(text.ids) if text.second is None else text.second for text in texts]
            types = (positions >= np.repeat(ends, lengths)).astype(int) % len(self._types)
            if self._positions is not None:
                inputs.inputs[:count, : self.config.dim] += self._types[types]
            else:
                inputs.inputs[:count, : self.config.dim] = self._types[types]
        rows = [(0, int(n)) for n in lengths]
        # The tokens of an item see the same last one. So each token is an item where it sees near ones.
        most = ROWS_PER_ITEM if inputs.second_work is None else 1
        work = make_work_list(rows, most, bidirectional=True)
        inputs.work[: len(work)] = work
        if inputs.second_work is not None:
            last = np.minimum(work[:, WORK_LAST], work[:, WORK_POSITION] + max(self.config.windows) - 1)
            inputs.second_work[: len(work)] = work
            inputs.second_work[: len(work), WORK_LAST] = last
        inputs.rows[0] = 0
        header = {HEADER_TOKENS: count, HEADER_ROWS: 1, HEADER_WORK: len(work), HEADER_INPUTS: count}
        for field, value in (header | {HEADER_SEQUENCES: len(texts)}).items():
            inputs.header[field] = value
        return lengths


def _scoring(gguf: GGUF, width: int) -> Iterator[tuple[Array, Array]]:
    """The weights and biases of the layers of SCORE that a file has; each takes what the one before gives."""
    for name in SCORE:
        if f"{name}.weight" in gguf.tensors:
            weights, bias = rows(gguf, f"{name}.weight", width), np.zeros(1, np.float32)
            if (given := f"{name}.bias") in gguf.tensors and (bias := vector(gguf, given)).size != len(
                weights
            ):
                gguf.fail(given, f"this must be {len(weights)} numbers: fetch or convert the file again")
            yield weights, bias
            width = len(weights)
