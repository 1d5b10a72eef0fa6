"""Writes a GemmPlan as MLIR-AIE text. Emulated; not yet run on a Phoenix. An `aie-opt` has read an earlier text of it.

Spelled for MLIR-AIE 1.4: a descriptor has `sizes` and `strides`, outermost first, and lock values are constants of
their region (1.3 wrote both as attributes). Every memory is typed as words of 32 bits, so that sizes, strides and
lengths are the plan's own numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tandem.devices.npu.array import (
    WORD,
    AieBuffer,
    CoreProgram,
    Descriptor,
    Kind,
    Operand,
    Port,
    Push,
    Route,
    Set,
    Tile,
    Use,
    Wait,
    Write,
)
from tandem.devices.npu.plan import GemmPlan
from tandem.devices.npu.tiling import STACK_BYTES, WEIGHTS

VERSION = "1.4"  # of MLIR-AIE
ARGUMENTS = ("A", "B", "C")
OBJECT_FILE = "tandem_gemm.o"  # the compiled core kernels
KERNEL_SOURCE = Path(__file__).with_name("gemm.cc")

Lines = Iterator[str]


def emit(plan: GemmPlan) -> str:
    """The whole module: the configuration, and the runtime sequence of this shape."""
    return _module(plan, emit_sequence(plan))


def emit_configuration(plan: GemmPlan) -> str:
    """What all plans of the same configuration share."""
    return _module(plan, ())


def _module(plan: GemmPlan, sequence: Iterable[str]) -> str:
    tiles = sorted({p.tile for r in plan.routes for p in (r.source, *r.destinations)})
    lines = ["module {", "  aie.device(npu1) {"]
    lines += _indent(_kernels(plan), 4)
    for tile in tiles:
        lines += _indent(emit_tile(plan, tile), 4)
    for route in plan.routes:
        lines += _indent(_flows(route), 4)
    lines += _indent(sequence, 4)
    t = plan.tiling
    kind = f"int8 x {plan.weights} to {plan.output}, {t.m} x {t.k} x {t.n} a core, {t.c_objects} of C"
    head = f"// MLIR-AIE {VERSION}: {kind}. Emulated; not yet run on a Phoenix."
    return "\n".join([head, *lines, "  }", "}", ""])


def kernel_options(plan: GemmPlan) -> list[str]:
    """What the compiler of `KERNEL_SOURCE` is told of the plan."""
    t = plan.tiling
    bits = WEIGHTS[plan.weights].bits
    return [
        *(f"-DTILE_M={t.m}", f"-DTILE_K={t.k}", f"-DTILE_N={t.n}"),
        *(f"-DWEIGHT_BITS={bits}", f"-DOUTPUT={plan.output}_t"),
    ]


def emit_tile(plan: GemmPlan, tile: Tile) -> Lines:
    """A tile with its buffers, locks, channels and program."""
    yield f"{_tile(tile)} = aie.tile({tile.column}, {tile.row})"
    for b in plan.buffers:
        if b.tile == tile:
            attributes = f'sym_name = "{_name(b.name)}", address = {b.offset} : i32'
            yield f"%{_name(b.name)} = aie.buffer({_tile(tile)}) {{{attributes}}} : {_type(b)}"
    for lock in plan.locks:
        if lock.tile == tile:
            yield f"{_lock(tile, lock.number)} = aie.lock({_tile(tile)}, {lock.number}) {{init = {lock.initial} : i32}}"
    starts = [s for s in plan.starts if s.port.tile == tile]
    if starts:
        region = "memtile_dma" if tile.kind is Kind.MEMORY else "mem"
        yield f"%dma_{tile.column}_{tile.row} = aie.{region}({_tile(tile)}) {{"
        yield from _values(u for d in plan.descriptors if d.tile == tile for u in (d.acquire, d.release))
        for i, start in enumerate(starts):
            following = f"^channel{i + 1}" if i + 1 < len(starts) else "^end"
            if i:
                yield f"^channel{i}:"
            channel = f"{start.port.direction.value}, {start.port.channel}"
            yield f"  %{i} = aie.dma_start({channel}, ^bd{start.first}, {following})"
            for d in _chain(plan, tile, start.first):
                yield from _ring(plan, d)
        yield from ("^end:", "  aie.end", "}")
    for program in plan.programs:
        if program.tile == tile:
            yield from _core(plan, program)


def emit_sequence(plan: GemmPlan) -> Lines:
    """What the host tells the shims. A task's outermost dimension is its descriptor's iteration.

    The compiler must be told when a descriptor can be written again: to await a task says so, for others `free` does.
    """
    buffers = _by_name(plan)
    yield f"aie.runtime_sequence({', '.join(f'%{name}: {_type(buffers[name])}' for name in ARGUMENTS)}) {{"
    written: dict[tuple[Tile, int], Descriptor] = {}
    pending: dict[Port, list[int]] = {}
    silent: dict[tuple[Tile, int], int] = {}  # tasks without a token, by descriptor
    yield f"  // C of {plan.M} x {plan.N}, {plan.K} deep, shift {plan.shift}"
    for value in sorted({c.value for c in plan.sequence if isinstance(c, Set)}):
        yield f"  %p{value} = arith.constant {value} : i32"
    for number, command in enumerate(plan.sequence):
        if isinstance(command, Set):
            name = f"@parameters_{command.tile.column}_{command.tile.row}"
            yield f"  aiex.npu.rtp_write({name}, {command.parameter}, %p{command.value}) : i32"
        elif isinstance(command, Write):
            written[command.descriptor.tile, command.descriptor.number] = command.descriptor
        elif isinstance(command, Push):
            d, port = written[command.port.tile, command.descriptor], command.port
            if (d.tile, d.number) in silent:
                yield f"  aiex.dma_free_task(%task{silent.pop((d.tile, d.number))})"
            token = "issue_token = true, " if command.token else ""
            iteration = (d.iterations, d.step if d.iterations > 1 else 0)
            dims = [iteration, *[(1, 0)] * (3 - len(d.sizes)), *_outermost_first(d)]
            channel = f"{_tile(port.tile)}, {port.direction.value}, {port.channel}"
            yield f"  %task{number} = aiex.dma_configure_task({channel}) {{"
            yield f"    {_transfer(buffers[d.buffer], d, dims)}"
            yield "    aie.end"
            yield f"  }} {{{token}repeat_count = {command.repeat} : i32}}"
            yield f"  aiex.dma_start_task(%task{number})"
            if command.token:
                pending.setdefault(port, []).append(number)
            else:
                silent[d.tile, d.number] = number
        elif isinstance(command, Wait):
            yield f"  aiex.dma_await_task(%task{pending[command.port].pop(0)})"
    yield "}"


def _kernels(plan: GemmPlan) -> Lines:
    """Declarations of what `OBJECT_FILE` holds."""
    p, buffers = plan.programs[0], _by_name(plan)
    a, b, c = (_type(buffers[o.buffers[0]]) for o in (p.a, p.b, p.c))
    sums = _type(buffers[p.accumulator]) if p.accumulator else c
    kernels = {"zero": sums, "multiply": f"{a}, {b}, {sums}"}
    if p.accumulator:
        kernels[_store(plan)] = f"{sums}, {c}, i32"
    for name, types in kernels.items():
        yield f'func.func private @{name}({types}) attributes {{link_with = "{OBJECT_FILE}"}}'


def _core(plan: GemmPlan, p: CoreProgram) -> Lines:
    """One output tile per iteration. Which of two objects of a FIFO is next is a bit that changes with each use."""
    t, buffers = p.tile, _by_name(plan)
    parameters = f"%{_name(p.parameters)}[{{}}] : {_type(buffers[p.parameters])}"
    yield f"%core_{t.column}_{t.row} = aie.core({_tile(t)}) {{"
    yield from _values(use for o in (p.a, p.b, p.c) for use in (o.acquire, o.release))
    for name, value in (("zero", 0), ("one", 1), ("ever", 2**32 - 1)):
        yield f"  %{name} = arith.constant {value} : index"
    yield from ("  %first = arith.constant false", "  %flip = arith.constant true")
    bits = "iter_args(%odd_input = %first, %odd_output = %first) -> (i1, i1)"
    yield f"  %through:2 = scf.for %turn = %zero to %ever step %one {bits} {{"
    c = f"%{_name(p.c.buffers[0])}"
    if len(p.c.buffers) > 1:
        c = "%c"
        yield f"    %c = {_select(buffers, p.c, 'odd_output')}"
    sums = f"%{_name(p.accumulator)}" if p.accumulator else c
    yield from _indent(_call(plan, p, sums, "%odd_input", parameters), 4)
    yield "    %next = arith.xori %odd_input, %flip : i1"
    yield "    %last = scf.for %i = %one to %depth step %one iter_args(%odd = %next) -> (i1) {"
    yield from _indent(_call(plan, p, sums, "%odd", None), 6)
    yield from ("      %other = arith.xori %odd, %flip : i1", "      scf.yield %other : i1", "    }")
    if p.accumulator:
        types = f"{_type(buffers[p.accumulator])}, {_type(buffers[p.c.buffers[0]])}, i32"
        yield f"    %shift = memref.load {parameters.format('%one')}"
        yield f"    func.call @{_store(plan)}({sums}, {c}, %shift) : ({types}) -> ()"
    yield f"    {_use(t, 'Release', p.c.release.lock, p.c.release.value)}"
    yield "    %done = arith.xori %odd_output, %flip : i1"
    yield from ("    scf.yield %last, %done : i1, i1", "  }", "  aie.end")
    yield f"}} {{stack_size = {STACK_BYTES} : i32}}"


def _call(plan: GemmPlan, p: CoreProgram, sums: str, odd: str, parameters: str | None) -> Lines:
    """One multiplication; the first of an output tile (with `parameters`) also learns the depth and begins at zero."""
    buffers, a, b = _by_name(plan), f"a_at_{odd[1:]}", f"b_at_{odd[1:]}"
    sums_type = _type(buffers[p.accumulator or p.c.buffers[0]])
    for operand in (p.a, p.b, p.c) if parameters else (p.a, p.b):
        yield _use(p.tile, "AcquireGreaterEqual", operand.acquire.lock, operand.acquire.value)
    if parameters:
        yield f"%word = memref.load {parameters.format('%zero')}"
        yield "%depth = arith.index_cast %word : i32 to index"
        yield f"func.call @zero({sums}) : ({sums_type}) -> ()"
    yield f"%{a} = {_select(buffers, p.a, odd[1:])}"
    yield f"%{b} = {_select(buffers, p.b, odd[1:])}"
    types = f"{_type(buffers[p.a.buffers[0]])}, {_type(buffers[p.b.buffers[0]])}, {sums_type}"
    yield f"func.call @multiply(%{a}, %{b}, {sums}) : ({types}) -> ()"
    for operand in (p.a, p.b):
        yield _use(p.tile, "Release", operand.release.lock, operand.release.value)


def _select(buffers: dict[str, AieBuffer], operand: Operand, odd: str) -> str:
    even_name, odd_name = (_name(name) for name in operand.buffers)
    return f"arith.select %{odd}, %{odd_name}, %{even_name} : {_type(buffers[operand.buffers[0]])}"


def _store(plan: GemmPlan) -> str:
    """The kernel that narrows: cores set their rounding once, so each has its own."""
    return f"store_{plan.rounding.replace(' ', '_')}"


def _flows(route: Route) -> Lines:
    source = route.source
    for end in route.destinations:
        yield f"aie.flow({_tile(source.tile)}, DMA : {source.channel}, {_tile(end.tile)}, DMA : {end.channel})"


def _ring(plan: GemmPlan, d: Descriptor) -> Lines:
    buffer = _by_name(plan)[d.buffer]
    yield f"^bd{d.number}:"
    if d.acquire:
        yield f"  {_use(d.tile, 'AcquireGreaterEqual', d.acquire.lock, d.acquire.value)}"
    yield f"  {_transfer(buffer, d, _outermost_first(d))}"
    if d.release:
        yield f"  {_use(d.tile, 'Release', d.release.lock, d.release.value)}"
    yield f"  aie.next_bd ^bd{d.next}"


def _chain(plan: GemmPlan, tile: Tile, first: int) -> Iterator[Descriptor]:
    there = {d.number: d for d in plan.descriptors if d.tile == tile}
    d = there[first]
    while True:
        yield d
        if d.next is None or d.next == first:
            return
        d = there[d.next]


def _transfer(buffer: AieBuffer, d: Descriptor, dims: list[tuple[int, int]]) -> str:
    place = f"%{_name(buffer.name)} : {_type(buffer)} offset = {d.offset // WORD} len = {d.length}"
    sizes, strides = [size for size, _ in dims], [stride for _, stride in dims]
    shape = f" sizes = {sizes} strides = {strides}" if len(dims) > 1 else ""
    return f"aie.dma_bd({place}{shape}) {{bd_id = {d.number} : i32}}"


def _outermost_first(d: Descriptor) -> list[tuple[int, int]]:
    return list(zip(d.sizes, d.strides, strict=True))[::-1]


def _by_name(plan: GemmPlan) -> dict[str, AieBuffer]:
    return {b.name: b for b in plan.buffers}


def _use(tile: Tile, how: str, lock: int, value: int) -> str:
    return f"aie.use_lock({_lock(tile, lock)}, {how}, %value{value})"


def _values(uses: Iterable[Use | None]) -> Lines:
    """The constants that a region's lock uses name."""
    for value in sorted({use.value for use in uses if use}):
        yield f"  %value{value} = arith.constant {value} : i32"


def _tile(tile: Tile) -> str:
    return f"%tile_{tile.column}_{tile.row}"


def _lock(tile: Tile, number: int) -> str:
    return f"%lock_{tile.column}_{tile.row}_{number}"


def _name(buffer: str) -> str:
    return buffer.replace(".", "_").replace("@", "_").replace(",", "_")


def _type(buffer: AieBuffer) -> str:
    return f"memref<{buffer.bytes // WORD}xi32>"


def _indent(lines: Iterable[str], by: int) -> Lines:
    return (" " * by + line for line in lines)
