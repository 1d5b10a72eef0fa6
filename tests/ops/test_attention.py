"""Attention: the same bits however rows are cut into work. `python -m tests.ops.test_attention` times it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem import native
from tandem.devices.cpu.device import CPUDevice
from tandem.kernels.abi import KV_BLOCK, KV_SCALED
from tandem.kernels.attention import KERNEL, make_case, make_work_list
from tandem.kernels.kernel import Array, Case
from tandem.kernels.kv_layout import kv_bytes, kv_quantise
from tests.ops.harness import STEP_INTS, assert_matches, run_once, time_case

pytestmark = pytest.mark.fast

SUPPORTED = [isa for isa in native.ISAS if native.load().tandem_isa_supported(isa.encode())]
ROWS = [(500, 24), (0, 17), (61, 1)]  # over a split, from the beginning, alone at the end of a chunk
CASES = {
    "float16": make_case(np.random.default_rng(1), "", (6, 2, 64), ROWS),
    "float32": make_case(np.random.default_rng(2), "", (2, 1, 32), ROWS, kv="f32"),
    "q8": make_case(np.random.default_rng(7), "", (6, 2, 64), ROWS, kv="q8"),
    "q8, odd head": make_case(np.random.default_rng(8), "", (3, 1, 40), ROWS, softcap=3.0, kv="q8"),
    "q8, window": make_case(np.random.default_rng(9), "", (4, 1, 32), ROWS, window=45, out_q8=1, kv="q8"),
    "odd head": make_case(np.random.default_rng(3), "", (3, 1, 40), ROWS, softcap=3.0),
    "window": make_case(np.random.default_rng(4), "", (4, 1, 32), ROWS, window=45, out_q8=1),
    "bidirectional": make_case(np.random.default_rng(6), "", (2, 2, 72), ROWS, bidirectional=True),
    "seven heads per group": make_case(np.random.default_rng(5), "", (7, 1, 16), ROWS, window=400),
}


def out_with(case: Case, isa: str, work: Array) -> bytes:
    other = replace(case, arrays={**case.arrays, "work": work}, counts={**case.counts, "work": len(work)})
    return bytes(run_once(KERNEL, isa, other, False)["out"].tobytes())


def work_list_at_random(rng: np.random.Generator, rows: Sequence[tuple[int, int]], **options: bool) -> Array:
    """Entries of 1 to 24 rows, in any order."""
    work = []
    for first, n, sequence, position, *rest in make_work_list(rows, 1000, **options):
        begin = 0
        while begin < n:
            size = min(int(rng.integers(1, 25)), n - begin)
            work.append((first + begin, size, sequence, position + begin, *rest))
            begin += size
    return rng.permutation(np.array(work, np.int32))


@pytest.mark.parametrize("isa", SUPPORTED)
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_however_rows_are_cut(name: str, isa: str) -> None:
    case, rng = CASES[name], np.random.default_rng(0)
    options = {"bidirectional": name.startswith("bidirectional")}
    alone = out_with(case, isa, make_work_list(ROWS, 1, **options))
    for max_rows in (2, 3, 5, 8, 16, 24):
        assert out_with(case, isa, make_work_list(ROWS, max_rows, **options)) == alone, (
            f"at most {max_rows} rows per entry"
        )
    for _ in range(6):
        work = work_list_at_random(rng, ROWS, **options)
        assert out_with(case, isa, work) == alone, f"entries {work.tolist()}"


@given(
    dim=st.sampled_from([4, 8, 20, 32, 40, 64, 96, 128]),
    group=st.integers(1, 9),
    rows=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 20)), min_size=1, max_size=3),
    window=st.sampled_from([0, 1, 7, 16, 33, 100]),
    max_rows=st.integers(1, 20),
    size=st.sampled_from([0.01, 1.0, 5.0]),
)
@settings(max_examples=25, deadline=None)
def test_any_shape_in_int8(
    dim: int, group: int, rows: list[tuple[int, int]], window: int, max_rows: int, size: float
) -> None:
    rng = np.random.default_rng(len(rows))
    case = make_case(rng, "", (2 * group, 2, dim), rows, window=window, max_rows=max_rows, size=size, kv="q8")
    expected = KERNEL.reference(case.arrays, case.scalars, case.counts)
    for isa in SUPPORTED:
        assert_matches(
            replace(case, atol=4e-6 * max(1.0, size)), run_once(KERNEL, isa, case, False), expected
        )


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 100), st.floats(1e-12, 1e6), st.integers(0, 1 << 30))
def test_int8_is_half_a_step_off_at_most(dim: int, size: float, seed: int) -> None:
    x = (np.random.default_rng(seed).standard_normal((3, 2, dim)) * size).astype(np.float32)
    quants, scales = kv_quantise(x)
    steps = np.repeat(scales.astype(np.float32), KV_SCALED, axis=-1)[..., :dim]
    least = 127 * 2.0**-24  # below, scales are 0 or have few bits, and quants may end at 127
    assert (np.abs(quants * steps - x) <= np.maximum(0.501 * steps, least)).all()


@pytest.mark.parametrize("isa", SUPPORTED)
@pytest.mark.parametrize("kv", ["f16", "q8"])
def test_keys_outside_the_window_change_no_bit(isa: str, kv: str) -> None:
    """What a row does not see may be anything finite: here large values in the blocks it shares with what it sees."""
    case = make_case(np.random.default_rng(6), "", (2, 1, 32), [(200, 3)], window=20, kv=kv)
    tables, cache = case.arrays["tables"], case.arrays["cache"].copy()
    block, first = tables[0, 181 // KV_BLOCK], 181 % KV_BLOCK  # the window of the first token begins at 181
    fields = ("k_scale", "v_scale") if kv == "q8" else ("k", "v")
    cache[fields[0]][block, ..., :first] = 60000.0
    hidden = slice(first)
    cache[fields[1]][(block, ..., hidden) if kv == "q8" else (block, slice(None), hidden)] = -60000.0
    assert cache.tobytes() != case.arrays["cache"].tobytes()
    changed = replace(case, arrays={**case.arrays, "cache": cache})
    before, after = (run_once(KERNEL, isa, c, False)["out"] for c in (case, changed))
    assert before.tobytes() == after.tobytes()


def main() -> None:
    """GFLOP/s of prompts and GB/s of generation, one thread and two; caches of generation exceed the processor's."""
    rng = np.random.default_rng(0)
    for threads in (1, 2):
        device = CPUDevice(threads)
        device.allocate_arena("step", 4 * STEP_INTS)
        print(f"attention on {device.isa}, {threads} threads")
        for heads in ((9, 3, 64), (12, 2, 128), (4, 1, 256)):
            q_heads, kv_heads, dim = heads
            for position, new in ((0, 512), (1024, 128)):
                max_rows = min(16, 64 // (q_heads // kv_heads))
                case = make_case(rng, "", heads, [(position, new)], out_q8=1, max_rows=max_rows)
                seconds = time_case(device, KERNEL, case, repeats=3)
                operations = 4 * dim * q_heads * sum(range(position + 1, position + new + 1))
                label = f"{new} rows at {position}"
                print(
                    f"{heads!s:>14} {label:20} {seconds * 1e6:8.0f} us {operations / seconds / 1e9:7.1f} GFLOP/s"
                )
            sequences = 100_000_000 // (4000 * kv_heads * dim * 4)
            for kv in ("f16", "q8"):
                case = make_case(rng, "", heads, [(4000, 1)] * sequences, out_q8=1, kv=kv)
                seconds = time_case(device, KERNEL, case, repeats=1)
                moved = sequences * 4001 * kv_bytes(1, kv_heads, dim, case.scalars["kv"]) / KV_BLOCK
                label = f"{sequences} x 1 at 4000, {kv}"
                print(f"{heads!s:>14} {label:20} {seconds * 1e6:8.0f} us {moved / seconds / 1e9:7.1f} GB/s")
        device.close()


if __name__ == "__main__":
    main()
