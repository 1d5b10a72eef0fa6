"""The words of a plan for the NPU's array: tiles, buffers, locks, descriptors, channels, routes, core programs.

Emulated; not yet run on a Phoenix. Sizes, strides and lengths of DMA are in words of 4 bytes, offsets in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

WORD = 4  # bytes: the granularity of every DMA
ODD_CHANNELS = 24  # a memory tile's odd channels use descriptors from here on, its even ones those below


class Kind(Enum):
    """What a tile is, by its row in the array."""

    SHIM = "shim"
    MEMORY = "memory tile"
    CORE = "core"


class Direction(Enum):
    """The direction of a DMA channel, seen from its tile's memory."""

    IN = "S2MM"
    OUT = "MM2S"


@dataclass(frozen=True, order=True)
class Tile:
    """Row 0 is the shim to DRAM, row 1 the memory tile, rows 2 to 5 are cores."""

    column: int
    row: int

    @property
    def kind(self) -> Kind:
        return (Kind.SHIM, Kind.MEMORY)[self.row] if self.row < 2 else Kind.CORE

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.column}, {self.row})"


@dataclass(frozen=True)
class AieBuffer:
    """A range of a tile's memory, or (on no tile) one of the arguments in DRAM."""

    name: str
    tile: Tile | None
    offset: int
    bytes: int


@dataclass(frozen=True)
class Lock:
    """A counting semaphore of a tile."""

    tile: Tile
    number: int
    initial: int


@dataclass(frozen=True)
class Use:
    """Acquire: wait until the lock is at least `value`, then subtract it. Release: add it."""

    lock: int
    value: int


@dataclass(frozen=True)
class Descriptor:
    """A DMA buffer descriptor: a stream of word addresses into one buffer, innermost dimension first.

    The outermost dimension that the hardware has no wrap field for ends with `length`. Each further run of the
    descriptor starts `step` words later; after `iterations` runs it is back at `offset`.
    """

    tile: Tile
    number: int
    buffer: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    length: int
    acquire: Use | None = None
    release: Use | None = None
    next: int | None = None
    iterations: int = 1
    step: int = 0


def words(sizes: tuple[int, ...]) -> int:
    """That a descriptor of these sizes moves."""
    return prod(sizes)


@dataclass(frozen=True, order=True)
class Port:
    """A DMA channel's end of a stream."""

    tile: Tile
    outgoing: bool
    channel: int

    @property
    def direction(self) -> Direction:
        return Direction.OUT if self.outgoing else Direction.IN

    def __str__(self) -> str:
        return f"{self.tile} {self.direction.value} {self.channel}"


@dataclass(frozen=True)
class Start:
    """A channel that runs its chain of descriptors for ever, from when the array is configured."""

    port: Port
    first: int


@dataclass(frozen=True)
class Route:
    """A circuit of stream switches: one source, and one destination or a broadcast to several."""

    source: Port
    destinations: tuple[Port, ...]


@dataclass(frozen=True)
class FifoStage:
    """A FIFO's objects on one of the tiles it passes, and the uses of the locks that count the free and the filled."""

    tile: Tile
    objects: tuple[str, ...]
    free: Use
    filled: Use


@dataclass(frozen=True)
class Fifo:
    """An object FIFO: on each tile it passes, as many objects as `depths` says, all of `bytes`."""

    name: str
    depths: tuple[int, ...]
    bytes: int
    stages: tuple[FifoStage, ...]


@dataclass(frozen=True)
class Operand:
    """A core's end of a FIFO: the buffers in turn, and the locks around each use of one."""

    buffers: tuple[str, ...]
    acquire: Use
    release: Use


@dataclass(frozen=True)
class CoreProgram:
    """For ever: `depth` times acquire a and b, the first time also c and zero it, multiply, release a and b; then store
    and release c. At rest a core waits for a, with nothing acquired.

    The depth, and the shift of a narrow output, are words of the buffer `parameters` (PARAMETERS), read once the first
    a and b are there: what the runtime sequence has written before it sent them. Kernels work on packed vector tiles:
    a is [m/4][k/d][4][d], b [k/d][n/8][d][8], c [m/4][n/8][4][8], where d is 8, or 16 with int4 weights. Without an
    `accumulator` they add up in c itself.
    """

    tile: Tile
    a: Operand
    b: Operand
    c: Operand
    accumulator: str | None
    parameters: str


PARAMETERS = ("depth", "shift")  # the words of a core's parameters, in this order


@dataclass(frozen=True)
class Set:
    """Runtime sequence: write a word of a core's parameters."""

    tile: Tile
    parameter: int
    value: int


@dataclass(frozen=True)
class Write:
    """Runtime sequence: write a shim descriptor."""

    descriptor: Descriptor


@dataclass(frozen=True)
class Push:
    """Runtime sequence: queue a descriptor on a shim channel, to run 1 + `repeat` times; a `token` says it is done."""

    port: Port
    descriptor: int
    repeat: int
    token: bool


@dataclass(frozen=True)
class Wait:
    """Runtime sequence: wait for the oldest token of a shim channel not waited for yet."""

    port: Port


Command = Set | Write | Push | Wait
