"""A step as the engine sees it, and the Recordings of which its legs are made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tandem.devices import device as devices
from tandem.devices.hybrid.cut import Gemm, Moved
from tandem.devices.hybrid.flow import Trip
from tandem.errors import DeviceError
from tandem.interrupts import deferred
from tandem.program.program import Program, Tensor

if TYPE_CHECKING:
    from tandem.devices.hybrid.device import HybridDevice


class SlotRecordings:
    """The Recordings of a step_slot's legs."""

    def __init__(
        self, device: HybridDevice, program: Program, step_slot: int, moved: Moved, scratch: Tensor | None
    ) -> None:
        self.device, self.step_slot, self._moved, self._scratch = device, step_slot, moved, scratch
        self.program = Program(
            [moved.launch(launch) for launch in program.launches], program.max_counts, program.arena_bytes
        )
        self.alone = device.record_main(self.program.launches, step_slot) if device.whole else None
        ends = [*(work.begin for work in device.works), len(program.launches)]
        begins = [0, *(work.end for work in device.works)]
        self.between = [
            device.record_main(self.program.launches[begin:end], step_slot) if begin < end else None
            for begin, end in zip(begins, ends, strict=True)
        ]
        self._shares: dict[tuple[int, int], tuple[devices.Recording, Tensor]] = {}
        self._cuts: set[tuple[int, tuple[int, ...]]] = set()

    def here(self, tensor: Tensor) -> Tensor:
        return self._moved.here(tensor)

    def is_new(self, index: int, cut: tuple[int, ...]) -> bool:
        """Whether a work is divided so for the first time: devices have to record their shares then."""
        new = (index, cut) not in self._cuts
        self._cuts.add((index, cut))
        return new

    def share(self, index: int, count: int) -> tuple[devices.Recording, Tensor]:
        """The main device's first units of a matmul, and where their columns go: to their place, or, as int8 tiles that
        lie closer, aside. Recorded once for each division that has come up."""
        if (index, count) not in self._shares:
            gemm = self.device.works[index]
            assert isinstance(gemm, Gemm)
            whole, out = self.program.launches[gemm.begin], self.here(gemm.out)
            if gemm.out.dtype == "q8" and count < gemm.units:
                assert self._scratch is not None
                out = replace(self._scratch, stride=gemm.columns(0, count)[1])
            launch = gemm.share(0, count, dict(whole.buffers), out) if count < gemm.units else whole
            self._shares[index, count] = self.device.record_main([launch], self.step_slot), out
        return self._shares[index, count]


class Recording:
    """The steps of a step slot. Those that the main device does alone go straight to it while no other is in flight."""

    def __init__(self, device: HybridDevice, step_slot: SlotRecordings) -> None:
        self.device, self.step_slot = device, step_slot
        self._trip: Trip | None = None

    def start(self) -> None:
        device, tokens = self.device, self.device.tokens(self.step_slot.step_slot)
        flow = device.flow
        if flow is None:
            raise DeviceError("the devices are closed: open the model again")
        kind = device.balance(tokens).next()
        if kind == "off" and flow.idle:
            self._trip = None
            assert self.step_slot.alone is not None
            self.step_slot.alone.start()
            return
        trip = Trip(self.step_slot.step_slot, tokens, kind)
        try:
            self._trip = trip
            flow.add(trip)
        except BaseException:  # an interrupt, before or after
            flow.withdraw(trip)
            raise

    def finish(self) -> None:
        if self._trip is None:
            if self.step_slot.alone:
                self.step_slot.alone.finish()
            return
        with deferred():  # else the next step would overwrite what this one is still working on
            self._trip.done.wait()
        if self._trip.error:
            raise self._trip.error

    def replay(self, begin: int = 0, end: int | None = None) -> None:
        if (begin, end) == (0, None):
            with deferred():
                self.start()
                self.finish()
        elif self.step_slot.alone:
            self.step_slot.alone.replay(begin, end)
        else:
            raise DeviceError("values inside a step are not seen with --placement npu-attention: use another")

    def replay_timed(self) -> list[float]:
        if self.step_slot.alone:
            return self.step_slot.alone.replay_timed()
        raise DeviceError("launches are not timed one by one with --placement npu-attention: use another")
