"""The figures of the docs are those of benchmarks/results/: `make docs` writes them."""

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


def typed_figures(text: str) -> list[str]:
    """Times and rates in a text, outside of code."""
    rate = r"(?:[munµ]?s|seconds|[GM]B/s|[GT]?FLOP/s|[GT]OP/s|tokens?(?:/s| a second))"
    plain = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    return [found[0] for found in re.finditer(rf"\d[\d,.]*\s{rate}\b", plain)]


def test_no_time_or_rate_of_the_performance_page_is_typed() -> None:
    assert not typed_figures(write_performance.TEMPLATE.read_text())


def test_figures_without_a_data_file_have_a_date() -> None:
    """docs/LESSONS.md is the page for such figures: each section says when they were measured."""
    sections = (write_performance.ROOT / "docs" / "LESSONS.md").read_text().split("\n## ")
    measured = [section for section in sections if typed_figures(section)]
    undated = [text.partition("\n")[0] for text in measured if not re.search(r"\b20\d\d-\d\d-\d\d\b", text)]
    assert measured and not undated


def test_the_newest_date_is_published(results: Path) -> None:
    data = json.loads(figures.newest("h200").read_text())
    targets = json.loads((results / "h200-targets.json").read_text())["rows"]
    one = next(row for row in data["rows"] if "batch 1 at" in row["label"])
    target = next(row for row in targets if row["label"] == one["label"])
    one["tok_s"] = target["reach"] + 5.4
    shown = f"{target['reach'] + 5}"
    (results / "2099-01-02-h200.json").write_text(json.dumps(data))
    (results / "2099-01-03-h200-again.json").write_text("{}")  # an unknown kind
    assert figures.newest("h200").name == "2099-01-02-h200.json"
    assert f"| {shown} |" in figures.FIGURES["h200_table"]()
    assert f">= {target['reach']}, reached" in figures.FIGURES["h200_table"]()
    assert "decode, batch 1 (" not in figures.FIGURES["h200_missed"]()
    assert f"| **{shown}** / {target['cuda']:.0f} |" in figures.FIGURES["readme_table"]()


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
    assert "**Prompt of 512**: 0.80 ms per step" in shown


def test_the_renaming_slowed_no_step_by_more_than_2_percent() -> None:
    rows = figures.read("renaming-h200")["rows"]
    slower = {row["label"]: sum(row["new_ms"]) / sum(row["old_ms"]) for row in rows}
    assert len(slower) == 12 and not {label: ratio for label, ratio in slower.items() if ratio > 1.02}


def test_two_trees_on_a_cpu_are_shown_once_they_are_measured(results: Path) -> None:
    ratio = {"value": 1.0104, "low": 0.98, "high": 1.02}
    row = {
        "measure": "decode, batch 1",
        "unit": "tok/s",
        "new": [100, 101, 102],
        "old": [99, 100],
        "ratio": ratio,
    }
    data = {"rounds": 9, "models": {"a.gguf": [row]}}
    (results / "2099-01-02-renaming-cpu.json").write_text(json.dumps(data))
    shown = figures.FIGURES["renaming_cpu"]()
    assert "| a.gguf | decode, batch 1, tok/s | 99.5 | 101 | 1.010 (0.980-1.020) |" in shown
    assert "medians of 9 rounds" in shown
    assert "a.gguf" not in figures.FIGURES["cpu_runs"]()


def test_a_kind_without_data_says_so(results: Path) -> None:
    figures.newest("quality").unlink()
    with pytest.raises(SystemExit, match=r"no DATE-quality\.json"):
        figures.FIGURES["kv_table"]()


def test_an_unknown_name_says_so() -> None:
    with pytest.raises(SystemExit, match="no figure named cpu_tabel"):
        write_performance.filled("{{ cpu_tabel }}")
