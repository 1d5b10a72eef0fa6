"""What int8 costs, as it was measured on real models: docs/NPU.md and int8_matmuls.json have these figures only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import npu_numerics
from tandem.devices.npu import int8_matmuls
from tandem.devices.tensor_parallel.int8_selection import LIMIT

pytestmark = pytest.mark.fast

RESULTS = sorted(npu_numerics.RESULTS.glob("*-npu-numerics.json"))[-1]
DOCS = Path(__file__).parents[2] / "docs/NPU.md"
KINDS = {
    "Q, K, V": "attn_[qkv]",
    "attention's output": "attn_output",
    "gate and up": "ffn_gate",
    "down": "ffn_down",
}
SHAPES = {"gemma3 18 x 640 x 2048": "gemma-3-270m", "qwen2 28 x 1536 x 8960": "qwen2.5-coder-1.5b"}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text())["results"]
    return found


def test_the_docs_have_its_tables(results: list[dict[str, Any]]) -> None:
    text = DOCS.read_text()
    assert RESULTS.name in text and npu_numerics.table(results).strip() in text


def test_the_gate_at_work(results: list[dict[str, Any]]) -> None:
    """On two models, both ways: what is selected costs half a percent at most, alone and together; some are not."""
    ways = {(result["model"], result["block"]) for result in results}
    assert ways == {(model, block) for model in SHAPES.values() for block in (None, 256)}
    for result in results:
        rows, selected = result["rows"], result["admitted"]
        assert result["tokens"] >= 1000 and result["limit"] == LIMIT and result["total"] in rows.values()
        assert selected and all(rows[group]["perplexity_cost"] <= LIMIT for group in selected)
        assert result["total"]["perplexity_cost"] <= LIMIT
        assert {"all", *KINDS} <= set(rows) and any(row["perplexity_cost"] > LIMIT for row in rows.values())


def test_the_allowed_matmuls_are_its(results: list[dict[str, Any]]) -> None:
    """Each matmul that `--npu` may give to the NPU was selected, and none that was is left out."""
    file = Path(int8_matmuls.__file__).with_name(int8_matmuls.NAME)
    for shape, allowed in json.loads(file.read_text()).items():
        of = [r for r in results if (r["model"], r["block"]) == (SHAPES[shape], allowed["block"])]
        wanted = {place for group in of[0]["admitted"] for place in places(group, int(shape.split()[1]))}
        assert {found(group) for group in allowed["groups"]} == wanted


def places(group: str, layers: int) -> list[tuple[int, str]]:
    """Layers and kinds of what was measured."""
    kind, _, span = group.partition(" of layers ")
    first, last = map(int, span.split("-")) if span else (0, layers - 1)
    return [(layer, kind) for layer in range(first, last + 1)]


def found(group: str) -> tuple[int, str]:
    """Of `layer 3 ffn_down`, say."""
    _, layer, name = group.split()
    return int(layer), next(kind for kind, pattern in KINDS.items() if re.match(pattern, name))
