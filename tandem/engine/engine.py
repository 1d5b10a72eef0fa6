"""The engine: a model compiled for a device, and the step that serves every request.

Load: ops -> fuse -> plan weights -> lower -> check on the null device -> allocate -> repack -> record.
Step: schedule -> write inputs -> start -> read the tokens of the step before. The host works while the device does.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tandem.devices.device import Device, Recording, validate_on
from tandem.engine.batch import Batch
from tandem.engine.kv_cache import KVCache
from tandem.engine.kv_plan import plan_kv
from tandem.engine.params import SamplingParams
from tandem.engine.prefill_budget import PrefillBudget
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Chunk, Sequence
from tandem.engine.speculation import Proposer, Speculator
from tandem.errors import ContextError, RequestError
from tandem.interrupts import deferred
from tandem.kernels.abi import KV_BLOCK, Q8_BLOCK, RESULT_INTS
from tandem.kernels.kernel import Array
from tandem.kernels.q8_tiles import q8_unpack
from tandem.model.model import Model
from tandem.program.fuse import PASSES, fuse
from tandem.program.lower import KVPlan, lower
from tandem.program.program import Program, Tensor, arena_in
from tandem.program.step_inputs import MAX_BIASES, StepInputs, StepLayout, StepLimits
from tandem.program.weight_plan import WeightPlan

if TYPE_CHECKING:
    from tandem.engine.structured_output import Constraint

STEP_TOKENS = 512  # of a step at most: a longer prompt takes several
SPLIT_STEP_TOKENS = 128  # where layers are split: a prompt's parts follow each other through the devices
ROWS_FOR_DRAFTS = 16
ITEMS_PER_WORKER = 2  # of attention, at least: with fewer some threads have twice the work of others


@dataclass(eq=False, slots=True)
class StepSlot:
    """What a step in flight has for itself."""

    batch: Batch
    recording: Recording
    chunks: list[Chunk] = field(default_factory=list)
    started: float = 0.0
    exclusive: bool = False  # nobody may write the logits before they are read


class Engine:
    def __init__(
        self, model: Model, device: Device, *, context: int, batch: int, kv: str = "f16",
        kv_memory: float | None = None, queue: int | None = None, share: bool = True,
        proposer: Proposer | None = None, passes: Iterable[str] = PASSES,
    ) -> None:  # fmt: skip
        """`kv`: what keys and values are stored as. `kv_memory`: bytes of the KV cache; None: a part of what is free.
        `queue`: requests that may wait. `share`: requests that begin alike compute that part once; a measurement may
        not want it. `proposer`: a source of draft tokens (speculation.py)."""
        self.model, self.device, self.context = model, device, context
        passes = tuple(passes)
        config = model.config
        blocks = -(-context // KV_BLOCK)
        tokens = min(STEP_TOKENS if device.stages == 1 else SPLIT_STEP_TOKENS, blocks * KV_BLOCK)
        rows = batch + (ROWS_FOR_DRAFTS if proposer else 0)
        limits = StepLimits(tokens, rows, batch + 1, blocks, len(config.windows), config.vocab)
        layout = StepLayout(limits)
        plan = WeightPlan(model.layouts(device.weight_layout))
        ops = fuse(model.ops(context), plan.layouts, passes)
        weight_bytes = model.nbytes(device.weight_layout)
        kv_blocks = plan_kv(
            config, limits, batch, weight_bytes, kv, device.free_memory(), kv_memory, device.step_slots
        )
        self.program: Program = lower(ops, plan, layout, KVPlan(kv_blocks, kv), passes)
        validate_on(device, self.program)
        device.place(self.program)
        model.load(plan, device, context)
        self.cache = KVCache(config.windows, kv_blocks)
        self.scheduler = Scheduler(
            limits, self.cache, prefill_budget=PrefillBudget(), queue=queue, share=share,
            speculator=Speculator(proposer) if proposer else None, stages=device.stages,
        )  # fmt: skip
        self._out_of_band_row = (
            self.scheduler.reserve_table_row()
        )  # for logits, capture and embeddings, whoever else is there
        self._use_step_slots(
            [self._make_step_slot(layout, step_slot) for step_slot in range(device.step_slots)]
        )

    def _use_step_slots(self, step_slots: list[StepSlot]) -> None:
        self.step_slots = step_slots
        self._in_flight: deque[StepSlot] = deque()  # steps that were started, oldest first
        self._done = 0.0  # when the last of them was finished
        self._processors = False  # some request had one
        self.watch: Callable[[list[Chunk], float], None] | None = None  # told of each step and its seconds
        self.begun = 0.0  # when `step` was called last

    def _make_step_slot(self, layout: StepLayout, step_slot: int) -> StepSlot:
        config = self.model.config
        inputs = StepInputs(layout, self.device.memory(arena_in(step_slot, "step")))
        results = self.device.memory(arena_in(step_slot, "results"))[: layout.result_bytes].view(np.int32)
        batch = Batch(
            step_slot, inputs, results.reshape(-1, RESULT_INTS), config.q_heads // config.kv_heads,
            -(-ITEMS_PER_WORKER * self.device.workers // config.kv_heads) if self.device.workers > 1 else 1,
        )  # fmt: skip
        return StepSlot(batch, self.device.record(self.program, step_slot))

    def submit(
        self, prompt: list[int], params: SamplingParams, stop_ids: frozenset[int] = frozenset()
    ) -> Sequence:
        """Queues a request; step() serves it until it has a finish_reason."""
        sequence = self.prepare(prompt, params, stop_ids)
        self.enqueue(sequence)
        return sequence

    def enqueue(self, sequence: Sequence) -> None:
        self._processors |= sequence.params.logits_processor is not None
        self.scheduler.add(sequence)

    def prepare(
        self, prompt: list[int], params: SamplingParams, stop_ids: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
    ) -> Sequence:  # fmt: skip
        """A request that has been checked but is not queued yet."""
        self._check_prompt(prompt)
        if len(prompt) >= self.context:
            raise ContextError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.context}, at least one of them for "
                f"the answer: shorten it, or use a larger context (up to {self.model.config.trained_context})"
            )
        if any(not 0 <= token < self.model.config.vocab for token in params.logit_bias):
            raise RequestError(f"logit_bias names a token outside 0 to {self.model.config.vocab - 1}")
        if len(params.logit_bias) > MAX_BIASES:
            raise RequestError(f"logit_bias has {len(params.logit_bias)} entries: give {MAX_BIASES} at most")
        banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
        if len(banned | stop_ids if params.min_tokens else banned) >= self.model.config.vocab:
            raise RequestError("logit_bias bans every token: leave one")
        max_tokens = self.context - len(prompt)
        return Sequence(prompt, params, stop_ids, self.cache.new_tables(), max_tokens, constraint=constraint)

    @property
    def max_sequences(self) -> int:
        """Sequences that may run at a time."""
        return self.scheduler.limits.sequences - 1  # one table row is for out-of-band forwards

    def step(self) -> list[Sequence]:
        """Starts steps while a step slot is free, then reads the oldest; returns the sequences that got a token."""
        self.begun = time.perf_counter()
        while (step_slot := self._free_step_slot()) and (chunks := self.scheduler.schedule()):
            self._start(step_slot, chunks)
        return self._collect() if self._in_flight else []

    def _free_step_slot(self) -> StepSlot | None:
        if self._in_flight and self._in_flight[-1].exclusive:
            return None
        for step_slot in self.step_slots:
            if step_slot not in self._in_flight:
                step_slot.started = time.perf_counter()  # scheduling is a part of the step
                return step_slot
        return None

    def _start(self, step_slot: StepSlot, chunks: list[Chunk]) -> None:
        step_slot.chunks = chunks
        step_slot.exclusive = self._processors and any(
            chunk.sequence.params.logits_processor for chunk in chunks
        )
        try:
            step_slot.batch.write(chunks)
            step_slot.recording.start()
        except BaseException:  # an interrupt, perhaps: others will go on
            self.scheduler.undo(chunks)
            step_slot.recording.finish()  # what did start may still read its inputs
            raise
        self._in_flight.append(step_slot)

    def _collect(self) -> list[Sequence]:
        """The sequences that the oldest step in flight gave a token, when it is done."""
        step_slot = self._in_flight[0]
        step_slot.recording.finish()
        self._in_flight.popleft()
        before, self._done = self._done, time.perf_counter()
        seconds = self._done - (step_slot.started if step_slot.started > before else before)
        # One whose requests have all ended may have been done long ago: nobody came to see.
        watched = any(chunk.sequence.finish_reason is None for chunk in step_slot.chunks)
        if watched:
            self.scheduler.observe(step_slot.chunks, seconds)
        served, batch, row = [], step_slot.batch, 0
        for chunk in step_slot.chunks:
            sequence = chunk.sequence
            if chunk.scores:
                sequence.prompt_scores[chunk.begin :] = [
                    batch.read_logprobs(row + i) for i in range(chunk.scores)
                ]
                row += chunk.scores
            if not chunk.sampled:
                continue
            sequence.in_flight_tokens -= 1
            if sequence.finish_reason is None:  # else it ended meanwhile, and this is a token too many
                if step_slot.exclusive and sequence.params.logits_processor:
                    self._process(sequence, batch, row)
                elif chunk.draft_tokens:
                    sampled = [batch.read(row + i, sequence) for i in range(1 + len(chunk.draft_tokens))]
                    self.scheduler.accept(chunk, sequence.extend(sampled, chunk.draft_tokens))
                else:
                    sequence.append(batch.read(row, sequence))
                served.append(sequence)
                if sequence.finish_reason:
                    self.scheduler.remove(sequence)
            row += 1 + len(chunk.draft_tokens)
        if self.watch and watched:
            self.watch(step_slot.chunks, seconds)
        return served

    def _process(self, sequence: Sequence, batch: Batch, row: int) -> None:
        """The next token of a sequence with a logits processor, sampled here."""
        from tandem.engine.processor import process

        _, tensor = self.program.values["logits"]
        offset, nbytes = 4 * tensor.stride * row, 4 * self.model.config.vocab
        one = Tensor("logits", tensor.arena, "f32", nbytes, tensor.stride, offset, tensor)
        logits: Array = self.device.read(one).view(np.float32).copy()
        sampled = process(sequence, logits, batch.inputs.params[row])
        if isinstance(sampled, RequestError):
            sequence.fail(sampled)
        else:
            sequence.append(sampled)

    def cancel(self, sequence: Sequence) -> None:
        sequence.finish("cancelled")
        self.scheduler.remove(sequence)

    def wait(self) -> None:
        """Until nothing is running on the device; what was sampled is read by the next steps."""
        for step_slot in self._in_flight:
            step_slot.recording.finish()

    def logits(self, ids: list[int]) -> Array:
        """float32 [len(ids), vocab]: the logits after each token, teacher-forced."""
        out = np.empty((len(ids), self.model.config.vocab), np.float32)
        for begin, count in self._forced(ids):
            self.step_slots[0].recording.replay()
            out[begin : begin + count] = self._read("logits", count)
        return out

    def capture(self, ids: list[int], names: Iterable[str]) -> dict[str, Array]:
        """Named intermediates for each token of `ids`."""
        parts = list(self.captured(ids, list(names)))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def captured(self, ids: list[int], names: list[str]) -> Iterator[dict[str, Array]]:
        """Named intermediates of the next tokens of `ids`, each read when complete. Steps may be made in between."""
        unknown = [name for name in names if not isinstance(name, str) or name not in self.program.values]
        if unknown:
            raise RequestError(f"no intermediate {unknown[0]!r}: `LLM.intermediates` lists their names")
        launches, recording = self.program.launches, self.step_slots[0].recording
        needed = 1 + max(i for i, launch in enumerate(launches) if "cache" in launch.buffers)
        for _, count in self._forced(ids):
            done, part = 0, {}
            for name in sorted(names, key=lambda name: self.program.values[name][0]):
                index, _ = self.program.values[name]
                recording.replay(done, index + 1)
                done = index + 1
                part[name] = self._read(name, count)
            if done < needed:  # later tokens look back at these
                recording.replay(done, needed)
            yield part

    def _read(self, name: str, count: int) -> Array:
        tensor = self.program.values[name][1]
        memory = self.device.read(tensor)
        if tensor.dtype == "q8":
            return q8_unpack(memory.view(Q8_BLOCK).reshape(-1, tensor.stride // 32), count)
        first, end = tensor.columns
        return np.ndarray((count, end - first), np.float32, memory, strides=(4 * tensor.stride, 4)).copy()

    def _forced(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        """Writes StepInputs for parts of `ids`; yields (first token, count). Others keep their places if they can."""
        self._check_prompt(ids)
        if len(ids) > self.context:
            raise ContextError(
                f"{len(ids)} tokens are more than the context of {self.context}: load with a larger one"
            )
        rows, tables = self.scheduler.limits.rows, self.cache.new_tables()
        sequence = Sequence(ids, SamplingParams(), frozenset(), tables, table_row=self._out_of_band_row)
        try:
            while sequence.computed < len(ids):
                with deferred():  # others' tokens and blocks are at stake
                    self.cache.free_outside_window(tables, sequence.computed)
                    while self._in_flight:
                        self._collect()
                    count = min(self.scheduler.max_out_of_band_tokens(), rows, len(ids) - sequence.computed)
                    self.scheduler.reserve_out_of_band(sequence, sequence.computed + count)
                for table in tables:
                    table.written[0] = 0  # another guest may have written its own
                self.step_slots[0].batch.write_all_rows(Chunk(sequence, sequence.computed, count, True))
                yield sequence.computed, count
                sequence.computed += count
        finally:
            with deferred():
                self.cache.free(tables)

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        if any(not 0 <= token < self.model.config.vocab for token in ids):
            raise RequestError(f"a token id is outside 0 to {self.model.config.vocab - 1}")
