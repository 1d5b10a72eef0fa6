"""Measured rows for the planner: models, steps, and hardware with the limits of the same rounds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

from benchmarks import figures
from tandem.bench.hardware import Hardware, load_hardware
from tandem.bench.step_cost import Step
from tandem.model.synthetic import SyntheticModel
from tandem.plan.predict import Planned, added

CONTEXT = 32768
# Published files mix formats; these are as large as they are.
CPU_MODELS = {
    "smollm2": "smollm2-135m:q4_1", "gemma-3-270m": "gemma-3-270m:q5_0", "qwen2.5-coder-1.5b": "qwen2.5-1.5b:q4_k_m",
}  # fmt: skip
GPU_MODEL = "gemma-3-27b:q4_0"


@dataclass(frozen=True)
class Row:
    """A measured rate in tokens per second, with its model, hardware and steps."""

    run: str
    hardware: Hardware
    model: str
    test: str
    steps: tuple[tuple[tuple[int, int], ...], ...]
    tokens: int
    measured: float

    @property
    def decodes(self) -> bool:
        return self.test.startswith("decode")

    @property
    def predicted(self) -> float:
        return self.tokens / self.seconds(self.hardware)

    @property
    def limit(self) -> float:
        return (
            self.tokens / added(self._planned.limit(self.hardware, list(step)) for step in self.steps).total
        )

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def seconds(self, hardware: Hardware) -> float:
        """Predicted."""
        return added(self._planned.predict(hardware, list(step)) for step in self.steps).total

    @property
    def _planned(self) -> Planned:
        return planned(self.model)


class _Mixed(SyntheticModel):
    """As files called Q4_K_M are made: values and the way down take Q6_K in half of the layers."""

    def matrices(self) -> dict[str, tuple[str, int, int]]:
        found = super().matrices()
        for i in range(self.config.layers):
            eighth = self.config.layers // 8
            if i < eighth or i >= 7 * eighth or (i - eighth) % 3 == 2:
                names = (f"blk.{i}.{part}.weight" for part in ("attn_v", "ffn_down", "ffn_down_exps"))
                found |= {name: ("q6_k", *found[name][1:]) for name in names if name in found}
        return found


@cache
def planned(model: str) -> Planned:
    mixed = model.endswith(":q4_k_m")
    full = _Mixed(model.removesuffix("_m")) if mixed else SyntheticModel(model)
    return Planned(full, min(CONTEXT, full.config.trained_context))


def decode(run: str, hardware: Hardware, model: str, batch: int, depth: int, measured: float) -> Row:
    step = ((depth, 1),) * batch
    return Row(run, hardware, model, f"decode, batch {batch} at {depth}", (step,), batch, measured)


def prefill(run: str, hardware: Hardware, model: str, tokens: int, measured: float) -> Row:
    steps: list[Step] = planned(model).prompt_steps(tokens)
    return Row(run, hardware, model, f"prompt of {tokens}", tuple(map(tuple, steps)), tokens, measured)


def cpu_rows() -> list[Row]:
    """Of every comparison with llama.cpp in the folder; those of kernels before the present ones are in older/."""
    found = [json.loads(file.read_text()) for file in sorted(figures.RESULTS.glob("*.json"))]
    runs = [run for run in found if isinstance(run, dict) and "peer_system" in run and "models" in run]
    return [row for run in sorted(runs, key=lambda run: str(run["date"])) for row in _cpu_run(run)]


def _cpu_run(run: dict[str, Any]) -> Iterator[Row]:
    steps, opening = run["settings"]["steps"], run["settings"]["opening"]
    for model in run["models"]:
        shape, name = CPU_MODELS.get(model["name"]), run["date"][:16]
        for row in model["rows"]:
            if shape is None or "read_gb_per_s_limit" not in row:
                continue  # a shape that the planner does not know, or no speed
            hardware = _with_limits(row["read_gb_per_s_limit"], model["int8_gop_per_s_limit"])
            measured = row["ours"]["median"]
            if found := re.fullmatch(r"prefill (\d+)", row["measure"]):
                yield prefill(name, hardware, shape, int(found[1]), measured)
            elif found := re.fullmatch(r"decode(?:, batch (\d+))?", row["measure"]):
                batch = found[1] or "1"
                yield decode(name, hardware, shape, int(batch), opening + steps[batch] // 2, measured)


def _with_limits(reads: list[float], int8_gop_per_s: float) -> Hardware:
    """The machine as it was in the rounds of a row: its best read for the limit, the usual one for a prediction."""
    rate = int8_gop_per_s / 1e3
    return replace(
        load_hardware("epyc-2-cores"), pin_gb_s=max(reads), read_gb_s=max(reads), usual_gb_s=median(reads),
        matrix_tflop_s=rate, dot_top_s=rate, peak_top_s=rate,
    )  # fmt: skip


def gpu_rows() -> list[Row]:
    return list(gpu_rows_by_label().values())


def gpu_rows_by_label() -> dict[str, Row]:
    """By the labels of `tandem bench`."""
    run = figures.read("h200")
    name, hardware = f"{run['date']}, {run['commit']}", load_hardware("h200")
    rates, found = {row["label"]: row["tok_s"] for row in run["rows"] if "tok_s" in row}, {}
    for label, rate in rates.items():
        if decoded := re.fullmatch(r"decode (\d+), batch (\d+) at (\d+)", label):
            tokens, batch, depth = map(int, decoded.groups())
            found[label] = decode(name, hardware, GPU_MODEL, batch, depth + tokens // 2, rate)
        elif read := re.fullmatch(r"prefill (\d+)", label):
            found[label] = prefill(name, hardware, GPU_MODEL, int(read[1]), rate)
    return found


def lavapipe_rows() -> list[Row]:
    """Vulkan in software, as `tandem bench smollm2 --device vulkan:lavapipe --json` tells, with its own limits."""
    run, usual = figures.read("lavapipe"), load_hardware("lavapipe")
    reads, ops = (
        run["limits"]["bytes_per_s"] / 1e9,
        (run["limits"]["ops_per_s"] or usual.dot_top_s * 1e12) / 1e12,
    )
    hardware = replace(
        usual,
        pin_gb_s=reads,
        read_gb_s=reads,
        usual_gb_s=reads,
        matrix_tflop_s=ops,
        dot_top_s=ops,
        peak_top_s=ops,
    )
    found, model = [], CPU_MODELS["smollm2"]
    for row in run["rows"]:
        if row["kind"] == "decode":
            depth = row["depth"] + row["tokens"] // 2
            found.append(decode(run["date"][:16], hardware, model, row["batch"], depth, row["median"]))
        elif row["depth"] == 0:
            found.append(prefill(run["date"][:16], hardware, model, row["tokens"], row["median"]))
    return found
