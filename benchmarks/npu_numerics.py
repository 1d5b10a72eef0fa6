"""What it costs to compute matmuls as the NPU would, in int8: `python -m benchmarks.npu_numerics MODEL...` writes
`results/DATE-npu-numerics.json` and prints the tables of docs/NPU.md.

The engine runs real text with some of its matmuls given to `Int8Accelerator`, which has the NPU's arithmetic; the
others are the CPU's own. Each row is compared with the same engine without: perplexity of the text, and the mean KL
divergence of predictions. The gate (tandem/devices/hybrid/gate.py) judges kinds of matmuls, and of one that fails
quarters of its layers. A scale for 32 columns is what any change costs: activations have these scales already, so that
nothing is rounded anew but weights, to 8 bits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tandem import LLM
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.hybrid.cut import Gemm, gemms
from tandem.devices.hybrid.device import HybridDevice
from tandem.devices.hybrid.gate import LIMIT, groups, judge
from tandem.devices.hybrid.int8 import Int8Accelerator
from tandem.engine.engine import Engine
from tandem.kernels.kernel import Array
from tandem.model.model import open_model
from tandem.model.tokenizer import Tokenizer
from tests.packages import model_path

TEXT = Path(__file__).parent.parent / "tests/models/text.txt"
RESULTS = Path(__file__).parent / "results"
WINDOW, STEP = 1400, 200  # tokens of a sequence, and of a step
BLOCKS = (None, 256)


class Measured:
    """A model whose matmuls are computed in int8, by groups (gate.py)."""

    def __init__(self, path: Path, block: int | None, tokens: int, threads: int, closing: ExitStack) -> None:
        model = closing.enter_context(open_model(path))
        device = HybridDevice(
            CPUDevice(threads), [Int8Accelerator(block)], shares=(0, 1), only=lambda gemm: self.chosen(gemm)
        )
        closing.callback(device.close)
        self.selected: frozenset[str] | None = None  # while weights are loaded: all
        self.engine = Engine(model, device, context=WINDOW, batch=STEP)
        self.works = [work for work in device.works if isinstance(work, Gemm)]
        ids = Tokenizer.from_gguf(model.gguf).encode(TEXT.read_text())[: tokens + 1]
        self.windows = [ids[i : i + WINDOW + 1] for i in range(0, len(ids) - 1, WINDOW)]
        self.base = [Predictions(logits, window[1:]) for logits, window in self.predicted(frozenset())]

    def chosen(self, gemm: Gemm) -> bool:
        return self.selected is None or any(group in self.selected for group in groups(gemm))

    def predicted(self, selected: frozenset[str]) -> Iterator[tuple[Array, list[int]]]:
        self.selected = selected
        for window in self.windows:
            yield self.engine.logits(window[:-1]), window

    def cost(self, selected: frozenset[str]) -> dict[str, float]:
        begun, more, divergence, without = time.perf_counter(), [], 0.0, []
        for base, (logits, window) in zip(self.base, self.predicted(selected), strict=True):
            divergence += base.divergence(logits)
            without.append(base.surprise)
            more.append(surprise(logits, window[1:]) - base.surprise)
        change = np.concatenate(more)
        return {
            "perplexity_without": float(np.exp(np.concatenate(without).mean())),
            "perplexity_cost": float(np.expm1(change.mean())),
            "standard_error": float(change.std() / np.sqrt(len(change))),
            "kl": divergence / len(change),
            "seconds": time.perf_counter() - begun,
        }


class Predictions:
    """Of the engine as it is; their divergence from others takes one exponential of each logit."""

    def __init__(self, logits: Array, targets: list[int]) -> None:
        self.surprise = surprise(logits, targets)
        self._shares = np.exp(logits - total(logits)[:, None])
        self._entropy = total(logits) - np.einsum("tv,tv->t", self._shares, logits)

    def divergence(self, logits: Array) -> float:
        """The sum over tokens of KL(these || those)."""
        cross = total(logits) - np.einsum("tv,tv->t", self._shares, logits)
        return float((cross - self._entropy).sum(dtype=np.float64))


def total(logits: Array) -> Array:
    """The logarithm of what exponentials add up to, row by row."""
    largest = logits.max(axis=1)
    sums = [float(np.exp(row - top).sum(dtype=np.float64)) for row, top in zip(logits, largest, strict=True)]
    found: Array = largest + np.log(sums)
    return found


def surprise(logits: Array, targets: list[int]) -> Array:
    found: Array = total(logits) - logits[np.arange(len(targets)), targets]
    return found


def measure(name: str, block: int | None, options: argparse.Namespace) -> dict[str, Any]:
    """The gate's judgement of each kind of matmul, and of each group of layers of those that stay off."""
    rows: dict[str, dict[str, float]] = {}
    with ExitStack() as closing:
        model = Measured(model_path(name), block, options.tokens, options.threads, closing)
        layers = len({groups(gemm)[1] for gemm in model.works})
        kinds = kind_groups(model.works)

        def cost(selected: frozenset[str]) -> float:
            label = label_of(selected, kinds)
            members = frozenset(member for group in selected for member in members_of(group, kinds))
            if label not in rows:
                rows[label] = model.cost(members)
                print(f"{name}, {said(block)}, {label}: {cell(rows[label])}", flush=True)
            return (
                rows[label]["perplexity_cost"] + rows[label]["standard_error"]
            )  # what is in doubt stays off

        cost(frozenset(kinds))
        verdict = judge(list(kinds), cost)
        if options.layers in kinds and options.layers not in verdict.admitted:
            finer = [f"{options.layers} of layers {a}-{b}" for a, b in quarters(layers)]
            verdict = judge([*sorted(verdict.admitted), *finer], cost)
    return {
        "model": name, "block": block, "tokens": sum(len(window) - 1 for window in model.windows), "limit": LIMIT,
        "rows": rows, "admitted": sorted(verdict.admitted), "total": rows.get(label_of(verdict.admitted, kinds)),
    }  # fmt: skip


