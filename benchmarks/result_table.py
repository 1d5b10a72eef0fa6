"""Rows of results and their table; `python -m benchmarks.result_table FILE.json` prints the table of a file again."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.pairs import Pair
from tandem.bench.machine import DISTURBED
from tandem.bench.statistics import ratio_of_medians, summarise

Row = dict[str, Any]
COLUMNS = (
    "model", "measure", "Tandem", "llama.cpp", "ratio (95%)", "target", "", "GB/s", "GOP/s", "of the limit"
)  # fmt: skip
MAX_SHARE = 1.1  # of a measured limit: above it, the result or the limit is wrong


@dataclass(frozen=True)
class Work:
    """What a round does: `steps` steps of `sequences` tokens, or without sequences one step of a prompt."""

    steps: int
    sequences: int
    prompt: int
    model: dict[str, Any]  # parameters and bytes, as tandem_worker.py tells

    @property
    def tokens(self) -> int:
        return self.steps * self.sequences or self.prompt

    @property
    def operations(self) -> float:
        head_rows = self.steps * max(1, self.sequences)  # a prompt needs the logits of its last token only
        body, head = self.model["body_parameters"], self.model["head_parameters"]
        return float(2 * (self.tokens * body + head_rows * head))


def speed_row(measure: str, work: Work, pairs: Sequence[Pair], target: float, int8_gop_per_s: float) -> Row:
    """With GB/s and GOP/s at the median, and the share of the nearer limit: the memory's in the same round."""
    ours = [work.tokens / pair.ours.seconds for pair in pairs]
    peer = [work.tokens / pair.peer.seconds for pair in pairs]
    row = _row(measure, "tok/s", pairs, target, ours, peer)
    row["ratio"] = asdict(ratio_of_medians(ours, peer))
    reads = row["read_gb_per_s_limit"] = [pair.read_gb_per_s for pair in pairs]
    for side, step_bytes in ((row["ours"], work.model["bytes"]), (row["peer"], work.model["file_bytes"])):
        gigabytes = step_bytes * work.steps / work.tokens / 1e9  # a token
        operations = work.operations / work.tokens / 1e9
        memory = [rate * gigabytes / read for rate, read in zip(side["values"], reads, strict=True)]
        shares = [(summarise(memory).median, "memory")]
        if int8_gop_per_s:
            shares.append((side["median"] * operations / int8_gop_per_s, "arithmetic"))
        side["gb_per_s"], side["gop_per_s"] = side["median"] * gigabytes, side["median"] * operations
        side["of_limit"], side["limited_by"] = max(shares)
    return row


def seconds_row(measure: str, pairs: Sequence[Pair], target: float) -> Row:
    """A row of seconds; the ratio is the peer's time over ours."""
    ours, peer = [pair.ours.seconds for pair in pairs], [pair.peer.seconds for pair in pairs]
    return _row(measure, "s", pairs, target, ours, peer) | {"ratio": asdict(ratio_of_medians(peer, ours))}


def share_row(measure: str, shares: list[float], pairs: Sequence[Pair], most: float) -> Row:
    return _row(measure, "share", pairs, most, shares)


def _row(
    measure: str,
    unit: str,
    pairs: Sequence[Pair],
    target: float,
    ours: list[float],
    peer: list[float] | None = None,
) -> Row:
    row: Row = {"measure": measure, "unit": unit, "target": target, "others": [pair.others for pair in pairs]}
    row["ours"] = asdict(summarise(ours)) | {"values": ours}
    if peer:
        row["peer"] = asdict(summarise(peer)) | {"values": peer}
    return row


def met(row: Row) -> bool:
    if row["unit"] == "share":
        return bool(row["ours"]["median"] < row["target"])
    return bool(row["ratio"]["value"] >= row["target"])


def table(results: dict[str, Any]) -> str:
    lines = [list(COLUMNS)]
    for model in results["models"]:
        lines += [[model["name"], *_cells(row)] for row in model["rows"]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    lines.insert(1, ["-" * width for width in widths])
    text = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return "\n".join([*text, "", *_notes(results)])


def one_line(row: Row) -> str:
    peer = f" against {_figure(row, 'peer')}: {row['ratio']['value']:.2f}x" if "peer" in row else ""
    return f"{row['measure']}: {_figure(row, 'ours')}{peer} ({'met' if met(row) else 'missed'})"


def _cells(row: Row) -> list[str]:
    verdict = "met" if met(row) else "missed"
    if "ratio" not in row:
        return [row["measure"], _figure(row, "ours"), "", "", f"< {row['target']:.0%}", verdict, "", "", ""]
    ratio = "{value:.2f} ({low:.2f}-{high:.2f})".format(**row["ratio"])
    cells = [
        row["measure"],
        _figure(row, "ours"),
        _figure(row, "peer"),
        ratio,
        f">= {row['target']:g}",
        verdict,
    ]
    if "gb_per_s" not in row["ours"]:
        return [*cells, "", "", ""]
    sides = row["ours"], row["peer"]
    return [
        *cells,
        " / ".join(f"{side['gb_per_s']:.1f}" for side in sides),
        " / ".join(f"{side['gop_per_s']:.0f}" for side in sides),
        " / ".join(f"{side['of_limit']:.0%} {side['limited_by']}" for side in sides),
    ]


def _figure(row: Row, side: str) -> str:
    form, unit = {"tok/s": (".1f", " tok/s"), "s": (".3f", " s"), "share": (".2%", "")}[row["unit"]]
    middle, low, high, mad = (format(row[side][key], form) for key in ("median", "low", "high", "mad"))
    return f"{middle}{unit} ±{mad} [{low}, {high}]"


def _notes(results: dict[str, Any]) -> list[str]:
    machine, settings = results["machine"], results["settings"]
    notes = [
        f"Median ±MAD [min, max] of {settings['rounds']} rounds, {settings['threads']} threads each; ratio with "
        "its bootstrap interval; a / b: Tandem / llama.cpp; GB/s counts weights only.",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, {results['date']}.",
        f"{results['versions']['tandem']} against {results['versions']['peer']}: {results['peer_system']}",
    ]
    for model in results["models"]:
        reads = [read for row in model["rows"] for read in row.get("read_gb_per_s_limit", [])]
        notes.append(
            f"{model['name']}: limits of {min(reads):.1f} to {max(reads):.1f} GB/s, measured in each round by reading "
            f"what a step reads, and of {model['int8_gop_per_s_limit']:.0f} GOP/s of int8."
        )
        for row in model["rows"]:
            where = f"{model['name']}, {row['measure']}"
            if max(row["others"]) > DISTURBED:
                notes.append(
                    f"Warning: other processes took up to {max(row['others']):.0%} of the machine in {where}."
                )
            if any(row.get(side, {}).get("of_limit", 0) > MAX_SHARE for side in ("ours", "peer")):
                notes.append(f"Wrong: {where} is above a limit: one of the two was mismeasured.")
    return notes


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
