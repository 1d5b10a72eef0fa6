"""Options that several commands share, and the parsers of option values. Each command's own options: commands.py."""

from __future__ import annotations

import argparse
import os
from argparse import ArgumentTypeError
from typing import Any

from tandem.errors import DeviceError, RequestError

SHORT_NAME = "a short name such as smollm2 or gemma-3-27b"
NAME_HELP = f"{SHORT_NAME}, or hf.co/user/repo:QUANT"
MODEL_HELP = f"a .gguf file, {SHORT_NAME}, hf.co/user/repo:QUANT, or ollama:NAME"


def formatter(prog: str) -> argparse.HelpFormatter:
    """argparse's formatter with the terminal's width, without the module that argparse imports to find it."""
    try:
        columns = os.get_terminal_size().columns or 80  # 0: the terminal does not know its width
    except OSError:
        columns = 80
    return argparse.HelpFormatter(prog, width=columns - 2)


def add(
    commands: Any,
    name: str,
    module: str,
    summary: str,
    *,
    model: str | None = MODEL_HELP,
    prints_data: bool = True,
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", formatter_class=formatter
    )
    command.set_defaults(module=module)
    if model:
        command.add_argument("model", metavar="MODEL", help=model)
    if prints_data:
        command.add_argument("--json", action="store_true", help="print JSON")
    return command


def add_speculation(command: argparse.ArgumentParser, models: str = "") -> None:
    """`models`: the metavar where several models may each have a draft model."""
    command.add_argument(
        "--prompt-lookup",
        action="store_true",
        help="speculative decoding with n-grams of the prompt: faster where the answer repeats it",
    )
    more = "; NAME= selects one of several models (may be repeated)" if models else ""
    command.add_argument(
        "--draft",
        metavar=models or "MODEL",
        action="append" if models else "store",
        help="speculative decoding with this draft model of the same family, or mtp: with the model's own draft head, "
        f"which is the default where the file has one; none: without{more}",
    )


def add_device(
    command: argparse.ArgumentParser, *, context: bool = True, value_optional: bool = False
) -> None:
    device = command.add_argument_group("device")
    if context:
        device.add_argument(
            "-c",
            "--context",
            type=positive,
            metavar="N",
            help="context length: tokens of prompt and answer (4096)",
        )
    device.add_argument("--threads", type=positive, metavar="N", help="CPU threads (one per core)")
    device.add_argument(
        "--device",
        type=device_name,
        default="auto",
        metavar="D",
        help="cpu, vulkan, vulkan:<index or part of a name>, auto, or several, such as vulkan,cpu (auto)",
        nargs="?" if value_optional else None,
        const="auto" if value_optional else None,
    )
    device.add_argument(
        "--split",
        type=layers,
        metavar="N,N",
        help="number of layers on each of several devices, or auto: by measured speed (auto)",
    )
    device.add_argument(
        "--placement",
        choices=("layers", "columns", "columns-overlapped", "npu-attention"),
        default="layers",
        help="how several devices share a model: by layers; by columns of matmuls; columns-overlapped: by columns "
        "with two steps in flight; npu-attention: attention on the second device (layers)",
    )
    device.add_argument("--gpu-memory", type=above_zero, metavar="GB", help="maximum GPU memory to use")
    device.add_argument(
        "--no-tune", action="store_true", help="skip the few seconds of tuning at the first use of a GPU"
    )
    device.add_argument(
        "--kv",
        choices=("f16", "q8"),
        default="f16",
        help="KV cache type: float16, or int8 with half the memory (f16)",
    )
    if context:
        device.add_argument(
            "--kv-memory",
            type=above_zero,
            metavar="GB",
            help="memory for the KV cache (up to a quarter of what is free, and at least one full context)",
        )


def add_one_device(command: argparse.ArgumentParser) -> None:
    """For commands that take one device."""
    command.add_argument(
        "--device",
        type=device_name,
        default="auto",
        metavar="D",
        help="cpu, vulkan, vulkan:<...>, auto (auto)",
    )


def check_either(options: argparse.Namespace) -> None:
    """For commands that take either a model file or a synthetic shape."""
    if not options.model and not options.synthetic:
        raise UsageError(
            "no model given: name a MODEL, such as smollm2 or a .gguf file, or a shape, such as "
            "--synthetic gemma-3-27b:q4_0"
        )
    if options.model and options.synthetic:
        raise UsageError("MODEL and --synthetic exclude each other: leave one of them out")


def add_npu(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--npu",
        choices=("off", "auto", "require"),
        default="off",
        help="use the NPU of a Ryzen 7040 or 8040 for prompts; tested by emulation, not yet run on hardware (off)",
    )


# ---- values of options


class UsageError(RequestError):
    """Options that exclude each other. The exit code is 2, as for errors of argparse."""


def device_name(text: str) -> str:
    if text in ("auto", "cpu"):  # these need no import
        return text
    from tandem.devices.backends import check_names

    try:
        check_names(text)
    except DeviceError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def layers(text: str) -> list[int] | None:
    return None if text == "auto" else [positive(part) for part in text.split(",")]


def positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise ArgumentTypeError(f"{number} is less than 1")
    return number


def above_zero(text: str) -> float:
    number = _number(text)
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text} is not a number above 0")
    return number


def numbers(text: str) -> list[int]:
    found = [_whole(part) for part in text.split(",")]
    if min(found) < 0:
        raise ArgumentTypeError(f"{min(found)} is less than 0")
    return found


def positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def floats(text: str) -> list[float]:
    return [_number(part) for part in text.split(",")]


def words(text: str) -> list[str]:
    return text.split(",")


def replicas(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    found = _whole(low), _whole(high or low)
    if not 1 <= found[0] <= found[1]:
        raise ArgumentTypeError(f"{text} is not a number of replicas, or a range such as 1-4")
    return found


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None
