"""Prints a BenchResult of `tandem bench` as tables for a terminal, as Markdown, or as CSV."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence

from tandem.bench.result import BenchResult, Compared, Launches, Limits, Row
from tandem.cli.terminal import human_size, print_table

Table = Callable[[Sequence[str], Sequence[Sequence[str]]], None]
PROFILE = ("KERNEL", "VALUE", "LAUNCHES:", "US/LAUNCH:", "TIME:", "MB:", "GB/S:", "TOP/S:")
COMPARED = ("TEST", "OLD TOK/S:", "NEW TOK/S:", "NEW/OLD:", "95%:", "VERDICT")
IMAGES = ("IMAGE", "TOKENS:", "ENCODED MS:", "TTFT MS:")
UNITS = {unit.lower(): unit for unit in ("GB/s", "TOP/s", "MB", "J/tok")}  # lower-case gb would be gigabits
CSV = (
    "label", "kind", "tokens", "batch", "depth", "steps", "rounds", "tokens_per_s", "low", "high", "ttft_s", "gb_per_s",
    "tflop_per_s", "of_roofline", "bound", "joules_per_token", "clock_low_mhz", "clock_high_mhz", "drift", "others",
    "outliers", "peer_tokens_per_s", "ratio", "ratio_low", "ratio_high", "old_tokens_per_s", "of_old", "of_old_low",
    "of_old_high", "verdict", "valid", "why",
)  # fmt: skip


def print_tables(result: BenchResult) -> None:
    _print(result, print_table)


def print_markdown(result: BenchResult) -> None:
    _print(result, _markdown_table, "- ")


def print_csv(result: BenchResult) -> None:
    """A line for each row; unknown values are empty."""
    compared = {each["label"]: each for each in result["comparison"] or ()}
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(CSV)
    for row in result["rows"]:
        energy, clock, peer, old = row["energy"], row["clock"], row["peer"], compared.get(row["label"])
        out.writerow([
            *(row["label"], row["kind"], row["tokens"], row["batch"], row["depth"], row["steps"], len(row["samples"])),
            *(row["median"], *row["interval"], row["ttft"], row["gb_per_s"], row["tflop_per_s"], row["of_roofline"]),
            row["bound"],
            energy and energy["joules_per_token"],
            *((clock["low_mhz"], clock["high_mhz"]) if clock else ("", "")),
            *(row["drift"], row["others"], " ".join(str(i + 1) for i in row["outliers"])),
            *((peer["median"], peer["ratio"], *peer["ratio_interval"]) if peer else [""] * 4),
            *((old["old"], old["ratio"], *old["ratio_interval"], old["verdict"]) if old else [""] * 5),
            *(row["valid"], row["why"]),
        ])  # fmt: skip


def _print(result: BenchResult, table: Table, bullet: str = "") -> None:
    limits, peer = result["limits"], result["peer"]
    print(f"{result['model']}, {human_size(result['weights_bytes'])} of weights, on {result['device']}")
    print(f"limits: {_limits(limits)}; median of {result['rounds']} round{'s' * (result['rounds'] > 1)}\n")
    energy, against = any(row["energy"] for row in result["rows"]), peer is not None
    header = ["TEST", "TOK/S:", "95%:", "TTFT MS:", "MS/STEP:", "GB/S:", "TOP/S:", "ROOFLINE:"]
    header += ["J/TOK:"] * energy + ["LLAMA.CPP:", "RATIO:"] * against
    table(header, [_cells(row, energy, against) for row in result["rows"]])
    said = _remarks(result)
    if said:
        print()
    for line in said:
        print(bullet + line)
    if result["images"]:
        print()
        table(IMAGES, [
            [f"{each['side']} x {each['side']}", str(each["tokens"]),
             *(f"{seconds * 1e3:.1f}" for seconds in (each["encoding"], each["ttft"]))]
            for each in result["images"]
        ])  # fmt: skip
    if result["comparison"]:
        print()
        table(COMPARED, [_compared(each) for each in result["comparison"]])
    for label, launches in result["profiles"].items():
        total = sum(each["seconds"] for each in launches)
        print(f"\n{label}: first step, each launch timed alone: {total * 1e3:.2f} ms")
        print()
        table(PROFILE, [_launches(each, total) for each in launches])


def _limits(limits: Limits) -> str:
    memory = f"{limits['bytes_per_s'] / 1e9:,.1f} GB/s ({limits['bytes_from']})"
    if not limits["ops_per_s"]:
        return f"{memory}; peak operations are not known"
    return f"{memory}, {limits['ops_per_s'] / 1e12:,.4g} TOP/s ({limits['ops_from']})"


def _cells(row: Row, energy: bool, against: bool) -> list[str]:
    low, high = row["interval"]
    cells = [
        row["label"],
        f"{row['median']:,.1f}" if row["valid"] else "INVALID",
        f"{low:,.1f} to {high:,.1f}",
        f"{row['ttft'] * 1e3:,.1f}",
        f"{row['tokens'] * row['batch'] / row['median'] / row['steps'] * 1e3:,.2f}",
        _digits(row["gb_per_s"]),
        _digits(row["tflop_per_s"]),
        f"{row['of_roofline']:{'.0%' if row['of_roofline'] >= 0.1 else '.1%'}} {row['bound']}",
    ]
    if energy:
        cells.append(f"{row['energy']['joules_per_token']:.3g}" if row["energy"] else "")
    if against:
        peer = row["peer"]
        ratio = peer and "{:.2f} ({:.2f} to {:.2f})".format(peer["ratio"], *peer["ratio_interval"])
        cells += [f"{peer['median']:,.1f}" if peer else "", ratio or ""]
    return cells


def _remarks(result: BenchResult) -> list[str]:
    said = [f"Invalid: {row['label']}: {row['why']}." for row in result["rows"] if not row["valid"]]
    said += [f"Warning: {row['label']}: {warning}." for row in result["rows"] for warning in row["warnings"]]
    said += [f"Note: {note}." for note in result["notes"]]
    if peer := result["peer"]:
        said.append(f"{peer['name']} {peer['version']}, built with: {peer['build'].strip()}")
    return said


def _compared(each: Compared) -> list[str]:
    low, high = each["ratio_interval"]
    rates = [f"{each['old']:,.1f}", f"{each['new']:,.1f}", f"{each['ratio']:.3f}"]
    return [each["label"], *rates, f"{low:.3f} to {high:.3f}", each["verdict"]]


def _launches(each: Launches, total: float) -> list[str]:
    seconds = max(each["seconds"], 1e-9)
    return [
        each["kernel"],
        each["name"],
        str(each["launches"]),
        f"{seconds / each['launches'] * 1e6:,.1f}",
        f"{seconds / total:.1%}",
        f"{each['bytes'] / 1e6:,.1f}",
        _digits(each["bytes"] / seconds / 1e9),
        _digits(each["ops"] / seconds / 1e12),
    ]


def _digits(number: float) -> str:
    """Three significant digits, for slow devices are far below 1."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}" if number >= 0.001 or not number else "<0.001"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    titles = (title.rstrip(":").lower() for title in header)
    print("| " + " | ".join(UNITS.get(title, title) for title in titles) + " |")
    print("|" + "|".join("---:" if title.endswith(":") else "---" for title in header) + "|")
    for row in rows:
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
