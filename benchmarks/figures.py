"""Figures and tables of the docs, made from the files in benchmarks/results/."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import result_table, serving, speculation
from benchmarks.pairs import HERE

Data = dict[str, Any]
RESULTS = HERE / "results"
TITLES = {
    "smollm2": "SmolLM2 135M, Q4_1",
    "gemma-3-270m": "Gemma 3 270M, Q4_K_M",
    "qwen2.5-coder-0.5b": "Qwen2.5 Coder 0.5B, Q4_K_M",
    "qwen2.5-coder-1.5b": "Qwen2.5 Coder 1.5B, Q4_K_M",
}
FIGURES: dict[str, Callable[[], str]] = {}


def figure(make: Callable[[], str]) -> Callable[[], str]:
    """`def cpu_table` is `{{ cpu_table }}`."""
    FIGURES[make.__name__] = make
    return make


def newest(kind: str) -> Path:
    """DATE-KIND.json, or DATE.json where KIND is "", of the latest date. No other name is taken."""
    name = re.compile(r"\d{4}-\d\d-\d\d" + (f"-{kind}" if kind else "") + r"\.json")
    found = sorted(path for path in RESULTS.iterdir() if name.fullmatch(path.name))
    if not found:
        raise SystemExit(f"benchmarks/results has no DATE{kind and '-' + kind}.json")
    return found[-1]


def read(kind: str) -> Data:
    data: Data = json.loads(newest(kind).read_text())
    return data


def rows_of(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def notes_listed(table: str) -> str:
    """The lines under a table as a list, not as one paragraph."""
    return "\n".join(
        line if line[:1] in ("", "|") else "- " + line.rstrip(" |") for line in table.split("\n")
    )


def about(kind: str, command: str) -> str:
    """Where figures come from: command, date, machine."""
    data = read(kind)
    machine, versions = data["machine"], data["versions"]
    return rows_of(
        ["", ""],
        [
            ["command", f"`{command}`; data in `benchmarks/results/{newest(kind).name}`"],
            ["date", data["date"].replace("T", " ").replace("+00:00", " UTC")],
            [
                "machine",
                f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, Linux {machine['kernel']}, "
                f"{versions['compiler']}; load before {machine['load_before']:.1f}",
            ],
        ],
    )


# ---- a CPU against llama.cpp


@figure
def cpu_table() -> str:
    return notes_listed(result_table.table(read("")))


@figure
def cpu_about() -> str:
    data = read("")
    return about("", f"python -m benchmarks.against_llama_cpp --rounds {data['settings']['rounds']}")


@figure
def cpu_missed() -> str:
    missed = [
        f"{model['name']}, {row['measure']} ({_reached(row)})"
        for model in read("")["models"]
        for row in model["rows"]
        if not result_table.met(row)
    ]
    return f"Missed in this run: {'; '.join(missed)}." if missed else "Every target is met in this run."


def _reached(row: result_table.Row) -> str:
    if "ratio" not in row:
        return f"{row['ours']['median']:.2%} where less than {row['target']:.0%} is the target"
    return f"{row['ratio']['value']:.2f} of {row['target']:g}"


@figure
def cpu_runs() -> str:
    """The same rows in every comparison that is kept: how far to rely on one run."""
    rows = []
    for path in sorted(RESULTS.rglob("[0-9]*.json")):
        if "-renaming-" in path.name:  # no comparison with llama.cpp
            continue
        data = json.loads(path.read_text())
        for model in data.get("models", []):
            for row in model.get("rows", []):
                if row["measure"] == "decode":
                    reads = row["read_gb_per_s_limit"]
                    rows.append(
                        [
                            model["name"], data["date"][:16].replace("T", " "), str(data["settings"]["rounds"]),
                            f"{row['ours']['median']:.1f}", f"{row['peer']['median']:.1f}",
                            "{value:.2f} ({low:.2f}-{high:.2f})".format(**row["ratio"]),
                            f"{min(reads):.0f} to {max(reads):.0f}", f"`{path.relative_to(RESULTS)}`",
                        ]
                    )  # fmt: skip
    head = [
        "model",
        "date",
        "rounds",
        "Tandem, tok/s",
        "llama.cpp",
        "ratio (95%)",
        "GB/s of the memory",
        "file",
    ]
    return rows_of(head, sorted(rows))


@figure
def cpu_limits() -> str:
    """What the machine that was measured allows at most, in tokens per second."""
    rows = []
    for model in read("")["models"]:
        reads = median(gb for row in model["rows"] for gb in row.get("read_gb_per_s_limit", []))
        rows.append(
            [
                TITLES[model["name"]], f"{model['tandem']['bytes'] / 1e6:,.0f} MB", f"{reads:.1f}",
                f"{model['int8_gop_per_s_limit']:.0f}", *(_limit(model, reads, n, n) for n in (1, 8, 32)),
                _limit(model, reads, 512, 1),
            ]
        )  # fmt: skip
    head = ["model", "weights a step", "GB/s", "GOP/s", "batch 1", "batch 8", "batch 32", "prompt of 512"]
    return rows_of(head, rows)


def _limit(model: Data, gb_per_s: float, tokens: int, sampled: int) -> str:
    """A step's bytes over reads, or its operations over the peak, whichever takes longer."""
    info = model["tandem"]
    operations = 2 * (tokens * info["body_parameters"] + sampled * info["head_parameters"])
    seconds = max(info["bytes"] / gb_per_s, operations / model["int8_gop_per_s_limit"]) / 1e9
    return f"{tokens / seconds:,.0f}"


