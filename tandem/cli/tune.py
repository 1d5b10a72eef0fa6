"""`tandem tune`: finds the fastest kernel variants on a device and saves them."""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tandem import __version__
from tandem.cli import interruptible
from tandem.cli.loading import model_file
from tandem.cli.options import check_either
from tandem.cli.terminal import check_writable, note, print_json, print_table, without_folder
from tandem.devices.backends import check_device, check_timed, open_device
from tandem.errors import DeviceError, RequestError
from tandem.model.model import Model, open_model
from tandem.settings import read_settings

HEADER = ("KERNEL", "SHAPE", "SIZE", "BEFORE US:", "AFTER US:", "GAIN:", "CHOICE")
SCHEMA = 1  # raised when a field is removed or changes its meaning; the fields are in docs/TUNING.md
MAX_CONTEXT = 4096  # tokens of a sequence
BUSY = 0.5  # share of the cores used by other processes, above which the number of threads is not tuned


def main(options: argparse.Namespace) -> int:
    from tandem.bench.kernel_checks import AnyDevice
    from tandem.bench.machine import disturbed
    from tandem.bench.roofline import computes_on_cpu
    from tandem.bench.sensors import Sensors
    from tandem.plan.predict import Planned
    from tandem.tune.search import keep, tune

    check_either(options)
    check_writable(options.output)
    settings, begun = read_settings(), time.perf_counter()
    _check_cache(settings.pipelines)
    check_device(options.device)
    check_timed(options.device)
    model = _model(options)
    context = min(MAX_CONTEXT, model.config.trained_context)
    program = Planned(model, context, options.kv).program
    busy = os.getloadavg()[0] > BUSY * settings.threads
    if busy:
        note("other processes keep this machine busy: run it on an idle machine")
    free_choice = options.threads is None and not settings.threads_given
    device = open_device(options.device, threads=settings.threads if free_choice else options.threads)
    try:
        if not isinstance(device, AnyDevice):
            raise DeviceError(f"{options.device} is several devices: tune them one at a time")
        findings = []

        def search() -> None:
            for finding in tune(
                device,
                program,
                context=context,
                quick=options.quick,
                limit=options.seconds,
                threads=free_choice and not busy,
            ):
                findings.append(finding)
                note(f"{finding.kernel} {finding.shape}, {finding.size}: {finding.gain:+.1%}")

        try:
            with interruptible():
                _, seen = Sensors().during(search)
        finally:  # also saves the findings before a failure or Ctrl-C
            file = keep(device, findings, settings.pipelines)
        busy = busy or (computes_on_cpu(device) and bool(disturbed(seen.others)))
        data = {
            "schema": SCHEMA,
            "version": __version__,
            "model": without_folder(options.synthetic or options.model),
            "device": device.describe(),
            "busy": busy,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - begun, 1),
            "findings": [_data(finding) for finding in findings],
        }
    finally:
        device.close()
    if options.output:
        options.output.write_text(json.dumps(data, indent=1) + "\n")
    if options.json:
        print_json(data)
    else:
        _print(data, file)
    return 0


def _check_cache(folder: Path) -> None:
    """Raises before minutes of work if the results cannot be saved."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder / "any")
    except (OSError, RequestError):
        raise RequestError(f"{folder} cannot be written: set XDG_CACHE_HOME to a writable folder") from None


def _model(options: argparse.Namespace) -> Model:
    from tandem.model.synthetic import SyntheticModel

    return SyntheticModel(options.synthetic) if options.synthetic else open_model(model_file(options.model))


def _data(finding: Any) -> dict[str, Any]:
    return {
        "kernel": finding.kernel,
        "shape": finding.shape,
        "size": finding.size,
        "launches": finding.launches,
        "before_us": finding.before * 1e6,
        "after_us": finding.after * 1e6,
        "gain": finding.gain,
        "choice": dict(finding.choice),
        "tried": finding.tried,
        "wrong": [dict(choice) for choice in finding.wrong],
    }


def _print(data: dict[str, Any], file: Path) -> None:
    findings = data["findings"]
    print(f"{data['model']} on {data['device']}\n")
    rows = [
        (
            f["kernel"], f["shape"], f["size"], f"{f['before_us']:,.1f}", f"{f['after_us']:,.1f}",
            f"{f['gain']:+.1%}" if f["choice"] else "", ", ".join(f"{k} {v}" for k, v in f["choice"].items()),
        )
        for f in findings
    ]  # fmt: skip
    print_table(HEADER, rows)
    wrong, better = sum(len(f["wrong"]) for f in findings), sum(bool(f["choice"]) for f in findings)
    print(
        f"\n{better} of {len(findings)} are faster than the default, after {data['seconds']} s; saved in {file}"
    )
    if data["busy"]:
        print("Warning: other processes kept this machine busy: tune again on an idle machine.")
    if wrong:
        print(f"Rejected: {wrong} candidates with wrong results.")
