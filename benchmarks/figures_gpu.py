"""Figures of the GPU for the docs: results of benchmarks.gpu, with the targets in benchmarks/results/h200-targets.json
and the limits of `tandem plan`."""

from __future__ import annotations

import json
import math
import re
from statistics import median
from typing import Any

from benchmarks.figures import RESULTS, Data, figure, newest, read, rows_of
from benchmarks.plan_rows import gpu_rows_by_label
from tandem.engine.engine import STEP_TOKENS

PROFILES = {
    "profile decode 1, batch 1 at 160": "1 sequence",
    "profile decode 1, batch 8 at 160": "8 sequences",
    "profile decode 1, batch 32 at 160": "32 sequences",
    "profile prefill 512": "prompt of 512",
}


def _rows() -> dict[str, Data]:
    return {row["label"]: row for row in read("h200")["rows"]}


def _title(label: str) -> str:
    if found := re.fullmatch(r"prefill (\d+)", label):
        return f"prompt of {int(found[1]):,}"
    _, batch, depth = map(int, re.findall(r"\d+", label))
    return f"decode, batch {batch}" if depth < 1000 else f"decode at depth {depth:,}"


@figure
def h200_about() -> str:
    data = read("h200")
    failures, checks = (
        data["failures"],
        "every kernel agrees with NumPy, and the golden models with transformers",
    )
    if failures is None:
        checks = "not run with it"
    elif failures:
        checks = f"{len(failures)} cases failed: " + "; ".join(f"`{each}`" for each in failures)
    return rows_of(
        ["", ""],
        [
            ["GPU", data["device"]],
            [
                "model",
                f"{data['model']}: random weights in the shape of Gemma 3 27B, 15.56 GB with a Q6_K head",
            ],
            ["date", f"{data['date']}, commit {data['commit']}"],
            ["command", f"`{data['command']}`; data in `benchmarks/results/{newest('h200').name}`"],
            ["checks", checks],
        ],
    )


def _rate(row: Data) -> str:
    """Tokens a second, rounded down, so that a missed target does not look reached."""
    return f"{math.floor(row['tok_s']):,}"


@figure
def h200_table() -> str:
    timed = {label: row for label, row in _rows().items() if "tok_s" in row}
    targets = {row["label"]: row for row in _targets()}
    planned, lines = gpu_rows_by_label(), []
    for label, row in timed.items():
        target = targets.get(label, {})
        peers = [f"{target[key]:,g}" if key in target else "-" for key in ("vulkan", "cuda")]
        rates = [f"{row['ms']:,.2f}", _rate(row), f"{row['GB_s']:,.0f}", f"{row['TFLOP_s']:,.1f}"]
        limit = f"{planned[label].limit:,.0f}"
        lines.append([_title(label), *rates, *peers, limit, _verdict(row, target, timed)])
    head = [
        "",
        "Tandem, ms per step",
        "tok/s",
        "GB/s",
        "TOP/s",
        "llama.cpp Vulkan",
        "llama.cpp CUDA",
        "limit",
    ]
    return rows_of([*head, "to reach"], lines)


def _targets() -> list[Data]:
    rows: list[Data] = json.loads((RESULTS / "h200-targets.json").read_text())["rows"]
    return rows


def _verdict(row: Data, target: Data, timed: dict[str, Data]) -> str:
    if "more_than" in target:
        other = timed[target["more_than"]]
        return f"> {_title(other['label']).removeprefix('decode, ')}, " + (
            "reached" if row["tok_s"] > other["tok_s"] else "missed"
        )
    if "reach" not in target:
        return "-"
    return f">= {target['reach']:,}, " + ("reached" if row["tok_s"] >= target["reach"] else "missed")


@figure
def h200_missed() -> str:
    missed = _missed({label: row for label, row in _rows().items() if "tok_s" in row})
    return f"Missed: {'; '.join(missed)}." if missed else "All is reached."


def _missed(timed: dict[str, Data]) -> list[str]:
    missed = []
    for target in _targets():
        row = timed[target["label"]]
        aim, _, verdict = _verdict(row, target, timed).rpartition(", ")
        if verdict == "missed":
            missed.append(f"{_title(row['label'])} ({_rate(row)} tokens/s, aim {aim})")
    return missed


@figure
def h200_profile() -> str:
    """Milliseconds of each kernel in a step, those that take most of one sequence first."""
    times = {title: _rows()[label]["ms"] for label, title in PROFILES.items()}
    one = times["1 sequence"]
    lines = [
        [kernel, *(f"{each[kernel]:,.3f}" if kernel in each else "-" for each in times.values())]
        for kernel in sorted({k for each in times.values() for k in each}, key=lambda k: -one.get(k, 0.0))
    ]
    sums = [f"**{sum(each.values()):,.3f}**" for each in times.values()]
    return rows_of(["kernel", *times], [*lines, ["**all**", *sums]])


@figure
def h200_launches() -> str:
    """Every launch with its rates, where the run has kept those."""
    parts = []
    for label, title in PROFILES.items():
        groups = _rows()[label].get("groups")
        if not groups:
            return "That run kept the time of each kernel only: rates of each launch come with the next."
        whole = sum(group["ms"] for group in groups)
        lines = [
            [
                f"{g['kernel']}, {g['name']}", str(g["launches"]), f"{g['ms']:,.3f}", f"{g['ms'] / whole:.1%}",
                f"{g['GB_s']:,.0f}", f"{g['TOP_s']:,.1f}",
            ]
            for g in groups
        ]  # fmt: skip
        head = ["kernel, what it makes", "launches", "ms", "share", "GB/s", "TOP/s"]
        parts.append(f"**{title.capitalize()}**: {whole:,.2f} ms per step\n\n" + rows_of(head, lines))
    return "\n\n".join(parts)


