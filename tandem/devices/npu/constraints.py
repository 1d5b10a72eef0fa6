"""Every limit of a Phoenix NPU that a plan must keep, by name. Emulated; not yet run on a Phoenix.

Numbers of the first group are those of the project's issue on this device; those of the second are facts of the same
hardware that the plan relies on (public sources: AMD's AM020 manual and the checks of the MLIR-AIE compiler).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tandem.devices.npu.array import (
    ODD_CHANNELS,
    PARAMETERS,
    WORD,
    Descriptor,
    Kind,
    Port,
    Push,
    Set,
    Tile,
    Wait,
    Write,
    words,
)
from tandem.devices.npu.tiling import (
    COLUMNS,
    CORE_BYTES,
    DATA_BYTES,
    M_STEP,
    N_STEP,
    ROWS,
    STACK_BYTES,
    WEIGHTS,
)
from tandem.errors import LimitError

if TYPE_CHECKING:
    from tandem.devices.npu.plan import GemmPlan

DESCRIPTORS = {Kind.CORE: 16, Kind.MEMORY: 48, Kind.SHIM: 16}
DIMENSIONS = {Kind.CORE: 3, Kind.MEMORY: 4, Kind.SHIM: 3}
WRAP_BITS = {Kind.CORE: 8, Kind.MEMORY: 10, Kind.SHIM: 10}
STEP_BITS = {Kind.CORE: 13, Kind.MEMORY: 17, Kind.SHIM: 20}
CHANNELS = {Kind.CORE: 2, Kind.MEMORY: 6, Kind.SHIM: 2}
ITERATIONS = 64
REPEAT = 255
CORE_WORDS = 16_383
MEMORY = {Kind.CORE: CORE_BYTES, Kind.MEMORY: 512 * 1024}
PROGRAM_BYTES = 16 * 1024

LOCKS = {Kind.CORE: 16, Kind.MEMORY: 64, Kind.SHIM: 16}
LOCK_VALUE = 63
ACCUMULATOR = 2**31 - 1

Broken = Iterator[tuple[str, str]]  # the limit's name, and what is past it


def check(plan: GemmPlan) -> None:
    """Raises LimitError with the name of the first limit that the plan breaks."""
    for rule in (_vectors, _array, _memory, _counts, _locks, _chains, _transfers, _fifos, _sequence):
        for limit, problem in rule(plan):
            raise LimitError(limit, f"{limit}: {problem}; make tiles smaller or cut the GEMM")


def all_descriptors(plan: GemmPlan) -> list[Descriptor]:
    """Those configured once, and those that the runtime sequence writes."""
    return [*plan.descriptors, *(c.descriptor for c in plan.sequence if isinstance(c, Write))]


def _ports(plan: GemmPlan) -> set[Port]:
    routed = {p for route in plan.routes for p in (route.source, *route.destinations)}
    return (
        routed | {s.port for s in plan.starts} | {c.port for c in plan.sequence if isinstance(c, Push | Wait)}
    )


def _vectors(plan: GemmPlan) -> Broken:
    """Cores multiply whole vector tiles, two by two of them."""
    t, deep = plan.tiling, WEIGHTS[plan.weights].vector_k
    if min(t.m, t.k, t.n) < 1 or t.m % M_STEP or t.k % deep or t.n % N_STEP:
        yield "vector tile", f"{t.m} x {t.k} x {t.n} is not made of whole {M_STEP} x {deep} x {N_STEP}"


def _array(plan: GemmPlan) -> Broken:
    tiles: Iterable[Tile] = {p.tile for p in plan.programs} | {port.tile for port in _ports(plan)}
    for tile in tiles:
        if not (0 <= tile.column < COLUMNS and 0 <= tile.row < ROWS + 2):
            yield "4 x 4 cores", f"{tile} is outside of the array"
    if plan.program_bytes > PROGRAM_BYTES:
        yield "program memory", f"a core holds {PROGRAM_BYTES} bytes of program, not {plan.program_bytes}"
    if plan.tiling.padded[2] * 128 * WEIGHTS[plan.weights].max_magnitude > ACCUMULATOR:
        yield "accumulator", f"{plan.tiling.padded[2]} products of int8 do not add up in 32 bits"


def _memory(plan: GemmPlan) -> Broken:
    ends: dict[Tile, int] = {}
    for buffer in sorted((b for b in plan.buffers if b.tile), key=lambda b: b.offset):
        assert buffer.tile
        if buffer.offset < ends.get(buffer.tile, 0):
            yield "disjoint buffers", f"{buffer.name} overlaps the buffer before it"
        if buffer.offset % WORD or buffer.bytes % WORD:
            yield "4-byte granularity", f"{buffer.name} is not made of whole words"
        if buffer.tile.kind is Kind.CORE and buffer.offset < STACK_BYTES:
            yield "core stack", f"{buffer.name} begins in the {STACK_BYTES} bytes of the stack"
        ends[buffer.tile] = buffer.offset + buffer.bytes
    for tile, end in ends.items():
        if end > MEMORY.get(tile.kind, 0):
            yield f"{tile.kind.value} memory", f"{tile} needs {end} bytes of {MEMORY.get(tile.kind, 0)}"
        if tile.kind is Kind.CORE and end > CORE_BYTES - DATA_BYTES:
            yield "core static data", f"{tile} keeps {CORE_BYTES - end} bytes of {DATA_BYTES} for it"


def _counts(plan: GemmPlan) -> Broken:
    for d in all_descriptors(plan):
        most = DESCRIPTORS[d.tile.kind]
        if not 0 <= d.number < most:
            yield f"{d.tile.kind.value} descriptors", f"{d.tile} has {most}; there is no number {d.number}"
    taken = Counter((d.tile, d.number) for d in plan.descriptors)
    for (tile, number), count in taken.items():
        if count > 1:
            yield "one meaning a descriptor", f"{tile} has descriptor {number} {count} times"
    for port in _ports(plan):
        most = CHANNELS[port.tile.kind]
        if not 0 <= port.channel < most:
            yield f"{port.tile.kind.value} channels", f"{port} is past the {most} of each direction"
    ends = Counter(p for route in plan.routes for p in (route.source, *route.destinations))
    for port, count in ends.items():
        if count > 1:
            yield "one stream a channel", f"{port} is in {count} streams"


def _locks(plan: GemmPlan) -> Broken:
    there = {(lock.tile, lock.number) for lock in plan.locks}
    for lock in plan.locks:
        if not 0 <= lock.number < LOCKS[lock.tile.kind]:
            yield "locks", f"{lock.tile} has {LOCKS[lock.tile.kind]}; there is no number {lock.number}"
        if not 0 <= lock.initial <= LOCK_VALUE:
            yield "lock values", f"lock {lock.number} of {lock.tile} starts with {lock.initial}"
    uses = [(d.tile, use) for d in all_descriptors(plan) for use in (d.acquire, d.release) if use]
    for p in plan.programs:
        uses += [(p.tile, use) for o in (p.a, p.b, p.c) for use in (o.acquire, o.release)]
    for tile, use in uses:
        if (tile, use.lock) not in there:
            yield "locks", f"{tile} uses lock {use.lock}, which the plan does not set up"
        if not 1 <= use.value <= LOCK_VALUE:
            yield "lock values", f"{tile} changes lock {use.lock} by {use.value}"


def _chains(plan: GemmPlan) -> Broken:
    """A channel's chain exists, and is made of descriptors that this channel may use and no other uses."""
    there = {(d.tile, d.number): d for d in plan.descriptors}
    owner: dict[tuple[Tile, int], Port] = {}
    for start in plan.starts:
        tile, number = start.port.tile, start.first
        seen: set[int] = set()
        while number not in seen:
            seen.add(number)
            if (tile, number) not in there:
                yield "chains", f"{start.port} runs descriptor {number}, which the plan does not set up"
                return
            if tile.kind is Kind.MEMORY and (number >= ODD_CHANNELS) != (start.port.channel % 2 == 1):
                yield "descriptors of a channel", f"{start.port} cannot use descriptor {number}"
            if owner.setdefault((tile, number), start.port) != start.port:
                yield "chains", f"{start.port} and {owner[tile, number]} both run descriptor {number}"
            following = there[tile, number].next
            if following is None:
                yield "chains", f"descriptor {number} of {tile} has no next one"
                return
            number = following
        if number != start.first:
            yield "chains", f"{start.port} never comes back to descriptor {start.first}"
    for tile, number in there.keys() - owner.keys():
        yield "chains", f"no channel runs descriptor {number} of {tile}"


