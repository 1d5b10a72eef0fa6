"""Executes a GemmPlan word by word in NumPy. Emulated; not yet run on a Phoenix.

A checker, never a device to time. Streams have no buffers of their own: words move when the source and all destinations
are ready, so what is free of deadlocks here stays so with the few words that the real switches hold. Every part runs as
far as its locks let it before another does, so that a lock which lets it too far shows as an overrun.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from tandem.devices.npu import kernels
from tandem.devices.npu.array import (
    PARAMETERS,
    WORD,
    Command,
    CoreProgram,
    Descriptor,
    Port,
    Push,
    Route,
    Set,
    Tile,
    Use,
    Wait,
    Write,
    words,
)
from tandem.devices.npu.constraints import LOCK_VALUE, MEMORY
from tandem.devices.npu.operands import Words, c_of_words, words_of_a, words_of_b
from tandem.devices.npu.plan import IN_FLIGHT, GemmPlan
from tandem.errors import EmulationError

Order = Literal["upstream", "downstream"] | int
Steps = Iterator[bool]  # whether the part got on; ends when its work is done
NEVER_WRITTEN = 0xA5A5A5A5  # what memory holds before anything is in it


def emulate(
    plan: GemmPlan, a: npt.NDArray[np.int8], b: npt.NDArray[np.int8], order: Order = "upstream"
) -> npt.NDArray[np.signedinteger]:
    """The M x N output of the plan, by an array that is configured for it.

    `order`: which parts run first, the ones nearer the inputs or nearer the output; a number mixes them by that seed.
    """
    found = EmulatedArray(plan, order).dispatch(plan, words_of_a(plan, a), words_of_b(plan, b))
    return c_of_words(plan, found)


@dataclass
class _Object:
    """A buffer. One of a tile goes free, filling, filled, draining, free; an argument in DRAM has no states."""

    name: str
    tile: Tile | None
    words: Words
    state: str = "free"

    def transition(self, tile: Tile, before: str, after: str) -> None:
        if self.tile is None:
            return
        if self.state != before:
            raise EmulationError(tile, f"{self.name} is {self.state} where it must be {before}: an overrun")
        self.state = after


@lru_cache(maxsize=64)
def _addresses(sizes: tuple[int, ...], strides: tuple[int, ...]) -> npt.NDArray[np.intp] | None:
    """The words a descriptor touches, in order; None when they are 0, 1, 2 and so on."""
    if len(sizes) == 1 and strides[0] == 1:
        return None
    stream = np.zeros(1, np.intp)
    for size, stride in zip(sizes, strides, strict=True):
        stream = (np.arange(size, dtype=np.intp)[:, None] * stride + stream).reshape(-1)
    return stream


@lru_cache(maxsize=512)
def _whole(sizes: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    """Whether an address stream touches each of `size` words once."""
    stream = _addresses(sizes, strides)
    return words(sizes) == size and (stream is None or len(np.unique(stream)) == size)


class _Channel:
    """A DMA channel at a descriptor: the run it is in, and how far."""

    def __init__(self, array: EmulatedArray, port: Port) -> None:
        self.array, self.port, self.tile = array, port, port.tile
        self.left = 0  # words of the run
        self.states = ("filled", "draining", "free") if port.outgoing else ("free", "filling", "filled")

    def ready(self) -> bool:
        return self.left > 0 or self._begin()

    def _begin(self) -> bool:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _set(self, d: Descriptor) -> None:
        """Starts the next run of `d`."""
        target, start = self.array.objects[d.buffer], self.array.next_start(d)
        self.stream = _addresses(d.sizes, d.strides)
        last = start + sum((size - 1) * stride for size, stride in zip(d.sizes, d.strides, strict=True))
        if last >= len(target.words):
            raise EmulationError(self.port, f"descriptor {d.number} runs past the end of {d.buffer}")
        if target.tile and not (start == 0 and _whole(d.sizes, d.strides, len(target.words))):
            raise EmulationError(
                self.port, f"descriptor {d.number} does not move each word of {d.buffer} once"
            )
        target.transition(self.tile, self.states[0], self.states[1])
        self.descriptor, self.target, self.start, self.left = d, target, start, d.length

    def _here(self, count: int) -> slice | npt.NDArray[np.intp]:
        done = self.descriptor.length - self.left
        if self.stream is None:
            return slice(self.start + done, self.start + done + count)
        here = self.stream[done : done + count]
        return here + self.start if self.start else here

    def read(self, count: int) -> Words:
        return self.target.words[self._here(count)]

    def write(self, data: Words) -> None:
        here = self._here(len(data))
        if self.target.tile is None:
            self.array.note_output(self.port, here)
        self.target.words[here] = data

    def advance(self, count: int) -> None:
        self.left -= count
        if not self.left:
            self.target.transition(self.tile, self.states[1], self.states[2])
            self._end()


class _Ring(_Channel):
    """A channel of a core or memory tile: a chain of descriptors, for ever."""

    def __init__(self, array: EmulatedArray, port: Port, first: int) -> None:
        super().__init__(array, port)
        self.next = first

    def _begin(self) -> bool:
        d = self.array.descriptors[self.tile, self.next]
        if d.acquire and not self.array.acquire(self.tile, d.acquire):
            return False
        self._set(d)
        return True

    def _end(self) -> None:
        d = self.descriptor
        if d.release:
            self.array.release(self.tile, d.release)
        self.next = self.next if d.next is None else d.next


class _Queue(_Channel):
    """A channel of a shim: the tasks that the runtime sequence pushed."""

    def __init__(self, array: EmulatedArray, port: Port) -> None:
        super().__init__(array, port)
        self.tasks: deque[Push] = deque()
        self.run = 0
        self.tokens = 0

    def push(self, task: Push) -> None:
        if len(self.tasks) == IN_FLIGHT:
            raise EmulationError(self.port, f"its queue holds {IN_FLIGHT} tasks: an overrun")
        self.tasks.append(task)

    def _begin(self) -> bool:
        if not self.tasks:
            return False
        key = self.tile, self.tasks[0].descriptor
        if key not in self.array.written:
            raise EmulationError(self.port, f"descriptor {key[1]} was never written")
        d = self.array.written[key]
        if (d.buffer == "C") == self.port.outgoing:
            raise EmulationError(
                self.port, f"descriptor {d.number} is of {d.buffer}, which does not go this way"
            )
        self._set(d)
        return True

    def _end(self) -> None:
        self.run += 1
        if self.run > self.tasks[0].repeat:
            self.tokens += self.tasks.popleft().token
            self.run = 0


class EmulatedArray:
    """The whole array, configured for a plan; any plan of the same configuration can then be dispatched, and others
    after it."""

    def __init__(self, plan: GemmPlan, order: Order = "upstream") -> None:
        self.plan = plan
        self.locks = {(lock.tile, lock.number): lock.initial for lock in plan.locks}
        self.waits: dict[Tile, Use] = {}
        self.descriptors = {(d.tile, d.number): d for d in plan.descriptors}
        self.written: dict[tuple[Tile, int], Descriptor] = {}
        self.runs: dict[tuple[Tile, int], int] = {}
        self.objects: dict[str, _Object] = {}
        memories = {
            tile: np.full(MEMORY[tile.kind] // WORD, NEVER_WRITTEN, np.uint32)
            for tile in {b.tile for b in plan.buffers}
            if tile
        }
        for b in plan.buffers:
            if b.tile and b.offset + b.bytes > MEMORY[b.tile.kind]:
                raise EmulationError(b.tile, f"{b.name} runs past the end of its memory")
            start, size = b.offset // WORD, b.bytes // WORD
            view = memories[b.tile][start : start + size] if b.tile else np.zeros(size, np.uint32)
            self.objects[b.name] = _Object(b.name, b.tile, view)
        self.rings = {s.port: _Ring(self, s.port, s.first) for s in plan.starts}
        ports = {p for r in plan.routes for p in (r.source, *r.destinations)}
        self.queues = {p: _Queue(self, p) for p in ports if p.tile.row == 0}
        inward = [r for r in plan.routes if r.source.tile.row < r.destinations[0].tile.row]
        outward = [r for r in plan.routes if r not in inward]
        self.parts = [*map(self._route, inward), *map(self._core, plan.programs), *map(self._route, outward)]
        self.order = order

    def dispatch(self, plan: GemmPlan, a: Words, b: Words) -> Words:
        """C, from A and B as they lie in DRAM."""
        if plan.configuration != self.plan.configuration:
            raise EmulationError("array", "it is configured for another tile: configure it for this plan")
        sizes = [size // WORD for size in plan.argument_bytes]
        if [len(a), len(b)] != sizes[:2]:
            raise EmulationError("DRAM", f"A and B are of {len(a)} and {len(b)} words, not {sizes[:2]}")
        for name, data in (("A", a), ("B", b), ("C", np.zeros(sizes[2], np.uint32))):
            self.objects[name].words = data
        self.output = np.zeros(sizes[2], bool)
        self._run(plan.sequence)
        return self.objects["C"].words

    def next_start(self, d: Descriptor) -> int:
        """The word that the next run of a descriptor starts at."""
        if d.offset % WORD:
            raise EmulationError(d.tile, f"descriptor {d.number} starts at byte {d.offset}: unaligned")
        if d.length != words(d.sizes):
            raise EmulationError(
                d.tile, f"descriptor {d.number} moves {d.length} words of {words(d.sizes)}: over-long"
            )
        run = self.runs.get((d.tile, d.number), 0)
        self.runs[d.tile, d.number] = run + 1
        return d.offset // WORD + run % d.iterations * d.step

    def note_output(self, port: Port, here: slice | npt.NDArray[np.intp]) -> None:
        if self.output[here].any():
            raise EmulationError(port, "words of the output are written twice: an overrun")
        self.output[here] = True

    def acquire(self, tile: Tile, use: Use) -> bool:
        if self.locks[tile, use.lock] < use.value:
            self.waits[tile] = use
            return False
        self.locks[tile, use.lock] -= use.value
        self.waits.pop(tile, None)
        return True

    def release(self, tile: Tile, use: Use) -> None:
        self.locks[tile, use.lock] += use.value
        if self.locks[tile, use.lock] > LOCK_VALUE:
            raise EmulationError(tile, f"lock {use.lock} counts past {LOCK_VALUE}: an overrun")

    def _run(self, commands: tuple[Command, ...]) -> None:
        """Until the runtime sequence is through and nothing moves; then all must be as it was at the start."""
        sequence = self._sequence(commands)
        parts = [sequence, *self.parts]
        if self.order == "downstream":
            parts.reverse()
        elif isinstance(self.order, int):
            random.Random(self.order).shuffle(parts)
        through = False
        while True:
            moved = False
            for part in parts:
                while (step := next(part, None)) is True:
                    moved = True
                through = through or (part is sequence and step is None)
            if not moved:
                break
        if not through:
            self._deadlock()
        self._check_idle()

    def _route(self, route: Route) -> Steps:
        ends = [self.queues.get(p) or self.rings[p] for p in (route.source, *route.destinations)]
        source, destinations = ends[0], ends[1:]
        while True:
            if not (source.ready() and all([d.ready() for d in destinations])):
                yield False
                continue
            count = min(end.left for end in ends)
            data = source.read(count)
            for d in destinations:
                d.write(data)
            for end in ends:
                end.advance(count)
            yield True

    def _core(self, p: CoreProgram) -> Steps:
        m, k, n = self.plan.tiling.m, self.plan.tiling.k, self.plan.tiling.n
        plan, inputs, outputs = self.plan, 0, 0
        while True:
            c = self.objects[p.c.buffers[outputs % len(p.c.buffers)]]
            sums = self.objects[p.accumulator].words if p.accumulator else c.words
            i, depth = 0, 1
            while i < depth:
                a, b = (self.objects[o.buffers[inputs % len(o.buffers)]] for o in (p.a, p.b))
                for operand, ready in ((p.a, a), (p.b, b)):
                    while not self.acquire(p.tile, operand.acquire):
                        yield False
                    ready.transition(p.tile, "filled", "draining")
                if i == 0:
                    while not self.acquire(p.tile, p.c.acquire):
                        yield False
                    c.transition(p.tile, "free", "filling")
                    depth = self._parameter(p, "depth")
                    sums[:] = 0
                kernels.multiply(a.words, b.words, sums, m, k, n, plan.weights)
                for operand, done in ((p.a, a), (p.b, b)):
                    done.transition(p.tile, "draining", "free")
                    self.release(p.tile, operand.release)
                i, inputs = i + 1, inputs + 1
                yield True
            if p.accumulator:
                c.words.view(plan.output)[:] = kernels.narrow(
                    sums.view(np.int32), plan.output, self._parameter(p, "shift"), plan.rounding
                )
            c.transition(p.tile, "filling", "filled")
            self.release(p.tile, p.c.release)
            outputs += 1
            yield True

    def _parameter(self, p: CoreProgram, name: str) -> int:
        value = int(self.objects[p.parameters].words[PARAMETERS.index(name)])
        if value == NEVER_WRITTEN:
            raise EmulationError(p.tile, f"the parameter {name} was never written")
        return value

    def _sequence(self, commands: tuple[Command, ...]) -> Steps:
        for command in commands:
            if isinstance(command, Set):
                target = self.objects[f"parameters@{command.tile.column},{command.tile.row}"]
                target.words[command.parameter] = command.value
            elif isinstance(command, Write):
                d = command.descriptor
                for port, queue in self.queues.items():
                    if port.tile == d.tile and any(task.descriptor == d.number for task in queue.tasks):
                        raise EmulationError(port, f"descriptor {d.number} is rewritten while it is queued")
                self.written[d.tile, d.number] = d
                self.runs[d.tile, d.number] = 0
            elif isinstance(command, Push):
                self.queues[command.port].push(command)
            elif isinstance(command, Wait):
                while not self.queues[command.port].tokens:
                    yield False
                self.queues[command.port].tokens -= 1
            yield True

    def _deadlock(self) -> None:
        tile = min(self.waits, key=lambda t: (-t.row, t.column), default=None)
        waits = "; ".join(
            f"{t} for lock {use.lock} to reach {use.value}" for t, use in sorted(self.waits.items())
        )
        raise EmulationError(tile or "shim", f"a deadlock; waiting: {waits or 'the runtime sequence'}")

    def _check_idle(self) -> None:
        """Checks that every part is back in its initial state, so that the array can run the plan again."""
        for lock in self.plan.locks:
            if self.locks[lock.tile, lock.number] != lock.initial:
                raise EmulationError(
                    lock.tile, f"lock {lock.number} is left at {self.locks[lock.tile, lock.number]}"
                )
        for item in self.objects.values():
            if item.state != "free":
                raise EmulationError(item.tile, f"{item.name} is left {item.state}")
        for port, queue in self.queues.items():
            if queue.tasks or queue.tokens:
                raise EmulationError(port, "tasks are left in its queue")
        if not self.output.all():
            raise EmulationError("DRAM", "words of the output were never written")
