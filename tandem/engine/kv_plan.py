"""How many KV blocks there are: decided from the memory that is free, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tandem.errors import DoesNotFitError
from tandem.kernels.abi import KV_BLOCK, KV_TYPES, PANEL_ROWS
from tandem.kernels.kv_layout import kv_bytes
from tandem.kernels.panels import LAYOUTS
from tandem.model.config import ModelConfig
from tandem.program.step_inputs import StepLayout, StepLimits

KV_SHARE = 0.25  # of the free memory, for sequences beyond the first
HEADROOM = 200e6  # bytes left for Python, tokenizer and activations
LAYER_MOST = (1 << 32) - 1  # bytes of a layer's keys and values: offsets in shaders have 32 bits


def plan_kv(
    config: ModelConfig, limits: StepLimits, batch: int, weights: int, kv: str, free: tuple[float, float],
    wanted: float | None = None, step_slots: int = 1,
) -> tuple[int, ...]:  # fmt: skip
    """Blocks of each KV group: one full context at least, up to `batch` of them within a share of the fast memory; or
    as many as `wanted` bytes hold, or as a layer may have. `step_slots`: steps that have inputs of their own."""
    inputs = step_bytes(limits, step_slots)
    fast, every = (nbytes - weights - HEADROOM - inputs for nbytes in free)

    def nbytes(blocks: int) -> int:
        return context_bytes(config, blocks, limits.tokens, kv)

    one = nbytes(limits.blocks)
    if every < one <= every + inputs - step_bytes(_of_batch(limits, 1), step_slots):
        most = _largest_batch(limits, step_slots, every + inputs - one)
        raise DoesNotFitError(
            f"the model ({weights / 1e9:.1f} GB), a context of {limits.blocks * KV_BLOCK} ({one / 1e9:.1f} GB) and "
            f"what steps of a batch of {batch} need ({inputs / 1e9:.1f} GB) do not fit in the {free[1] / 1e9:.1f} GB "
            f"that are free: use a batch of at most {most}, or a smaller context",
            missing=one - every,
        )
    if every < one:
        room = every + inputs
        largest = KV_BLOCK * _most(
            lambda n: nbytes(n) + step_bytes(replace(limits, blocks=n), step_slots) <= room, limits.blocks
        )
        raise DoesNotFitError(
            f"the model ({weights / 1e9:.1f} GB) with a context of {limits.blocks * KV_BLOCK} ({one / 1e9:.1f} GB) "
            f"does not fit in the {free[1] / 1e9:.1f} GB that are free: "
            + (
                f"use a context of at most {largest}" + (", or kv q8 for half of it" if kv != "q8" else "")
                if largest
                else f"use {_quantisation(config, every + weights - one)}, a file of at most "
                f"{max(0, free[1] - HEADROOM) / 1e9:.1f} GB"
            ),
            missing=one - every,
        )
    if wanted is None:
        sequences = float(max(1, min(batch, int(fast * KV_SHARE / one))))
    else:
        _check_wanted(wanted, one, every, limits.blocks * KV_BLOCK)
        sequences = wanted / one
    blocks = _per_sequence(config, limits.blocks, limits.tokens)
    layer_block = kv_bytes(1, config.kv_heads, config.head_dim, KV_TYPES.index(kv))
    sequences = min(sequences, max(1.0, LAYER_MOST / (layer_block * max(blocks))))
    return tuple(int(n * sequences) for n in blocks)


def context_bytes(config: ModelConfig, blocks: int, tokens: int, kv: str) -> int:
    """Of the keys and values of one sequence of so many blocks, in steps of so many tokens."""
    block = kv_bytes(1, config.kv_heads, config.head_dim, KV_TYPES.index(kv))
    groups = zip(config.windows, _per_sequence(config, blocks, tokens), strict=True)
    return block * sum(config.layer_window.count(window) * count for window, count in groups)


def _per_sequence(config: ModelConfig, blocks: int, tokens: int) -> list[int]:
    """Blocks of each group: a sliding one keeps its window, a step's tokens, and a part of a block at either end."""
    return [min(blocks, (window + tokens) // KV_BLOCK + 2) if window else blocks for window in config.windows]


def step_bytes(limits: StepLimits, step_slots: int) -> int:
    """Of what grows with the batch: StepInputs and results of each step_slot, and the logits."""
    layout = StepLayout(limits)
    return step_slots * (layout.nbytes + layout.result_bytes) + 4 * limits.rows * limits.vocab


def _of_batch(limits: StepLimits, batch: int) -> StepLimits:
    spare = limits.rows - limits.sequences  # rows for draft tokens, less a guest's slot
    return replace(limits, rows=batch + 1 + spare, sequences=batch + 1)


def _largest_batch(limits: StepLimits, step_slots: int, room: float) -> int:
    """Whose steps need no more than `room` bytes."""
    return _most(lambda n: step_bytes(_of_batch(limits, n), step_slots) <= room, limits.sequences - 1)


def _most(fits: Callable[[int], bool], end: int) -> int:
    """The largest number below `end` that fits, if smaller ones do; 0 if none."""
    low, high = 0, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _quantisation(config: ModelConfig, room: float) -> str:
    """The largest in which the model's weights take no more than `room` bytes."""
    q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    layer = 2 * config.dim * (q + kv) + 3 * config.dim * config.ffn_dim
    weights = config.layers * layer + config.vocab * config.dim * (1 if config.tied_head else 2)
    sizes = {name: weights * each.chunk_bytes / (each.span * PANEL_ROWS) for name, each in LAYOUTS.items()}
    fitting = [name for name, size in sizes.items() if size <= room]
    if not fitting:
        return "a smaller model"
    best = max(fitting, key=lambda name: sizes[name])
    return f"it in {best.upper()} ({sizes[best] / 1e9:.1f} GB) or smaller, or another model"


def _check_wanted(wanted: float, one: int, free: float, context: int) -> None:
    if wanted < one:
        raise DoesNotFitError(
            f"a context of {context} takes {one / 1e9:.2f} GB of KV cache, more than the {wanted / 1e9:.2f} GB allowed "
            "for it: allow more, or use a smaller context",
            missing=math.inf,
        )
    if wanted > free:
        raise DoesNotFitError(
            f"a KV cache of {wanted / 1e9:.2f} GB does not fit beside the model: {max(0, free) / 1e9:.2f} GB are left",
            missing=wanted - free,
        )