def _transfers(plan: GemmPlan) -> Broken:
    buffers = {b.name: b for b in plan.buffers}
    for d in all_descriptors(plan):
        kind, where = d.tile.kind, f"descriptor {d.number} of {d.tile}"
        if len(d.sizes) != len(d.strides) or not 1 <= len(d.sizes) <= DIMENSIONS[kind]:
            yield f"{kind.value} dimensions", f"{where} has {len(d.sizes)} of at most {DIMENSIONS[kind]}"
        if d.offset % WORD:
            yield "4-byte granularity", f"{where} starts at byte {d.offset}"
        wraps = d.sizes[: DIMENSIONS[kind] - 1]  # the outermost ends with the length
        if max(wraps, default=0) >= 2 ** WRAP_BITS[kind] and len(d.sizes) > 1:
            yield f"{kind.value} wrap", f"{where} has sizes {d.sizes} in {WRAP_BITS[kind]} bits"
        if min(d.sizes) < 1 or min(d.strides) < 1 or d.length != words(d.sizes):
            yield (
                "transfer length",
                f"{where} moves {d.length} words with sizes {d.sizes}, strides {d.strides}",
            )
        if max(*d.strides, d.step) > 2 ** STEP_BITS[kind]:
            yield f"{kind.value} step", f"{where} has strides {d.strides}, {d.step} in {STEP_BITS[kind]} bits"
        if not 1 <= d.iterations <= ITERATIONS or (d.iterations > 1 and d.step < 1):
            yield "iteration", f"{where} has {d.iterations} of at most {ITERATIONS}, step {d.step}"
        if kind is Kind.CORE and d.length > CORE_WORDS:
            yield "core transfer words", f"{where} moves {d.length} words of at most {CORE_WORDS}"
        if d.buffer not in buffers or (kind is not Kind.SHIM and buffers[d.buffer].tile != d.tile):
            yield "own memory", f"{where} names the buffer {d.buffer}, which is not on its tile"


