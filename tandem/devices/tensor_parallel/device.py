"""A main device that shares its matmuls (`columns`, `columns-overlapped`) or its attention (`npu-attention`) with
accelerators.

The main device holds the whole model, so it runs a step alone where partitioning does not pay. The engine sees one
device. `columns-overlapped` is `columns` with two steps in flight: the main device runs one step while the accelerators
compute their partitions of the other; each step has its own activations.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from tandem.devices import device as devices
from tandem.devices.device import Bytes, Device, WeightRows
from tandem.devices.tensor_parallel.accelerator import (
    MAX_RECENT_TIMES,
    Accelerator,
    DeviceAccelerator,
    Partition,
    rows_bytes,
)
from tandem.devices.tensor_parallel.balance import Balance, Fixed
from tandem.devices.tensor_parallel.cut import Gemm, Work, attentions, gemms, moved_activations, put_columns
from tandem.devices.tensor_parallel.recording import SlotRecordings, TensorParallelRecording
from tandem.devices.tensor_parallel.segments import SegmentedStep, SegmentRunner
from tandem.errors import DeviceError
from tandem.kernels.abi import COUNTS, Q8_COLUMNS
from tandem.kernels.kernel import Counts
from tandem.kernels.layout import Layout
from tandem.program.program import Launch, Program, Tensor, arena_in
from tandem.program.weight_plan import align

MEASURED = 3  # runs of a partition when it is timed


class Mapped(Device, Protocol):
    """A device whose activations the host can address."""

    def view(self, tensor: Tensor) -> Bytes: ...


class TensorParallelDevice:
    holds_several_programs = False

    def __init__(
        self,
        main: Mapped,
        accelerators: Sequence[Accelerator],
        placement: str = "columns",
        fractions: Sequence[float] | None = None,
        only: Callable[[Gemm], bool] | None = None,
    ) -> None:
        """`fractions`: each device's fraction of a matmul's columns; None: from measured times. `only`: the matmuls
        that may be partitioned (int8_selection.py)."""
        if fractions is not None and (
            len(fractions) != 1 + len(accelerators) or min(fractions) < 0 or sum(fractions) <= 0
        ):
            raise DeviceError(
                f"split {','.join(map(str, fractions))}: give {1 + len(accelerators)} numbers, one per device"
            )
        self.main, self.accelerators, self.placement, self.fractions = (
            main,
            accelerators,
            placement,
            fractions,
        )
        self.devices = [
            main,
            *(
                accelerator.device
                for accelerator in accelerators
                if isinstance(accelerator, DeviceAccelerator)
            ),
        ]
        self.only = only or (lambda gemm: True)
        self.name = ",".join(
            [main.name.split()[0], *(accelerator.name.split()[0] for accelerator in accelerators)]
        )
        self.stages = 2 if placement == "columns-overlapped" else 1
        self.step_slots = (
            2 if placement == "columns-overlapped" else 1 if placement == "npu-attention" else main.step_slots
        )
        self.whole = placement != "npu-attention"  # the main device can run a whole step alone
        self.shares_memory, self.loaders, self.workers = main.shares_memory, main.loaders, main.workers
        self.works: list[Work] = []
        self.runner: SegmentRunner | None = None
        self.balances: dict[int, Balance | Fixed] = {}  # by bucket of tokens
        self._program = Program([], {}, {})
        self._slot_recordings: dict[int, SlotRecordings] = {}
        # Begin and end of recent partitions of the main device.
        self.times: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT_TIMES)
        self._ended = 0.0

    def with_accelerator(self, accelerator: Accelerator) -> TensorParallelDevice:
        """Returns a device with one more accelerator; no model is placed yet."""
        if not self.whole or self.fractions is not None:
            raise DeviceError(
                "the NPU needs measured partitions: use --placement columns or columns-overlapped, and no --split"
            )
        return TensorParallelDevice(
            self.main, [*self.accelerators, accelerator], self.placement, None, self.only
        )

    def describe(self) -> str:
        kind = {
            "columns": "columns of matmuls",
            "columns-overlapped": "columns of matmuls, two steps in flight,",
        }
        said = f"{kind.get(self.placement, 'attention')} on {' and '.join(h.describe() for h in self.accelerators)}"
        divisions = [
            f"{bucket} tokens: {self._said(balance)}" for bucket, balance in sorted(self.balances.items())
        ]
        return f"{self.main.describe()}; {said}" + (f" ({'; '.join(divisions)})" if divisions else "")

    def _said(self, balance: Balance | Fixed) -> str:
        if isinstance(balance, Fixed) and not self.whole:
            per_step = 1e3 / max(1, balance.steps)
            elsewhere = per_step * (balance.seconds - balance.rest)
            return f"attention took {elsewhere:.2f} of {per_step * balance.seconds:.2f} ms"
        if not balance.on:
            return "not measured" if balance.on is None else "it does not pay"
        units = [sum(n[i] for n in balance.cuts.values()) for i in range(1 + len(self.accelerators))]
        return "/".join(f"{100 * n / max(1, sum(units)):.0f}%" for n in units)

    # ---- memory

    def weight_layout(self, format: str, rows: int, columns: int) -> Layout:
        return self.main.weight_layout(format, rows, columns)

    def fast_head_dim(self, head_dim: int) -> int:
        return self.main.fast_head_dim(head_dim)

    def free_memory(self) -> tuple[float, float]:
        return self.main.free_memory()

    def allocate(self, program: Program) -> None:
        self._stop()
        self.works = gemms(program) if self.whole else attentions(program)
        self._program = program
        self._slot_recordings, self.balances = {}, {}
        sizes = dict(program.arena_bytes)
        used = align(sizes["activations"])
        scratch_bytes = max(
            (w.out.nbytes for w in self.works if isinstance(w, Gemm) and w.out.dtype == "q8"), default=0
        )
        # Bytes between the activations of two step slots.
        self._slot_stride = used + align(scratch_bytes) if self.stages > 1 else 0
        self._scratch_range, sizes["activations"] = (
            (used, scratch_bytes),
            (used + align(scratch_bytes)) * self.stages,
        )
        if not self.whole:
            sizes["kv"] = 0
        launches = [launch for step_slot in range(self.stages) for launch in self._main_launches(step_slot)]
        for accelerator in self.accelerators:
            accelerator.allocate(self.works, program, copies=self.stages > 1)
        self.main.allocate(Program(launches, program.max_counts, sizes))
        self.runner = SegmentRunner(self._run_segment, behind=self.stages > 1)

    def _main_launches(self, step_slot: int) -> list[Launch]:
        """Returns all launches that the main device may run in a step slot. `allocate` needs them: a tensor must not be
        split."""
        tensor_map, scratch = moved_activations(step_slot * self._slot_stride), self._scratch(step_slot)
        offloaded = set() if self.whole else {i for work in self.works for i in range(work.begin, work.end)}
        launches = [
            tensor_map.launch(launch) for i, launch in enumerate(self._program.launches) if i not in offloaded
        ]
        for work in self.works:
            if isinstance(work, Gemm) and work.out.dtype == "q8" and scratch:
                whole = tensor_map.launch(work.launch)
                launches.append(work.partition(0, work.units, dict(whole.buffers), scratch))
        return launches

    def _scratch(self, step_slot: int) -> Tensor | None:
        begin, nbytes = self._scratch_range
        if not nbytes:
            return None
        return Tensor(
            "scratch", "activations", "q8", nbytes, Q8_COLUMNS, begin + step_slot * self._slot_stride
        )

    def memory(self, arena: str) -> Bytes:
        return self.main.memory(arena)

    def read(self, tensor: Tensor) -> Bytes:
        if offloaded := self._find_offloaded(tensor):
            return offloaded[0].device.read(offloaded[1])
        return self.main.read(tensor)

    def write(self, tensor: Tensor, data: Bytes) -> None:
        if offloaded := self._find_offloaded(tensor):
            offloaded[0].device.write(offloaded[1], data)
        else:
            self.main.write(tensor, data)

    def _find_offloaded(self, tensor: Tensor) -> tuple[DeviceAccelerator, Tensor] | None:
        """Returns the accelerator that holds a KV cache, and the tensor there; None: the main device holds it."""
        accelerator = self.accelerators[0]
        if tensor.arena != "kv" or self.whole or not isinstance(accelerator, DeviceAccelerator):
            return None
        mapped = accelerator.mapped(tensor)
        return (accelerator, mapped) if mapped else None

    def repack(self, rows: Sequence[WeightRows]) -> None:
        self.main.repack(rows)

    def _load(self) -> None:
        """Copies the weights of each Work from the main device to its accelerators."""
        for index, work in enumerate(self.works):
            eligible = self.eligible(work)[1:]
            if not any(eligible):
                continue
            constants = {
                name: self.main.read(tensor)
                for launch in work.launches
                for name, tensor in launch.buffers.items()
                if tensor is not None and tensor.arena == "weights"
            }
            for accelerator, may in zip(self.accelerators, eligible, strict=True):
                if may:
                    accelerator.load(index, constants)

    # ---- running

    def step_program(self, program: Program, counts: Counts, single: bool) -> Program:
        """Returns the launches of a step that the main device runs alone."""
        return self.main.step_program(program, counts, single)

    def record(self, program: Program, step_slot: int = 0) -> TensorParallelRecording:
        if not self._slot_recordings:
            self._load()
        tensor_map = moved_activations(step_slot * self._slot_stride)
        self._slot_recordings[step_slot] = SlotRecordings(
            self, program, step_slot, tensor_map, self._scratch(step_slot if self.stages > 1 else 0)
        )
        return TensorParallelRecording(self, self._slot_recordings[step_slot])

    def record_main(self, launches: Sequence[Launch], step_slot: int) -> devices.Recording:
        return self.main.record(Program(list(launches), self._program.max_counts, {}), step_slot)

    def tokens(self, step_slot: int) -> int:
        step = self.main.memory(arena_in(step_slot, "step"))
        return int(step[:4].view(np.int32)[COUNTS.index("tokens")])

    def balance(self, tokens: int) -> Balance | Fixed:
        bucket = 1 << max(tokens - 1, 0).bit_length()
        if bucket not in self.balances:
            if self.fractions is not None or not self.whole:
                self.balances[bucket] = Fixed(self.fractions or (1,))
            else:
                works = [(work, self.eligible(work)) for work in self.works if isinstance(work, Gemm)]
                self.balances[bucket] = Balance(works, overlaps_steps=self.stages > 1)
        return self.balances[bucket]

    def eligible(self, work: Work) -> tuple[bool, ...]:
        if not isinstance(work, Gemm):
            return False, True
        may = self.only(work)
        return (True, *(may and accelerator.supports(work) for accelerator in self.accelerators))

    def _run_segment(self, step: SegmentedStep) -> bool:
        recordings, balance = self._slot_recordings[step.step_slot], self.balance(step.tokens)
        if step.segment == 0:
            if step.kind == "measure":
                balance.measure(lambda *what: self._measure(recordings, step.tokens, *what), step.tokens)
                step.kind = "together" if balance.on else "alone"
            step.begun = time.perf_counter()  # measuring does not count as part of the step
        if step.kind in ("off", "alone"):
            assert recordings.alone is not None
            recordings.alone.replay()
            if step.kind == "alone":
                self._observe_step(step, balance)
            return True
        if step.segment:
            self._gather(recordings, step, balance)
        begun = time.perf_counter()
        recording = recordings.between[step.segment]
        if recording:
            recording.replay()
        step.rest += time.perf_counter() - begun
        if step.segment == len(self.works):
            self._observe_step(step, balance)
            return True
        self._divide(recordings, step, balance)
        step.segment += 1
        return False

    def _observe_step(self, step: SegmentedStep, balance: Balance | Fixed) -> None:
        now = time.perf_counter()
        seconds, self._ended = now - max(step.begun, self._ended), now
        if not step.first:
            balance.observe_step(step.tokens, seconds, step.rest, step.kind == "together")

    def _divide(self, recordings: SlotRecordings, step: SegmentedStep, balance: Balance | Fixed) -> None:
        """Submits each accelerator's partition of the segment's Work, and computes the main device's own."""
        work = self.works[step.segment]
        eligible = self.eligible(work)
        cut = balance.division(work, eligible) if isinstance(work, Gemm) else (0, 1)
        step.first |= recordings.is_new(step.segment, cut)
        inputs: list[Bytes] | None = None
        first = cut[0]
        for worker, (accelerator, count) in enumerate(zip(self.accelerators, cut[1:], strict=True), 1):
            if count:
                inputs = inputs or self._inputs(recordings, work, step.tokens)
                future = accelerator.submit(
                    Partition(step.segment, first, count, step.tokens, inputs, self._step(step.step_slot))
                )
                step.waiting.append((worker, first, count, future))
                first += count
        if cut[0]:
            assert isinstance(work, Gemm)
            begun = time.perf_counter()
            recordings.partition(step.segment, cut[0])[0].replay()
            ended = time.perf_counter()
            if step.waiting:
                self.times.append((begun, ended))
            if not step.first:
                balance.observe(work, eligible, 0, cut[0], ended - begun)

    def _inputs(self, recordings: SlotRecordings, work: Work, tokens: int) -> list[Bytes]:
        tensors = [recordings.mapped(tensor) for tensor in work.entering]
        inputs = [self.main.read(replace(t, nbytes=rows_bytes(t, tokens))) for t in tensors]
        return [data.copy() for data in inputs] if self.stages > 1 or len(inputs) > 1 else inputs

    def _step(self, step_slot: int) -> Bytes:
        return self.main.memory(arena_in(step_slot, "step"))

    def _gather(self, recordings: SlotRecordings, step: SegmentedStep, balance: Balance | Fixed) -> None:
        """Copies the accelerators' results into the output, beside the main device's own columns."""
        waiting, step.waiting = step.waiting, []
        index = step.segment - 1
        work = self.works[index]
        for worker, first, count, future in waiting:
            result = future.result()
            if isinstance(work, Gemm):
                out = self.main.view(recordings.mapped(work.out))
                put_columns(out, work, step.tokens, *work.columns(first, count), result.outputs[0])
                if not step.first:
                    balance.observe(work, self.eligible(work), worker, count, result.ended - result.begun)
            else:
                for tensor, data in zip(work.leaving, result.outputs, strict=True):
                    self.main.write(recordings.mapped(tensor), data)
        own = waiting[0][1] if waiting else 0
        if isinstance(work, Gemm) and own and work.out.dtype == "q8":
            scratch = recordings.partition(index, own)[1]
            columns = work.columns(0, own)
            data = self.main.read(replace(scratch, nbytes=rows_bytes(scratch, step.tokens)))
            put_columns(self.main.view(recordings.mapped(work.out)), work, step.tokens, *columns, data)

    def _measure(self, recordings: SlotRecordings, tokens: int, gemm: Gemm, worker: int, units: int) -> float:
        """Measures `units` of a matmul on one device; returns the minimum seconds of several runs."""
        index = self.works.index(gemm)
        # Zeros: activations may hold garbage now.
        inputs = [np.zeros(rows_bytes(t, tokens), np.uint8) for t in gemm.entering]
        times = []
        for _ in range(MEASURED):
            if worker:
                partition = Partition(
                    index, gemm.units - units, units, tokens, inputs, self._step(recordings.step_slot)
                )
                result = self.accelerators[worker - 1].submit(partition).result()
                times.append(result.ended - result.begun)
            else:
                begun = time.perf_counter()
                recordings.partition(index, units)[0].replay()
                times.append(time.perf_counter() - begun)
        return min(times)

    def _stop(self) -> None:
        runner, self.runner = self.runner, None
        if runner:
            runner.stop()

    def beside(self) -> Device:
        raise NotImplementedError  # it holds one Program

    def close(self) -> None:
        self._stop()
        for accelerator in self.accelerators:
            accelerator.close()
        self.main.close()
