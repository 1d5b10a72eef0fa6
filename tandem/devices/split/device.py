"""Pipeline parallelism: several devices as one. Each device holds some of the layers; a step passes through all.

A step is on one device at a time, so there are as many steps in flight as devices, each with a part of the sequences.
The engine sees one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Semaphore

import numpy as np

from tandem.devices.device import Bytes, Device, WeightRows, validate_on
from tandem.devices.split.balance import balance
from tandem.devices.split.cut import OWN, ProgramPart, cut, layer_starts
from tandem.devices.split.stage import Stage, StagedStep, StepBuffers
from tandem.errors import DeviceError, DoesNotFitError
from tandem.interrupts import deferred
from tandem.kernels.kernel import Counts
from tandem.kernels.layout import Layout
from tandem.program.program import MAX_STEP_SLOTS, Program, Tensor, arena_in


class SplitDevice:
    shares_memory = False
    holds_several_programs = False

    def __init__(self, devices: Sequence[Device], split: Sequence[int] | None = None) -> None:
        """`split`: number of layers of each device; None: balanced by measured speed."""
        if len(devices) > MAX_STEP_SLOTS:
            raise DeviceError(f"{len(devices)} devices are more than {MAX_STEP_SLOTS}: name fewer")
        if split is not None and (len(split) != len(devices) or min(split) < 1):
            raise DeviceError(
                f"split {','.join(map(str, split))}: give {len(devices)} numbers, the layers of each device"
            )
        self.devices, self.split = devices, split
        self.name = ",".join(device.name.split()[0] for device in devices)
        self.step_slots = self.stages = len(devices)
        self.loaders = max(device.loaders for device in devices)
        self.workers = min(device.workers for device in devices)
        self._loading = [Semaphore(device.loaders) for device in devices]
        self.chain: list[Stage] = []  # stages in layer order
        self.latest = 0  # the stage that ran last, when launches are replayed in ranges
        self._buffers: list[StepBuffers] = []

    def describe(self) -> str:
        if not self.chain:
            return "; ".join(device.describe() for device in self.devices)
        return "; ".join(
            f"layers {stage.part.layers[0]} to {stage.part.layers[-1]} on {stage.device.describe()}"
            for stage in self.chain
        )

    # ---- memory

    def weight_layout(self, format: str, rows: int, columns: int) -> Layout:
        """Returns the layout of all devices: they run parts of one Program."""
        layout, *others = (device.weight_layout(format, rows, columns) for device in self.devices)
        if any(other != layout for other in others):
            raise DeviceError(
                f"{self.name} store {format} weights in different layouts: use one kind of device"
            )
        return layout

    def fast_head_dim(self, head_dim: int) -> int:
        return head_dim

    def free_memory(self) -> tuple[float, float]:
        """Returns the devices' own memory, plus the host memory counted once."""
        free = [(device.shares_memory, *device.free_memory()) for device in self.devices]
        own = sum(fast for shares, fast, _ in free if not shares)
        host = [nbytes if shares else nbytes - fast for shares, fast, nbytes in free]
        shared = max((fast for shares, fast, _ in free if shares), default=0.0)
        return own + shared, own + max(host)

    def allocate(self, program: Program) -> None:
        self._stop()
        starts = layer_starts(program)
        counts = self.split or self._balance(program, starts)
        if sum(counts) != len(starts):
            raise DeviceError(
                f"split {','.join(map(str, counts))}: the model has {len(starts)} layers, not {sum(counts)}"
            )
        parts = cut(program, starts, counts)
        self._check_fit(parts)
        for device, part in zip(self.devices, parts, strict=True):
            validate_on(device, part.program, part.entering)
            device.allocate(part.program)
        crossing = max(sum(tensor.nbytes for tensor in part.leaving) for part in parts)
        sizes = program.arena_bytes["step"], program.arena_bytes["results"], crossing
        self._buffers = [StepBuffers(*(np.zeros(n, np.uint8) for n in sizes)) for _ in range(self.step_slots)]
        self.chain = [Stage(device, part) for device, part in zip(self.devices, parts, strict=True)]
        for stage, after in zip(self.chain, [*self.chain[1:], None], strict=True):
            stage.start(after.inbox.put if after else lambda step: step.done.set())

    def _balance(self, program: Program, starts: Sequence[int]) -> list[int]:
        if len(starts) < len(self.devices):
            raise DeviceError(
                f"the model has {len(starts)} layers, too few for {len(self.devices)} devices: name fewer"
            )
        return balance(program, starts, self.devices)

    def _check_fit(self, parts: list[ProgramPart]) -> None:
        left = self.free_memory()[1]
        for device, part in zip(self.devices, parts, strict=True):
            free = min(device.free_memory()[1], left)
            if part.nbytes > free:
                raise DoesNotFitError(
                    f"layers {part.layers[0]} to {part.layers[-1]} take {part.nbytes / 1e9:.2f} GB, and "
                    f"{device.name} has {free / 1e9:.2f} GB free: give it fewer layers, or use a smaller context"
                )
            left -= part.nbytes

    def memory(self, arena: str) -> Bytes:
        for step_slot, buffers in enumerate(self._buffers):
            if arena == arena_in(step_slot, "step"):
                return buffers.step
            if arena == arena_in(step_slot, "results"):
                return buffers.results
        raise DeviceError(f"the host does not see the {arena} arena: report this")

    def read(self, tensor: Tensor) -> Bytes:
        stage = self._having(tensor)[0]
        return stage.device.read(stage.part.mapped(tensor))

    def write(self, tensor: Tensor, data: Bytes) -> None:
        for stage in self._having(tensor):
            stage.device.write(stage.part.mapped(tensor), data)

    def repack(self, rows: Sequence[WeightRows]) -> None:
        for stage, loading in zip(self.chain, self._loading, strict=True):
            mine = [
                each._replace(tensor=stage.part.mapped(each.tensor))
                for each in rows
                if each.tensor.root in stage.part.tensor_map
            ]
            if mine:
                with loading:
                    stage.device.repack(mine)

    def _having(self, tensor: Tensor) -> list[Stage]:
        """Returns the stages that hold a tensor: several hold a tied head or RoPE's table."""
        self._check_open()
        if tensor.arena in OWN:
            return [stage for stage in self.chain if tensor.root in stage.part.tensor_map]
        return [self.chain[-1 if tensor.arena == "output" else self.latest]]

    # ---- running

    def step_program(self, program: Program, counts: Counts, single: bool) -> Program:
        """Returns the launches of all stages, one after the other."""
        parts = [stage.device.step_program(stage.part.program, counts, single) for stage in self.chain]
        launches = [launch for part in parts for launch in part.launches]
        return replace(program, launches=launches) if launches else program

    def record(self, program: Program, step_slot: int = 0) -> SplitRecording:
        return SplitRecording(self, self._buffers[step_slot])

    def _check_open(self) -> None:
        if not self.chain:
            raise DeviceError("the devices are closed: open the model again")

    def _stop(self) -> None:
        stages, self.chain = self.chain, []
        for stage in stages:  # in order: each passes on its steps
            stage.stop()

    def beside(self) -> Device:
        raise NotImplementedError  # it holds one Program

    def close(self) -> None:
        self._stop()
        for device in self.devices:
            device.close()


