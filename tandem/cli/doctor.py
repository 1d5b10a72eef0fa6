"""`tandem doctor`: prints the findings of all checks on one screen."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap

from tandem.cli.terminal import note, print_json, printable
from tandem.doctor.checks import as_data, examine
from tandem.doctor.finding import Finding

COLOURS = {"pass": 32, "warn": 33, "fail": 31}
NAME_WIDTH = 13


def main(options: argparse.Namespace) -> int:
    note("checking this machine and measuring its memory bandwidth")
    findings = list(examine())
    if options.json:
        print_json(as_data(findings))
    else:
        show(findings)
    return int(any(finding.status == "fail" for finding in findings))


def show(findings: list[Finding]) -> None:
    width = max(60, shutil.get_terminal_size((100, 0)).columns)
    for finding in findings:
        _print_lines(finding.found, width, f"{finding.name:{NAME_WIDTH}} ", finding.status)
        for line in filter(None, (*finding.shown, finding.fix and f"fix: {finding.fix}")):
            _print_lines(line, width, " " * (NAME_WIDTH + 1))
    counts = [f"{sum(f.status == status for f in findings)} {status}" for status in COLOURS]
    print(", ".join(counts))


def _print_lines(text: str, width: int, label: str, status: str = "") -> None:
    begin, rest = f"{status:4}  {label}", " " * (6 + max(len(label), NAME_WIDTH + 1))
    lines = textwrap.wrap(
        printable(text), width, initial_indent=begin, subsequent_indent=rest, break_on_hyphens=False
    )
    if status and sys.stdout.isatty():
        lines[0] = f"\033[{COLOURS[status]}m{status}\033[0m{lines[0][4:]}"
    print("\n".join(lines))
