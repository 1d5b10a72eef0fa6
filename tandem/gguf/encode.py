"""float32 to blocks of GGUF formats: each function takes [n, block] and returns uint8 [n, block bytes].

Scales come from the extremes of a group and values are rounded to nearest: for tests and synthetic models.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tandem.kernels.kernel import Array
from tandem.kernels.panels import FLOAT4_VALUES, IQ4_VALUES


def _half(values: Array) -> Array:
    return values.astype("<f2").view(np.uint8)


def _rounded_half(values: Array) -> Array:
    """Rounds scales to float16, as a reader will see them."""
    return values.astype(np.float16).astype(np.float32)


def _pack(fields: Array, bits: int, group: int) -> Array:
    """Packs fields: the inverse of `decode.planes`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    grouped = fields.astype(np.uint8).reshape(len(fields), -1, 8 // bits, group) << shifts
    packed: Array = np.bitwise_or.reduce(grouped, axis=2).reshape(len(fields), -1)
    return packed


def _steps(values: Array, step: Array, low: int, high: int) -> Array:
    """Returns values / step, rounded and clipped; 0 where the step is 0."""
    quotient = np.divide(values, step, out=np.zeros_like(values), where=step != 0)
    return np.clip(np.rint(quotient), low, high)


def _extreme(groups: Array) -> Array:
    """Returns the value of largest magnitude, with its sign: the longer side of the range is for this sign."""
    largest = np.abs(groups).argmax(axis=-1, keepdims=True)
    return np.take_along_axis(groups, largest, axis=-1)


def bf16(values: Array) -> Array:
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    quiet = bits >> 16 | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype("<u2").view(np.uint8)


def _symmetric(values: Array, bits: int) -> tuple[Array, Array]:
    middle = 1 << (bits - 1)
    scale = _rounded_half(_extreme(values) / -middle)
    return scale, _steps(values, scale, -middle, middle - 1) + middle


def _affine(values: Array, bits: int) -> tuple[Array, Array, Array]:
    low = _rounded_half(values.min(axis=1, keepdims=True))
    scale = _rounded_half((values.max(axis=1, keepdims=True) - low) / ((1 << bits) - 1))
    return scale, low, _steps(values - low, scale, 0, (1 << bits) - 1)


def q4_0(values: Array) -> Array:
    scale, q = _symmetric(values, 4)
    return np.concatenate([_half(scale), _pack(q, 4, 16)], axis=1)


def q4_1(values: Array) -> Array:
    scale, low, q = _affine(values, 4)
    return np.concatenate([_half(scale), _half(low), _pack(q, 4, 16)], axis=1)


def q5_0(values: Array) -> Array:
    scale, q = _symmetric(values, 5)
    return np.concatenate([_half(scale), _pack(q // 16, 1, 1), _pack(q % 16, 4, 16)], axis=1)


def q5_1(values: Array) -> Array:
    scale, low, q = _affine(values, 5)
    return np.concatenate([_half(scale), _half(low), _pack(q // 16, 1, 1), _pack(q % 16, 4, 16)], axis=1)


def q8_0(values: Array) -> Array:
    scale = _rounded_half(np.abs(values).max(axis=1, keepdims=True) / 127)
    return np.concatenate(
        [_half(scale), _steps(values, scale, -127, 127).astype(np.int8).view(np.uint8)], axis=1
    )


def _k_affine(values: Array, bits: int) -> tuple[Array, Array]:
    """Returns the head of a Q4_K or Q5_K block (two halves, 8 scales and 8 minima of 6 bits), and the values."""
    groups = values.reshape(len(values), 8, 32)
    low = np.maximum(-groups.min(axis=2), 0)  # minima are stored negated, never below zero
    step = (groups.max(axis=2) + low) / ((1 << bits) - 1)
    scale = _rounded_half(step.max(axis=1, keepdims=True) / 63)
    minimum = _rounded_half(low.max(axis=1, keepdims=True) / 63)
    scales, minima = _steps(step, scale, 0, 63), _steps(low, minimum, 0, 63)
    offset, step = (minimum * minima)[:, :, None], (scale * scales)[:, :, None]
    q = _steps(groups + offset, np.broadcast_to(step, groups.shape), 0, (1 << bits) - 1)
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | m[:, 4:] << 4]
    return np.concatenate([_half(scale), _half(minimum), *packed], axis=1), q.reshape(values.shape)


def q4_k(values: Array) -> Array:
    head, q = _k_affine(values, 4)
    return np.concatenate([head, _pack(q, 4, 32)], axis=1)


def q5_k(values: Array) -> Array:
    head, q = _k_affine(values, 5)
    return np.concatenate([head, _pack(q // 16, 1, 32), _pack(q % 16, 4, 32)], axis=1)


def q6_k(values: Array) -> Array:
    groups = values.reshape(len(values), 16, 16)
    step = _extreme(groups)[:, :, 0] / -32
    scale = _rounded_half(np.abs(step).max(axis=1, keepdims=True) / 127)
    scales = _steps(step, scale, -127, 127)
    q = _steps(groups, np.broadcast_to((scale * scales)[:, :, None], groups.shape), -32, 31) + 32
    q = q.reshape(values.shape)
    packed = [_pack(q % 16, 4, 64), _pack(q // 16, 2, 32), scales.astype(np.int8).view(np.uint8)]
    return np.concatenate([*packed, _half(scale)], axis=1)


def q3_k(values: Array) -> Array:
    groups = values.reshape(len(values), 16, 16)
    step = _extreme(groups)[:, :, 0] / -4
    scale = _rounded_half(np.abs(step).max(axis=1, keepdims=True) / 31)
    scales = _steps(step, scale, -31, 31)
    q = _steps(groups, np.broadcast_to((scale * scales)[:, :, None], groups.shape), -4, 3) + 4
    q, s = q.reshape(values.shape), scales + 32
    packed = [_pack(q // 4, 1, 32), _pack(q % 4, 2, 32), _pack(s % 16, 4, 8), _pack(s // 16, 2, 4)]
    return np.concatenate([*packed, _half(scale)], axis=1)


def q2_k(values: Array) -> Array:
    groups = values.reshape(len(values), 16, 16)
    low = np.maximum(-groups.min(axis=2), 0)  # minima are stored negated, never below zero
    step = (groups.max(axis=2) + low) / 3
    scale = _rounded_half(step.max(axis=1, keepdims=True) / 15)
    minimum = _rounded_half(low.max(axis=1, keepdims=True) / 15)
    scales, minima = _steps(step, scale, 0, 15), _steps(low, minimum, 0, 15)
    offset, step = (minimum * minima)[:, :, None], (scale * scales)[:, :, None]
    q = _steps(groups + offset, np.broadcast_to(step, groups.shape), 0, 3).reshape(values.shape)
    return np.concatenate(
        [(scales + 16 * minima).astype(np.uint8), _pack(q, 2, 32), _half(scale), _half(minimum)], axis=1
    )


def _nearest(values: Array, scale: Array, table: tuple[int, ...]) -> Array:
    """Returns the index of the entry nearest to values / scale."""
    order = np.argsort(table)
    entries = np.array(table, np.float32)[order]
    quotient = np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)
    indices: Array = order[np.searchsorted((entries[1:] + entries[:-1]) / 2, quotient)]
    return indices


def iq4_nl(values: Array) -> Array:
    scale = _rounded_half(_extreme(values) / IQ4_VALUES[0])
    return np.concatenate([_half(scale), _pack(_nearest(values, scale, IQ4_VALUES), 4, 16)], axis=1)


def iq4_xs(values: Array) -> Array:
    groups = values.reshape(len(values), 8, 32)
    step = _extreme(groups)[:, :, 0] / IQ4_VALUES[0]
    scale = _rounded_half(np.abs(step).max(axis=1, keepdims=True) / 31)
    scales = _steps(step, scale, -31, 31)
    indices = _nearest(groups, np.broadcast_to((scale * scales)[:, :, None], groups.shape), IQ4_VALUES)
    s = scales + 32
    packed = [
        _pack(s // 16, 2, 1),
        _pack(s % 16, 4, 1),
        _pack(indices.reshape(-1, 32), 4, 16).reshape(-1, 128),
    ]
    return np.concatenate([_half(scale), *packed], axis=1)


def mxfp4(values: Array) -> Array:
    largest = np.abs(values).max(axis=1, keepdims=True)
    exponent = np.frexp(largest / 6)[1]  # 2^exponent * 6, the largest value, is no less than `largest`
    exponent = np.where(largest > 0, np.clip(exponent, -120, 120), -120)
    indices = _nearest(values, np.ldexp(np.float32(0.5), exponent), FLOAT4_VALUES)
    return np.concatenate([(exponent + 127).astype(np.uint8), _pack(indices, 4, 16)], axis=1)


ENCODERS: dict[str, Callable[[Array], Array]] = {
    encoder.__name__.upper(): encoder
    for encoder in (
        *(bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k),
        *(iq4_nl, iq4_xs, mxfp4),
    )
}
