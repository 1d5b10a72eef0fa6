"""Bytes and operations of a step, counted from the costs that its launches declare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from tandem.kernels import expert_matmul
from tandem.kernels.abi import KV_BLOCK
from tandem.kernels.kernel import Cost
from tandem.kernels.kv_layout import kv_bytes, latent_bytes
from tandem.program.program import Launch, Program

Step = list[tuple[int, int]]  # (position, tokens) of each sequence
ATTENTION = ("attention", "attention_rope", "attention_latent")
# Kernels whose operations count: those of others are negligible.
COUNTED_KERNELS = "matmul", "expert_matmul", "attention"


def step_costs(program: Program, step: Step, rows: int | None = None) -> list[Cost]:
    """The cost of each launch: what it declares, plus the keys and values that attention reads. `rows`: rows of
    logits, if not one for each sequence."""
    tokens = sum(count for _, count in step)
    counts = {"tokens": tokens, "rows": rows or len(step), "work": len(step)}
    alike = Counter(step)
    return [_launch_cost(launch, counts, alike) for launch in program.launches]


def min_cost(program: Program, step: Step, rows: int | None = None) -> Cost:
    """The cost that no engine can avoid: weights, keys and values read once, and the operations of matmuls and
    attention. Activations do not count, for they may stay in caches. `rows`: as in step_costs."""
    costs, alike, tokens = step_costs(program, step, rows), Counter(step), sum(count for _, count in step)
    return Cost(
        sum(weights_read(launch, tokens) + kv_read(launch, alike) for launch in program.launches),
        sum(
            cost.ops
            for launch, cost in zip(program.launches, costs, strict=True)
            if launch.kernel.name.startswith(COUNTED_KERNELS)
        ),
    )


def added(costs: Iterable[Cost]) -> Cost:
    each = list(costs)
    return Cost(sum(cost.bytes for cost in each), sum(cost.ops for cost in each))


def weights_read(launch: Launch, tokens: int = 1) -> float:
    """Bytes of weights; of a mixture, those of the experts that `tokens` tokens use if each chooses at random. Rows of
    the embedding and of the RoPE table are negligible."""
    if launch.kernel.name.startswith("expert_matmul"):
        return expert_matmul.expected_bytes(launch.scalars, tokens)
    if not launch.kernel.name.startswith(("matmul", "norm")):
        return 0.0
    return sum(tensor.nbytes for tensor in launch.touched("r") if tensor.arena == "weights")


def kv_read(launch: Launch, alike: Counter[tuple[int, int]]) -> float:
    """Bytes of keys and values. `alike`: the number of sequences for each (position, tokens)."""
    if launch.kernel.name not in ATTENTION:
        return 0.0
    window, each = kv_read_per_position(launch)
    window = window or 1 << 30
    return each * sum(n * min(begin + count, window + count - 1) for (begin, count), n in alike.items())


def kv_read_per_position(launch: Launch) -> tuple[int, int]:
    """The window of a launch of attention, 0 for none, and the bytes that the cache has for a position."""
    s = launch.scalars
    if launch.kernel.name == "attention_latent":
        return 0, latent_bytes(1, s["latent"] + s["rotated"], s["kv"]) // KV_BLOCK
    return int(s["window"]), kv_bytes(1, s["kv_heads"], int(s["head_dim"]), s["kv"]) // KV_BLOCK


def _launch_cost(launch: Launch, counts: dict[str, int], alike: Counter[tuple[int, int]]) -> Cost:
    cost, s = launch.cost(counts), launch.scalars
    if launch.kernel.name not in ATTENTION:
        return cost
    window = kv_read_per_position(launch)[0] or 1 << 30
    pairs = sum(
        n * int(np.minimum(np.arange(begin, begin + count) + 1, window).sum())
        for (begin, count), n in alike.items()
    )
    latent = launch.kernel.name == "attention_latent"
    # Half of the columns of a query and a value together.
    columns = s["latent"] + s["rotated"] / 2 if latent else s["head_dim"]
    ops = 4 * pairs * int(s["q_heads"]) * columns
    return Cost(cost.bytes + kv_read(launch, alike), cost.ops + ops)
