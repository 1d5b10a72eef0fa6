"""`tandem bench`: measures a model, and compares it with the roofline, an earlier run or llama.cpp."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from itertools import product
from pathlib import Path
from typing import Any, cast

from tandem.bench.benchmark import run
from tandem.bench.images import time_images
from tandem.bench.peers.peer import LlamaCpp, check_peer
from tandem.bench.result import SCHEMA, BenchResult, ImageRow
from tandem.bench.rounds import Workload
from tandem.bench.rows import compare, unlike
from tandem.cli.bench_tables import print_csv, print_markdown, print_tables
from tandem.cli.loading import model_file, open_with_npu, resolve_npu, tune_at_first_use
from tandem.cli.options import UsageError, check_either
from tandem.cli.terminal import check_writable, note, print_json, without_folder
from tandem.devices.backends import check_device, check_timed
from tandem.errors import RequestError
from tandem.model.model import Model, open_model
from tandem.model.synthetic import SyntheticModel
from tandem.model.vision import open_beside, sees
from tandem.settings import read_settings


def main(options: argparse.Namespace) -> int:
    check_either(options)
    options.npu = resolve_npu(options.npu)
    workloads, older = _workloads(options), read_result(options.compare) if options.compare else None
    _check(options)
    file = None if options.synthetic else model_file(options.model)
    model: Model = open_model(file) if file else SyntheticModel(options.synthetic, skew=options.skew)
    _check_length(workloads, model.config.trained_context)
    if options.images and file and not sees(file):
        raise RequestError("--images needs the vision encoder beside the model: fetch its mmproj file")
    if file:
        tune_at_first_use(options.device, file, options.no_tune)
    device = open_with_npu(
        options.npu,
        options.device,
        threads=options.threads,
        gpu_memory=options.gpu_memory and options.gpu_memory * 1e9,
        split=options.split,
        placement=options.placement,
    )

    def peer() -> LlamaCpp:
        assert file
        threads = getattr(device, "threads", None) or read_settings().threads
        python, vocab = options.peer or sys.executable, model.config.vocab
        return LlamaCpp(python, file, threads, gpu=device.name != "cpu", kv=options.kv, vocab=vocab)

    try:
        result = run(
            model,
            device,
            workloads,
            name=without_folder(options.synthetic or options.model),
            command=shlex.join(["tandem", *map(without_folder, options.arguments)]),
            rounds=options.rounds,
            kv=options.kv,
            profiled=options.profile or bool(options.html),
            peer=peer if options.against else None,
            tell=note,
        )
        if options.synthetic and model.config.experts:
            skewed = f"skewed by {options.skew:g}" if options.skew else "uniformly"
            result["notes"].append(f"random weights: tokens choose their experts {skewed}")
        if options.placement != "layers":
            result["notes"].append(f"partitions: {device.describe()}")
    finally:
        device.close()
    if options.images and file:
        result["images"] = _images(options, file)
    if older:
        result["comparison"] = compare(result, older)
        result["notes"] += unlike(result, older)
    try:
        _print(result, options)
    finally:  # a closed pipe must not lose the HTML page
        if options.html:
            from tandem.bench.html_report import write_html

            write_html(options.html, dict(result), dict(older) if older else None)
    return 0


def _images(options: argparse.Namespace, file: Path) -> list[ImageRow]:
    """Times images, in an engine of its own that has the encoder, too."""
    vision = open_beside(file)
    assert vision
    device = open_with_npu(
        options.npu,
        options.device,
        threads=options.threads,
        gpu_memory=options.gpu_memory and options.gpu_memory * 1e9,
    )
    try:
        return time_images(open_model(file), device, vision, options.images, options.rounds, options.kv)
    finally:
        device.close()
        vision.close()


def _check(options: argparse.Namespace) -> None:
    """Refuses wrong options before a model is downloaded."""
    if options.against and options.synthetic:
        raise UsageError("--against llama.cpp needs a file: give a MODEL instead of --synthetic")
    if options.skew and not options.synthetic:
        raise UsageError("--skew is for random weights: add --synthetic SHAPE:FORMAT")
    if options.images and options.synthetic:
        raise UsageError("--images needs a file: give a MODEL instead of --synthetic")
    if options.peer and not options.against:
        raise UsageError("--peer has no effect without a comparison: add --against llama.cpp")
    if options.csv and options.profile:
        raise UsageError("--csv cannot show a profile: use --json or --markdown with --profile")
    if options.placement == "npu-attention" and (options.profile or options.html):
        raise UsageError(
            "--placement npu-attention cannot time single launches: leave --profile and --html out"
        )
    if options.against:
        check_peer(options.peer or sys.executable)
    check_writable(options.html)
    check_device(options.device, options.split, options.placement)
    check_timed(options.device)


def _print(result: BenchResult, options: argparse.Namespace) -> None:
    if options.json:
        print_json(result)
    elif options.csv:
        print_csv(result)
    elif options.markdown:
        print_markdown(result)
    else:
        print_tables(result)


def _workloads(options: argparse.Namespace) -> list[Workload]:
    found = []
    for depth in options.depth:
        found += [Workload("prefill", n, 1, depth) for n in options.prompt if n]
        found += [
            Workload("decode", n, batch, depth) for n, batch in product(options.generate, options.batch) if n
        ]
    if not found:
        raise UsageError("nothing to measure: give -p or -n a number above 0")
    return list(dict.fromkeys(found))


def _check_length(workloads: list[Workload], trained: int) -> None:
    """Refuses lengths beyond the trained context, as `tandem run` does."""
    longest = max(workload.depth + workload.tokens for workload in workloads)
    if longest > trained:
        raise RequestError(
            f"{longest} tokens exceed the trained context of {trained}: use smaller -d, -p or -n"
        )


def read_result(file: Path) -> BenchResult:
    try:
        data = json.loads(file.read_text())
        schema = data["schema"]
        sound = schema != SCHEMA or _is_whole(data)
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise RequestError(f"{file} is not a result of `tandem bench --json`: give one that is")
    if schema != SCHEMA:
        raise RequestError(f"{file} was written by another version of Tandem: measure again with this one")
    return cast(BenchResult, data)


def _is_whole(data: Any) -> bool:
    """Whether the fields that a comparison needs are present."""
    return (
        data["rows"] != []
        and all(
            min(row["samples"]) > 0 and {"label", "valid", "median", "others"} <= row.keys()
            for row in data["rows"]
        )
        and {"model", "device", "kv", "threads"} <= data.keys()
        and "cpu" in data["machine"]
    )
