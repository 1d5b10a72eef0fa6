"""What several commands share: how one is added, and the options that say where and how a model runs."""

from __future__ import annotations

import argparse
import os
from argparse import ArgumentTypeError
from typing import Any

from tandem.errors import RequestError

NAME_HELP = "a short name such as smollm2 or gemma-3-27b, or hf.co/user/repo:QUANT"
MODEL_HELP = f"a .gguf file, {NAME_HELP}, or ollama:NAME"


def formatter(prog: str) -> argparse.HelpFormatter:
    """As argparse's own, which would import a module at each start to learn how wide the terminal is."""
    try:
        columns = os.get_terminal_size().columns or 80  # 0: one that does not know
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
        name, help=summary, description=summary.capitalize() + ".", formatter_class=formatter
    )
    command.set_defaults(module=module)
    if model:
        command.add_argument("model", metavar="MODEL", help=model)
    if prints_data:
        command.add_argument("--json", action="store_true", help="print data as JSON")
    return command


def add_speculation(command: argparse.ArgumentParser, models: str = "") -> None:
    """`models`: how it is written where there may be several, each with its own."""
    command.add_argument(
        "--prompt-lookup",
        action="store_true",
        help="speculate on tokens that repeat the prompt: faster where an answer repeats it",
    )
    more = "; for the model NAME, where there are several (may be repeated)" if models else ""
    command.add_argument(
        "--draft", metavar=models or "MODEL", action="append" if models else "store",
        help=f"speculative decoding with this smaller model of the same family{more}",
    )  # fmt: skip


def add_device(
    command: argparse.ArgumentParser, *, context: bool = True, value_optional: bool = False
) -> None:
    device = command.add_argument_group("device")
    if context:
        device.add_argument(
            "-c", "--context", type=positive, metavar="N", help="tokens of prompt and answer together (4096)"
        )
    device.add_argument("--threads", type=positive, metavar="N", help="of the CPU (one a core)")
    device.add_argument(
        "--device", type=device_name, default="auto", metavar="D",
        help="where to run: cpu, vulkan, vulkan:<index or part of a name>, auto, or several, as vulkan,cpu (auto)",
        nargs="?" if value_optional else None, const="auto" if value_optional else None,
    )  # fmt: skip
    device.add_argument(
        "--split", type=layers, metavar="N,N",
        help="layers of each of several devices, or auto: as many as it is fast (auto)",
    )  # fmt: skip
    device.add_argument(
        "--placement", choices=("layers", "columns", "pipeline", "npu-attention"), default="layers",
        help="what several devices divide: layers, or columns of matmuls, one step at a time or two (layers)",
    )  # fmt: skip
    device.add_argument(
        "--gpu-memory", type=above_zero, metavar="GB", help="of the GPU's own memory to use at most"
    )
    device.add_argument(
        "--no-tune", action="store_true", help="not the few seconds of tuning at a GPU's first use"
    )
    device.add_argument(
        "--kv", choices=("f16", "q8"), default="f16",
        help="keep keys and values in 16 bits or in 8, which takes half the memory (f16)",
    )  # fmt: skip
    if context:
        device.add_argument(
            "--kv-memory", type=above_zero, metavar="GB", help="for keys and values (enough for one context)"
        )


def add_one_device(command: argparse.ArgumentParser) -> None:
    """For commands that look at one device as it is."""
    command.add_argument(
        "--device",
        type=device_name,
        default="auto",
        metavar="D",
        help="cpu, vulkan, vulkan:<...>, auto (auto)",
    )


def check_either(options: argparse.Namespace) -> None:
    """For commands that take a model's file or its shape alone."""
    if not options.model and not options.synthetic:
        raise UsageError(
            "name what to run: a MODEL, such as smollm2 or a .gguf file, or --synthetic gemma-3-27b:q4_0, a shape "
            "that needs no file"
        )
    if options.model and options.synthetic:
        raise UsageError("a MODEL or --synthetic SHAPE:FORMAT, not both: leave one of them out")


def add_npu(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--npu", choices=("off", "auto", "require"), default="off",
        help="let the NPU of a Ryzen 7040 or 8040 help with prompts; emulated; not yet run on a Phoenix (off)",
    )  # fmt: skip


# ---- values of options


class UsageError(RequestError):
    """Options that do not go together: the exit code is 2, as for those that argparse refuses."""


def device_name(text: str) -> str:
    for name in text.split(","):
        if name not in ("auto", "cpu") and name.partition(":")[0] != "vulkan":
            raise ArgumentTypeError(
                f"no device {name!r}: use cpu, vulkan, vulkan:<index or part of a name> or auto"
            )
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
    fewest, _, most = text.partition("-")
    found = _whole(fewest), _whole(most or fewest)
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
