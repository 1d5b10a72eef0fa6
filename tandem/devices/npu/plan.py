"""The plan of a GEMM on a Phoenix NPU: C = A x B, int8 x int8 or int4, as one object: checked, emulated and emitted.

Emulated; not yet run on a Phoenix. A and B lie in DRAM in the tiles of a core, C row-major (operands.py). Memory tile r
holds A's tiles for the cores of row r and sends each to all of them; memory tile c holds B's tiles for the cores of
column c, packs them on the way, and joins C's tiles of its column. The order: rows of tiles, columns of tiles, depth.

What the array is configured with depends on the tile of a core alone; the shape is in the runtime sequence. So plans
with one tile run one after the other without a new configuration, which would take milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.devices.npu.array import (
    ODD_CHANNELS,
    WORD,
    AieBuffer,
    Command,
    CoreProgram,
    Descriptor,
    Fifo,
    FifoStage,
    Lock,
    Operand,
    Port,
    Push,
    Route,
    Set,
    Start,
    Tile,
    Use,
    Wait,
    Write,
    words,
)
from tandem.devices.npu.constraints import check
from tandem.devices.npu.tiling import (
    COLUMNS,
    DEPTH,
    PARAMETER_BYTES,
    ROWS,
    STACK_BYTES,
    WEIGHTS,
    Tiling,
    best,
    resident,
)
from tandem.errors import LimitError

OUTPUTS = {"int8": 1, "int16": 2, "int32": 4}
ROUNDINGS = ("floor", "half up", "half even")
IN_FLIGHT = 4  # blocks of the runtime sequence: what a channel's task queue holds
MAX_ITERATIONS = 64  # of one shim descriptor

View = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides in words, innermost first


@dataclass(frozen=True)
class GemmPlan:
    """All that the array is told. `program_bytes` is what the compiled core program takes: 0 until there is one."""

    M: int
    N: int
    K: int
    weights: str
    output: str
    shift: int
    rounding: str
    tiling: Tiling
    buffers: tuple[AieBuffer, ...]
    locks: tuple[Lock, ...]
    descriptors: tuple[Descriptor, ...]
    starts: tuple[Start, ...]
    routes: tuple[Route, ...]
    fifos: tuple[Fifo, ...]
    programs: tuple[CoreProgram, ...]
    sequence: tuple[Command, ...]
    program_bytes: int = 0

    @property
    def out_bytes(self) -> int:
        return OUTPUTS[self.output]

    @property
    def configuration(self) -> tuple[object, ...]:
        """All that the array keeps between plans; two plans that agree in it need no new configuration."""
        on_tiles = tuple(buffer for buffer in self.buffers if buffer.tile)
        kinds = (self.weights, self.output, self.rounding, self.tiling.m, self.tiling.k, self.tiling.n)
        return (
            *kinds,
            *(on_tiles, self.locks, self.descriptors, self.starts, self.routes, self.fifos, self.programs),
        )

    @property
    def argument_bytes(self) -> tuple[int, int, int]:
        """Of A, B and C in DRAM, padded."""
        a, b, c = (buffer.bytes for buffer in self.buffers if buffer.tile is None)
        return a, b, c


@dataclass
class _Builder:
    buffers: list[AieBuffer] = field(default_factory=list)
    locks: list[Lock] = field(default_factory=list)
    descriptors: list[Descriptor] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    fifos: list[Fifo] = field(default_factory=list)
    programs: list[CoreProgram] = field(default_factory=list)
    stages: dict[tuple[Tile, str], FifoStage] = field(default_factory=dict)
    used: dict[Tile, int] = field(default_factory=dict)  # bytes

    def place(self, tile: Tile, name: str, size: int) -> str:
        """A buffer at the next free byte; a core's stack comes first."""
        start = self.used.get(tile, STACK_BYTES if tile.row > 1 else 0)
        full = f"{name}@{tile.column},{tile.row}"
        self.buffers.append(AieBuffer(full, tile, start, size))
        self.used[tile] = start + size
        return full

    def stage(self, tile: Tile, name: str, size: int, depth: int = DEPTH) -> FifoStage:
        """Objects on a tile, all free."""
        objects = tuple(self.place(tile, f"{name}.{i}", size) for i in range(depth))
        number = sum(lock.tile == tile for lock in self.locks)
        self.locks += [Lock(tile, number, depth), Lock(tile, number + 1, 0)]
        self.stages[tile, name] = FifoStage(tile, objects, Use(number, 1), Use(number + 1, 1))
        return self.stages[tile, name]

    def ring(self, port: Port, objects: list[tuple[FifoStage, str]], view: View) -> None:
        """Descriptors that fill (or, of a port out, drain) the objects in turn, for ever."""
        odd = port.tile.row == 1 and port.channel % 2 == 1
        mine = [
            d.number for d in self.descriptors if d.tile == port.tile and (d.number >= ODD_CHANNELS) == odd
        ]
        first = max(mine, default=ODD_CHANNELS - 1 if odd else -1) + 1
        sizes, strides = view
        for i, (stage, buffer) in enumerate(objects):
            following = first + (i + 1) % len(objects)
            before, after = (stage.filled, stage.free) if port.outgoing else (stage.free, stage.filled)
            self.descriptors.append(
                Descriptor(
                    port.tile, first + i, buffer, 0, sizes, strides, words(sizes), before, after, following
                )
            )
        self.starts.append(Start(port, first))


