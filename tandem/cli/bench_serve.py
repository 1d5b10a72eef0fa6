"""`tandem bench serve`: measures a running server under load."""

from __future__ import annotations

import argparse
import math

from tandem.bench.load_generator import Load, Percentiles, ServeRow, ServerTarget, run
from tandem.cli.options import UsageError
from tandem.cli.terminal import note, print_json, print_table, printable

HEADER = (
    *("LOAD:", "ANSWERED:", "TOK/S:", "REQ/S:"),
    *("TTFT MS p50:", "p90:", "p99:"),
    *("ITL MS p50:", "p90:", "p99:"),  # inter-token latency
    *("E2E S p50:", "p90:", "p99:"),  # end-to-end latency of a request
)


def main(options: argparse.Namespace) -> int:
    if not all(0 < rate < math.inf for rate in options.rate):
        raise UsageError("--rate must be requests per second above 0: give numbers such as 0.5,1,2")
    server = ServerTarget(options.url, options.model, options.api_key)
    wanted = [(0.0, n) for n in options.clients] if options.clients else [(r, 0) for r in options.rate]
    loads = [
        Load(rate, options.requests, options.prompt, options.generate, options.timeout, options.seed, clients)
        for rate, clients in wanted
    ]
    result = run(server, loads, lambda row: note(f"{_load(row)}: {row['tokens_per_s']:,.1f} tokens/s"))
    if options.json:
        print_json(result)
    else:
        title = f"{result['model']} at {result['server']}, {options.requests} requests at each load"
        print(printable(title) + "\n")
        print_table(HEADER, [_cells(row) for row in result["rows"]])
        said = [line for row in result["rows"] for line in _remarks(row)]
        said += [f"Note: {text}." for text in result["notes"]]
        if said:
            print("\n" + printable("\n".join(said)))
    return 0 if all(row["answered"] for row in result["rows"]) else 1


def _cells(row: ServeRow) -> list[str]:
    return [
        _load(row),
        f"{row['answered']} of {row['requests']}",
        f"{row['tokens_per_s']:,.1f}",
        f"{row['requests_per_s']:,.2f}",
        *_percentiles(row["ttft"], 1e3, ",.0f"),
        *_percentiles(row["between_tokens"], 1e3, ",.1f"),
        *_percentiles(row["whole"], 1.0, ",.2f"),
    ]


def _load(row: ServeRow) -> str:
    clients = row["clients"]
    return f"{clients} client{'s'[: clients != 1]}" if clients else f"{row['rate']:g}/s"


def _percentiles(found: Percentiles | None, scale: float, form: str) -> list[str]:
    return [format(found[p] * scale, form) for p in ("p50", "p90", "p99")] if found else [""] * 3


def _remarks(row: ServeRow) -> list[str]:
    failed = [f"Failed: {_load(row)}: {count} requests: {what}." for what, count in row["errors"].items()]
    return failed + [f"Warning: {_load(row)}: {warning}." for warning in row["warnings"]]
