"""Which matmuls the NPU may compute in int8: those that cost at most half a percent of perplexity."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.devices.hybrid.cut import Gemm

LIMIT = 0.005  # of perplexity, more than without
Cost = Callable[
    [frozenset[str]], float
]  # what perplexity grows by with these groups in int8, as a part of it


@dataclass(frozen=True)
class Verdict:
    costs: dict[str, float]  # of each group alone
    admitted: frozenset[str]
    total: float  # of all that are admitted

    def admits(self, gemm: Gemm) -> bool:
        return any(group in self.admitted for group in groups(gemm))


def groups(gemm: Gemm) -> list[str]:
    """What a matmul may be judged by: its layer, what it multiplies with, and both."""
    names = gemm.weights.name.replace(".weight", "").split("+")
    layer = re.match(r"blk\.(\d+)\.", names[0])
    kind = "+".join(name.split(".")[-1] for name in names)
    return [kind, f"layer {layer[1]}", f"layer {layer[1]} {kind}"] if layer else [kind]


def judge(candidates: Sequence[str], cost: Cost, limit: float = LIMIT) -> Verdict:
    """Those that are too dear alone stay off. So do the dearest of the rest, as long as all together are."""
    costs = {group: cost(frozenset([group])) for group in candidates}
    admitted = sorted((group for group in candidates if costs[group] <= limit), key=costs.__getitem__)
    while admitted and (total := cost(frozenset(admitted))) > limit:
        admitted.pop()
    return Verdict(costs, frozenset(admitted), total if admitted else 0.0)
