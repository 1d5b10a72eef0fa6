"""A main device, and helpers with shares of its matmuls (`columns`, `pipeline`) or its attention (`npu-attention`).

The main device has the whole model and can do without the others: it does where they do not pay. The engine sees a
device like any other. `pipeline` is `columns` with two steps in flight: the main device runs one while helpers have the
other's shares, and each has activations of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from tandem.devices import device as devices
from tandem.devices.device import Bytes, Device, Piece
from tandem.devices.hybrid.accelerator import KEPT, Accelerator, DeviceAccelerator, Share, rows_bytes
from tandem.devices.hybrid.balance import Balance, Fixed
from tandem.devices.hybrid.cut import Gemm, Work, attentions, gemms, moved_activations, put_columns
from tandem.devices.hybrid.flow import Flow, Trip
from tandem.devices.hybrid.recording import Recording, SlotRecordings
from tandem.errors import DeviceError
from tandem.kernels.kernel import COUNTS
from tandem.kernels.panels import Q8_COLUMNS
from tandem.program.program import Launch, Program, Tensor, arena_in
from tandem.program.weight_plan import align

MEASURED = 3  # times that a share is run to know how long it takes


class Mapped(Device, Protocol):
    """A device whose activations the host sees."""

    def view(self, tensor: Tensor) -> Bytes: ...


class HybridDevice:
    def __init__(
        self, main: Mapped, helpers: Sequence[Accelerator], placement: str = "columns",
        shares: Sequence[float] | None = None, only: Callable[[Gemm], bool] | None = None,
    ) -> None:  # fmt: skip
        """`shares`: of each device in a matmul's columns; None: by measured times. `only`: the matmuls that helpers may
        take a share in (gate.py)."""
        if shares is not None and (len(shares) != 1 + len(helpers) or min(shares) < 0 or sum(shares) <= 0):
            raise DeviceError(
                f"split {','.join(map(str, shares))}: give {1 + len(helpers)} numbers, a share of each device"
            )
        self.main, self.helpers, self.placement, self.shares = main, helpers, placement, shares
        self.devices = [main, *(helper.device for helper in helpers if isinstance(helper, DeviceAccelerator))]
        self.only = only or (lambda gemm: True)
        self.name = ",".join([main.name.split()[0], *(helper.name.split()[0] for helper in helpers)])
        self.stages = 2 if placement == "pipeline" else 1
        self.step_slots = (
            2 if placement == "pipeline" else 1 if placement == "npu-attention" else main.step_slots
        )
        self.whole = placement != "npu-attention"  # the main device can run a step alone
        self.shares_memory, self.loaders, self.workers = main.shares_memory, main.loaders, main.workers
        self.works: list[Work] = []
        self.flow: Flow | None = None
        self.balances: dict[int, Balance | Fixed] = {}  # by bucket of tokens
        self._program = Program([], {}, {})
        self._slot_recordings: dict[int, SlotRecordings] = {}
        self.times: deque[tuple[float, float]] = deque(
            maxlen=KEPT
        )  # when the main device had shares of its own
        self._ended = 0.0

    def joined_by(self, helper: Accelerator) -> HybridDevice:
        """With another helper, before a model is placed."""
        if not self.whole or self.shares is not None:
            raise DeviceError(
                "the NPU takes shares that are measured: use --placement columns or pipeline, and no --split"
            )
        return HybridDevice(self.main, [*self.helpers, helper], self.placement, None, self.only)

    def describe(self) -> str:
        kind = {"columns": "columns of matmuls", "pipeline": "columns of matmuls, a step behind the other,"}
        said = (
            f"{kind.get(self.placement, 'attention')} on {' and '.join(h.describe() for h in self.helpers)}"
        )
        found = [
            f"{bucket} tokens: {self._said(balance)}" for bucket, balance in sorted(self.balances.items())
        ]
        return f"{self.main.describe()}; {said}" + (f" ({'; '.join(found)})" if found else "")

    def _said(self, balance: Balance | Fixed) -> str:
        if isinstance(balance, Fixed) and not self.whole:
            per_step = 1e3 / max(1, balance.steps)
            elsewhere = per_step * (balance.seconds - balance.rest)
            return f"attention took {elsewhere:.2f} of {per_step * balance.seconds:.2f} ms"
        if not balance.on:
            return "not measured" if balance.on is None else "it does not pay"
        units = [sum(n[i] for n in balance.cuts.values()) for i in range(1 + len(self.helpers))]
        return "/".join(f"{100 * n / max(1, sum(units)):.0f}%" for n in units)

    # ---- memory

    def free_memory(self) -> tuple[float, float]:
        return self.main.free_memory()

    def place(self, program: Program) -> None:
        self._stop()
        self.works = gemms(program) if self.whole else attentions(program)
        self._program = program
        self._slot_recordings, self.balances = {}, {}
        sizes = dict(program.arena_bytes)
        used = align(sizes["activations"])
        aside = max(
            (w.out.nbytes for w in self.works if isinstance(w, Gemm) and w.out.dtype == "q8"), default=0
        )
        self._apart = (
            used + align(aside) if self.stages > 1 else 0
        )  # from one step_slot's activations to the next's
        self._aside, sizes["activations"] = (used, aside), (used + align(aside)) * self.stages
        if not self.whole:
            sizes["kv"] = 0
        launches = [launch for step_slot in range(self.stages) for launch in self._main_launches(step_slot)]
        for helper in self.helpers:
            helper.place(self.works, program, copies=self.stages > 1)
        self.main.place(Program(launches, program.max_counts, sizes))
        self.flow = Flow(self._leg, behind=self.stages > 1)

    def _main_launches(self, step_slot: int) -> list[Launch]:
        """All that the main device may run in a step_slot: it is told, so that each tensor lies in one piece."""
        moved, scratch = moved_activations(step_slot * self._apart), self._scratch(step_slot)
        lent = set() if self.whole else {i for work in self.works for i in range(work.begin, work.end)}
        launches = [moved.launch(launch) for i, launch in enumerate(self._program.launches) if i not in lent]
        for work in self.works:
            if isinstance(work, Gemm) and work.out.dtype == "q8" and scratch:
                whole = moved.launch(work.launch)
                launches.append(work.share(0, work.units, dict(whole.buffers), scratch))
        return launches

    def _scratch(self, step_slot: int) -> Tensor | None:
        begin, nbytes = self._aside
        if not nbytes:
            return None
        return Tensor("aside", "activations", "q8", nbytes, Q8_COLUMNS, begin + step_slot * self._apart)

    def memory(self, arena: str) -> Bytes:
        return self.main.memory(arena)

    def read(self, tensor: Tensor) -> Bytes:
        found = self._lent(tensor)
        if found:
            return found[0].device.read(found[1])
        return self.main.read(tensor)

    def write(self, tensor: Tensor, data: Bytes) -> None:
        found = self._lent(tensor)
        if found:
            found[0].device.write(found[1], data)
        else:
            self.main.write(tensor, data)

    def _lent(self, tensor: Tensor) -> tuple[DeviceAccelerator, Tensor] | None:
        """Where a KV cache is, if not on the main device."""
        helper = self.helpers[0]
        if tensor.arena != "kv" or self.whole or not isinstance(helper, DeviceAccelerator):
            return None
        here = helper.here(tensor)
        return (helper, here) if here else None

    def repack(self, pieces: Sequence[Piece]) -> None:
        self.main.repack(pieces)

    def _load(self) -> None:
        """Gives helpers the constants of their works, as the main device has them."""
        for index, work in enumerate(self.works):
            takers = self.takers(work)[1:]
            if not any(takers):
                continue
            constants = {
                name: self.main.read(tensor)
                for launch in work.launches
                for name, tensor in launch.buffers.items()
                if tensor is not None and tensor.arena == "weights"
            }
            for helper, taker in zip(self.helpers, takers, strict=True):
                if taker:
                    helper.load(index, constants)

    # ---- running

    def record(self, program: Program, step_slot: int = 0) -> Recording:
        if not self._slot_recordings:
            self._load()
        moved = moved_activations(step_slot * self._apart)
        self._slot_recordings[step_slot] = SlotRecordings(
            self, program, step_slot, moved, self._scratch(step_slot if self.stages > 1 else 0)
        )
        return Recording(self, self._slot_recordings[step_slot])

    def record_main(self, launches: Sequence[Launch], step_slot: int) -> devices.Recording:
        return self.main.record(Program(list(launches), self._program.max_counts, {}), step_slot)

    def tokens(self, step_slot: int) -> int:
        step = self.main.memory(arena_in(step_slot, "step"))
        return int(step[:4].view(np.int32)[COUNTS.index("tokens")])

    def balance(self, tokens: int) -> Balance | Fixed:
        bucket = 1 << max(tokens - 1, 0).bit_length()
        if bucket not in self.balances:
            if self.shares is not None or not self.whole:
                self.balances[bucket] = Fixed(self.shares or (1,))
            else:
                works = [(work, self.takers(work)) for work in self.works if isinstance(work, Gemm)]
                self.balances[bucket] = Balance(works, beside=self.stages > 1)
        return self.balances[bucket]

    def takers(self, work: Work) -> tuple[bool, ...]:
        if not isinstance(work, Gemm):
            return False, True
        may = self.only(work)
        return (True, *(may and helper.takes(work) for helper in self.helpers))

    def _leg(self, trip: Trip) -> bool:
        step_slot, balance = self._slot_recordings[trip.step_slot], self.balance(trip.tokens)
        if trip.leg == 0:
            if trip.kind == "measure":
                balance.measure(lambda *what: self._measure(step_slot, trip.tokens, *what), trip.tokens)
                trip.kind = "together" if balance.on else "alone"
            trip.begun = time.perf_counter()  # what was measured is no part of the step
        if trip.kind in ("off", "alone"):
            assert step_slot.alone is not None
            step_slot.alone.replay()
            if trip.kind == "alone":
                self._observe_step(trip, balance)
            return True
        if trip.leg:
            self._gather(step_slot, trip, balance)
        begun = time.perf_counter()
        recording = step_slot.between[trip.leg]
        if recording:
            recording.replay()
        trip.rest += time.perf_counter() - begun
        if trip.leg == len(self.works):
            self._observe_step(trip, balance)
            return True
        self._divide(step_slot, trip, balance)
        trip.leg += 1
        return False

    def _observe_step(self, trip: Trip, balance: Balance | Fixed) -> None:
        now = time.perf_counter()
        seconds, self._ended = now - max(trip.begun, self._ended), now
        if not trip.first:
            balance.observe_step(trip.tokens, seconds, trip.rest, trip.kind == "together")

    def _divide(self, step_slot: SlotRecordings, trip: Trip, balance: Balance | Fixed) -> None:
        """Gives each helper its share of the leg's work, and does the main device's."""
        work = self.works[trip.leg]
        takers = self.takers(work)
        cut = balance.division(work, takers) if isinstance(work, Gemm) else (0, 1)
        trip.first |= step_slot.is_new(trip.leg, cut)
        inputs: list[Bytes] | None = None
        first = cut[0]
        for worker, (helper, count) in enumerate(zip(self.helpers, cut[1:], strict=True), 1):
            if count:
                inputs = inputs or self._inputs(step_slot, work, trip.tokens)
                answer = helper.submit(
                    Share(trip.leg, first, count, trip.tokens, inputs, self._step(trip.step_slot))
                )
                trip.waiting.append((worker, first, count, answer))
                first += count
        if cut[0]:
            assert isinstance(work, Gemm)
            begun = time.perf_counter()
            step_slot.share(trip.leg, cut[0])[0].replay()
            ended = time.perf_counter()
            if trip.waiting:
                self.times.append((begun, ended))
            if not trip.first:
                balance.observe(work, takers, 0, cut[0], ended - begun)

    def _inputs(self, step_slot: SlotRecordings, work: Work, tokens: int) -> list[Bytes]:
        tensors = [step_slot.here(tensor) for tensor in work.entering]
        found = [self.main.read(replace(t, nbytes=rows_bytes(t, tokens))) for t in tensors]
        return [data.copy() for data in found] if self.stages > 1 or len(found) > 1 else found

    def _step(self, step_slot: int) -> Bytes:
        return self.main.memory(arena_in(step_slot, "step"))

    def _gather(self, step_slot: SlotRecordings, trip: Trip, balance: Balance | Fixed) -> None:
        """The answers, beside the main device's own columns."""
        waiting, trip.waiting = trip.waiting, []
        index = trip.leg - 1
        work = self.works[index]
        for worker, first, count, answer in waiting:
            found = answer.result()
            if isinstance(work, Gemm):
                out = self.main.view(step_slot.here(work.out))
                put_columns(out, work, trip.tokens, *work.columns(first, count), found.outputs[0])
                if not trip.first:
                    balance.observe(work, self.takers(work), worker, count, found.ended - found.begun)
            else:
                for tensor, data in zip(work.leaving, found.outputs, strict=True):
                    self.main.write(step_slot.here(tensor), data)
        own = waiting[0][1] if waiting else 0
        if isinstance(work, Gemm) and own and work.out.dtype == "q8":
            aside = step_slot.share(index, own)[1]
            columns = work.columns(0, own)
            data = self.main.read(replace(aside, nbytes=rows_bytes(aside, trip.tokens)))
            put_columns(self.main.view(step_slot.here(work.out)), work, trip.tokens, *columns, data)

    def _measure(self, step_slot: SlotRecordings, tokens: int, gemm: Gemm, worker: int, units: int) -> float:
        """Seconds of some of a matmul on one device: the best of some, for other work only makes it longer."""
        index = self.works.index(gemm)
        inputs = [
            np.zeros(rows_bytes(t, tokens), np.uint8) for t in gemm.entering
        ]  # memory may hold anything
        times = []
        for _ in range(MEASURED):
            if worker:
                share = Share(
                    index, gemm.units - units, units, tokens, inputs, self._step(step_slot.step_slot)
                )
                found = self.helpers[worker - 1].submit(share).result()
                times.append(found.ended - found.begun)
            else:
                begun = time.perf_counter()
                step_slot.share(index, units)[0].replay()
                times.append(time.perf_counter() - begun)
        return min(times)

    def _stop(self) -> None:
        flow, self.flow = self.flow, None
        if flow:
            flow.stop()

    def close(self) -> None:
        self._stop()
        for helper in self.helpers:
            helper.close()
        self.main.close()
