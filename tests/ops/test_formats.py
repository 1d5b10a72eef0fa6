"""Every tensor format against the `gguf` package, bit for bit; what we write, within a step of its format."""

import gguf
import numpy as np
import pytest

from tandem.gguf.formats import FORMATS, Format, by_name, dequantise, quantise

pytestmark = pytest.mark.fast

KNOWN = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
DEQUANTISED = [
    f for f in FORMATS.values() if f.name in ("F32", "F16") or f.ggml_type in gguf.quants._type_traits
]


def ids(format: Format) -> str:
    return format.name


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, where not a number in both."""
    nan = np.isnan(a)
    bits = (np.where(nan, np.float32(0), x).view(np.uint32) for x in (a, b))
    return np.array_equal(nan, np.isnan(b)) and np.array_equal(*bits)


def test_every_type_the_package_dequantises_is_here() -> None:
    assert {f.ggml_type for f in DEQUANTISED} >= {int(kind) for kind in gguf.quants._type_traits} | {0, 1}


@pytest.mark.parametrize("format", FORMATS.values(), ids=ids)
def test_sizes(format: Format) -> None:
    assert by_name(format.name) is format
    if format.ggml_type in KNOWN:
        assert (format.block, format.block_bytes) == KNOWN[format.ggml_type]
        assert gguf.GGMLQuantizationType(format.ggml_type).name == format.name


@pytest.mark.parametrize("format", DEQUANTISED, ids=ids)
def test_random_blocks_are_bit_equal(format: Format) -> None:
    rng = np.random.default_rng(format.ggml_type)
    raw = rng.integers(0, 256, (3, 5, max(1, 8192 // format.block) * format.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(format.ggml_type))
    actual = dequantise(format, raw)
    assert actual.dtype == np.float32 and actual.shape == expected.shape
    assert same_bits(actual, expected)


def test_every_scale_of_the_4_bit_floats_is_bit_equal() -> None:
    rng = np.random.default_rng(0)
    for format, scales in ((by_name("MXFP4"), 1), (by_name("NVFP4"), 4)):
        raw = rng.integers(0, 256, (256, format.block_bytes), np.uint8)
        raw[:, :scales] = np.arange(256)[:, None]
        with np.errstate(over="ignore"):
            expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(format.ggml_type))
        assert same_bits(dequantise(format, raw), expected)


@pytest.mark.parametrize("name, levels", [("Q1_0", [-1, 1]), ("Q2_0", [-1, 0, 1, 2])])
def test_formats_newer_than_the_package(name: str, levels: list[int]) -> None:
    format = by_name(name)
    values = np.array(levels * (format.block // len(levels)), np.float32)
    fields = np.tile(np.arange(len(levels)), format.block // len(levels))
    width = len(levels).bit_length() - 1
    bits = (fields[:, None] >> np.arange(width) & 1).astype(np.uint8)
    raw = np.concatenate([np.float16([0.5]).view(np.uint8), np.packbits(bits, bitorder="little")])
    assert np.array_equal(dequantise(format, raw), values / 2)


def test_numbers_are_read_as_they_are() -> None:
    for name, dtype in {"I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8", "F64": "f8"}.items():
        values = np.arange(-6, 6).reshape(3, 4)
        assert np.array_equal(dequantise(by_name(name), values.astype(dtype).view(np.uint8)), values)


# The largest error in units of the range of a group: half a step, and what rounding the scales adds.
STEPS = {
    **{"Q4_0": 16, "Q4_1": 15, "Q5_0": 32, "Q5_1": 31, "Q8_0": 254, "Q4_K": 15, "Q5_K": 31, "Q6_K": 64},
    **{"Q3_K": 7, "Q2_K": 3, "IQ4_NL": 16, "IQ4_XS": 16, "MXFP4": 6},
}


@pytest.mark.parametrize("name, steps", STEPS.items())
@pytest.mark.parametrize("scale, shift", [(1.0, 0.0), (0.01, 0.003), (30.0, -10.0)])
def test_what_we_write_is_within_a_step(name: str, steps: int, scale: float, shift: float) -> None:
    format = by_name(name)
    values = np.random.default_rng(steps).standard_normal((7, 4, 1024)).astype(np.float32) * scale + shift
    raw = quantise(format, values)
    assert raw.dtype == np.uint8 and raw.shape == (7, 4, format.row_bytes(1024))
    groups = values.reshape(-1, 256)
    # Symmetric formats span -max to max.
    reach = np.maximum(np.ptp(groups, axis=1), 2 * np.abs(groups).max(axis=1))
    error = np.abs(dequantise(format, raw) - values).reshape(-1, 256)
    assert (error <= reach[:, None] / steps).all()
    assert np.sqrt((error**2).mean()) < 0.4 * reach.mean() / steps


@pytest.mark.parametrize("name, bits", [("F32", 24), ("F16", 11), ("BF16", 8)])
def test_floats_round_to_nearest(name: str, bits: int) -> None:
    values = np.random.default_rng(bits).standard_normal((5, 64)).astype(np.float32) + 3
    back = dequantise(by_name(name), quantise(by_name(name), values))
    assert (np.abs(back - values) <= np.abs(values) * 2.0**-bits).all()
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    assert same_bits(dequantise(by_name(name), quantise(by_name(name), special)), special)


@pytest.mark.parametrize("name", STEPS)
def test_zeros_and_constants_survive(name: str) -> None:
    values = np.repeat(np.float32([0, 0.5, -0.5, 1000]), 256).reshape(4, 256)
    back = dequantise(by_name(name), quantise(by_name(name), values))
    assert np.array_equal(back[0], values[0])
    # Scales of MXFP4 are powers of two.
    assert np.allclose(back, values, rtol=0.03 if name == "MXFP4" else 0.01)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="whole number of blocks of 18"):
        dequantise(by_name("Q4_0"), np.zeros((2, 19), np.uint8))
    with pytest.raises(ValueError, match="whole number of blocks of 256"):
        quantise(by_name("Q4_K"), np.zeros((2, 100), np.float32))
    with pytest.raises(NotImplementedError, match="IQ2_XS"):
        quantise(by_name("IQ2_XS"), np.zeros((2, 256), np.float32))


def test_no_rows() -> None:
    assert dequantise(by_name("Q6_K"), np.zeros((0, 210), np.uint8)).shape == (0, 256)