class SplitRecording:
    """Passes the steps of one step slot through all stages."""

    def __init__(self, device: SplitDevice, buffers: StepBuffers) -> None:
        self.device, self.buffers = device, buffers
        self._step = StagedStep(buffers)
        self._step.done.set()

    def start(self) -> None:
        self.device._check_open()
        step, inbox = StagedStep(self.buffers), self.device.chain[0].inbox
        self._step = step
        try:
            inbox.put(step)
        except BaseException as interrupt:
            # The step may be queued already. A second one after it shows when it has passed.
            follower = StagedStep(self.buffers, interrupt)
            inbox.put(follower)
            follower.done.wait()
            step.done.set()
            raise

    def finish(self) -> None:
        with deferred():  # the next step would overwrite the inputs of this one
            self._step.done.wait()
        if self._step.error:
            raise self._step.error

    def replay(self, begin: int = 0, end: int | None = None) -> None:
        if (begin, end) == (0, None):
            with deferred():
                self.start()
                self.finish()
            return
        for i, stage in enumerate(self.device.chain):
            part = stage.part
            first, last = max(begin, part.begin), part.end if end is None else min(end, part.end)
            if first < last:
                self.device.latest = i
                if first == part.begin:
                    stage.copy_in(self.buffers)
                stage.recording.replay(first - part.begin, last - part.begin)
                if last == part.end:
                    stage.copy_out(self.buffers)

    def replay_timed(self) -> list[float]:
        seconds = []
        for stage in self.device.chain:
            stage.copy_in(self.buffers)
            seconds += stage.recording.replay_timed()
            stage.copy_out(self.buffers)
        return seconds
