"""The commands and their options."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tandem.cli.values import above_zero, device_name, floats, layers, numbers, positive, replicas, words
from tandem.model.catalogue import SHORT_NAMES

NAME_HELP = "a short name such as smollm2 or gemma-3-27b, or hf.co/user/repo:QUANT"
MODEL_HELP = f"a .gguf file, {NAME_HELP}, or ollama:NAME"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options with `module`, the command's module in tandem.cli, `command`, its name, and `arguments`, all of them."""
    arguments = typed = sys.argv[1:] if arguments is None else arguments
    if list(arguments[:2]) == ["bench", "serve"]:
        arguments = ["bench serve", *arguments[2:]]
    description = "Runs language models from GGUF files on this machine."
    parser = argparse.ArgumentParser(prog="tandem", description=description, formatter_class=_formatter)
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog="tandem")
    for name in arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS:
        COMMANDS[name](commands)  # the others would take milliseconds of each start
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


def _formatter(prog: str) -> argparse.HelpFormatter:
    """As argparse's own, which would import a module at each start to learn how wide the terminal is."""
    try:
        columns = os.get_terminal_size().columns
    except OSError:
        columns = 80
    return argparse.HelpFormatter(prog, width=columns - 2)


def _add(
    commands: Any,
    name: str,
    module: str,
    summary: str,
    *,
    model: str | None = MODEL_HELP,
    prints_data: bool = True,
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary.capitalize() + ".", formatter_class=_formatter
    )
    command.set_defaults(module=module)
    if model:
        command.add_argument("model", metavar="MODEL", help=model)
    if prints_data:
        command.add_argument("--json", action="store_true", help="print data as JSON")
    return command


def _add_run(commands: Any) -> None:
    run = _add(commands, "run", "run", "ask a model, or chat with it if there is no prompt")
    run.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="what to ask; read from stdin if that is a pipe or a file"
    )
    run.add_argument(
        "--raw", action="store_true", help="complete the prompt as it is, without the chat template"
    )
    run.add_argument("--system", metavar="TEXT", help="instructions to put before the conversation")
    run.add_argument(
        "-n", "--max-tokens", type=positive, default=1024, metavar="N", help="stop after so many (1024)"
    )
    run.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop before this text (may be repeated)"
    )
    run.add_argument("--json-schema", metavar="JSON", help="answer with JSON of this schema ('{}': any)")
    run.add_argument("--regex", metavar="R", help="answer with a text that matches this regular expression")
    sampling = run.add_argument_group("sampling")
    sampling.add_argument(
        "-t", "--temperature", type=float, metavar="X", help="0 takes the likeliest token (0)"
    )
    sampling.add_argument("--top-k", type=int, metavar="N", help="choose among the N likeliest tokens")
    sampling.add_argument(
        "--top-p", type=float, metavar="P", help="choose among the likeliest that make up P"
    )
    sampling.add_argument(
        "--min-p", type=float, metavar="P", help="leave out those below P times the likeliest"
    )
    sampling.add_argument(
        "--repeat-penalty", type=float, metavar="X", help="divide the logits of tokens that were used"
    )
    sampling.add_argument(
        "--presence-penalty", type=float, metavar="X", help="subtract X once a token was used"
    )
    sampling.add_argument(
        "--frequency-penalty", type=float, metavar="X", help="subtract X for each time it was used"
    )
    sampling.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    _add_guesses(run)
    _add_device(run)
    _add_npu(run)


def _add_guesses(command: argparse.ArgumentParser, models: str = "") -> None:
    """`models`: how it is written where there may be several, each with its own."""
    command.add_argument(
        "--lookup",
        action="store_true",
        help="guess tokens from the prompt: faster where an answer repeats it",
    )
    more = "; for the model NAME, where there are several (may be repeated)" if models else ""
    command.add_argument(
        "--draft", metavar=models or "MODEL", action="append" if models else "store",
        help=f"guess tokens with this smaller model of the same family{more}",
    )  # fmt: skip


