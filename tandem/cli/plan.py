"""`tandem plan`: predicts the memory and speed of a model on a machine from the Program that would run there."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

from tandem.bench.hardware import HOST_SHARE, Hardware, known_hardware, load_hardware, with_memory
from tandem.cli.options import UsageError
from tandem.cli.terminal import human_size, note, print_json, print_table, without_folder
from tandem.errors import ModelNotFoundError
from tandem.kernels.abi import KV_TYPES
from tandem.model import locate
from tandem.model.model import Model, open_model
from tandem.model.synthetic import SHAPES, SyntheticModel
from tandem.model.vision import open_beside
from tandem.plan.npu import npu_lines, npu_plan
from tandem.plan.predict import Planned
from tandem.plan.what_if import (
    SCHEMA,
    TARGET_DEPTHS,
    Data,
    PlanOptions,
    describe,
    experts,
    parameters,
    plan_of,
)

WHERE = {"device": "on the GPU", "memory": "of memory"}  # heaps of the data, as they are printed
PARTS = {"keys and values": "KV cache"}  # parts of the data, as they are printed
LITTLE = 1e9  # bytes left beside a model: too little for a desktop and its programs
LEGEND = (
    "LIMIT: the roofline, which no engine can exceed. PREDICTED: Tandem's kernels. BY: the bottleneck. "
    "DEPTH: tokens of each sequence that are already in the KV cache. Tokens a second are the total of the batch."
)
COUNTED = (
    "Predicted from what each kernel executes, counted in an emulator, with three numbers fitted to published rates of "
    "llama.cpp (docs/AMD.md)."
)
HEADER = ("BATCH:", "DEPTH:", "LIMIT TOK/S:", "BY", "PREDICTED TOK/S:", "BY", "MS/STEP:", "FITS")


def main(options: argparse.Namespace) -> int:
    wanted = _plan_options(options)
    _check_used(options)
    _check_kv(options.kv)
    draft, asked = options.draft and _named(options.draft), _named(options.model)
    drafts = {kv: Planned(_model(draft), options.context, kv) for kv in options.kv if draft}
    plans, models = [], {name: _model(name) for name in _names(asked, options.weights)}
    hardware = _hardware(options)  # last, for it may measure for seconds: errors in the options come first
    visions = {name: open_beside(Path(name)) if _is_file(name) else None for name in models}
    for name, model in models.items():
        for kv in options.kv:
            planned = Planned(model, options.context, kv, mtp=options.mtp, vision=visions[name])
            plans.append(
                {"model": without_folder(name), **plan_of(planned, hardware, wanted, drafts.get(kv))}
            )
            if options.npu:
                plans[-1]["npu"] = npu_plan(planned, hardware, wanted.prompt, wanted.depths[0])
    data: Data = {
        "schema": SCHEMA,
        "status": hardware.status,
        "model": {
            "name": without_folder(asked),
            "architecture": model.config.architecture,
            "parameters": parameters(model),
        },
        "hardware": describe(hardware),
        "context": options.context,
        "draft": draft and without_folder(draft),
        "plans": plans,
        "experts": _experts(wanted.active, next(iter(models.values())), hardware) if wanted.active else None,
    }
    if options.json:
        print_json(data)
    else:
        _print(data, hardware)
    return 0


def _experts(active: float, model: Model, hardware: Hardware) -> Data:
    """In the first of the requested formats; q4_0 for a file, which may mix formats."""
    return experts(active, getattr(model, "layout", "q4_0"), hardware)


def _hardware(options: argparse.Namespace) -> Hardware:
    if options.hardware is None:
        raise UsageError(f"no hardware given: use --hardware this, or one of {', '.join(known_hardware())}")
    if options.hardware != "this":
        return load_hardware(options.hardware, options.memory)
    from tandem.plan.this_machine import this_machine  # takes longer to import than a plan takes

    note("measuring this machine, unless an earlier measurement is saved")
    found = this_machine(options.measure, options.device or "auto")
    return found if options.memory is None else with_memory(found, options.memory)


def _plan_options(options: argparse.Namespace) -> PlanOptions:
    """By default, depths are a short text and one that fills the context."""
    last = options.context - 1
    depths = options.depth or sorted({min(128, last), last})
    prompt = options.prompt or max(1, min(512, last))
    active = options.active and options.active * 1e9
    rates = options.acceptance or PlanOptions.acceptance
    targets = sorted({*TARGET_DEPTHS, *(options.depth or ())})
    wanted = PlanOptions(
        options.context, options.batch, depths, prompt, rates, options.target, targets, active
    )
    wanted.check()
    return wanted


def _check_used(options: argparse.Namespace) -> None:
    """Refuses options that would have no effect."""
    if options.hardware != "this" and (options.measure or options.device):
        raise UsageError("--measure and --device are for this machine: use --hardware this with them")
    if options.acceptance and not (options.draft or options.mtp):
        raise UsageError("--acceptance needs a draft model: name one with --draft, or use --mtp")
    if options.draft and options.mtp:
        raise UsageError("--draft and --mtp exclude each other: give one of the two")


def _check_kv(kinds: list[str]) -> None:
    if unknown := [kv for kv in kinds if kv not in KV_TYPES]:
        raise UsageError(f"no KV cache type {unknown[0]!r}: use {', '.join(KV_TYPES)}")


def _names(model: str, weights: list[str] | None) -> list[str]:
    shape = model.partition(":")[0]
    if weights and _is_file(model):
        raise UsageError(
            f"--weights does not apply to a file: use it with a shape, one of {', '.join(SHAPES)}"
        )
    return [f"{shape}:{layout.lower()}" for layout in weights] if weights else [model]


def _named(model: str) -> str:
    """A shape with its format, or the path of a file, also for the name of a model in the cache."""
    shape, _, layout = model.lower().partition(":")
    if shape in SHAPES:
        return f"{shape}:{layout or 'q4_0'}"
    try:
        return str(locate.resolve(model)) if locate.is_known(model) else model
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{error}, or plan for a shape, which needs no file: {', '.join(SHAPES)}"
        ) from None


def _model(name: str) -> Model:
    return open_model(name) if _is_file(name) else SyntheticModel(name)


def _is_file(name: str) -> bool:
    return name.endswith(".gguf") or Path(name).is_file()


def _print(data: Data, hardware: Hardware) -> None:
    print(f"{data['model']['name']} on {hardware.title}: {data['status']}")
    print(LEGEND)
    if hardware.warning:
        print(f"Warning: {hardware.warning}.")
    for plan in data["plans"]:
        _print_plan(plan, data, hardware)
    if data["experts"]:
        found = data["experts"]
        print(
            f"\nA mixture of experts with {found['active_parameters'] / 1e9:.3g} billion active parameters in "
            f"{found['weights']} ({human_size(found['bytes_per_token'])} per token), batch 1: limit "
            f"{found['limit_tokens_per_s']:.1f} tok/s, predicted {found['predicted_tokens_per_s']:.1f}. "
            "By the active weights alone: routing, attention and the memory for all experts are not counted."
        )
    basis = COUNTED if hardware.rdna3 else f"Calibration: {hardware.calibration.source}"
    print(f"\nStatus of all figures: {data['status']}. {basis}")


def _print_plan(plan: Data, data: Data, hardware: Hardware) -> None:
    memory, prompt = plan["memory"], plan["prefill"]
    print(f"\n{plan['model']}, KV cache in {plan['kv']}")
    parts = ", ".join(f"{PARTS.get(name, name)} {human_size(size)}" for name, size in memory["parts"].items())
    heaps = ", ".join(
        f"{human_size(heap['used'])} of {human_size(heap['bytes'])} {WHERE.get(name, name)}"
        for name, heap in memory["heaps"].items()
    )
    print(f"memory for a context of {data['context']}: {human_size(memory['needed'])} ({parts})")
    half = "Linux's default, half of " if hardware.kind == "apu" else ""
    assumed = f" ({half}{hardware.memory_gib:g} GiB)" if hardware.name != "this" else ""
    print(f"  in {heaps}{assumed}: {_verdict(memory, hardware)}")
    weights, reads = plan["weight_bytes_per_step"], hardware.read_gb_s
    print(
        f"each step reads {human_size(weights)} of weights at {_digits(reads)} GB/s or less: at batch 1 no more than "
        f"{_rate(reads * 1e9 / weights)} tok/s without speculative decoding\n"
    )
    print_table(HEADER, [_cells(row) for row in plan["decode"]])
    _print_step_down(plan["decode"], hardware)
    print(
        f"\nprefill of {prompt['tokens']} tokens: limit {prompt['limit']['tokens_per_s']:,.0f} tok/s, predicted "
        f"{prompt['predicted']['tokens_per_s']:,.0f} (by {prompt['predicted']['bottleneck']}), first token after "
        f"{_digits(prompt['first_token_s'])} s"
    )
    for row in plan["speculation"] or []:
        limit, predicted = row["limit"]["tokens_per_s"], row["predicted"]["tokens_per_s"]
        print(
            f"batch 1 at depth {plan['decode'][0]['depth']} with {row['draft_tokens']} "
            f"draft token{'s' * (row['draft_tokens'] > 1)} per step by {data['draft'] or 'its draft head'}, "
            f"acceptance rate {row['acceptance']:.0%} (assumed): limit {limit:.1f} tok/s, predicted {predicted:.1f}"
            + ("" if row["fits"] else "; both models together DO NOT FIT")
        )
    for row in plan["published"] or []:
        print(
            f"published: {row['about']}: {row['plain']} tok/s, and {row['drafted']} with {row['draft_tokens']} draft "
            f"tokens of which {row['accepted']:.0%} were accepted; predicted for these: "
            f"{row['predicted_plain']:.1f} and {row['predicted_drafted']:.1f}"
        )
    for source in sorted({row["source"] for row in plan["published"] or []}):
        print(f"published at {source}")
    if plan["target"]:
        _print_target(plan["target"])
    if "npu" in plan:
        print("\n" + "\n".join(npu_lines(plan["npu"])))


def _verdict(memory: Data, hardware: Hardware) -> str:
    if memory["fits"] and memory["free"] < LITTLE:
        return f"fits, but leaves only {human_size(memory['free'])} for the desktop and other programs"
    if memory["fits"]:
        return (
            f"fits, with room for {memory['max_sequences']} such context{'s' * (memory['max_sequences'] > 1)}"
        )
    missing = f"DOES NOT FIT, {human_size(-memory['free'])} are missing"
    if hardware.kind == "apu" and memory["needed"] <= hardware.memory_gib * 2**30 * HOST_SHARE:
        return f"{missing}; it would fit with a higher memory limit for the GPU (docs/AMD.md, Memory)"
    return missing


def _print_step_down(rows: list[Data], hardware: Hardware) -> None:
    """Explains a larger batch that is predicted to be slower, which looks like a mistake."""
    for few, many in pairwise(rows):
        less = many["predicted"]["tokens_per_s"] < few["predicted"]["tokens_per_s"]
        matrix = few["batch"] < hardware.matrix_from <= many["batch"]
        if few["depth"] == many["depth"] and less and (matrix or hardware.rdna3):
            carried = "" if hardware.ran else ", whose efficiency is only known from an H200"
            why = f"from {hardware.matrix_from} tokens on, matmuls use the matrix units{carried}"
            if hardware.rdna3:
                why = "its matmuls run as other shaders (docs/appendix/AMD_CALIBRATION.md)"
            print(f"Batch {many['batch']} is predicted to be slower than {few['batch']}: {why}.")
            return


def _print_target(target: Data) -> None:
    for row in target["rows"]:
        print(
            f"{target['tokens_per_s']:g} tok/s in total at depth {row['depth']}: limit "
            f"{_batch(row['limit'], target)}; predicted {_batch(row['predicted'], target)}"
        )


def _batch(found: Data, target: Data) -> str:
    if found["batch"] is None:
        return f"not reached up to batch {target['max_batch']}"
    each = target["tokens_per_s"] / found["batch"]
    of_each = f" ({each:.1f} tok/s each)" if found["batch"] > 1 else ""
    return f"from batch {found['batch']}{of_each}" + ("" if found["fits"] else ", which does not fit")


def _cells(row: Data) -> list[str]:
    return [
        str(row["batch"]),
        str(row["depth"]),
        _rate(row["limit"]["tokens_per_s"]),
        row["limit"]["bottleneck"],
        _rate(row["predicted"]["tokens_per_s"]),
        row["predicted"]["bottleneck"],
        _digits(row["predicted"]["seconds"] * 1e3),
        "yes" if row["fits"] else "no",
    ]


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _rate(number: float) -> str:
    return f"{number:,.1f}" if number >= 1 else f"{number:.2g}"