def verdicts(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the NPU may compute (tandem/devices/npu/verdicts.json): of a model's results those that admit the most."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(result["model"] for result in results):
        with LLM(model_path(name), device="cpu", context=64, batch=1) as llm:
            works = [work for work in gemms(llm.engine.program) if isinstance(work, Gemm)]
            c = llm.engine.model.config
        kinds = kind_groups(works)
        options = [
            (result["block"], [member for group in result["admitted"] for member in members_of(group, kinds)])
            for result in results
            if result["model"] == name
        ]
        block, admitted = max(options, key=lambda option: len(option[1]))
        found[f"{c.architecture} {c.layers} x {c.dim} x {c.ffn_dim}"] = {
            "block": block,
            "groups": sorted(admitted),
        }
    return found


def label_of(selected: frozenset[str], kinds: dict[str, list[str]]) -> str:
    return "all" if selected == frozenset(kinds) else " and ".join(sorted(selected))


def kind_groups(works: Sequence[Gemm]) -> dict[str, list[str]]:
    """What is judged at first, by the names of weights: some files have keys and values in formats of their own."""
    kinds: dict[str, list[str]] = {}
    for gemm in works:
        names = groups(gemm)[0]
        kind = "Q, K, V" if names[:6] in ("attn_q", "attn_k", "attn_v") else names
        kind = {
            "attn_output": "attention's output",
            "ffn_gate+ffn_up": "gate and up",
            "ffn_down": "down",
        }.get(kind, kind)
        kinds.setdefault(kind, []).append(groups(gemm)[2])
    return kinds


def quarters(layers: int) -> list[tuple[int, int]]:
    ends = [layers * i // 4 for i in range(5)]
    return [(begin, end - 1) for begin, end in pairwise(ends)]


def members_of(group: str, kinds: dict[str, list[str]]) -> list[str]:
    kind, _, span = group.partition(" of layers ")
    if not span:
        return kinds[kind]
    first, last = map(int, span.split("-"))
    return [member for member in kinds[kind] if first <= int(member.split()[1]) <= last]


def said(block: int | None) -> str:
    return f"a scale for {block} columns" if block else "a scale for a row"


def cell(row: dict[str, float]) -> str:
    return f"{row['perplexity_cost']:+.2%} ± {row['standard_error']:.2%}, KL {row['kl']:.4f}"


def table(results: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(result["model"] for result in results))
    lines = []
    for name in names:
        mine = [result for result in results if result["model"] == name]
        labels = [
            label
            for result in mine
            for label in result["rows"]
            if " and " not in label or label == "gate and up"
        ]
        lines += [f"{name}, {mine[0]['tokens']} tokens:", ""]
        lines += [
            "| in int8 | " + " | ".join(said(result["block"]) for result in mine) + " |",
            "|---" * (1 + len(mine)) + "|",
        ]
        for label in dict.fromkeys(labels):
            cells = [cell(result["rows"][label]) if label in result["rows"] else "" for result in mine]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        admitted = [
            f"{', '.join(result['admitted']) or 'nothing'}: {result['total']:+.2%}" for result in mine
        ]
        lines += ["| **the gate admits** | " + " | ".join(admitted) + " |", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="without any: the table of what was measured")
    parser.add_argument("--tokens", type=int, default=WINDOW)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block", type=int, action="append", help="columns with a scale; 0: all of a row")
    parser.add_argument(
        "--layers", default="down", help="what is judged by quarters of its layers if it fails"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-npu-numerics.json")
    parser.add_argument("--verdicts", type=Path, help="where to write what the gate admits")
    options = parser.parse_args()
    results = json.loads(options.out.read_text())["results"] if options.out.exists() else []
    for name in options.models:
        for block in [n or None for n in options.block] if options.block else BLOCKS:
            results = [old for old in results if (old["model"], old["block"]) != (name, block)]
            results.append(measure(name, block, options))
            options.out.write_text(
                json.dumps({"date": str(date.today()), "text": TEXT.name, "results": results}, indent=1)
                + "\n"
            )
    print(table(results))
    if options.verdicts:
        options.verdicts.write_text(json.dumps(verdicts(results), indent=1) + "\n")


if __name__ == "__main__":
    main()
