"""The cost in perplexity of the NPU's int8 matmuls.

    python -m benchmarks.npu_numerics MODEL...

Writes `results/DATE-npu-numerics.json` and prints the tables of docs/NPU.md. The engine runs real text. Some of its
matmuls run on `Int8Accelerator`, which has the NPU's arithmetic, and the others on the CPU.

The increase of perplexity is an expectation over the next token under the probabilities of float32, instead of the next
token of the text: it has far less variance, so a thousand tokens are enough. The file has both, and the KL divergence
from float32 with and without int8. The selection (devices/tensor_parallel/int8_selection.py) decides about each kind of
matmul, and if a kind fails, about quarters of its layers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import date
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandem import LLM
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.tensor_parallel.cut import Gemm, gemms
from tandem.devices.tensor_parallel.device import TensorParallelDevice
from tandem.devices.tensor_parallel.int8 import Int8Accelerator
from tandem.devices.tensor_parallel.int8_selection import LIMIT, groups, select_int8
from tandem.engine.engine import Engine
from tandem.kernels.kernel import Array
from tandem.model.model import open_model
from tandem.model.tokenizer import Tokenizer
from tests.models.reference import ReferenceModel
from tests.packages import model_path

TEXT = Path(__file__).parent.parent / "tests/models/text.txt"
RESULTS = Path(__file__).parent / "results"
STEP, ROWS = 200, 50  # tokens per step of the engine; rows of the reference's logits at a time
BLOCKS = (None, 256)
# Published rates, as in `tandem plan --npu`: operations per second of both, bytes per second that the NPU writes.
IGPU, NPU, WRITTEN = 8.1e12, 4.57e12, 15e9


class Measured:
    """A model with selected groups of matmuls (int8_selection.py) in int8."""

    def __init__(self, path: Path, block: int | None, tokens: int, threads: int, closing: ExitStack) -> None:
        model = closing.enter_context(open_model(path))
        device = TensorParallelDevice(
            CPUDevice(threads),
            [Int8Accelerator(block)],
            fractions=(0, 1),
            only=lambda gemm: self.chosen(gemm),
        )
        closing.callback(device.close)
        self.selected: frozenset[str] | None = None  # None while weights are loaded: all groups
        self.engine = Engine.load(model, device, context=tokens, batch=STEP)
        self.works = [work for work in device.works if isinstance(work, Gemm)]
        self.ids = Tokenizer.from_gguf(model.gguf).encode(TEXT.read_text())[: tokens + 1]
        self.truth = truth(path, tuple(self.ids[:-1]))
        self.without = self.predicted(frozenset())

    def chosen(self, gemm: Gemm) -> bool:
        return self.selected is None or any(group in self.selected for group in groups(gemm))

    def predicted(self, selected: frozenset[str]) -> tuple[Array, Array]:
        """Cross-entropy in nats at each token: of the text's next token, and expected under float32's probabilities."""
        self.selected = selected
        logits = self.engine.logits(self.ids[:-1])
        largest = logits.max(axis=1)
        sums = [np.exp(row - top).sum(dtype=np.float64) for row, top in zip(logits, largest, strict=True)]
        total = largest + np.log(sums)
        return (
            total - logits[np.arange(len(logits)), self.ids[1:]],
            total - np.einsum("tv,tv->t", self.truth.shares, logits),
        )

    def cost(self, selected: frozenset[str]) -> dict[str, float]:
        begun = time.perf_counter()
        found = self.predicted(selected)
        text, own = (
            (now - before).astype(np.float64) for now, before in zip(found, self.without, strict=True)
        )
        return {
            "perplexity_cost": float(np.expm1(own.mean())),
            "standard_error": error(own),
            "on_the_text": float(np.expm1(text.mean())),
            "on_the_text_standard_error": error(text),
            "perplexity_of_the_text_without": float(np.exp(self.without[0].mean())),
            "kl": float((found[1] - self.truth.entropy).mean()),
            "kl_without": float((self.without[1] - self.truth.entropy).mean()),
            "largest_of_a_token": float(own.max()),  # in nats
            "largest_at": int(own.argmax()),
            "seconds": time.perf_counter() - begun,
        }


def error(values: Array) -> float:
    return float(values.std() / np.sqrt(len(values)))


class Truth(NamedTuple):
    """Predictions of the same weights in float32."""

    shares: Array  # probabilities [tokens, vocabulary]
    entropy: Array


@lru_cache(1)
def truth(path: Path, ids: tuple[int, ...]) -> Truth:
    model = ReferenceModel(path)
    hidden, shares, entropy = model.final_hidden(ids), [], []
    for row in range(0, len(ids), ROWS):
        logits = model.head(hidden[row : row + ROWS])
        logits -= logits.max(axis=1, keepdims=True)
        some = np.exp(logits)
        total = some.sum(axis=1, dtype=np.float64)
        some /= total[:, None].astype(np.float32)
        entropy.append(np.log(total) - np.einsum("tv,tv->t", some, logits))
        shares.append(some)
    return Truth(np.concatenate(shares), np.concatenate(entropy))


def measure(result: dict[str, Any], options: argparse.Namespace, save: Callable[[], None]) -> None:
    """Decides about each kind of matmul, and about quarters of kinds that fail. Adds to `result`."""
    name, block, rows = result["model"], result["block"], result["rows"]
    kinds = kind_groups(matmuls(name)[0])
    layers = 1 + max(int(member.split()[1]) for members in kinds.values() for member in members)
    with ExitStack() as closing:
        model: list[Measured] = []

        def cost(selected: frozenset[str]) -> float:
            label = label_of(selected, kinds)
            if label not in rows:
                if not model:
                    model.append(Measured(model_path(name), block, options.tokens, options.threads, closing))
                members = [member for group in selected for member in members_of(group, kinds)]
                rows[label] = model[0].cost(frozenset(members))
                print(f"{name}, {said(block)}, {label}: {cell(rows[label])}", flush=True)
                save()
            return float(rows[label]["perplexity_cost"])

        cost(frozenset(kinds))
        selection = select_int8(list(kinds), cost)
        failed = [
            kind for kind in options.layers or ["down"] if kind in kinds and kind not in selection.selected
        ]
        if failed:
            finer = [f"{kind} of layers {a}-{b}" for kind in failed for a, b in quarters(layers)]
            selection = select_int8([*sorted(selection.selected), *finer], cost)
    result["admitted"] = sorted(selection.selected)
    result["total"] = rows.get(label_of(selection.selected, kinds))
    save()


def matmuls(name: str) -> tuple[list[Gemm], str]:
    """The matmuls of a model, and its shape as in int8_matmuls.json."""
    with LLM(model_path(name), device="cpu", context=64, batch=1) as llm:
        c = llm.engine.model.config
        works = [work for work in gemms(llm.engine.program) if isinstance(work, Gemm)]
        return works, f"{c.architecture} {c.layers} x {c.dim} x {c.ffn_dim}"


def int8_matmuls(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the NPU may compute (tandem/devices/npu/int8_matmuls.json): per model, the result that saves most."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(result["model"] for result in results):
        works, shape = matmuls(name)
        kinds = kind_groups(works)
        options = []
        for result in results:
            if result["model"] == name:
                members = [m for group in result.get("admitted", []) for m in members_of(group, kinds)]
                options.append((saved(result["block"], works, members), result["block"], sorted(members)))
        _, block, selected = max(options, key=lambda option: option[0])
        found[shape] = {"block": block, "groups": selected}
    return found


def saved(block: int | None, works: Sequence[Gemm], members: Sequence[str]) -> float:
    """Operations per prompt token that move from the iGPU to the NPU. The NPU writes the sums of each block
    separately: 4 bytes for 2 x block operations."""
    rate = min(NPU, block / 2 * WRITTEN) if block else NPU
    taken = [work for work in works if groups(work)[2] in members]
    return rate / (rate + IGPU) * sum(2 * work.rows * int(work.launch.scalars["columns"]) for work in taken)


def label_of(selected: frozenset[str], kinds: dict[str, list[str]]) -> str:
    return "all" if selected == frozenset(kinds) else " and ".join(sorted(selected))


def kind_groups(works: Sequence[Gemm]) -> dict[str, list[str]]:
    """Groups by kind of matmul, from the names of weights: in some files K and V have other formats than Q."""
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
    text = f"{row['on_the_text']:+.1%} ± {row['on_the_text_standard_error']:.1%}"
    return f"{row['perplexity_cost']:+.2%} ± {row['standard_error']:.2%} ({text})"


def divergences(result: dict[str, Any]) -> str:
    """KL divergences in nats per token: nothing in int8, the selected groups, all matmuls."""
    rows, total = result["rows"], result.get("total")
    found = [rows["all"]["kl_without"], *([total["kl"]] if total else []), rows["all"]["kl"]]
    return ", ".join(f"{kl:.4f}" for kl in found)


def table(results: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(result["model"] for result in results))
    lines = []
    for name in names:
        mine = [result for result in results if result["model"] == name]
        # Rows of several groups are trials of the selection: the table shows only the last.
        labels = [x for result in mine for x in result["rows"] if " and " not in x.replace("gate and up", "")]
        lines += [f"{name}, {mine[0]['tokens']} tokens:", ""]
        lines += [
            "| in int8 | " + " | ".join(said(result["block"]) for result in mine) + " |",
            "|---" * (1 + len(mine)) + "|",
        ]
        for label in dict.fromkeys(labels):
            cells = [cell(result["rows"][label]) if label in result["rows"] else "" for result in mine]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        sums = [f": {cell(result['total'])}" if result.get("total") else "" for result in mine]
        selected = [", ".join(result.get("admitted", ["not measured yet"])) or "nothing" for result in mine]
        selected = [groups + total for groups, total in zip(selected, sums, strict=True)]
        lines.append("| **selected** | " + " | ".join(selected) + " |")
        lines += ["| KL from float32: none, selected, all | " + " | ".join(map(divergences, mine)) + " |", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="without one: print the table of the file")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block", type=int, action="append", help="columns per scale; 0: a whole row")
    parser.add_argument(
        "--layers", action="append", help="kinds to try by quarters of the layers if they fail (down)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-npu-numerics.json")
    parser.add_argument("--int8-matmuls", type=Path, help="file for the selected groups")
    options = parser.parse_args()
    results = json.loads(options.out.read_text())["results"] if options.out.exists() else []

    def save() -> None:
        written = {"date": str(date.today()), "text": TEXT.name, "results": results}
        options.out.write_text(json.dumps(written, indent=1) + "\n")

    for name in options.models:
        for block in [n or None for n in options.block] if options.block else BLOCKS:
            known = (name, block, options.tokens)
            mine = [old for old in results if (old["model"], old["block"], old["tokens"]) == known]
            if not mine:
                mine = [{"model": name, "block": block, "tokens": options.tokens, "limit": LIMIT, "rows": {}}]
                results += mine
            measure(mine[0], options, save)
    print(table(results))
    if options.int8_matmuls:
        options.int8_matmuls.write_text(json.dumps(int8_matmuls(results), indent=1) + "\n")


if __name__ == "__main__":
    main()
