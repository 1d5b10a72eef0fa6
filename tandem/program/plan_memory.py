"""Memory planning: assigns offsets to activations. Two share bytes only if one is dead before the other is written."""

from __future__ import annotations

from tandem.program.program import Launch, Tensor
from tandem.program.weight_plan import align

# A GPU may run these together with as many launches after them (devices/vulkan/fuse_launches.py): what they read stays
# until then.
FUSED_WITH_NEXT = {"route": 2, "gather_tokens": 1, "combine": 1}


def lifetimes(launches: list[Launch]) -> dict[Tensor, tuple[int, int]]:
    """First and last launch that touches each activation (views count for their base)."""
    lives: dict[Tensor, tuple[int, int]] = {}
    for i, launch in enumerate(launches):
        fused = FUSED_WITH_NEXT.get(launch.kernel.name, 0)
        for tensors, last in ((launch.touched("r"), i + fused), (launch.touched("w"), i)):
            for tensor in tensors:
                if tensor.arena == "activations":
                    first, until = lives.get(tensor.root, (i, i))
                    lives[tensor.root] = (first, max(until, last))
    return lives


def plan_memory(launches: list[Launch]) -> int:
    """Sets offsets in the "activations" arena, largest tensors first; returns the arena's size."""
    lives = lifetimes(launches)
    placed: list[Tensor] = []
    for tensor in sorted(lives, key=lambda t: (-t.nbytes, lives[t])):
        first, last = lives[tensor]
        taken = sorted(
            (t.start, t.start + align(t.nbytes))
            for t in placed
            if lives[t][0] <= last and first <= lives[t][1]
        )
        offset = 0
        for begin, end in taken:
            if begin - offset >= align(tensor.nbytes):
                break
            offset = max(offset, end)
        tensor.offset = offset
        placed.append(tensor)
    return max((t.offset + align(t.nbytes) for t in placed), default=0)
