"""The command that is asked for, and its options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tandem.cli.options import formatter

MEASURING = ("bench", "bench serve", "plan", "tune", "doctor", "report")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options with `module`, the command's module in tandem.cli, `command`, its name, and `arguments`, all of them."""
    arguments = typed = sys.argv[1:] if arguments is None else arguments
    if list(arguments[:2]) == ["bench", "serve"]:
        arguments = ["bench serve", *arguments[2:]]
    description = "Runs language models from GGUF files on this machine."
    parser = argparse.ArgumentParser(prog="tandem", description=description, formatter_class=formatter)
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog="tandem")
    for add_command in _wanted(arguments[0] if arguments else ""):
        add_command(commands)
    if not arguments:
        parser.print_help(sys.stderr)
        parser.exit(2)
    options, rest = parser.parse_known_args(arguments)
    if len(rest) == 1 and options.command == "run" and options.prompt is None and _is_text(rest[0]):
        options.prompt = rest.pop()  # after an option, where argparse no longer looks for it
    if rest:
        hint = ": put the prompt in quotes" if options.command == "run" and _is_text(rest[0]) else ""
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    options.arguments = list(typed)
    return options


def _wanted(name: str) -> list[Callable[[Any], None]]:
    """What adds the command of that name, or all: the others would take milliseconds of each start."""
    if name in MEASURING:
        from tandem.cli.commands_measuring import COMMANDS

        return [COMMANDS[name]]
    from tandem.cli.commands_models import COMMANDS

    if name in COMMANDS:
        return [COMMANDS[name]]
    from tandem.cli import commands_measuring

    return [*COMMANDS.values(), *commands_measuring.COMMANDS.values()]


def _is_text(argument: str) -> bool:
    return not argument.startswith("-") or " " in argument


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print("tandem", version("tandem-llm"))
        parser.exit()
