"""How a kernel is dispatched on a GPU: workgroups, the entry point of its shader and its specialisation constants.

A dispatch rule is a function (scalars, counts, gpu) -> Dispatch. Each stands beside the kernel that it is for:
`dispatch` in kernels/NAME.py, or kernels/NAME_dispatch.py where it is long; dispatch_table.py lists them. `counts` are
those of the bucket that is being recorded ("tokens", "rows", "work"): the shader skips what lies past the counts in
StepInputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tandem.kernels.abi import MAX_SCALARS
from tandem.kernels.kernel import Counts, Scalars


class Choices(Protocol):
    def of(self, kernel: str, scalars: Scalars, *sizes: int) -> Mapping[str, int]:
        """What tuning has chosen for a kernel and a shape; empty: nothing."""


class Gpu(Protocol):
    """The properties of a GPU that dispatch rules read."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...  # discrete, integrated, software, ...
    @property
    def subgroup_min(self) -> int: ...
    @property
    def subgroup_max(self) -> int: ...
    @property
    def shared_memory(self) -> int: ...  # bytes a workgroup
    @property
    def workgroup_invocations(self) -> int: ...
    @property
    def matrix_shapes(self) -> Sequence[Any]: ...  # of cooperative matrices: m, n, k, a, b, c
    @property
    def register_coopmat(
        self,
    ) -> bool: ...  # it is known which lane holds which element of a cooperative matrix
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
    scratch: Literal["", "r", "w"] = (
        ""  # how it uses scratch memory, where the kernel itself declares no such buffer
    )
    expand: str = (
        ""  # the kernel that must have written the activations to scratch memory in this shader's order
    )


DispatchRule = Callable[[Scalars, Counts, Gpu], Dispatch | None]  # None: this GPU does not run such a launch

# Scratch memory is one buffer of the device. It begins with counters, which are 0 between launches (scratch.slang).
SCRATCH_BYTES, COUNTERS = 32 << 20, 16384
COUNTER_BYTES = 4 * COUNTERS
SCRATCH_WORDS_BYTES = SCRATCH_BYTES - COUNTER_BYTES  # what is left after the counters

ENOUGH_WORKGROUPS = {"discrete": 1024, "integrated": 256}  # workgroups that fill a GPU of this kind


def compiled_scalars(gpu: Gpu, count: int = MAX_SCALARS) -> int:
    """How many scalars of a launch for one token are compiled in: a discrete GPU starts sooner without loading them,
    and its driver compiles fast."""
    return count if gpu.kind == "discrete" else 0
