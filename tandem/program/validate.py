"""Validates a Program without running it.

Rules, each a ProgramError that names the launch:
- shape: every bound tensor has at least the bytes that its kernel touches, inside its arena (a view: inside its base);
- overlap: no launch writes over bytes that a later launch, or another of its own buffers, still needs;
- use before write: an activation is read only after a launch has written it;
- barrier: a launch waits for an earlier one if it reads or writes bytes that it wrote, or writes bytes that it read.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from tandem.errors import ProgramError
from tandem.program.hazards import PendingAccesses, overlap
from tandem.program.program import Launch, Program, Tensor

INITIALISED = ("weights", "kv", "step", "results.1")  # arenas with contents before the first launch
READ_ONLY = ("weights", "step", "results.1")


def validate(program: Program, given: Iterable[Tensor] = ()) -> None:
    """Raises ProgramError. `given`: activations that are written before the first launch."""
    since = PendingAccesses()
    intact = set(given)  # written so far, and not written over since
    lost: dict[Tensor, Tensor] = {}  # root -> what was written over it
    for i, launch in enumerate(program.launches):
        where = f"launch {i} ({launch.kernel.name} -> {launch.name})"
        _check_bindings(where, launch)
        _check_extents(where, launch, program)
        _check_no_aliasing(where, launch)
        for tensor in launch.touched("r"):
            if tensor.arena not in INITIALISED:
                _check_written(where, tensor, intact, lost)
        conflict = None if launch.barrier else since.conflict(launch)
        if conflict:
            raise ProgramError(f"{where} {conflict}, without a barrier")
        if launch.barrier:
            since = PendingAccesses()
        since.add(launch)
        for tensor in launch.touched("w"):
            over = {t for t in intact if t.root is not tensor.root and overlap(t, tensor)}
            lost |= {t.root: tensor for t in over}
            intact = intact - over | {tensor}


def _check_bindings(where: str, launch: Launch) -> None:
    if set(launch.buffers) != {b.name for b in launch.kernel.buffers}:
        raise ProgramError(f"{where} binds {sorted(launch.buffers)}, not the buffers its kernel declares")
    if set(launch.scalars) != set(launch.kernel.scalar_names):
        raise ProgramError(f"{where} gives {sorted(launch.scalars)}, not the scalars its kernel declares")
    for tensor in launch.touched("w"):
        if tensor.arena in READ_ONLY:
            raise ProgramError(
                f"{where} writes {tensor.name}, but kernels only read the {tensor.arena} arena"
            )


def _check_extents(where: str, launch: Launch, program: Program) -> None:
    needed = launch.kernel.extents(launch.scalars, program.max_counts)
    for name, tensor in launch.buffers.items():
        if tensor is None:
            continue
        if tensor.base and not 0 <= tensor.offset <= tensor.base.nbytes - tensor.nbytes:
            raise ProgramError(f"{where}: {name} ({tensor.name}) lies outside of {tensor.base.name}")
        if not 0 <= tensor.root.offset <= program.arena_bytes[tensor.arena] - tensor.root.nbytes:
            raise ProgramError(f"{where}: {name} ({tensor.name}) lies outside the {tensor.arena} arena")
        if needed[name] > tensor.nbytes:
            raise ProgramError(
                f"{where} touches {needed[name]} bytes of {name}; {tensor.name} has {tensor.nbytes}"
            )


def _check_no_aliasing(where: str, launch: Launch) -> None:
    """Items run in any order, so an output may not overlap another buffer."""
    bound = [(b.access, launch.buffers[b.name]) for b in launch.kernel.buffers]
    for (access_a, a), (access_b, b) in combinations(bound, 2):
        if a and b and "w" in access_a + access_b and overlap(a, b):
            raise ProgramError(f"{where} writes over its own operand: {a.name} and {b.name} share bytes")


def _check_written(where: str, tensor: Tensor, intact: set[Tensor], lost: dict[Tensor, Tensor]) -> None:
    _, begin, end = tensor.region
    same = [t for t in intact if t.root is tensor.root]
    whole = any(t.start <= begin and end <= t.start + t.nbytes for t in same)
    if not whole and not _columns_written(tensor, same):
        by = lost.get(tensor.root)
        why = f"{by.name} has been written over it" if by else "nothing has written it"
        raise ProgramError(f"{where} reads {tensor.name}, but {why}")


def _columns_written(tensor: Tensor, same: list[Tensor]) -> bool:
    """Whether tensors of `same`, in the same root, together have all columns of a tensor's rows."""
    if not tensor.stride:
        return False
    first, end = tensor.columns
    rows = -(-tensor.nbytes // (4 * tensor.stride))
    views = [t for t in same if t.stride == tensor.stride and -(-t.nbytes // (4 * t.stride)) >= rows]
    for begin, stop in sorted(t.columns for t in views):
        if begin <= first:
            first = max(first, stop)
    return first >= end
