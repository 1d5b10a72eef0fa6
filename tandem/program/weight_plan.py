"""Which weights a Program needs, in which layout and order: decided before anything is read or allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.kernels.panels import LANES, LAYOUTS
from tandem.program.graph import Matrix, Vector
from tandem.program.program import Tensor

ALIGNMENT = 64  # a cache line, and one AVX-512 vector
GLU_ROWS = 32  # gate and up alternate by this many rows, so that one work item holds both


@dataclass(frozen=True)
class Piece:
    """Rows [begin, end) of a matrix of the file."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class PackedMatrix:
    tensor: Tensor
    rows: int
    columns: int
    pieces: tuple[Piece, ...]  # stacked in this order


@dataclass(frozen=True)
class PackedVector:
    tensor: Tensor
    parts: tuple[Vector | int, ...]  # constants by name, or so many zeros


def align(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


@dataclass
class WeightPlan:
    layouts: Mapping[str, str]  # matrix name -> layout on this device
    matrices: dict[tuple[Piece, ...], PackedMatrix] = field(default_factory=dict)
    vectors: dict[tuple[Vector | int, ...], PackedVector] = field(default_factory=dict)
    nbytes: int = 0

    def matrix(self, parts: list[Matrix], *, glu: bool = False) -> Tensor:
        """`parts` stacked into one matrix (all of one layout); shared if asked for again, as a tied head is."""
        if glu:
            steps = range(0, parts[0].rows, GLU_ROWS)
            pieces = tuple(Piece(part.name, r, r + GLU_ROWS) for r in steps for part in parts)
        else:
            pieces = tuple(Piece(part.name, 0, part.rows) for part in parts)
        if pieces not in self.matrices:
            layout = self.layouts[parts[0].name]
            rows, columns = sum(part.rows for part in parts), parts[0].columns
            tensor = Tensor("+".join(part.name for part in parts), "weights", layout,
                            LAYOUTS[layout].matrix_bytes(rows, columns))  # fmt: skip
            self._place(tensor)
            self.matrices[pieces] = PackedMatrix(tensor, rows, columns, pieces)
        return self.matrices[pieces].tensor

    def vector(self, *parts: Vector | int) -> Tensor:
        """`parts` one after the other, padded with zeros to whole panels."""
        if parts not in self.vectors:
            size = sum(part if isinstance(part, int) else part.size for part in parts)
            name = "+".join(part.name for part in parts if isinstance(part, Vector))
            tensor = Tensor(name, "weights", "f32", 4 * -(-size // LANES) * LANES)
            self._place(tensor)
            self.vectors[parts] = PackedVector(tensor, parts)
        return self.vectors[parts].tensor

    def _place(self, tensor: Tensor) -> None:
        tensor.offset, self.nbytes = self.nbytes, self.nbytes + align(tensor.nbytes)
