"""Writes a run of `tandem bench` as one self-contained HTML file with plots: no server, no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, cast

import numpy as np

from tandem.bench.result import BenchResult, Row
from tandem.bench.rows import compare
from tandem.bench.statistics import outliers

PARTS = Path(__file__).parent / "page"
SCRIPTS = ("draw.js", "roofline.js", "curves.js", "strips.js", "cards.js", "main.js")
MAX_OUTLIERS = 40  # steps of a test that are marked, the farthest from the median first


def write_html(path: Path, result: Mapping[str, Any], older: Mapping[str, Any] | None = None) -> None:
    """`result` and `older` are outputs of `--json` (result.py). Rows with the same label are compared."""
    path.write_text(
        page(cast(BenchResult, result), cast(BenchResult, older) if older else None), encoding="utf-8"
    )


def page(result: BenchResult, older: BenchResult | None = None) -> str:
    script = "\n".join((PARTS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template((PARTS / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(f"{result['model']}: tandem bench"),
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=(PARTS / "style.css").read_text(encoding="utf-8"),
        data=_as_script(_data(result, older)),
        script=script,
    )


def _as_script(data: Any) -> str:
    """JSON without "<", so that no model name can end the script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _data(result: BenchResult, older: BenchResult | None) -> dict[str, Any]:
    return {
        "result": {key: value for key, value in result.items() if key != "rows"},
        "rows": [_row(row) for row in result["rows"]],
        "older": older and {"rows": {row["label"]: row["median"] for row in older["rows"]}},
        "comparisons": [*_with_older(result, older), *_with_peer(result)],
    }


def _row(row: Row) -> dict[str, Any]:
    """The row with rounded step times, their outliers and their percentiles."""
    times = [float(f"{seconds:.4g}") for seconds in row["step_seconds"]]
    odd = sorted((times[i] for i in outliers(times)), reverse=True) if times else []
    marks = [(f"p{p}", float(np.percentile(times, p))) for p in (50, 90, 99)] if times else []
    shown = {key: value for key, value in row.items() if key not in ("step_seconds", "seconds")}
    return shown | {"times": times, "odd": odd[:MAX_OUTLIERS], "marks": marks}


def _with_older(result: BenchResult, older: BenchResult | None) -> list[dict[str, Any]]:
    rows = compare(result, older) if older else []
    if not older or not rows:
        return []
    when = older["date"][:16].replace("T", " ")
    note = f"{when} UTC: {older['model']} on {older['device']}, Tandem {older['version']}."
    alone = len(result["rows"]) + len(older["rows"]) - 2 * len(rows)
    if alone:
        note += f" Tests that only one of the two has: {alone}."
    return [{"id": "older", "title": "Against the older run", "note": note, "rows": rows}]


def _with_peer(result: BenchResult) -> list[dict[str, Any]]:
    peer = result["peer"]
    rows = [
        {
            "label": row["label"], "old": found["median"], "new": row["median"], "ratio": found["ratio"],
            "ratio_interval": found["ratio_interval"], "verdict": "",
        }
        for row in result["rows"]
        if (found := row["peer"])
    ]  # fmt: skip
    if not peer or not rows:
        return []
    note = f"Rounds of both alternate. {peer['name']} {peer['version']}: {peer['build']}"
    return [{"id": "peer", "title": f"Against {peer['name']}", "note": note, "rows": rows}]
