"""Writes the figures of docs/PERFORMANCE.md, docs/VULKAN.md and README.md again, from benchmarks/results/.

    python -m benchmarks.write_performance        (make docs)

docs/PERFORMANCE.md is docs/templates/PERFORMANCE.md.in with each `{{ name }}` replaced: change the template, not the
page. On the other pages what stands between `<!-- made: name -->` and `<!-- /made -->` is replaced. The names are those
of the functions in figures*.py; each takes the newest file of its kind, by the date in its name:

    DATE.json               against llama.cpp on a CPU     DATE-speculation.json   with and without speculation
    DATE-serving.json       the servers                    DATE-quality.json       KL and perplexity
    DATE-h200.json          the GPU                        DATE-tune-h200.json, -tune-lavapipe.json, -tune-cpu.json
    DATE-renaming-h200.json, -renaming-cpu.json    two commits side by side
    DATE-formats-h200.json                         weight formats, of gpu_formats.py
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import figures_gpu, figures_readme, figures_tune
from benchmarks.figures import FIGURES

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "docs" / "templates" / "PERFORMANCE.md.in"
PAGE = ROOT / "docs" / "PERFORMANCE.md"
REGIONS = [
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("VULKAN.md", "TUNING.md", "appendix/RENAMING.md")),
]
NOTE = "<!-- Made by `make docs` from docs/templates/PERFORMANCE.md.in and benchmarks/results/: edit those. -->\n"
__all__ = ["figures_gpu", "figures_readme", "figures_tune"]  # imported for the figures they add


def made(name: str) -> str:
    if name not in FIGURES:
        raise SystemExit(f"there is no figure named {name}; there are {', '.join(sorted(FIGURES))}")
    return FIGURES[name]()


def filled(template: str) -> str:
    return NOTE + re.sub(r"\{\{ (\w+) \}\}", lambda found: made(found[1]), template)


def with_regions(page: str) -> str:
    return re.sub(
        r"(<!-- made: (\w+) -->\n).*?(\n<!-- /made -->)",
        lambda found: found[1] + made(found[2]) + found[3],
        page,
        flags=re.DOTALL,
    )


def pages() -> dict[Path, str]:
    """What each page should be."""
    return {PAGE: filled(TEMPLATE.read_text())} | {path: with_regions(path.read_text()) for path in REGIONS}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
