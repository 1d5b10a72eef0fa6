"""The figures of the docs are those of benchmarks/results/: `make docs` writes them, and nobody else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import figures, write_performance

pytestmark = pytest.mark.fast


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the results, to change."""
    shutil.copytree(figures.RESULTS, tmp_path / "results")
    for module in (figures, write_performance.figures_gpu):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.mark.parametrize("page", write_performance.pages(), ids=lambda path: path.name)
def test_pages_are_as_they_are_made(page: Path) -> None:
    assert page.read_text() == write_performance.pages()[page], (
        f"run `make docs`: {page.name} is not as it is made"
    )


def test_every_figure_is_shown_once_at_least() -> None:
    sources = [write_performance.TEMPLATE, *write_performance.REGIONS]
    asked = {name for path in sources for name in re.findall(r"(?:\{\{|<!-- made:) (\w+) ", path.read_text())}
    assert asked == figures.FIGURES.keys()
    assert "{{" not in write_performance.PAGE.read_text()


def test_no_time_or_rate_of_the_performance_page_is_typed() -> None:
    """What is copied by hand is in docs/LESSONS.md, which says so."""
    text = re.sub(r"```.*?```|`[^`]*`", "", write_performance.TEMPLATE.read_text(), flags=re.DOTALL)
    rate = r"(?:[munµ]?s|seconds|[GM]B/s|[GT]?FLOP/s|[GT]OP/s|tokens?(?:/s| a second))"
    assert not re.findall(rf"\d[\d,.]*\s{rate}\b", text)
    assert "copied by hand" in (write_performance.ROOT / "docs" / "LESSONS.md").read_text()


def test_the_newest_date_is_published(results: Path) -> None:
    data = json.loads((results / "2026-11-16-h200.json").read_text())
    one = next(row for row in data["rows"] if "batch 1 at" in row["label"])
    one["tok_s"] = 170.4
    (results / "2027-01-02-h200.json").write_text(json.dumps(data))
    (results / "2027-01-03-h200-again.json").write_text("{}")  # no kind that is known
    assert figures.newest("h200").name == "2027-01-02-h200.json"
    assert "| 170 |" in figures.FIGURES["h200_table"]()
    assert ">= 165, reached" in figures.FIGURES["h200_table"]()
    assert "decode, batch 1 (" not in figures.FIGURES["h200_missed"]()
    assert "| **170** / 106 |" in figures.FIGURES["readme_table"]()


def test_launches_have_their_rates_where_the_run_kept_them(results: Path) -> None:
    path = figures.newest("h200")
    data = json.loads(path.read_text())
    group = {"kernel": "norm", "name": "ffn_norm", "launches": 62, "ms": 0.4, "GB_s": 1234.5, "TOP_s": 0.25}
    for row in data["rows"]:
        if row["label"].startswith("profile"):
            row["groups"] = [group, group | {"name": "attn_norm"}]
    path.write_text(json.dumps(data))
    shown = figures.FIGURES["h200_launches"]()
    assert shown.count("| norm, ffn_norm | 62 | 0.400 | 50.0% | 1,234 | 0.2 |") == 4
    assert "**Prompt of 512**: 0.80 ms a step" in shown


def test_a_kind_without_data_says_so(results: Path) -> None:
    figures.newest("quality").unlink()
    with pytest.raises(SystemExit, match=r"no DATE-quality\.json"):
        figures.FIGURES["kv_table"]()


def test_an_unknown_name_says_so() -> None:
    with pytest.raises(SystemExit, match="no figure named cpu_tabel"):
        write_performance.filled("{{ cpu_tabel }}")