def linear(size: int) -> View:
    return (size // WORD,), (1,)


def packed(rows: int, columns: int, high: int, wide: int, bits: int) -> View:
    """Reads a row-major tile as vector tiles of `high` x `wide`, row of them by row of them."""
    row, pitch = wide * bits // 32, columns * bits // 32  # words
    return (row, high, columns // wide, rows // high), (1, pitch, row, high * pitch)


def unpacked(rows: int, columns: int, element: int) -> View:
    """Reads vector tiles of 4 x 8 as a row-major tile."""
    row = 8 * element // WORD  # words of a vector tile's row
    return (row, columns // 8, 4, rows // 4), (1, 4 * row, row, 4 * row * (columns // 8))


def plan_gemm(
    M: int,
    N: int,
    K: int,
    output: str = "int32",
    *,
    weights: str = "int8",
    shift: int = 0,
    rounding: str = "half even",
    tiling: Tiling | None = None,
) -> GemmPlan:
    """A plan for M x K times K x N; narrow outputs are shifted right by `shift`, rounded and saturated. One that is
    past a limit of the hardware (constraints.py) is refused."""
    if output not in OUTPUTS or rounding not in ROUNDINGS:
        raise LimitError("output", f"ask for one of {', '.join(OUTPUTS)}, rounded {' or '.join(ROUNDINGS)}")
    if weights not in WEIGHTS:
        raise LimitError("weights", f"weights of {weights} are not multiplied: use {' or '.join(WEIGHTS)}")
    if not 0 <= shift < 32 or (output == "int32" and shift):
        raise LimitError("shift", f"{shift} bits cannot be shifted out of 32; int32 outputs are not shifted")
    tiling = tiling or best(M, N, K, OUTPUTS[output], weights)
    build, deep, bits = _Builder(), WEIGHTS[weights].vector_k, WEIGHTS[weights].bits
    for c in range(COLUMNS):
        for r in range(ROWS):
            _core(build, Tile(c, r + 2), tiling, bits, OUTPUTS[output])
    a_view = packed(tiling.m, tiling.k, 4, deep, 8)
    b_view = packed(tiling.k, tiling.n, deep, 8, bits)
    for c in range(COLUMNS):
        _input(build, "A", c, 0, a_view, [Tile(x, c + 2) for x in range(COLUMNS)])
        _input(build, "B", c, 1, b_view, [Tile(c, r + 2) for r in range(ROWS)])
        _output(build, c, tiling, OUTPUTS[output])
    rows, columns, depth = tiling.padded
    build.buffers += [
        AieBuffer("A", None, 0, rows * depth),
        AieBuffer("B", None, 0, depth * columns * bits // 8),
        AieBuffer("C", None, 0, rows * columns * OUTPUTS[output]),
    ]
    plan = GemmPlan(
        M,
        N,
        K,
        weights,
        output,
        shift,
        rounding,
        tiling,
        tuple(build.buffers),
        tuple(build.locks),
        tuple(build.descriptors),
        tuple(build.starts),
        tuple(build.routes),
        tuple(build.fifos),
        tuple(build.programs),
        (*_parameters(tiling, output, shift), *_sequence(tiling, bits, OUTPUTS[output])),
    )
    check(plan)
    return plan


def plan_resident(
    shapes: Sequence[tuple[int, int, int]], output: str = "int32", *, weights: str = "int8", shift: int = 0
) -> list[GemmPlan]:
    """Plans for GEMMs of these M, N, K with one configuration."""
    tilings = resident(shapes, OUTPUTS[output], weights)
    return [
        plan_gemm(*shape, output, weights=weights, shift=shift, tiling=tiling)
        for shape, tiling in zip(shapes, tilings, strict=True)
    ]


def _core(build: _Builder, tile: Tile, tiling: Tiling, bits: int, element: int) -> None:
    """A core's parameters, its objects, its three channels and its program."""
    m, k, n = tiling.m, tiling.k, tiling.n
    operands, parameters = [], build.place(tile, "parameters", PARAMETER_BYTES)
    for name, size, channel, out in (
        ("A", m * k, 0, False),
        ("B", k * n * bits // 8, 1, False),
        ("C", m * n * element, 0, True),
    ):
        stage = build.stage(tile, name, size, tiling.c_objects if out else DEPTH)
        build.ring(Port(tile, out, channel), [(stage, o) for o in stage.objects], linear(size))
        before, after = (stage.free, stage.filled) if out else (stage.filled, stage.free)
        operands.append(Operand(stage.objects, before, after))
    a, b, c = operands
    accumulator = build.place(tile, "accumulator", m * n * 4) if element < 4 else None
    build.programs.append(CoreProgram(tile, a, b, c, accumulator, parameters))


def _input(
    build: _Builder,
    name: str,
    column: int,
    channel: int,
    view: View,
    cores: list[Tile],
) -> None:
    """A or B: shim to memory tile row-major, memory tile to its four cores packed by `view`."""
    shim, memory = Tile(column, 0), Tile(column, 1)
    size = words(view[0]) * WORD
    stage = build.stage(memory, name, size)
    objects = [(stage, o) for o in stage.objects]
    build.ring(Port(memory, False, channel), objects, linear(size))
    build.ring(Port(memory, True, channel), objects, view)
    build.routes += [
        Route(Port(shim, True, channel), (Port(memory, False, channel),)),
        Route(Port(memory, True, channel), tuple(Port(core, False, channel) for core in cores)),
    ]
    ends = [build.stages[core, name] for core in cores]
    build.fifos.append(Fifo(f"{name}{column}", (DEPTH,) * (1 + len(ends)), size, (stage, *ends)))


def _output(build: _Builder, column: int, tiling: Tiling, element: int) -> None:
    """C: each core to its own objects in the memory tile; from there row after row of cores, unpacked, to the shim.

    Each core has its own locks: with one pair for all, a fast core's second tile could pass for a slow one's first.
    """
    shim, memory = Tile(column, 0), Tile(column, 1)
    size = tiling.m * tiling.n * element
    stages = []
    for r in range(ROWS):
        core, port = Tile(column, r + 2), Port(memory, False, 2 + r)
        stage = build.stage(memory, f"C{r}", size)
        build.ring(port, [(stage, o) for o in stage.objects], linear(size))
        build.routes.append(Route(Port(core, True, 0), (port,)))
        depths = tiling.c_objects, DEPTH
        build.fifos.append(Fifo(f"C{column}.{r}", depths, size, (build.stages[core, "C"], stage)))
        stages.append(stage)
    port = Port(memory, True, 2)
    objects = [(stage, stage.objects[i]) for i in range(DEPTH) for stage in stages]
    build.ring(port, objects, unpacked(tiling.m, tiling.n, element))
    build.routes.append(Route(port, (Port(shim, False, 0),)))


def _parameters(tiling: Tiling, output: str, shift: int) -> list[Command]:
    """What the cores are told of this shape, in the order of PARAMETERS."""
    values = (tiling.depth,) if output == "int32" else (tiling.depth, shift)
    return [
        Set(Tile(c, r + 2), number, value)
        for c in range(COLUMNS)
        for r in range(ROWS)
        for number, value in enumerate(values)
    ]


def _sequence(tiling: Tiling, bits: int, element: int) -> list[Command]:
    """What the host queues: for each row of tiles, up to 64 columns of tiles a descriptor; C's token ends a block.

    C of a block is whole only when its A and B have been read, so one token frees all three descriptors.
    """
    blocks = [
        (row, first, min(MAX_ITERATIONS, tiling.columns - first))
        for row in range(tiling.rows)
        for first in range(0, tiling.columns, MAX_ITERATIONS)
    ]
    commands: list[Command] = []
    for number, (row, first, count) in enumerate(blocks):
        for c in range(COLUMNS):
            done = Port(Tile(c, 0), False, 0)
            if number >= IN_FLIGHT:
                commands.append(Wait(done))
            a, b, out = _block(tiling, bits, element, c, 3 * (number % IN_FLIGHT), row, first, count)
            commands += [Write(a), Write(b), Write(out)]
            commands += [
                Push(done, out.number, count - 1, True),
                Push(Port(Tile(c, 0), True, 0), a.number, count - 1, False),
                Push(Port(Tile(c, 0), True, 1), b.number, 0, False),
            ]
    left = min(IN_FLIGHT, len(blocks))
    return commands + [Wait(Port(Tile(c, 0), False, 0)) for _ in range(left) for c in range(COLUMNS)]


def _block(
    tiling: Tiling, bits: int, element: int, c: int, number: int, row: int, first: int, count: int
) -> tuple[Descriptor, Descriptor, Descriptor]:
    """Shim descriptors of column c for `count` columns of tiles: A (to be repeated), B (all of them) and C."""
    m, n = tiling.m, tiling.n
    _, N, K = tiling.padded
    shim, start = Tile(c, 0), (first * COLUMNS + c) * n
    a_bytes, b_bytes = m * K, n * K * bits // 8  # of a row of tiles and of a column of them
    panel, strip = linear(a_bytes), linear(count * b_bytes)
    a = Descriptor(shim, number, "A", (row * ROWS + c) * a_bytes, *panel, words(panel[0]))
    begin = (c * tiling.columns + first) * b_bytes
    b = Descriptor(shim, number + 1, "B", begin, *strip, words(strip[0]))
    tile, pitch = (n * element // WORD, ROWS * m), N * element // WORD
    offset = (row * ROWS * m * N + start) * element
    out = Descriptor(
        *(shim, number + 2, "C", offset, tile, (1, pitch), words(tile)),
        iterations=count,
        step=COLUMNS * n * element // WORD,
    )
    return a, b, out
