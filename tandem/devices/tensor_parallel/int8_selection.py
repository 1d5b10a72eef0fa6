"""Decides which matmuls the NPU may compute in int8: perplexity may rise by at most half a percent."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.devices.tensor_parallel.cut import Gemm

LIMIT = 0.005  # maximum relative increase of perplexity
Cost = Callable[[frozenset[str]], float]  # groups in int8 -> relative increase of perplexity


@dataclass(frozen=True)
class Int8Selection:
    costs: dict[str, float]  # increase for each group alone
    selected: frozenset[str]
    total: float  # increase with all selected groups

    def includes(self, gemm: Gemm) -> bool:
        return any(group in self.selected for group in groups(gemm))


def groups(gemm: Gemm) -> list[str]:
    """Returns the groups that a matmul belongs to: its layer, its kind of weights, and both together."""
    names = gemm.weights.name.replace(".weight", "").split("+")
    layer = re.match(r"blk\.(\d+)\.", names[0])
    kind = "+".join(name.split(".")[-1] for name in names)
    return [kind, f"layer {layer[1]}", f"layer {layer[1]} {kind}"] if layer else [kind]


def select_int8(candidates: Sequence[str], cost: Cost, limit: float = LIMIT) -> Int8Selection:
    """Selects groups within the limit alone, then drops the costliest until all together are within it."""
    costs = {group: cost(frozenset([group])) for group in candidates}
    selected = sorted((group for group in candidates if costs[group] <= limit), key=costs.__getitem__)
    while selected and (total := cost(frozenset(selected))) > limit:
        selected.pop()
    return Int8Selection(costs, frozenset(selected), total if selected else 0.0)
