"""The null device runs no kernel: it checks a Program, and counts what each launch costs.

Rules, each a ProgramError that names the launch:
- shape: every bound tensor has at least the bytes its kernel touches, inside its arena;
- overlap: nothing is written over bytes that a later launch still reads under another name;
- use before write: an activation is read only after a launch has written it;
- barrier: a launch that reads or writes what an earlier one wrote, or writes what it read, waits for it.
"""

from __future__ import annotations

from tandem.errors import ProgramError
from tandem.kernels.kernel import Cost, Counts
from tandem.program.hazards import Unordered, overlap
from tandem.program.program import Launch, Program, Tensor

HOST_WRITTEN = ("weights", "kv", "step")  # arenas whose bytes are there before the first launch


def check(program: Program) -> None:
    since = Unordered()
    owner: list[Tensor] = []  # activations written so far whose bytes are still theirs
    for i, launch in enumerate(program.launches):
        where = f"launch {i} ({launch.kernel.name} -> {launch.name})"
        _check_extents(where, launch, program)
        for tensor in launch.touched("r"):
            if tensor.arena not in HOST_WRITTEN and not any(t.root is tensor.root for t in owner):
                lost = next((t for t in owner if overlap(t, tensor)), None)
                why = f"{lost.name} has been written over it" if lost else "nothing has written it"
                raise ProgramError(f"{where} reads {tensor.name}, but {why}")
        conflict = None if launch.barrier else since.conflict(launch)
        if conflict:
            raise ProgramError(f"{where} {conflict}, without a barrier")
        if launch.barrier:
            since = Unordered()
        since.add(launch)
        for tensor in launch.touched("w"):
            owner = [t for t in owner if t.root is tensor.root or not overlap(t.root, tensor)] + [tensor]


def _check_extents(where: str, launch: Launch, program: Program) -> None:
    if set(launch.buffers) != {b.name for b in launch.kernel.buffers}:
        raise ProgramError(f"{where} binds {sorted(launch.buffers)}, not the buffers its kernel declares")
    if set(launch.scalars) != {name for name, _ in launch.kernel.scalars}:
        raise ProgramError(f"{where} gives {sorted(launch.scalars)}, not the scalars its kernel declares")
    needed = launch.kernel.extents(launch.scalars, program.max_counts) if launch.kernel.extents else {}
    for name, tensor in launch.buffers.items():
        if tensor is None:
            continue
        arena, _, end = tensor.region
        if tensor.offset < 0 or end > program.arena_bytes[arena]:
            raise ProgramError(f"{where}: {name} ({tensor.name}) lies outside the {arena} arena")
        if needed.get(name, 0) > tensor.nbytes:
            raise ProgramError(
                f"{where} touches {needed[name]} bytes of {name}; {tensor.name} has {tensor.nbytes}"
            )


def costs(program: Program, counts: Counts) -> list[Cost]:
    """Bytes and operations of each launch for a step of these counts."""
    return [launch.cost(counts) for launch in program.launches]
