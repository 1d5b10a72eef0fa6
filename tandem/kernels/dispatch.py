"""How a kernel is dispatched on a GPU: workgroups, the entry point of its shader and its specialisation constants.

A dispatch rule is a function (scalars, counts, gpu) -> Dispatch. Each stands beside its kernel: `dispatch` in
kernels/NAME.py, or kernels/NAME_dispatch.py where it is long; dispatch_table.py lists them. `counts` are the counts
("tokens", "rows", "work") of the bucket that is being recorded: the shader skips work past the counts in StepInputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tandem.kernels.abi import MAX_SCALARS
from tandem.kernels.kernel import Counts, Scalars


class Choices(Protocol):
    def of(self, kernel: str, scalars: Scalars, *sizes: int) -> Mapping[str, int]:
        """The tuned parameters for a kernel and a shape; empty if it is not tuned."""


class Gpu(Protocol):
    """The properties of a GPU that dispatch rules read."""

    @property
    def name(self) -> str: ...
    @property
    def vendor(self) -> str: ...
    @property
    def kind(self) -> str: ...  # discrete, integrated, software, ...
    @property
    def subgroup_min(self) -> int: ...
    @property
    def subgroup_max(self) -> int: ...
    @property
    def shared_memory(self) -> int: ...  # bytes per workgroup
    @property
    def workgroup_invocations(self) -> int: ...
    @property
    def matrix_shapes(self) -> Sequence[Any]: ...  # cooperative matrices: m, n, k, a, b, c
    # Whether lanes hold the elements of a cooperative matrix in the known order (coopmat_layout.py).
    @property
    def register_coopmat(self) -> bool: ...
    @property
    def choices(self) -> Choices: ...


@dataclass(frozen=True)
class Dispatch:
    x: int  # workgroups
    y: int = 1
    z: int = 1
    shader: str = ""  # entry point; "": the kernel's own name
    constants: tuple[int, ...] = ()  # specialisation constants 0, 1, ...; absent ones keep their defaults
    subgroup: int = 0  # invocations; 0: the driver's choice
    compiled_scalars: int = 0  # the launch's first scalars, compiled in as specialisation constants
    # How the shader uses scratch memory, if the kernel itself declares no such buffer.
    scratch: Literal["", "r", "w"] = ""
    # The kernel that must have written the activations to scratch memory in this shader's order.
    expand: str = ""


DispatchRule = Callable[[Scalars, Counts, Gpu], Dispatch | None]  # None: this GPU does not run such a launch

# Scratch memory is one buffer of the device. It begins with counters, which are 0 between launches (scratch.slang).
SCRATCH_BYTES, COUNTERS = 32 << 20, 16384
COUNTER_BYTES = 4 * COUNTERS
SCRATCH_WORDS_BYTES = SCRATCH_BYTES - COUNTER_BYTES  # bytes after the counters

ENOUGH_WORKGROUPS = {"discrete": 1024, "integrated": 256}  # workgroups that fill a GPU of this kind


def compiled_scalars(gpu: Gpu, count: int = MAX_SCALARS) -> int:
    """Number of scalars that are compiled in for a launch of one token.

    A discrete GPU starts sooner without loading them, and its driver compiles fast.
    """
    return count if gpu.kind == "discrete" else 0
