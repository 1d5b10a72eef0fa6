"""The engine compiles a model for a device, and runs the steps that serve every request.

Driver (driver.py) serialises access and runs single steps; LLM and AsyncLLM loop.

Load (`Engine.load`): ops -> fuse -> plan weights -> lower -> validate -> allocate -> repack -> record.
Step (`Engine.step`): schedule -> write StepInputs -> start -> read the tokens of the oldest step in flight. The host
schedules and writes one step while the device runs the previous one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from tandem.devices.device import Device, Recording, validate_on
from tandem.engine.batch import Batch
from tandem.engine.images import Image, ImageCache, ImageSpan, SectionedAngles, images_in, whole_images
from tandem.engine.kv_cache import KVCache
from tandem.engine.kv_size import plan_kv, plan_states
from tandem.engine.params import SamplingParams
from tandem.engine.sampling import sample_on_host
from tandem.engine.scheduler import PrefillBudget, Scheduler
from tandem.engine.sequence import Chunk, Sequence
from tandem.engine.speculation import Proposer, Speculator, accept_draft
from tandem.errors import ContextError, DeviceError, OutOfMemoryError, RequestError
from tandem.interrupts import deferred
from tandem.kernels.abi import KV_BLOCK, Q8_BLOCK, RESULT_INTS
from tandem.kernels.kernel import Array
from tandem.kernels.q8_tiles import q8_unpack
from tandem.model.config import ModelConfig
from tandem.model.model import Model
from tandem.program.fuse import PASSES, fuse
from tandem.program.graph import layer_states
from tandem.program.lower import lower
from tandem.program.lowering_base import KVCacheShape
from tandem.program.program import Program, Tensor, arena_in
from tandem.program.step_inputs import MAX_BIASES, StepInputs, StepLayout, StepLimits
from tandem.program.weight_plan import WeightPlan

if TYPE_CHECKING:
    from tandem.engine.disk_cache import DiskCache
    from tandem.engine.draft_head import DraftHead
    from tandem.engine.image_encoder import ImageEncoder
    from tandem.engine.stats import EngineStats
    from tandem.engine.structured_output import Constraint
    from tandem.engine.text_encoder import TextEncoder
    from tandem.model.vision import VisionModel

STEP_TOKENS = 512  # maximum tokens per step; longer prompts take several steps
SPLIT_STEP_TOKENS = 128  # maximum if layers are split over devices: the chunks of a prompt fill the pipeline
ROWS_FOR_DRAFTS = 16  # rows of results for draft tokens, in addition to one per sequence
# Seconds, and part of a step's, for blocks from the disk between steps.
MIN_RESTORING, RESTORING_SHARE = 0.002, 0.2
ITEMS_PER_WORKER = 2  # minimum attention items per thread; fewer would leave some threads idle


@dataclass(eq=False, slots=True)
class StepSlot:
    """The memory of one step in flight: its StepInputs, results and Recording."""

    batch: Batch
    recording: Recording
    chunks: list[Chunk] = field(default_factory=list)
    started: float = 0.0
    # A sequence has a logits processor: no other step may start before the host has read the logits.
    samples_on_host: bool = False


class Engine:
    def __init__(
        self,
        model: Model,
        device: Device,
        program: Program,
        cache: KVCache,
        scheduler: Scheduler,
        step_slots: list[StepSlot],
        context: int,
        encoder: ImageEncoder | None = None,
        draft_head: DraftHead | None = None,
    ) -> None:
        """Use `Engine.load`. `context`: maximum tokens per sequence."""
        self.model, self.device, self.program, self.context = model, device, program, context
        self.cache, self.scheduler, self.step_slots = cache, scheduler, step_slots
        self.num_steps = 0  # finished steps
        self.step_called = 0.0  # time of the last call of `step`
        # Called after each step, with its chunks and seconds.
        self.on_step: Callable[[list[Chunk], float], None] | None = None
        self._in_flight: deque[StepSlot] = deque()  # oldest first
        self._last_finished = 0.0  # time when the last step was finished
        self._any_logits_processor = False  # some request had one
        self._out_of_band_row = scheduler.reserve_table_row()
        self.encoder = encoder  # None: the model takes no images
        self.draft_head = draft_head  # the model's own, if it is the proposer
        # Of a model that embeds and ranks texts, and generates none.
        self.text_encoder: TextEncoder | None = None
        self.images = ImageCache()
        self._encoding: tuple[Image, Iterator[Array | None]] | None = None
        self.disk: DiskCache | None = None  # set by DiskCache.open, here and in the scheduler
        self._step_seconds = 0.0  # of the last step

    @classmethod
    def load(
        cls,
        model: Model,
        device: Device,
        *,
        context: int,
        batch: int,
        kv: str = "f16",
        kv_memory: float | None = None,
        queue: int | None = None,
        prefix_caching: bool = True,
        proposer: Proposer | None = None,
        draft_head: bool = False,
        vision: VisionModel | None = None,
        passes: Iterable[str] = PASSES,
    ) -> Self:
        """Compiles a model for a device and loads its weights.

        `batch`: maximum number of running sequences. `kv`: the type of the KV cache. `kv_memory`: its bytes; None: a
        fraction of the free memory. `queue`: maximum number of waiting requests. `proposer`: source of draft tokens
        (speculation.py). `draft_head`: it is the model's own (draft_head.py). `vision`: the encoder of its images.
        `passes`: fusions."""
        if not draft_head:
            model.config = replace(model.config, draft_layers=0)
        config, passes = model.config, tuple(passes)
        if config.encodes:
            return cls._load_encoder(model, device, context, kv)
        limits = step_limits(model, device, context, batch, ROWS_FOR_DRAFTS if proposer or draft_head else 0)
        encoder = None
        if vision:
            from tandem.engine.image_encoder import ImageEncoder, check_fits

            check_fits(vision, model, device, limits)
            # First: the KV cache gets a share of what is free then.
            encoder = ImageEncoder(vision, device, kv)
            angles = config.ropes[0].rot_dim if config.rope_axes else 0
            limits = replace(
                limits,
                input_width=vision.config.out_dim,
                angles=angles,
                second_work=any(map(config.causal_images, range(config.layers))),
            )
        layout = StepLayout(limits)
        weights = WeightPlan(model.layouts(device.weight_layout))
        ops = fuse(model.ops(context), weights.layouts, passes)
        sizes, free, nbytes = layer_states(ops), device.free_memory(), model.nbytes(device.weight_layout)
        states = plan_states(
            limits, sizes, weights=nbytes, free=free[0], step_slots=device.step_slots, kv_memory=kv_memory
        )
        kv_blocks = plan_kv(
            config,
            limits,
            kv,
            weights=nbytes,
            free=free,
            step_slots=device.step_slots,
            wanted=kv_memory,
            states=states * sum(sizes),
        )
        shape = KVCacheShape(kv_blocks, kv, states)
        program = lower(ops, weights, layout, shape, passes)
        validate_on(device, program)
        draft_program = None
        if config.draft_layers:
            from tandem.engine.draft_head import DraftHead, lower_draft_head

            draft_program = lower_draft_head(model, device, context, passes, program, weights, layout, shape)
        device.allocate(program)
        model.load(weights, device, context)
        cache = KVCache(config.windows, kv_blocks, states)
        sectioned = (
            SectionedAngles(config.ropes[0].table(context), config.rope_axes) if limits.angles else None
        )
        head = None
        if draft_program:
            proposer = head = DraftHead(device, program, draft_program, layout, cache, config.dim, sectioned)
        scheduler = Scheduler(
            limits,
            cache,
            prefill_budget=PrefillBudget(),
            queue=queue,
            prefix_caching=prefix_caching,
            speculator=Speculator(proposer) if proposer else None,
            stages=device.stages,
        )
        # The second step slot is the draft head's.
        step_slots = [
            _make_step_slot(config, device, program, layout, i, sectioned)
            for i in range(1 if head else device.step_slots)
        ]
        return cls(model, device, program, cache, scheduler, step_slots, context, encoder, head)

    @classmethod
    def _load_encoder(cls, model: Model, device: Device, context: int, kv: str) -> Self:
        """An engine without a KV cache, which runs no steps: forwards are out of band."""
        from tandem.engine.text_encoder import TextEncoder

        encoder, windows = TextEncoder(model, device, context, kv), model.config.windows
        limits, cache = step_limits(model, device, context, 1, 0), KVCache(windows, (0,) * len(windows))
        engine = cls(model, device, encoder.program, cache, Scheduler(limits, cache), [], context)
        engine.text_encoder = encoder
        return engine

    # ---- requests

    def check_generates(self) -> None:
        """Raises RequestError if the model only embeds and ranks texts."""
        if self.text_encoder:
            raise RequestError(
                f"a {self.model.config.architecture} model embeds and ranks texts, and generates none: use embed or "
                "rerank, or another model"
            )

    @property
    def max_sequences(self) -> int:
        """The maximum number of running sequences."""
        return self.scheduler.limits.sequences - 1  # one table row is for out-of-band forwards

    def submit(
        self, prompt: list[int], params: SamplingParams, eos_ids: frozenset[int] = frozenset()
    ) -> Sequence:
        """Checks and queues a request; `step` serves it until it has a finish_reason."""
        sequence = self.new_sequence(prompt, params, eos_ids)
        self.enqueue(sequence)
        return sequence

    def new_sequence(
        self,
        prompt: list[int],
        params: SamplingParams,
        eos_ids: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
    ) -> Sequence:
        """Checks a request and makes its Sequence, which is not queued yet."""
        self.check_generates()
        config = self.model.config
        if len(prompt) >= self.context:
            raise ContextError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.context}, at least one of them for "
                f"the output: shorten it, or use a larger context (up to {config.trained_context})"
            )
        self.check_prompt(prompt)
        if any(not 0 <= token < config.vocab for token in params.logit_bias):
            raise RequestError(f"logit_bias names a token outside 0 to {config.vocab - 1}")
        if len(params.logit_bias) > MAX_BIASES:
            raise RequestError(f"logit_bias has {len(params.logit_bias)} entries: give {MAX_BIASES} at most")
        banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
        if len(banned | eos_ids if params.min_tokens else banned) >= config.vocab:
            raise RequestError("logit_bias bans every token: leave one")
        max_tokens, images = self.context - len(prompt), self._shared_images(prompt)
        if images and params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs cannot be given for a prompt with images: leave out one of the two"
            )
        return Sequence(
            prompt, params, eos_ids, self.cache.new_tables(), max_tokens, constraint=constraint, images=images
        )

    def _shared_images(self, prompt: list[int]) -> list[ImageSpan]:
        """The images of a prompt; one whose content is cached has its embeddings already."""
        return [ImageSpan(span.begin, self.images.share(span.image)) for span in images_in(prompt)]

    def enqueue(self, sequence: Sequence) -> None:
        self._any_logits_processor |= sequence.request.params.logits_processor is not None
        self.scheduler.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        sequence.finish("cancelled")
        self.scheduler.remove(sequence)

    # ---- the step

    def step(self) -> list[Sequence]:
        """Starts steps while a step slot is free, then reads the oldest; returns the sequences that got a token."""
        self.step_called = time.perf_counter()
        try:
            if self.encoder:
                self._encode_part(self.encoder)
            if self.disk:
                self.disk.write_to_device(max(MIN_RESTORING, RESTORING_SHARE * self._step_seconds))
            while (step_slot := self._free_step_slot()) and (chunks := self.scheduler.schedule()):
                self._start(step_slot, chunks)
            if self._in_flight:
                return self._collect()
            if self.disk and self.scheduler.waiting:
                self.disk.wait_while_idle()
            return []
        except DeviceError:
            if self.disk:
                self.disk.saves = False  # what memory has may be wrong
            raise

    def _encode_part(self, encoder: ImageEncoder) -> None:
        """Encodes a part of the next image that a waiting request needs. Other requests run in between."""
        if self._encoding is None:
            images = (sequence.next_image for sequence in self.scheduler.waiting if sequence.images)
            image = next((image for image in images if image), None)
            if image is None:
                return
            self._encoding = image, encoder.encode_in_parts(image.pixels)
        (image, parts), self._encoding = self._encoding, None  # an error ends it
        if (embeddings := next(parts)) is None:
            self._encoding = image, parts
        else:
            image.set_embeddings(embeddings)
            self.images.encoded += 1
            self.images.evict()

    def _free_step_slot(self) -> StepSlot | None:
        in_flight = self._in_flight
        if len(in_flight) == len(self.step_slots) or (in_flight and in_flight[-1].samples_on_host):
            return None
        for step_slot in self.step_slots:
            if step_slot not in in_flight:
                step_slot.started = time.perf_counter()  # scheduling is a part of the step
                return step_slot
        return None

    def _start(self, step_slot: StepSlot, chunks: list[Chunk]) -> None:
        step_slot.chunks = chunks
        step_slot.samples_on_host = self._any_logits_processor and any(
            chunk.sequence.request.params.logits_processor for chunk in chunks
        )
        try:
            step_slot.batch.write(chunks)
            step_slot.recording.start()
        except BaseException:  # also an interrupt: the other requests go on
            self.scheduler.undo(chunks)
            step_slot.batch.undo(chunks)
            step_slot.recording.finish()  # a part that did start may still read its inputs
            raise
        self._in_flight.append(step_slot)

    def _collect(self) -> list[Sequence]:
        """Waits for the oldest step in flight, and appends its sampled tokens; returns the sequences that got one."""
        step_slot = self._in_flight[0]
        step_slot.recording.finish()
        self._in_flight.popleft()
        before, self._last_finished = self._last_finished, time.perf_counter()
        chunks, self.num_steps = step_slot.chunks, self.num_steps + 1
        seconds: float | None = self._last_finished - max(step_slot.started, before)
        for chunk in chunks:
            if chunk.sequence.finish_reason is None:
                break
        else:  # all its requests have ended: nobody waited for the step, and it may have finished long ago
            seconds = None
        self._step_seconds = seconds or 0.0
        self.scheduler.complete(chunks, seconds)
        served, ended, batch, row = [], list[Sequence](), step_slot.batch, 0
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.scores:
                sequence.score_prompt(
                    chunk.begin, [batch.read_logprobs(row + i) for i in range(chunk.scores)]
                )
                row += chunk.scores
            if not chunk.samples_next:
                continue
            if sequence.finish_reason is None:  # else it ended meanwhile, and this token is dropped
                if step_slot.samples_on_host and sequence.request.params.logits_processor:
                    self._sample_on_host(sequence, batch, row)
                elif chunk.draft_tokens:
                    sampled = [batch.read(row + i, sequence) for i in range(1 + len(chunk.draft_tokens))]
                    accepted = accept_draft(sequence, sampled, chunk.draft_tokens)
                    self.scheduler.count_accepted(chunk, accepted)
                else:
                    sequence.append(batch.read(row, sequence))
                served.append(sequence)
                if sequence.finish_reason:
                    ended.append(sequence)
            row += 1 + len(chunk.draft_tokens)
        if self.draft_head:
            self.draft_head.store(chunks)
        for sequence in ended:
            self.scheduler.remove(sequence)
        if self.on_step and seconds is not None:
            self.on_step(chunks, seconds)
        return served

    def _sample_on_host(self, sequence: Sequence, batch: Batch, row: int) -> None:
        """Samples the next token of a sequence with a logits processor."""
        _, tensor = self.program.values["logits"]
        offset, nbytes = 4 * tensor.stride * row, 4 * self.model.config.vocab
        one = Tensor("logits", tensor.arena, "f32", nbytes, tensor.stride, offset, tensor)
        logits: Array = self.device.read(one).view(np.float32).copy()
        sampled = sample_on_host(sequence, logits, batch.inputs.params[row])
        if isinstance(sampled, RequestError):
            sequence.fail(sampled)
        else:
            sequence.append(sampled)

    def wait(self) -> None:
        """Waits until the device is idle. The next call of `step` reads the sampled tokens."""
        for step_slot in self._in_flight:
            step_slot.recording.finish()

    def out_of_memory(self, known: Iterable[Sequence]) -> None:
        """Ends all requests, after a step had no memory. `known`: some that the scheduler may have lost."""
        self.wait()
        self._in_flight.clear()
        for sequence in {*known, *self.scheduler.running, *self.scheduler.waiting}:
            if sequence.finish_reason is None:
                sequence.fail(OutOfMemoryError())
            self.scheduler.remove(sequence)

    # ---- out-of-band forwards: logits and activations of a text, computed between steps

    def logits(self, ids: list[int]) -> Array:
        """Returns the logits after each token (teacher-forced): float32 [len(ids), vocab]."""
        out = np.empty((len(ids), self.model.config.vocab), np.float32)
        for begin, count in self._forward(ids):
            self.step_slots[0].recording.replay()
            out[begin : begin + count] = self._read("logits", count)
        return out

    def capture(self, ids: list[int], names: Iterable[str]) -> dict[str, Array]:
        """Returns activations by name, for each token of `ids`."""
        parts = list(self.captured(ids, list(names)))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def captured(self, ids: list[int], names: list[str]) -> Iterator[dict[str, Array]]:
        """Yields activations by name, for `ids` in parts. Steps may run between two parts."""
        self.check_generates()
        unknown = [name for name in names if not isinstance(name, str) or name not in self.program.values]
        if unknown:
            raise RequestError(f"no intermediate {unknown[0]!r}: `LLM.intermediates` lists their names")
        launches, recording = self.program.launches, self.step_slots[0].recording
        needed = 1 + max(i for i, launch in enumerate(launches) if launch.buffers.keys() & {"cache", "state"})
        for _, count in self._forward(ids):
            done, part = 0, {}
            for name in sorted(names, key=lambda name: self.program.values[name][0]):
                index, _ = self.program.values[name]
                recording.replay(done, index + 1)
                done = index + 1
                part[name] = self._read(name, count)
            if done < needed:  # later tokens need the keys, values and states of these
                recording.replay(done, needed)
            yield part

    def _read(self, name: str, count: int) -> Array:
        tensor = self.program.values[name][1]
        memory = self.device.read(tensor)
        if tensor.dtype == "q8":
            return q8_unpack(memory.view(Q8_BLOCK).reshape(-1, tensor.stride // 32), count)
        first, end = tensor.columns
        return np.ndarray((count, end - first), np.float32, memory, strides=(4 * tensor.stride, 4)).copy()

    def _forward(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        """Writes StepInputs for parts of `ids`; yields (first token, count) for the caller to replay. Running sequences
        are preempted only if their KV blocks are needed."""
        self.check_generates()
        if len(ids) > self.context:
            raise ContextError(
                f"{len(ids)} tokens are more than the context of {self.context}: load with a larger one"
            )
        self.check_prompt(ids)
        rows, tables = self.scheduler.limits.logits_rows, self.cache.new_tables()
        images = self._shared_images(ids)
        if self.encoder:
            while self._encoding:  # the encoder has memory for one image at a time
                self._encode_part(self.encoder)
            self.encoder.encode_all(span.image for span in images)
        sequence = Sequence(
            ids, SamplingParams(), frozenset(), tables, table_row=self._out_of_band_row, images=images
        )
        begin = 0
        try:
            while begin < len(ids):
                with deferred():  # an interrupt must not lose tokens and blocks of running sequences
                    self.cache.free_outside_window(tables, begin)
                    while self._in_flight:
                        self._collect()
                    count = min(self.scheduler.max_out_of_band_tokens(), rows, len(ids) - begin)
                    count = whole_images(images, begin, count, rows)
                    if not count:
                        raise RequestError(f"an image has more than {rows} tokens: load with a larger batch")
                    self.scheduler.reserve_out_of_band(sequence, begin + count)
                    chunk = Chunk(sequence, begin, count, True)
                    self.scheduler.place_states(chunk)
                self.step_slots[0].batch.write_out_of_band(chunk)
                yield begin, count
                begin += count
        finally:
            with deferred():
                self.cache.free(tables)
                self.cache.free_states(sequence.kv.states)

    def check_prompt(self, ids: list[int]) -> None:
        """Raises RequestError if a prompt has no tokens, or some that the model does not know."""
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        if any(not 0 <= token < self.model.config.vocab for token in ids):
            raise RequestError(f"a token id is outside 0 to {self.model.config.vocab - 1}")

    # ---- statistics

    def stats(self) -> EngineStats:
        from tandem.engine.stats import read_stats

        return read_stats(self)

    def step_bytes(self, tokens: int, rows: int) -> float:
        """Returns the bytes that a decode step reads and writes, without keys and values of earlier positions."""
        counts = {"tokens": tokens, "rows": rows, "work": rows}
        return sum(launch.cost(counts).bytes for launch in self.program.launches)


def step_limits(model: Model, device: Device, context: int, batch: int, draft_rows: int) -> StepLimits:
    blocks = -(-context // KV_BLOCK)
    tokens = min(STEP_TOKENS if device.stages == 1 else SPLIT_STEP_TOKENS, blocks * KV_BLOCK)
    groups, vocab = len(model.config.windows), model.config.vocab
    return StepLimits(tokens, batch + draft_rows, batch + 1, blocks, groups, vocab)


def _make_step_slot(
    config: ModelConfig,
    device: Device,
    program: Program,
    layout: StepLayout,
    index: int,
    angles: SectionedAngles | None,
) -> StepSlot:
    inputs = StepInputs(layout, device.memory(arena_in(index, "step")))
    results = device.memory(arena_in(index, "results"))[: layout.result_bytes].view(np.int32)
    kv_heads = config.kv_heads or 1  # a model without attention has none
    min_items = -(-ITEMS_PER_WORKER * device.workers // kv_heads) if device.workers > 1 else 1
    queries_per_kv_head = config.q_heads // kv_heads or 1
    batch = Batch(index, inputs, results.reshape(-1, RESULT_INTS), queries_per_kv_head, min_items, angles)
    return StepSlot(batch, device.record(program, index))