def _add_pull(commands: Any) -> None:
    pull = _add(commands, "pull", "models", "fetch a model into the cache", model=NAME_HELP)
    pull.epilog = "Short names: " + ", ".join(SHORT_NAMES) + "."


def _add_list(commands: Any) -> None:
    _add(commands, "list", "models", "show the models in the cache", model=None)


def _add_rm(commands: Any) -> None:
    summary, model = "delete a model from the cache", "its name in `tandem list`"
    remove = _add(commands, "rm", "models", summary, model=model)
    remove.add_argument("-y", "--yes", action="store_true", help="do not ask")


def _add_inspect(commands: Any) -> None:
    summary = "show a model's configuration and what becomes of its tensors, or the devices of this machine"
    inspect = _add(commands, "inspect", "inspect", summary, model=None)
    inspect.add_argument("model", metavar="MODEL", nargs="?", help=f"{MODEL_HELP}; without: the devices")
    inspect.add_argument("--program", action="store_true", help="list each launch of a step")
    _add_device(inspect, value_optional=True)


def _add_perplexity(commands: Any) -> None:
    perplexity = _add(commands, "perplexity", "perplexity", "measure how well a model predicts a text")
    perplexity.add_argument("file", metavar="FILE", help="a text in UTF-8")
    perplexity.add_argument("--chunk", type=positive, default=512, metavar="N", help="tokens at a time (512)")
    perplexity.add_argument("--chunks", type=positive, metavar="N", help="stop after so many")
    _add_device(perplexity, context=False)


def _add_bench(commands: Any) -> None:
    from pathlib import Path

    summary = "measure how fast a model runs here, beside what the machine allows"
    bench = _add(commands, "bench", "bench", summary, model=None, prints_data=False)
    bench.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    bench.add_argument(
        "--synthetic", metavar="SHAPE:FORMAT", help="instead: random weights, such as gemma-3-27b:q4_0"
    )
    for short, name, default, meaning in (
        ("-p", "prompt", 512, "tokens of a prompt"),
        ("-n", "generate", 128, "tokens that each sequence generates"),
        ("-b", "batch", 1, "sequences that generate at a time"),
        ("-d", "depth", 0, "tokens before those"),
    ):
        bench.add_argument(
            short, f"--{name}", type=numbers, default=[default], metavar="N,N", help=f"{meaning} ({default})"
        )
    bench.add_argument("-r", "--rounds", type=positive, default=5, metavar="N", help="of each test (5)")
    bench.add_argument("--profile", action="store_true", help="show where the time of a step goes")
    bench.add_argument("--compare", type=Path, metavar="OLD.json", help="with what --json printed before")
    bench.add_argument(
        "--against", choices=("llama.cpp",), help="alternate with llama.cpp (the package llama-cpp-python)"
    )
    bench.add_argument("--peer", metavar="PYTHON", help="one that has that package (this one)")
    bench.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, too")
    form = bench.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print data as JSON")
    form.add_argument("--csv", action="store_true", help="print a line of data for each test")
    form.add_argument("--markdown", action="store_true", help="print tables for a web page")
    _add_device(bench, context=False)
    _add_npu(bench)


def _add_bench_serve(commands: Any) -> None:
    summary = "measure how a running server answers requests that come at random times"
    serve = _add(commands, "bench serve", "bench_serve", summary, model=None)
    serve.add_argument(
        "url", metavar="URL", help="of ours or any with OpenAI's API, as http://localhost:8000"
    )
    serve.add_argument("--model", metavar="NAME", help="that is asked for (the first it lists)")
    serve.add_argument("--api-key", metavar="KEY", help="that it wants")
    serve.add_argument(
        "--rate", type=floats, default=[1.0], metavar="R,R", help="requests a second on average (1)"
    )
    serve.add_argument("--requests", type=positive, default=32, metavar="N", help="at each rate (32)")
    serve.add_argument(
        "-p", "--prompt", type=positive, default=128, metavar="N", help="words of a prompt on average (128)"
    )
    serve.add_argument(
        "-n", "--generate", type=positive, default=64, metavar="N", help="tokens of an answer, alike (64)"
    )
    serve.add_argument(
        "--timeout", type=above_zero, default=600.0, metavar="S", help="seconds for an answer (600)"
    )
    serve.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and prompts (0)")


