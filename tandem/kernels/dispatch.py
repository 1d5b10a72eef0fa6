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
from tandem.kernels.panels import CHOSEN


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
    def cores(self) -> int: ...  # that run workgroups; 0: unknown
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
    part_sums: bool = False  # workgroups leave sums for each other behind scratch memory's other contents
    # The kernel that must have written the activations to scratch memory in this shader's order.
    expand: str = ""


DispatchRule = Callable[[Scalars, Counts, Gpu], Dispatch | None]  # None: this GPU does not run such a launch

# Scratch memory is one buffer of the device. It begins with counters, which are 0 between launches (scratch.slang). On
# GPUs with register cooperative matrices it ends with the sums of workgroups that share a tile of a matmul.
SCRATCH_BYTES, COUNTERS, PART_SUMS_BYTES = 32 << 20, 16384, 32 << 20
COUNTER_BYTES = 4 * COUNTERS
SCRATCH_WORDS_BYTES = SCRATCH_BYTES - COUNTER_BYTES  # bytes after the counters

# Specialisation constants that say which format the weights have, in shaders that several formats share.
FLOAT_CONSTANT, CHOSEN_CONSTANT = 2, 5  # float_panels.slang, chosen_panels.slang
FLOAT_TYPES = ("f16", "bf16")  # on matrix units, in the order of float_panels.slang

ENOUGH_WORKGROUPS = {"discrete": 1024, "integrated": 256}  # workgroups that fill a GPU of this kind


def shader_layout(layout: str) -> str:
    """The part of a shader's name that says which formats it is for."""
    return "chosen" if layout in CHOSEN else "float" if layout in FLOAT_TYPES else layout


def with_format(constants: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Adds the constant by which a shader for several formats is told the one of its weights."""
    if layout in CHOSEN:
        return *padded(constants, CHOSEN_CONSTANT), CHOSEN.index(layout)
    if layout in FLOAT_TYPES:
        return *padded(constants, FLOAT_CONSTANT), FLOAT_TYPES.index(layout)
    return constants


def padded(constants: tuple[int, ...], count: int) -> tuple[int, ...]:
    return *constants, *[0] * (count - len(constants))  # 0: the shader has no such constant


def compiled_scalars(gpu: Gpu, count: int = MAX_SCALARS) -> int:
    """Number of scalars that are compiled in for a launch of one token.

    A discrete GPU starts sooner without loading them, and its driver compiles fast.
    """
    return count if gpu.kind == "discrete" else 0
