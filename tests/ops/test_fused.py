"""The references of fused GPU kernels: each is what the kernels that it replaces do, one after the other.

That the shaders agree with them: tests/vulkan/test_kernels.py and test_matrices.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tandem.kernels import (
    all_kernels,
    attention,
    attention_rope,
    expand,
    matmul,
    matmul_norm_partials,
    norm,
    norm_finish,
    rope,
)
from tandem.kernels.abi import KV_BLOCK, TOKEN_INTS, TOKEN_POSITION, TOKEN_SLOT
from tandem.kernels.dispatch import COUNTER_BYTES
from tandem.kernels.kernel import Kernel
from tandem.kernels.q8_tiles import q8_unpack
from tests.ops.harness import assert_matches

pytestmark = pytest.mark.fast
FUSED = {name: kernel for name, kernel in all_kernels().items() if kernel.gpu_only}


@pytest.mark.parametrize("kernel", FUSED.values(), ids=FUSED)
def test_cases_are_as_declared(kernel: Kernel) -> None:
    """Arrays have the bytes of the extents, references return what is written, and nothing else."""
    for case in kernel.cases(np.random.default_rng(0)):
        assert set(case.scalars) == set(kernel.scalar_names), case.label
        extents = kernel.extents(case.scalars, case.counts)
        assert set(extents) == {buffer.name for buffer in kernel.buffers}
        assert all(array.nbytes >= extents[name] for name, array in case.arrays.items()), case.label
        before = {name: array.copy() for name, array in case.arrays.items()}
        found = kernel.reference(case.arrays, case.scalars, case.counts)
        written = {b.name for b in kernel.buffers if "w" in b.access}
        assert set(found) == written & set(case.arrays)  # some may be absent
        assert all(case.arrays[name].tobytes() == before[name].tobytes() for name in before)
        assert kernel.cost(case.scalars, case.counts).bytes >= 0


@pytest.mark.parametrize("layout", matmul_norm_partials.BY_LAYOUT)
@pytest.mark.parametrize("options", ["", "post", "q8", "post q8"])
def test_a_matmul_with_partials_and_the_norm_that_finishes_them(layout: str, options: str) -> None:
    rng, dim = np.random.default_rng(1), 96
    case = matmul_norm_partials.make_case(layout, dim, 512, "post" in options, rng)
    partials = matmul_norm_partials.BY_LAYOUT[layout].reference(case.arrays, case.scalars, case.counts)
    of_norm = norm.make_case(rng, "norm", 1, dim, f"add {options}")
    arrays = {**of_norm.arrays, "x": case.arrays["residual"], "weight": case.arrays["weight"]}
    if "post" in options:
        arrays["post_weight"] = case.arrays["post_weight"]
    out = {**case.arrays, "out": np.zeros((1, dim), np.float32)}
    matmul_scalars = {**case.scalars, "out_stride": dim}
    arrays["add"] = matmul.BY_LAYOUT[layout].reference(out, matmul_scalars, case.counts)["out"]
    expected = norm.reference(arrays, of_norm.scalars, of_norm.counts)
    given = {name: arrays[name] for name in ("x", "post_weight", "out") if name in arrays} | partials
    scalars = {**of_norm.scalars, "rows_per_sum": case.scalars["rows_per_sum"]}
    found = norm_finish.reference(given, scalars, of_norm.counts)
    assert_matches(replace(of_norm, atol=1e-5, rtol=1e-5), found, expected)


def test_attention_with_rope_is_rope_and_attention() -> None:
    for case in attention_rope.cases(np.random.default_rng(2)):
        tokens = np.zeros((case.counts["tokens"], TOKEN_INTS), np.int32)
        for row, _, sequence, position in case.arrays["work"][:, :4]:
            block = case.arrays["tables"][sequence, position // KV_BLOCK]
            tokens[row, TOKEN_POSITION] = position
            tokens[row, TOKEN_SLOT] = block * KV_BLOCK + position % KV_BLOCK
        s = case.scalars
        columns = {"q": 0, "k": int(s["k_column"]), "v": int(s["v_column"])}
        heads = {name: case.arrays["qkv"][:, column:] for name, column in columns.items()}
        given = {**attention_rope.by_kernel(case.arrays, s), **heads, "tokens": tokens}
        rotated = rope.reference(given, attention_rope.rope_scalars(s), case.counts)
        given |= {name: rotated[name] for name in ("q", "cache")}
        attended = attention.reference(given, attention_rope.attention_scalars(s), case.counts)
        found = attention_rope.reference(case.arrays, s, case.counts)
        assert found["cache"].tobytes() == rotated["cache"].tobytes(), case.label
        assert found["out"].tobytes() == attended["out"].tobytes(), case.label
        assert np.isfinite(q8_unpack(found["out"], case.counts["tokens"])).all(), case.label


@pytest.mark.parametrize("kernel", expand.KERNELS, ids=expand.BY_NAME)
def test_expanded_activations_are_those_of_the_matmul(kernel: Kernel) -> None:
    """Each once, a sixteenth of what it is, and zeros besides."""
    for case in kernel.cases(np.random.default_rng(3)):
        found = kernel.reference(case.arrays, case.scalars, case.counts)["expanded"][COUNTER_BYTES // 2 :]
        x = case.arrays["x"]
        rows = expand._rows(kernel.name, case.scalars, case.counts)  # tokens, or slots of experts
        values = np.sort((x if x.dtype == np.float32 else q8_unpack(x, rows)).ravel() / 16)
        kept = np.sort(found.astype(np.float32))
        zeros = np.zeros(len(kept) - len(values), np.float32)
        np.testing.assert_allclose(kept, np.sort(np.concatenate([values, zeros])), rtol=2e-3, atol=1e-6)