def _add_plan(commands: Any) -> None:
    shape = (
        "a shape such as gemma-3-27b:q4_0, of which no file is needed, a .gguf file, or a model in the cache"
    )
    plan = _add(
        commands,
        "plan",
        "plan",
        "tell what a model could do on a machine, before buying or fetching",
        model=shape,
    )
    plan.add_argument(
        "--hardware",
        required=True,
        metavar="NAME",
        help="such as phoenix-780m, or this; a wrong one lists all",
    )
    plan.add_argument("--measure", action="store_true", help="this machine again, though it has been")
    plan.add_argument(
        "--device", type=device_name, default="auto", metavar="D", help="of this machine: cpu, vulkan, auto"
    )
    plan.add_argument("--memory", type=float, metavar="GIB", help="of the machine, or of a GPU with its own")
    plan.add_argument("--npu", action="store_true", help="and what the machine's NPU would add")
    plan.add_argument("--weights", type=words, metavar="F,F", help="formats to compare, as q4_0,q6_k,q8_0")
    plan.add_argument(
        "--kv", type=words, default=["f16"], metavar="K,K", help="keys and values: f16, q8 or both (f16)"
    )
    plan.add_argument(
        "-c", "--context", type=positive, default=4096, metavar="N", help="tokens of a sequence (4096)"
    )
    batches = "1,2,4,8,16,32,64"
    plan.add_argument(
        "-b", "--batch", type=numbers, default=numbers(batches), metavar="N,N",
        help=f"sequences that generate at a time ({batches})",
    )  # fmt: skip
    plan.add_argument(
        "-d", "--depth", type=numbers, metavar="N,N", help="tokens before (128, and all but one)"
    )
    plan.add_argument("-p", "--prompt", type=positive, metavar="N", help="tokens of a prompt (512)")
    plan.add_argument("--draft", metavar="SHAPE", help="with guesses by this smaller model")
    plan.add_argument(
        "--acceptance", type=floats, default=[0.6, 0.7, 0.8], metavar="A,A",
        help="chances that a guess is right (0.6,0.7,0.8)",
    )  # fmt: skip
    plan.add_argument(
        "--target", type=above_zero, metavar="N", help="tokens a second in all: at which batch?"
    )
    plan.add_argument(
        "--active", type=above_zero, metavar="B",
        help="and a mixture of experts that takes so many billion parameters a token",
    )  # fmt: skip


def _add_serve(commands: Any) -> None:
    from pathlib import Path  # takes milliseconds that other commands need not spend

    summary = "serve models to other programs on this machine or elsewhere, and a page to chat"
    serve = _add(commands, "serve", "serve", summary, model=None, prints_data=False)
    serve.add_argument(
        "models", metavar="MODEL", nargs="*",
        help=f"{MODEL_HELP}; the first answers those who name none (without: all in the cache)",
    )  # fmt: skip
    serve.add_argument("--host", metavar="H", help="to listen on: 0.0.0.0 for all (127.0.0.1)")
    serve.add_argument("--port", type=int, metavar="N", help="to listen on (8000)")
    serve.add_argument("--api-keys", type=Path, metavar="FILE", help="with a key a line: others are refused")
    serve.add_argument("--settings", type=Path, metavar="FILE", help="a TOML file with any of the settings")
    serve.add_argument(
        "--cors-origin", action="append", dest="cors_origins", metavar="URL",
        help="a web page's origin that may call (may be repeated)",
    )  # fmt: skip
    serve.add_argument("--batch", type=positive, metavar="N", help="requests answered at a time (64)")
    serve.add_argument("--max-queue", type=positive, metavar="N", help="requests that may wait (128)")
    serve.add_argument("--timeout", type=float, metavar="S", help="seconds for an answer (600)")
    serve.add_argument(
        "--keep-alive", type=float, metavar="S",
        help="unload a model so many seconds after its last use (when another needs its memory)",
    )  # fmt: skip
    serve.add_argument(
        "--ray", type=replicas, nargs="?", const="2", metavar="N",
        help="answer by N replicas on a Ray cluster (2), or by 1-4, as many as are needed",
    )  # fmt: skip
    _add_guesses(serve, "[NAME=]MODEL")
    _add_device(serve)
    _add_npu(serve)
    serve.set_defaults(device=None, kv=None, lookup=None)  # the settings' own


