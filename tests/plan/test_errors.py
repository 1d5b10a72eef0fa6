"""Predictions beside what was measured, each row with the limits of its own rounds: nearly all within what the planner
aims for, also where the factors were found without them, and nothing above a limit."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import groupby
from statistics import median

import numpy as np
import pytest

from benchmarks import rdna3_fit, rdna3_tables
from benchmarks.plan_errors import (
    MADE,
    PAGES,
    Checked,
    checked_cpu,
    checked_gpu,
    checked_lavapipe,
    published,
    with_figures,
)
from benchmarks.plan_fit import CPU, errors, fit, shares
from benchmarks.plan_profile import (
    bytes_line,
    gpu_read_gb_s,
    matmuls,
    measured_launch_us,
    profiled,
)
from benchmarks.plan_rows import cpu_rows
from tandem.plan.rdna3 import FITTED, launch_time

# (run, start of the model's name, start of the test's) of rows that miss the aim, and why
EXPLAINED = {
    (
        "2026-11-15T21:59",
        "smollm2",
        "decode, batch 8",
    ): "small matrices: a launch waits for its slowest thread; rounds were 602 to 1,145",
    ("2026-11-15T21:59", "gemma-3-270m", "decode, batch 8"): "small matrices, alike; rounds were 525 to 687",
    (
        "2026-11-15, bf48d2c",
        "gemma-3",
        "prompt of 4096",
    ): "left out, nothing tells what attention's operations take",
    (
        "2026-11-15T19:38",
        "smollm2",
        "decode, batch 2 at 129",
    ): "lavapipe; by a percent, and only left out of the fit",
}
KNOWN = {run for run, _, _ in EXPLAINED} | {"2026-11-15T21:59"}  # runs of which each miss must be explained
MOST = 2 / 3  # of the rows of any other run


def checked() -> list[Checked]:
    return checked_cpu() + checked_gpu() + checked_lavapipe()


def missed(c: Checked) -> bool:
    return max(abs(c.error), *map(abs, c.without)) > c.aim


def explained(c: Checked) -> bool:
    return any(
        c.row.run == run and c.row.model.startswith(model) and c.row.test.startswith(test)
        for run, model, test in EXPLAINED
    )


def test_predictions_are_near_what_was_measured() -> None:
    """Of the runs that are known all, but for what is explained."""
    for c in checked():
        assert not missed(c) or c.row.run not in KNOWN or explained(c), (
            c.row.run,
            c.row.model,
            c.row.test,
            c,
        )


def test_factors_hold_for_any_run() -> None:
    """So also for one that is put there later: it has its own limits, and the middle and most of it must be near."""

    def of_run(c: Checked) -> tuple[str, bool]:
        return c.row.run, c.row.decodes

    for (run, _), rows in groupby(sorted(checked(), key=of_run), of_run):
        each = list(rows)
        offs = [abs(c.error) for c in each]
        how = (
            f"{run} is off by {offs}: python -m benchmarks.plan_fit prints factors of the engine as it is now"
        )
        assert median(offs) <= each[0].aim and sum(off <= each[0].aim for off in offs) >= MOST * len(each), (
            how
        )


def test_all_comparisons_on_the_cpu_are_looked_at() -> None:
    rows = cpu_rows()
    assert "2026-11-15T21:59" in {row.run for row in rows} and len(rows) >= 12
    assert len({row.hardware.usual_gb_s for row in rows}) > len(rows) / 2  # each has its own


def test_a_run_with_slower_memory_needs_no_other_factors() -> None:
    """What this is for: the same work, half the bandwidth, and the same factors are found."""
    known = shares(cpu_rows(), CPU)
    factors = np.array([0.9, 0.5, 0.2])
    drift = np.random.default_rng(0).uniform(0.5, 2, len(known))
    made = np.column_stack([np.zeros(len(known)), known[:, 1] * drift, known[:, 2:]])
    made /= (made[:, 1:] @ (1 / factors))[:, None]  # of a machine that has just these
    assert fit(made) == pytest.approx(factors, rel=1e-6) and np.abs(errors(made, factors)).max() < 1e-9


def test_published_figures_have_sources() -> None:
    """Some were told to this project, and have no public address."""
    told = [p.entry["model"] for p in published() if not p.entry["source"].startswith("https://")]
    assert set(told) == {"qwen2.5-7b:q4_k_m", "qwen3-30b-a3b:q4_k_m", "gpt-oss-20b:mxfp4"}


def test_the_cost_model_of_amd_gpus_is_near_what_others_measured() -> None:
    """llama.cpp's own shaders: enough figures and GPUs, a small median error, also of figures that were left out of the
    fit, and none far off."""
    rows = rdna3_tables.checked()
    assert len(rows) >= 12 and len({row.entry["hardware"] for row, _, _ in rows}) >= 3
    for off in ([error for _, error, _ in rows], [alone for _, _, alone in rows]):
        assert median(map(abs, off)) <= rdna3_tables.AIM
        assert max(map(abs, off)) <= rdna3_tables.WORST


def test_the_fitted_numbers_are_those_in_use() -> None:
    found = rdna3_fit.fit(rdna3_fit.published())
    assert astuple(FITTED) == pytest.approx(astuple(found), rel=0.01)


def test_figures_add_up_as_launches_do() -> None:
    """The fit computes with arrays what launch_time does one by one."""
    row = rdna3_fit.published()[0]
    works = sum(times * launch_time(work, row.gpu).total for work, times in row.step.works)
    others = replace(row, step=row.step._replace(works=[]))
    assert row.seconds(FITTED) == pytest.approx(works + others.seconds(FITTED))


def test_nothing_measured_is_above_the_limit() -> None:
    for row in (*(c.row for c in checked()), *published()):
        assert row.measured < row.limit and row.predicted < row.limit, row


def test_bytes_of_the_null_device_fit_the_time_of_the_gpu() -> None:
    """Counted bytes over the time of a profile: no kernel reads faster than memory gives, and the one matmul that
    takes far longer than a launch comes near to it, nearer if it runs several times in a row."""
    rows, best = list(profiled()), gpu_read_gb_s()
    assert {"matmul_q4_0", "attention"} <= {row.kernel for row in rows}
    assert all(row.gb_s < best for row in rows)
    head = max((row for row in rows if "batch 1 " in row.step), key=lambda row: row.nbytes / row.launches)
    assert head.launches == 1 and head.nbytes == pytest.approx(262208 * 5376 * 210 / 256, rel=2e-3)
    in_a_row = next(p.row_us for p in matmuls() if p.kernel == head.kernel)
    assert in_a_row and head.nbytes / in_a_row / 1e3 > 0.95 * best > head.gb_s > 0.85 * best


def test_time_is_a_launch_and_the_bytes_counted() -> None:
    """Matmuls of four sizes, ten times apart: one bandwidth, the same for all, explains each time within 10%."""
    line = bytes_line()
    sizes = [nbytes for _, nbytes, _ in line.rows]
    assert len(sizes) >= 4 and max(sizes) > 10 * min(sizes)
    assert all(line.us(nbytes) == pytest.approx(us, rel=0.1) for _, nbytes, us in line.rows)
    assert 0.75 * gpu_read_gb_s() < line.gb_s < gpu_read_gb_s() and 3 < line.launch_us < 8


def test_time_times_bandwidth_is_at_least_the_bytes_counted() -> None:
    """However a matmul is timed, it cannot have read more; in a row, where only its bytes take time, also not less."""
    found, best = matmuls(), gpu_read_gb_s()
    assert [p.kernel for p in found].count("matmul_q4_0") == 4 and found[0].kernel == "matmul_q6_k"
    by_hand = {
        "ffn_act": 2 * 21504 * 5376,
        "ffn_out": 5376 * 21504,
        "attn_out": 5376 * 4096,
        "q+k+v": 8192 * 5376,
    }
    for p in found:
        assert p.name not in by_hand or p.nbytes == pytest.approx(by_hand[p.name] * 18 / 32, rel=0.01)
        assert p.read(p.us - measured_launch_us(), best) > 1, p
        assert p.row_us and p.is_read_in(p.row_us, best), p


def test_the_pages_are_as_they_are_made() -> None:
    texts = {page: page.read_text() for page in PAGES}
    for name in MADE:
        places = [
            text for text in texts.values() if f"<!-- {name} -->\n" in text and f"\n<!-- /{name} -->" in text
        ]
        assert len(places) == 1, f"{name} must be in one of the pages"
    for page, text in texts.items():
        assert with_figures(text) == text, f"run `make docs`: {page.name} is not as it is made"
