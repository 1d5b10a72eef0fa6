"""Every kernel, on every instruction set of this CPU, against its NumPy reference; new ones by themselves."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tandem import native
from tandem.kernels import all_kernels
from tandem.kernels.abi import Q8_BLOCK
from tandem.kernels.kernel import Array, Case
from tandem.kernels.q8_tiles import q8_pack, q8_unpack
from tests.ops.harness import assert_matches, assert_q8_matches, run_kernel, run_once

pytestmark = pytest.mark.fast

KERNELS = {name: kernel for name, kernel in all_kernels().items() if not kernel.gpu_only}
SUPPORTED = [isa for isa in native.ISAS if native.load().tandem_isa_supported(isa.encode())]


@cache
def cases_of(name: str) -> dict[str, Case]:
    cases = list(KERNELS[name].cases(np.random.default_rng(zlib.crc32(name.encode()))))
    by_label = {case.label: case for case in cases}
    assert len(by_label) == len(cases), f"{name}: two cases share a label"
    return by_label


@cache
def expected(name: str, label: str) -> dict[str, Array]:
    case = cases_of(name)[label]
    return KERNELS[name].reference(case.arrays, case.scalars, case.counts)


EVERY_CASE = [(name, label) for name in KERNELS for label in cases_of(name)]


@pytest.mark.parametrize("isa", SUPPORTED)
@pytest.mark.parametrize(("name", "label"), EVERY_CASE)
def test_matches_reference(name: str, label: str, isa: str) -> None:
    case = cases_of(name)[label]
    assert_matches(case, run_kernel(KERNELS[name], isa, case), expected(name, label))


# The table of group_tokens is one for all tokens of a step.
@pytest.mark.parametrize("isa", SUPPORTED)
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "group_tokens"])
def test_a_smaller_batch_gives_the_same_bits(name: str, isa: str) -> None:
    """What a run over the first tokens writes is what the whole batch writes there."""
    kernel = KERNELS[name]
    for case in cases_of(name).values():
        for size in {1, 2, 5, 16, 17} & set(range(1, max(case.counts.values()))):
            fewer = replace(case, counts={count: min(n, size) for count, n in case.counts.items()})
            some, every = run_once(kernel, isa, fewer, False), run_once(kernel, isa, case, False)
            for buffer in some:
                before, after, whole = (
                    a.reshape(-1).view(np.uint8) for a in (case.arrays[buffer], some[buffer], every[buffer])
                )
                written = before != after
                assert (after[written] == whole[written]).all(), f"{case.label}: {buffer} of {size} differs"


# In these kernels' cases token t is row t of every [T, ...] array, so it can be moved to a batch of its own.
@pytest.mark.parametrize("isa", SUPPORTED)
@pytest.mark.parametrize("name", ["norm", "layer_norm", "quantise", "glu", "rope"])
def test_a_token_alone_gives_the_same_bits(name: str, isa: str) -> None:
    kernel = KERNELS[name]
    for case in cases_of(name).values():
        tokens = case.counts["tokens"]
        if tokens != 33 or kernel.grid(case.scalars).count != "tokens":
            continue
        every = run_once(kernel, isa, case, False)
        for t in (0, 15, 16, 32):
            alone = run_once(kernel, isa, one_token(case, t), False)
            for buffer, array in alone.items():
                if buffer == "cache":  # written in place: only this token's slot changes
                    before, after, whole = (
                        a.reshape(-1).view(np.uint8) for a in (case.arrays["cache"], array, every["cache"])
                    )
                    changed = after != before
                    assert (after[changed] == whole[changed]).all(), f"{case.label}: token {t}"
                else:
                    want = token_bytes(every[buffer], t)
                    assert token_bytes(array, 0) == want, f"{case.label}: {buffer} of token {t}"


def one_token(case: Case, t: int) -> Case:
    tokens = case.counts["tokens"]
    arrays = {}
    for buffer, array in case.arrays.items():
        if array.dtype == Q8_BLOCK:
            arrays[buffer] = array[:1]
        else:
            arrays[buffer] = array[t : t + 1] if array.shape[0] == tokens else array
    return replace(case, arrays=arrays, counts={**case.counts, "tokens": 1})


def token_bytes(array: Array, t: int) -> bytes:
    if array.dtype == Q8_BLOCK:
        return b"".join(array[field][t // 16, :, t % 16].tobytes() for field in Q8_BLOCK.fields or ())
    return bytes(array[t].tobytes())


def test_q8_round_trip() -> None:
    """The twin of q8_write: half a step of error at most, and what it packs passes the harness's check."""
    x = np.random.default_rng(0).standard_normal((18, 96)).astype(np.float32)
    blocks = q8_pack(x)
    step = np.abs(x).max() / 127
    assert np.abs(q8_unpack(blocks, 18) - x).max() <= 0.501 * step
    assert_q8_matches("x", blocks, blocks.copy(), 0, 0)


def test_the_harness_sees_a_write_past_the_end() -> None:
    """The guard: a `dim` larger than the row writes past the last row of `out`."""
    kernel = KERNELS["glu"]
    case = cases_of("glu")["2x17 silu"]
    wrong: dict[str, float] = {**case.scalars, "dim": case.scalars["out_stride"] + 1}
    with pytest.raises(AssertionError, match="outside of out"):
        run_kernel(kernel, "plain", replace(case, scalars=wrong))