@figure
def h200_steady() -> str:
    lines = [
        [
            row["label"].rpartition(" ")[2], f"{row['step_us'] / 1e3:,.2f}", f"{row['host_us']:,.0f}",
            f"{row['submit_us']:,.0f}", f"{row['idle']:.2%}",
        ]
        for row in read("h200")["steady"]
    ]  # fmt: skip
    head = [
        "sequences",
        "ms per step",
        "host's work, us",
        "driver's call to submit, us",
        "device waits for the host",
    ]
    return rows_of(head, lines)


# ---- weight formats


@figure
def formats_h200() -> str:
    """Results of benchmarks.gpu_formats."""
    lines = []
    for run in read("formats-h200")["runs"]:
        for layout, rows in run["formats"].items():
            cells = list(rows.values())
            name = f"{run['model']} {layout.upper()}" + (", before" if run.get("before") else "")
            rates = [f"{cell['tok_s']:,.0f}" for cell in cells]
            lines.append([name, *rates, f"{cells[0]['GB_s']:,.0f}", f"{cells[-1]['TFLOP_s']:,.0f}"])
    return rows_of(
        ["", "1", "2", "4", "8", "9", "16", "32", "64", "prefill", "GB/s", "TFLOP/s"],
        lines,
    )


@figure
def formats_h200_profile() -> str:
    """The launches of a step, by what they compute: ms of all layers, and TFLOP/s of a prompt's matmuls."""
    steps = [(p["format"], p["label"], p["groups"]) for p in read("formats-h200")["profiles"]]
    names = list(dict.fromkeys(_part(group) for _, _, groups in steps for group in groups))
    lines = []
    for name in names:
        cells = []
        for _, label, groups in steps:
            same = [group for group in groups if _part(group) == name]
            ms, rate = (
                sum(group["ms"] for group in same),
                max((group["TOP_s"] for group in same), default=0.0),
            )
            fast = f" ({rate:.0f})" if label.startswith("prefill") and rate > 100 else ""
            cells.append(f"{ms:.2f}{fast}" if same else "-")
        lines.append([name, *cells])
    return rows_of(["", *(f"{layout.upper()}, {_title(label)}" for layout, label, _ in steps)], lines)


def _part(group: dict[str, Any]) -> str:
    """Matmuls by name, other launches by kernel."""
    kernel = str(group["kernel"])
    named = kernel.startswith("matmul") or kernel.startswith("expand")
    return str(group["name"]) if named else kernel.partition("_")[0]


# ---- before and after the renaming


@figure
def renaming_h200() -> str:
    data = read("renaming-h200")
    lines = []
    for row in data["rows"]:
        old, new = median(row["old_ms"]), median(row["new_ms"])
        lines.append([_title(row["label"]), f"{old:,.2f}", f"{new:,.2f}", f"{new / old:.3f}"])
    return rows_of(
        ["", f"{data['commits']['old']}, ms per step", f"{data['commits']['new']}, ms per step", "new / old"],
        lines,
    )


@figure
def renaming_h200_summary() -> str:
    """Ratios of decode and prompts, the host's work, and the targets that the newer commit misses."""
    data = read("renaming-h200")
    new_ms = {row["label"]: median(row["new_ms"]) for row in data["rows"]}
    ratios = {row["label"]: new_ms[row["label"]] / median(row["old_ms"]) for row in data["rows"]}

    def span(kind: str) -> str:
        found = [ratio - 1 for label, ratio in ratios.items() if kind in label]
        return f"{min(found):+.1%} to {max(found):+.1%}"

    timed = {label: {"label": label, "tok_s": _tokens(label) / ms * 1e3} for label, ms in new_ms.items()}
    host = [
        f"{median(new['host_us']):,.0f} us ({median(old['host_us']):,.0f}) at batch {new['label'].rpartition(' ')[2]}"
        for old, new in zip(data["steady"]["old"], data["steady"]["new"], strict=True)
    ]
    return (
        f"Change of a step's time: one sequence {span('batch 1 at')}, all decode rows {span('decode')}, "
        f"prompts {span('prefill')}. Host time of a step, {data['commits']['old']} in brackets, median of "
        f"{len(data['steady']['old'][0]['host_us'])} runs: "
        f"{', '.join(host)}. Targets that {data['commits']['new']} misses: {'; '.join(_missed(timed)) or 'none'}."
    )


def _tokens(label: str) -> int:
    """Tokens of a step: the batch of a decode row, the chunk of a prompt."""
    found = re.search(r"batch (\d+)", label)
    return int(found[1]) if found else STEP_TOKENS


@figure
def renaming_cpu() -> str:
    """Results of benchmarks.two_trees; a ratio above 1: the newer tree is faster."""
    try:
        data = read("renaming-cpu")
    except SystemExit:
        return "A CPU: not measured yet."
    lines = [
        [
            model,
            f"{row['measure']}, {row['unit']}",
            f"{median(row['old']):,.4g}",
            f"{median(row['new']):,.4g}",
            "{value:.3f} ({low:.3f}-{high:.3f})".format(**row["ratio"]),
        ]
        for model, rows in data["models"].items()
        for row in rows
    ]
    return rows_of(["model", f"medians of {data['rounds']} rounds", "old", "new", "gain (95%)"], lines)


def rates_by_label() -> dict[str, float]:
    """Tokens a second of each workload."""
    return {label: row["tok_s"] for label, row in _rows().items() if "tok_s" in row}


def peer_rates(backend: str) -> dict[str, float]:
    """llama.cpp's, of its back end "cuda" or "vulkan"."""
    return {row["label"]: row[backend] for row in _targets() if backend in row}
