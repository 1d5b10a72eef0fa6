"""Computes the size of the KV cache from the free memory, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.errors import DoesNotFitError
from tandem.kernels.abi import KV_BLOCK, KV_TYPES, PANEL_ROWS
from tandem.kernels.kv_layout import kv_bytes
from tandem.kernels.panels import LAYOUTS
from tandem.model.config import ModelConfig
from tandem.program.step_inputs import StepLayout, StepLimits

KV_FRACTION = 0.25  # fraction of the free memory for KV caches of several sequences
STATE_FRACTION = 0.1  # fraction of the fast memory left beside the weights for recurrent states
MIN_STATES = 4  # state slots: of a sequence, of an out-of-band forward, and checkpoints
STATES_OF_SEQUENCE = 2  # state slots for each sequence: its own, and one for a checkpoint
CHECKPOINTS = 16  # more state slots for checkpoints
MIN_CHECKPOINTS = 2  # the end of a prompt and that of its answer
BLOCKS_WITHOUT_KV = 1 << 16  # maximum blocks of several sequences in a model without attention
HEADROOM = 200e6  # bytes left for Python, tokenizer and activations
MAX_LAYER_BYTES = (1 << 32) - 1  # maximum bytes of a layer's keys and values, or states: offsets have 32 bits


def plan_states(
    limits: StepLimits,
    layer_states: Sequence[int],
    *,
    weights: int,
    free: float,
    step_slots: int = 1,
    kv_memory: float | None = None,
) -> int:
    """Returns the number of state slots: those of sequences, draft tokens, an out-of-band forward and checkpoints,
    within STATE_FRACTION of the `free` bytes of fast memory that the weights leave. `layer_states`: bytes of a state
    in each layer. If the memory for keys and values is given, checkpoints have STATE_FRACTION of it."""
    if not layer_states:
        return 0
    state = sum(layer_states)
    left = free - weights - HEADROOM - step_bytes(limits, step_slots)
    draft_rows = limits.logits_rows - (limits.sequences - 1)
    checkpoints = (STATES_OF_SEQUENCE - 1) * limits.sequences + CHECKPOINTS
    if kv_memory is not None:
        checkpoints = min(checkpoints, max(MIN_CHECKPOINTS, int(STATE_FRACTION * kv_memory / state)))
    wanted = limits.sequences + draft_rows + checkpoints
    limit = min(left * STATE_FRACTION / state, MAX_LAYER_BYTES / max(layer_states))
    return max(MIN_STATES, min(wanted, int(limit)))


def plan_kv(
    config: ModelConfig,
    limits: StepLimits,
    kv: str,
    *,
    weights: int,
    free: tuple[float, float],
    step_slots: int = 1,
    wanted: float | None = None,
    states: int = 0,
) -> tuple[int, ...]:
    """Returns the number of blocks of each KV group.

    They hold at least one full context, and up to one per sequence within KV_FRACTION of the fast memory, or as many as
    fit in `wanted` bytes. `weights`: bytes of the model. `free`: bytes of fast memory, and of all memory. `step_slots`:
    steps in flight, each with its own inputs. `states`: bytes of recurrent states. Raises
    DoesNotFitError, which says what would fit."""
    batch, context = limits.sequences - 1, limits.blocks * KV_BLOCK
    inputs = step_bytes(limits, step_slots)
    fast_free, total_free = (nbytes - weights - states - HEADROOM - inputs for nbytes in free)
    one_context = context_bytes(config, limits.blocks, limits.tokens, kv)
    if total_free < one_context:
        if one_context <= total_free + inputs - step_bytes(_with_batch(limits, 1), step_slots):
            raise _batch_too_large(limits, step_slots, weights, one_context, free[1], total_free)
        raise _context_too_large(config, limits, step_slots, kv, weights, one_context, free[1], total_free)
    blocks = _blocks_per_sequence(config, limits.blocks, limits.tokens)
    if not one_context:  # without attention, blocks take no memory but that of the lists which count them
        return tuple(max(n, min(n * batch, BLOCKS_WITHOUT_KV)) for n in blocks)
    if wanted is None:
        sequences = float(max(1, min(batch, int(fast_free * KV_FRACTION / one_context))))
    else:
        _check_wanted(wanted, one_context, total_free, context)
        sequences = wanted / one_context
    layer_block = max(
        kv_bytes(1, *size, KV_TYPES.index(kv)) for w in config.windows for size in config.kv_sizes(w)
    )
    sequences = min(sequences, max(1.0, MAX_LAYER_BYTES / (layer_block * max(blocks))))
    return tuple(int(n * sequences) for n in blocks)


def _batch_too_large(
    limits: StepLimits, step_slots: int, weights: int, one_context: int, free: float, left: float
) -> DoesNotFitError:
    """`one_context`: bytes of one context. `left`: bytes of the `free` ones that are left for the KV cache."""
    inputs = step_bytes(limits, step_slots)
    room = left + inputs - one_context
    max_batch = _largest(
        lambda n: step_bytes(_with_batch(limits, n), step_slots) <= room, limits.sequences - 1
    )
    return DoesNotFitError(
        f"the model ({weights / 1e9:.1f} GB), a context of {limits.blocks * KV_BLOCK} ({one_context / 1e9:.1f} GB) and "
        f"what steps of a batch of {limits.sequences - 1} need ({inputs / 1e9:.1f} GB) do not fit in the "
        f"{free / 1e9:.1f} GB that are free: use a batch of at most {max_batch}, or a smaller context",
        missing=one_context - left,
    )


def _context_too_large(
    config: ModelConfig,
    limits: StepLimits,
    step_slots: int,
    kv: str,
    weights: int,
    one_context: int,
    free: float,
    left: float,
) -> DoesNotFitError:
    room = left + step_bytes(limits, step_slots)

    def fits(blocks: int) -> bool:
        needed = context_bytes(config, blocks, limits.tokens, kv)
        return needed + step_bytes(replace(limits, blocks=blocks), step_slots) <= room

    if max_context := KV_BLOCK * _largest(fits, limits.blocks):
        advice = f"use a context of at most {max_context}" + (
            ", or kv q8 for half of it" if kv != "q8" else ""
        )
    else:
        advice = (
            f"use {_smaller_format(config, left + weights - one_context)}, a file of at most "
            f"{max(0, free - HEADROOM) / 1e9:.1f} GB"
        )
    return DoesNotFitError(
        f"the model ({weights / 1e9:.1f} GB) with a context of {limits.blocks * KV_BLOCK} ({one_context / 1e9:.1f} GB) "
        f"does not fit in the {free / 1e9:.1f} GB that are free: {advice}",
        missing=one_context - left,
    )


def context_bytes(config: ModelConfig, blocks: int, tokens: int, kv: str) -> int:
    """Returns the bytes of keys and values of a sequence of `blocks` blocks, in steps of up to `tokens` tokens."""
    groups = zip(config.windows, _blocks_per_sequence(config, blocks, tokens), strict=True)
    return sum(
        kv_bytes(count, *size, KV_TYPES.index(kv))
        for window, count in groups
        for size in config.kv_sizes(window)
    )


def _blocks_per_sequence(config: ModelConfig, blocks: int, tokens: int) -> list[int]:
    """Returns the blocks of each group. A sliding-window group holds the window, the tokens of a step, and a part of a
    block at either end."""
    return [min(blocks, (window + tokens) // KV_BLOCK + 2) if window else blocks for window in config.windows]


def step_bytes(limits: StepLimits, step_slots: int) -> int:
    """Returns the bytes that grow with the batch: StepInputs and results of each step slot, and the logits."""
    layout = StepLayout(limits)
    return step_slots * (layout.nbytes + layout.result_bytes) + 4 * limits.logits_rows * limits.vocab


def _with_batch(limits: StepLimits, batch: int) -> StepLimits:
    draft_rows = limits.logits_rows - (limits.sequences - 1)
    return replace(limits, logits_rows=batch + draft_rows, sequences=batch + 1)


def _largest(fits: Callable[[int], bool], end: int) -> int:
    """Returns the largest number below `end` that fits, given that all smaller ones do; 0 if none."""
    low, high = 0, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _smaller_format(config: ModelConfig, room: float) -> str:
    """Names the largest format in which the weights take at most `room` bytes."""
    q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    layer = 2 * config.dim * (q + kv) + 3 * config.dim * config.ffn_dim
    weights = config.layers * layer + config.vocab * config.dim * (1 if config.tied_head else 2)
    sizes = {name: weights * each.chunk_bytes / (each.span * PANEL_ROWS) for name, each in LAYOUTS.items()}
    fitting = [name for name, size in sizes.items() if size <= room]
    if not fitting:
        return "a smaller model"
    best = max(fitting, key=lambda name: sizes[name])
    return f"it in {best.upper()} ({sizes[best] / 1e9:.1f} GB) or smaller, or another model"


def _check_wanted(wanted: float, one_context: int, free: float, context: int) -> None:
    if wanted < one_context:
        raise DoesNotFitError(
            f"a context of {context} takes {one_context / 1e9:.2f} GB of KV cache, more than the {wanted / 1e9:.2f} GB "
            "allowed for it: allow more, or use a smaller context",
            missing=math.inf,
        )
    if wanted > free:
        raise DoesNotFitError(
            f"a KV cache of {wanted / 1e9:.2f} GB does not fit beside the model: {max(0, free) / 1e9:.2f} GB are left",
            missing=wanted - free,
        )