def _fifos(plan: GemmPlan) -> Broken:
    """Each stage has as many objects as its FIFO is deep, and locks that start with all of them free."""
    buffers = {b.name: b for b in plan.buffers}
    initial = {(lock.tile, lock.number): lock.initial for lock in plan.locks}
    for fifo in plan.fifos:
        for stage, depth in zip(fifo.stages, fifo.depths, strict=True):
            sizes = {buffers[name].bytes for name in stage.objects}
            if len(stage.objects) != depth or sizes != {fifo.bytes}:
                yield "depth", f"{fifo.name} has depth {depth} but the objects {', '.join(stage.objects)}"
            start = initial[stage.tile, stage.free.lock], initial[stage.tile, stage.filled.lock]
            if start != (depth, 0):
                yield (
                    "depth",
                    f"{fifo.name} starts with {start[0]} objects free and {start[1]} filled on {stage.tile}",
                )


def _sequence(plan: GemmPlan) -> Broken:
    cores = {p.tile for p in plan.programs}
    least = dict(enumerate(1 if name == "depth" else 0 for name in PARAMETERS))
    for command in plan.sequence:
        if isinstance(command, Set):
            number, value = command.parameter, command.value
            if command.tile not in cores or number not in least or not least[number] <= value < 2**31:
                yield "parameters", f"{command.tile} cannot be told {value} as number {number}"
        if isinstance(command, Push) and not 0 <= command.repeat <= REPEAT:
            yield "repeat", f"{command.port} repeats a descriptor {command.repeat} times, {REPEAT} at most"
