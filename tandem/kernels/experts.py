"""The tables of a mixture of experts: their sizes, and a NumPy version of them.

`chosen`: int32 [tokens, used], the experts of each token; `weights`: float32 of the same shape (route.py).
`groups`: the tokens of each expert, the slots of each token, and the token of each slot (group_tokens.py).

A slot is a row of activations for one expert. Slots are sorted by expert, and the slots of each expert begin with a new
tile. gather_tokens.py copies tokens to slots, expert_matmul.py computes on slots, and combine.py adds up the slots of a
token.

Only the device knows how many experts a step uses. The host knows an upper bound: `most_experts`.
"""

from __future__ import annotations

import numpy as np

from tandem.kernels.abi import (
    GROUP_EXPERT,
    GROUP_EXPERTS,
    GROUP_HEADER,
    GROUP_INTS,
    GROUP_SLOT,
    GROUP_TOKENS,
    Q8_TILE,
)
from tandem.kernels.kernel import Array, Scalars


def most_experts(tokens: int, s: Scalars) -> int:
    """Experts that `tokens` tokens use at most."""
    return min(tokens * int(s["used"]), int(s["experts"]))


def expected_experts(tokens: int, s: Scalars) -> float:
    """Experts that tokens use if each chooses at random."""
    return float(s["experts"] * (1 - (1 - s["used"] / s["experts"]) ** tokens))


def max_slots(tokens: int, s: Scalars) -> int:
    return Q8_TILE * (tokens * int(s["used"]) // Q8_TILE + most_experts(tokens, s))


def chosen_bytes(tokens: int, s: Scalars) -> int:
    return 4 * tokens * int(s["used"])


def groups_bytes(tokens: int, s: Scalars) -> int:
    return 4 * (
        GROUP_HEADER + int(s["experts"]) * GROUP_INTS + tokens * int(s["used"]) + max_slots(tokens, s)
    )


def random_choice(tokens: int, used: int, experts: int, rng: np.random.Generator) -> Array:
    """`chosen` of tokens that use some experts more often than others."""
    odds = 1.0 / (1.0 + np.arange(experts))
    tokens_ = [rng.choice(experts, used, replace=False, p=odds / odds.sum()) for _ in range(tokens)]
    return np.stack(tokens_).astype(np.int32)


def group(chosen: Array, experts: int) -> Array:
    """The table `groups`."""
    tokens = np.bincount(chosen.ravel(), minlength=experts)
    first = np.concatenate([[0], np.cumsum(-(-tokens // Q8_TILE) * Q8_TILE)])
    in_use = np.flatnonzero(tokens)
    sizes = {"experts": experts, "used": chosen.shape[1]}
    groups = np.zeros(groups_bytes(len(chosen), sizes) // 4, np.int32)
    groups[GROUP_EXPERTS] = len(in_use)
    table = groups[GROUP_HEADER : GROUP_HEADER + len(in_use) * GROUP_INTS].reshape(-1, GROUP_INTS)
    table[:, GROUP_EXPERT], table[:, GROUP_SLOT], table[:, GROUP_TOKENS] = (
        in_use,
        first[in_use],
        tokens[in_use],
    )
    slots, following = groups[GROUP_HEADER + experts * GROUP_INTS :], first.copy()
    for i, expert in enumerate(chosen.ravel()):
        slots[i] = following[expert]
        slots[chosen.size + following[expert]] = i // chosen.shape[1]
        following[expert] += 1
    return groups


def slots_of(groups: Array, s: Scalars, tokens: int) -> Array:
    """int32 [tokens, used]."""
    begin = GROUP_HEADER + int(s["experts"]) * GROUP_INTS
    used = int(s["used"])
    return groups[begin : begin + tokens * used].reshape(tokens, used)


def tokens_of(groups: Array, s: Scalars, tokens: int) -> Array:
    """int32 [slots]: the token of each slot that is in use."""
    begin = GROUP_HEADER + int(s["experts"]) * GROUP_INTS + tokens * int(s["used"])
    return groups[begin : begin + max_slots(tokens, s)]


def in_use(groups: Array) -> list[tuple[int, int, int]]:
    """(expert, first slot, tokens) of each expert in use."""
    count = int(groups[GROUP_EXPERTS])
    table = groups[GROUP_HEADER : GROUP_HEADER + count * GROUP_INTS].reshape(count, GROUP_INTS)
    return [(int(row[GROUP_EXPERT]), int(row[GROUP_SLOT]), int(row[GROUP_TOKENS])) for row in table]
