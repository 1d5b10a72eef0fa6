"""Blocks of GGUF formats to float32: each function takes uint8 [n, block bytes] and returns [n, block].

Nearly all share one form: small integers packed in bit planes, times a scale for each group, plus an offset.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tandem.kernels.kernel import Array
from tandem.kernels.panels import FLOAT4_VALUES


def half(blocks: Array, at: int) -> Array:
    """Returns the float16 at byte `at` of each block: [n, 1]."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def planes(data: Array, bits: int, group: int) -> Array:
    """Unpacks fields of `bits`: of each `group` bytes first all the lowest fields, then the next ones up."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = data.reshape(len(data), -1, 1, group) >> shifts
    fields &= np.uint8((1 << bits) - 1)
    return fields.reshape(len(data), -1)


def scaled(values: Array, scale: Array, offset: Array | None = None) -> Array:
    """values [n, block] times scale [n, groups] plus offset [n, groups]."""
    grouped = values.astype(np.float32, copy=False).reshape(*scale.shape, -1) * scale[:, :, None]
    if offset is not None:
        grouped += offset[:, :, None]
    return grouped.reshape(values.shape)


def bf16(blocks: Array) -> Array:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def q1_0(blocks: Array) -> Array:
    return scaled(planes(blocks[:, 2:], 1, 1) * np.float32(2) - 1, half(blocks, 0))


def q2_0(blocks: Array) -> Array:
    return scaled(planes(blocks[:, 2:], 2, 1) - np.float32(1), half(blocks, 0))


def q4_0(blocks: Array) -> Array:
    return scaled(planes(blocks[:, 2:], 4, 16) - np.float32(8), half(blocks, 0))


def q4_1(blocks: Array) -> Array:
    return scaled(planes(blocks[:, 4:], 4, 16), half(blocks, 0), half(blocks, 2))


def _five_bits(high: Array, low: Array, group: int) -> Array:
    """Low four bits in groups of `group` bytes; fifth bits in order (group 16) or in planes (group 32)."""
    fifth = planes(high, 1, 1 if group == 16 else group)
    values: Array = planes(low, 4, group) | fifth << np.uint8(4)
    return values


def q5_0(blocks: Array) -> Array:
    return scaled(_five_bits(blocks[:, 2:6], blocks[:, 6:], 16) - np.float32(16), half(blocks, 0))


def q5_1(blocks: Array) -> Array:
    return scaled(_five_bits(blocks[:, 4:8], blocks[:, 8:], 16), half(blocks, 0), half(blocks, 2))


def q8_0(blocks: Array) -> Array:
    return scaled(blocks[:, 2:].view(np.int8), half(blocks, 0))


def q2_k(blocks: Array) -> Array:
    scales = blocks[:, :16]
    offset = half(blocks, 82) * (scales >> 4)
    return scaled(planes(blocks[:, 16:80], 2, 32), half(blocks, 80) * (scales & 15), -offset)


def q3_k(blocks: Array) -> Array:
    # A clear bit of the high plane subtracts 4; scales are 6 bits, the low four apart from the high two.
    values = planes(blocks[:, 32:96], 2, 32) | planes(blocks[:, :32], 1, 32) << np.uint8(2)
    scales = planes(blocks[:, 96:104], 4, 8) | planes(blocks[:, 104:108], 2, 4) << np.uint8(4)
    return scaled(values - np.float32(4), half(blocks, 108) * (scales - np.float32(32)))


def _k_scales(packed: Array) -> tuple[Array, Array]:
    """12 bytes -> 8 scales, 8 minima of 6 bits; the last four of each leave their top bits with the first."""
    scales, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (
        np.concatenate([scales & 63, rest & 15 | scales >> 2 & 48], axis=1),
        np.concatenate([minima & 63, rest >> 4 | minima >> 2 & 48], axis=1),
    )


def q4_k(blocks: Array) -> Array:
    scales, minima = _k_scales(blocks[:, 4:16])
    return scaled(planes(blocks[:, 16:], 4, 32), half(blocks, 0) * scales, -(half(blocks, 2) * minima))


def q5_k(blocks: Array) -> Array:
    scales, minima = _k_scales(blocks[:, 4:16])
    values = _five_bits(blocks[:, 16:48], blocks[:, 48:], 32)
    return scaled(values, half(blocks, 0) * scales, -(half(blocks, 2) * minima))


def q6_k(blocks: Array) -> Array:
    values = planes(blocks[:, :128], 4, 64) | planes(blocks[:, 128:192], 2, 32) << np.uint8(4)
    return scaled(values - np.float32(32), half(blocks, 208) * blocks[:, 192:208].view(np.int8))


def _trits(data: Array, group: int, count: int) -> Array:
    """Unpacks base-3 digits. A byte holds them as a fraction of 256: multiplying by 3 moves a digit to the top."""
    powers = (3 ** np.arange(count)).astype(np.uint8)[:, None]
    fractions = data.reshape(len(data), -1, 1, group) * powers  # modulo 256: the digits before are gone
    return (fractions.astype(np.uint16) * 3 >> 8).reshape(len(data), -1)


def tq1_0(blocks: Array) -> Array:
    parts = _trits(blocks[:, :32], 32, 5), _trits(blocks[:, 32:48], 16, 5), _trits(blocks[:, 48:52], 4, 4)
    return scaled(np.concatenate(parts, axis=1) - np.float32(1), half(blocks, 52))


def tq2_0(blocks: Array) -> Array:
    return scaled(planes(blocks[:, :64], 2, 32) - np.float32(1), half(blocks, 64))


_FLOAT4 = np.array(FLOAT4_VALUES, np.float32)


def mxfp4(blocks: Array) -> Array:
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scaled(_FLOAT4[planes(blocks[:, 1:], 4, 16)], scale)


def nvfp4(blocks: Array) -> Array:
    # Scales have 4 bits of exponent, 3 of mantissa; the sign is ignored, and 0x7f, which is no number, is 0.
    byte = blocks[:, :4].astype(np.int32)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    scale = np.ldexp((mantissa + 8 * (exponent > 0)).astype(np.float32), np.maximum(exponent, 1) - 11)
    return scaled(_FLOAT4[planes(blocks[:, 4:], 4, 8)], np.where(byte == 0x7F, np.float32(0), scale))


DECODERS: dict[str, Callable[[Array], Array]] = {
    decoder.__name__.upper(): decoder
    for decoder in (
        *(bf16, q1_0, q2_0, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k),
        *(tq1_0, tq2_0, mxfp4, nvfp4),
    )
}