# ---- servers and speculation


@figure
def serving_table() -> str:
    return notes_listed(serving.table(read("serving")))


@figure
def serving_file() -> str:
    return f"`benchmarks/results/{newest('serving').name}`"


@figure
def serving_missed() -> str:
    lines = [
        [cell.strip() for cell in line.split("|")] for line in serving.table(read("serving")).split("\n")
    ]
    missed = [f"{cells[1]}, {cells[2]} ({cells[3]}, aim {cells[6]})" for cells in lines if "missed" in cells]
    return f"Missed in this run: {'; '.join(missed)}." if missed else "Every aim is met in this run."


@figure
def speculation_table() -> str:
    return "\n".join([speculation.HEAD, *map(speculation.line, read("speculation")["rows"])])


@figure
def speculation_about() -> str:
    return about(
        "speculation",
        f"python -m benchmarks.speculation --rounds {read('speculation')['settings']['rounds']}",
    )


# ---- quality


@figure
def quality_table() -> str:
    rows = []
    for row in read("quality")["rows"]:
        kl, perplexity = row["kl"], row["perplexity"]
        rows.append(
            [
                TITLES[row["model"]], f"{row['tokens']:,} of {row['text']}",
                f"{kl['f16']:.6f}", f"{kl['llama.cpp']:.6f}", f"{kl['f16'] / kl['llama.cpp']:.2f}",
                f"{perplexity['f16']:.4f}", f"{perplexity['llama.cpp']:.4f}",
            ]
        )  # fmt: skip
    head = ["model", "tokens", "KL, Tandem", "llama.cpp", "ratio", "perplexity, Tandem", "llama.cpp"]
    return rows_of(head, rows)


@figure
def kv_table() -> str:
    rows = []
    for row in read("quality")["rows"]:
        kl, perplexity, size = row["kl"], row["perplexity"], row["kv_bytes_per_token"]
        rows.append(
            [
                TITLES[row["model"]], f"{row['tokens']:,}", f"{kl['f16']:.6f}", f"{kl['q8']:.6f}",
                f"{perplexity['f16']:.4f}", f"{perplexity['q8']:.4f}",
                f"{perplexity['q8'] / perplexity['f16'] - 1:+.2%}", f"{size['f16']:,.0f}", f"{size['q8']:,.0f}",
            ]
        )  # fmt: skip
    head = ["model", "tokens", "KL, float16", "KL, int8", "perplexity, float16", "int8", "change"]
    return rows_of([*head, "bytes per token, float16", "int8"], rows)


@figure
def quality_about() -> str:
    return about("quality", "python -m benchmarks.quality")