def _add_ps(commands: Any) -> None:
    _add(commands, "ps", "servers", "show the servers that run on this machine", model=None)


def _add_stop(commands: Any) -> None:
    stop = _add(commands, "stop", "servers", "let servers end their answers and go", model=None)
    stop.add_argument("server", metavar="SERVER", nargs="?", help="its port, address or a model (all)")
    stop.add_argument("--wait", type=float, default=60.0, metavar="S", help="seconds at most (60)")


def _add_doctor(commands: Any) -> None:
    _add(
        commands,
        "doctor",
        "doctor",
        "say what works on this machine, and what to do about the rest",
        model=None,
    )


def _add_report(commands: Any) -> None:
    from pathlib import Path

    summary = "write one file about this machine to send in: what works, how fast, and whether it is right"
    report = _add(commands, "report", "report", summary, model=None, prints_data=False)
    report.add_argument(
        "--output", type=Path, default=Path("tandem-report.json"), metavar="FILE", help="(tandem-report.json)"
    )
    report.add_argument("--full", action="store_true", help="larger models, too, as far as they fit")
    report.add_argument("--npu", action="store_true", help="and what the NPU does")
    report.add_argument("--threads", type=positive, metavar="N", help="of the CPU (one a core)")
    report.add_argument(
        "--device",
        type=device_name,
        default="auto",
        metavar="D",
        help="cpu, vulkan, vulkan:<...>, auto (auto)",
    )


def _add_tune(commands: Any) -> None:
    from pathlib import Path

    summary = "find which of our kernels' variants are fastest here, and keep that"
    tune = _add(commands, "tune", "tune", summary, model=None)
    tune.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    tune.add_argument("--synthetic", metavar="SHAPE:FORMAT", help="instead: such as gemma-3-27b:q4_0")
    tune.add_argument("--quick", action="store_true", help="the largest products only, in a few seconds")
    tune.add_argument("--seconds", type=above_zero, metavar="S", help="at most so many (140, or 3 if quick)")
    tune.add_argument("--output", type=Path, metavar="FILE", help="write the data there, too")
    tune.add_argument("--threads", type=positive, metavar="N", help="of the CPU (what is found best)")
    tune.add_argument(
        "--device",
        type=device_name,
        default="auto",
        metavar="D",
        help="cpu, vulkan, vulkan:<...>, auto (auto)",
    )
    tune.add_argument("--kv", choices=("f16", "q8"), default="f16", help="keys and values (f16)")


COMMANDS: dict[str, Callable[[Any], None]] = {
    "run": _add_run,
    "serve": _add_serve,
    "ps": _add_ps,
    "stop": _add_stop,
    "pull": _add_pull,
    "list": _add_list,
    "rm": _add_rm,
    "inspect": _add_inspect,
    "perplexity": _add_perplexity,
    "bench": _add_bench,
    "bench serve": _add_bench_serve,
    "plan": _add_plan,
    "tune": _add_tune,
    "doctor": _add_doctor,
    "report": _add_report,
}


def _add_device(
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
        "--gpu-memory", type=float, metavar="GB", help="of the GPU's own memory to use at most"
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
            "--kv-memory", type=float, metavar="GB", help="for keys and values (enough for one context)"
        )


def _add_npu(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--npu", choices=("off", "auto", "require"), default="off",
        help="let the NPU of a Ryzen 7040 or 8040 help with prompts; it has not yet been run on one (off)",
    )  # fmt: skip


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
