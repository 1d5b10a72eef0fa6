"""The weights that a Program needs, with their layouts and places in memory, before anything is read or allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.kernels.layout import Layout
from tandem.program.graph import Matrix, Vector
from tandem.program.program import Tensor

ALIGNMENT = 64  # a cache line, and one AVX-512 vector


class PackedMatrix(NamedTuple):
    """Matrices of the file stacked by rows; with `glu`, two of equal shape alternate by the layout's glu_rows."""

    tensor: Tensor
    layout: Layout
    parts: tuple[Matrix, ...]
    glu: bool

    def row_groups(self, part: int) -> tuple[int, int, int]:
        """Returns (first, run, period): row group g of a part becomes group first + g // run * period + g % run."""
        if self.glu:
            run = self.layout.glu_rows // self.layout.group_rows
            return part * run, run, run * len(self.parts)
        groups = self.parts[part].rows // self.layout.group_rows + 1
        return sum(m.rows // self.layout.group_rows for m in self.parts[:part]), groups, groups


class PackedVector(NamedTuple):
    tensor: Tensor
    parts: tuple[Vector | int, ...]  # constants by name, or a number of zeros


def align(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


@dataclass
class WeightPlan:
    layouts: Mapping[str, Layout]  # by matrix name, as the device chose them
    matrices: dict[tuple[tuple[Matrix, ...], bool], PackedMatrix] = field(default_factory=dict)
    vectors: dict[tuple[Vector | int, ...], PackedVector] = field(default_factory=dict)
    nbytes: int = 0

    def matrix(self, parts: list[Matrix], *, glu: bool = False) -> Tensor:
        """`parts`, all of one layout, stacked into one matrix; the same one for the same parts (a tied head)."""
        key = (tuple(parts), glu)
        if key not in self.matrices:
            layout = self.layouts[parts[0].name]
            nbytes = layout.matrix_bytes(sum(part.rows for part in parts), parts[0].columns)
            tensor = Tensor("+".join(part.name for part in parts), "weights", layout.name, nbytes)
            self._place(tensor)
            self.matrices[key] = PackedMatrix(tensor, layout, tuple(parts), glu)
        return self.matrices[key].tensor

    def vector(self, *parts: Vector | int) -> Tensor:
        """`parts` one after the other, padded with zeros to ALIGNMENT: a kernel may read whole SIMD vectors."""
        if parts not in self.vectors:
            size = sum(part if isinstance(part, int) else part.size for part in parts)
            name = "+".join(part.name for part in parts if isinstance(part, Vector))
            tensor = Tensor(name, "weights", "f32", align(4 * size))
            self._place(tensor)
            self.vectors[parts] = PackedVector(tensor, parts)
        return self.vectors[parts].tensor

    def vector_names(self) -> set[str]:
        return {part.name for parts in self.vectors for part in parts if isinstance(part, Vector)}

    def _place(self, tensor: Tensor) -> None:
        tensor.offset, self.nbytes = self.nbytes, self.nbytes + align(tensor.nbytes)
