"""Hazards between launches: read after write, write after read and write after write, over byte ranges.

The memory plan lets tensors share bytes, so hazards are found by ranges, not by names.
"""

from __future__ import annotations

from tandem.program.program import Launch, Tensor


class PendingAccesses:
    """The tensors that launches have read and written since the last barrier."""

    def __init__(self) -> None:
        self.read: list[Tensor] = []
        self.written: list[Tensor] = []

    def conflict(self, launch: Launch) -> str | None:
        """Describes the first hazard that this launch would have without a barrier; None: there is none."""
        for kind, mine, theirs in (
            ("reads {} after it was written", launch.touched("r"), self.written),
            ("writes {} after it was read", launch.touched("w"), self.read),
            ("writes {} after it was written", launch.touched("w"), self.written),
        ):
            for a in mine:
                for b in theirs:
                    if overlap(a, b):
                        return kind.format(b.name if a.name == b.name else f"{a.name} (bytes of {b.name})")
        return None

    def add(self, launch: Launch) -> None:
        self.read += launch.touched("r")
        self.written += launch.touched("w")


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share bytes. Views of one matrix interleave by rows: they do if they share columns."""
    if a.arena != b.arena or a.start >= b.start + b.nbytes or b.start >= a.start + a.nbytes:
        return False
    if a.root is b.root and a.stride == b.stride > 0:
        (begin_a, end_a), (begin_b, end_b) = a.columns, b.columns
        return begin_a < end_b and begin_b < end_a
    return True


def place_barriers(launches: list[Launch]) -> None:
    """Sets a barrier before each launch that conflicts with one since the last barrier, and nowhere else."""
    since = PendingAccesses()
    for launch in launches:
        launch.barrier = since.conflict(launch) is not None
        if launch.barrier:
            since = PendingAccesses()
        since.add(launch)
