"""Which weights a Program needs, in which layout and order: decided before anything is read or allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.kernels.abi import GLU_ROWS, PANEL_ROWS
from tandem.kernels.panels import LAYOUTS
from tandem.program.graph import Matrix, Vector
from tandem.program.program import Tensor

ALIGNMENT = 64  # a cache line, and one AVX-512 vector


class PackedMatrix(NamedTuple):
    """Matrices of the file stacked by rows; with `glu` two of equal shape alternate by GLU_ROWS."""

    tensor: Tensor
    parts: tuple[Matrix, ...]
    glu: bool

    def placement(self, part: int) -> tuple[int, int, int]:
        """(first place, run, period) in panels: panel p of a part goes to first + p // run * period + p % run."""
        if self.glu:
            run = GLU_ROWS // PANEL_ROWS
            return part * run, run, run * len(self.parts)
        panels = self.parts[part].rows // PANEL_ROWS + 1
        return sum(m.rows // PANEL_ROWS for m in self.parts[:part]), panels, panels


class PackedVector(NamedTuple):
    tensor: Tensor
    parts: tuple[Vector | int, ...]  # constants by name, or so many zeros


def align(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


@dataclass
class WeightPlan:
    layouts: Mapping[str, str]  # matrix name -> layout on this device
    matrices: dict[tuple[tuple[Matrix, ...], bool], PackedMatrix] = field(default_factory=dict)
    vectors: dict[tuple[Vector | int, ...], PackedVector] = field(default_factory=dict)
    nbytes: int = 0

    def matrix(self, parts: list[Matrix], *, glu: bool = False) -> Tensor:
        """`parts` stacked into one matrix (all of one layout); shared if asked for again, as a tied head is."""
        key = (tuple(parts), glu)
        if key not in self.matrices:
            layout = self.layouts[parts[0].name]
            nbytes = LAYOUTS[layout].matrix_bytes(sum(part.rows for part in parts), parts[0].columns)
            tensor = Tensor("+".join(part.name for part in parts), "weights", layout, nbytes)
            self._place(tensor)
            self.matrices[key] = PackedMatrix(tensor, tuple(parts), glu)
        return self.matrices[key].tensor

    def vector(self, *parts: Vector | int) -> Tensor:
        """`parts` one after the other, padded with zeros to whole panels."""
        if parts not in self.vectors:
            size = sum(part if isinstance(part, int) else part.size for part in parts)
            name = "+".join(part.name for part in parts if isinstance(part, Vector))
            tensor = Tensor(name, "weights", "f32", 4 * -(-size // PANEL_ROWS) * PANEL_ROWS)
            self._place(tensor)
            self.vectors[parts] = PackedVector(tensor, parts)
        return self.vectors[parts].tensor

    def vector_names(self) -> set[str]:
        return {part.name for parts in self.vectors for part in parts if isinstance(part, Vector)}

    def _place(self, tensor: Tensor) -> None:
        tensor.offset, self.nbytes = self.nbytes, self.nbytes + align(tensor.nbytes)
