"""The commands and their options. Each command's code is in the module that it names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tandem.cli.options import (
    MODEL_HELP,
    NAME_HELP,
    above_zero,
    add,
    add_device,
    add_npu,
    add_one_device,
    add_speculation,
    device_name,
    floats,
    formatter,
    numbers,
    positive,
    positives,
    replicas,
    words,
)
from tandem.model.catalogue import SHORT_NAMES


def _run(commands: Any) -> None:
    run = add(commands, "run", "run", "ask a model, or chat with it if there is no prompt")
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
    add_speculation(run)
    add_device(run)
    add_npu(run)


def _serve(commands: Any) -> None:
    from pathlib import Path  # takes milliseconds that other commands need not spend

    summary = "serve models to other programs on this machine or elsewhere, and a page to chat"
    serve = add(commands, "serve", "serve", summary, model=None, prints_data=False)
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
    add_speculation(serve, "[NAME=]MODEL")
    add_device(serve)
    add_npu(serve)
    serve.set_defaults(device=None, kv=None, prompt_lookup=None)  # the settings' own


def _ps(commands: Any) -> None:
    add(commands, "ps", "servers", "show the servers that run on this machine", model=None)


def _stop(commands: Any) -> None:
    stop = add(commands, "stop", "servers", "let servers end their answers and go", model=None)
    stop.add_argument("server", metavar="SERVER", nargs="?", help="its port, address or a model (all)")
    stop.add_argument("--wait", type=float, default=60.0, metavar="S", help="seconds at most (60)")


def _pull(commands: Any) -> None:
    pull = add(commands, "pull", "models", "fetch a model into the cache", model=NAME_HELP)
    pull.epilog = "Short names: " + ", ".join(SHORT_NAMES) + "."


def _list(commands: Any) -> None:
    add(commands, "list", "models", "show the models in the cache", model=None)


def _rm(commands: Any) -> None:
    summary, model = "delete a model from the cache", "its name in `tandem list`"
    remove = add(commands, "rm", "models", summary, model=model)
    remove.add_argument("-y", "--yes", action="store_true", help="do not ask")


def _inspect(commands: Any) -> None:
    summary = "show a model's configuration and what becomes of its tensors, or the devices of this machine"
    inspect = add(commands, "inspect", "inspect", summary, model=None)
    inspect.add_argument("model", metavar="MODEL", nargs="?", help=f"{MODEL_HELP}; without: the devices")
    inspect.add_argument("--program", action="store_true", help="list each launch of a step")
    add_device(inspect, value_optional=True)


def _perplexity(commands: Any) -> None:
    perplexity = add(commands, "perplexity", "perplexity", "measure how well a model predicts a text")
    perplexity.add_argument("file", metavar="FILE", help="a text in UTF-8")
    perplexity.add_argument("--chunk", type=positive, default=512, metavar="N", help="tokens at a time (512)")
    perplexity.add_argument("--chunks", type=positive, metavar="N", help="stop after so many")
    add_device(perplexity, context=False)


def _bench(commands: Any) -> None:
    from pathlib import Path

    summary = "measure how fast a model runs here, beside what the machine allows"
    bench = add(commands, "bench", "bench", summary, model=None, prints_data=False)
    bench.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    bench.add_argument(
        "--synthetic", metavar="SHAPE:FORMAT", help="instead: random weights, such as gemma-3-27b:q4_0"
    )
    for short, name, kind, default, meaning in (
        ("-p", "prompt", numbers, 512, "tokens of a prompt; 0: none"),
        ("-n", "generate", numbers, 128, "tokens that each sequence generates; 0: none"),
        ("-b", "batch", positives, 1, "sequences that generate at a time"),
        ("-d", "depth", numbers, 0, "tokens before those"),
    ):
        bench.add_argument(
            short, f"--{name}", type=kind, default=[default], metavar="N,N", help=f"{meaning} ({default})"
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
    add_device(bench, context=False)
    add_npu(bench)


def _bench_serve(commands: Any) -> None:
    summary = "measure how a running server answers requests that come at random times"
    serve = add(commands, "bench serve", "bench_serve", summary, model=None)
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


def _plan(commands: Any) -> None:
    shape = (
        "a shape such as gemma-3-27b:q4_0, of which no file is needed, a .gguf file, or a model in the cache"
    )
    plan = add(
        commands,
        "plan",
        "plan",
        "tell what a model could do on a machine, before buying or fetching",
        model=shape,
    )
    plan.add_argument(
        "--hardware",
        metavar="NAME",
        help="such as phoenix-780m, or this: the machine at hand; without it, all are listed",
    )
    plan.add_argument("--measure", action="store_true", help="this machine again, though it has been")
    plan.add_argument(
        "--device", type=device_name, metavar="D", help="of this machine: cpu, vulkan, auto (auto)"
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
    plan.add_argument("--draft", metavar="SHAPE", help="with this smaller model as draft model")
    plan.add_argument(
        "--acceptance", type=floats, metavar="A,A",
        help="acceptance rates of draft tokens (0.6,0.7,0.8)",
    )  # fmt: skip
    plan.add_argument(
        "--target", type=above_zero, metavar="N", help="tokens a second in all: at which batch?"
    )
    plan.add_argument(
        "--active", type=above_zero, metavar="B",
        help="and a mixture of experts that takes so many billion parameters a token",
    )  # fmt: skip


def _tune(commands: Any) -> None:
    from pathlib import Path

    summary = "find which of our kernels' variants are fastest here, and keep that"
    tune = add(commands, "tune", "tune", summary, model=None)
    tune.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    tune.add_argument("--synthetic", metavar="SHAPE:FORMAT", help="instead: such as gemma-3-27b:q4_0")
    tune.add_argument("--quick", action="store_true", help="the largest products only, in a few seconds")
    tune.add_argument("--seconds", type=above_zero, metavar="S", help="at most so many (140, or 3 if quick)")
    tune.add_argument("--output", type=Path, metavar="FILE", help="write the data there, too")
    tune.add_argument("--threads", type=positive, metavar="N", help="of the CPU (what is found best)")
    add_one_device(tune)
    tune.add_argument("--kv", choices=("f16", "q8"), default="f16", help="keys and values (f16)")


def _doctor(commands: Any) -> None:
    add(
        commands,
        "doctor",
        "doctor",
        "say what works on this machine, and what to do about the rest",
        model=None,
    )


def _report(commands: Any) -> None:
    from pathlib import Path

    summary = "write one file about this machine to send in: what works, how fast, and whether it is right"
    report = add(commands, "report", "report", summary, model=None, prints_data=False)
    report.add_argument(
        "--output", type=Path, default=Path("tandem-report.json"), metavar="FILE", help="(tandem-report.json)"
    )
    report.add_argument("--full", action="store_true", help="larger models, too, as far as they fit")
    report.add_argument("--npu", action="store_true", help="and what the NPU does")
    report.add_argument("--threads", type=positive, metavar="N", help="of the CPU (one a core)")
    add_one_device(report)


COMMANDS: dict[str, Callable[[Any], None]] = {
    "run": _run,
    "serve": _serve,
    "ps": _ps,
    "stop": _stop,
    "pull": _pull,
    "list": _list,
    "rm": _rm,
    "inspect": _inspect,
    "perplexity": _perplexity,
    "bench": _bench,
    "bench serve": _bench_serve,
    "plan": _plan,
    "tune": _tune,
    "doctor": _doctor,
    "report": _report,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options with `module`, the command's module in tandem.cli, `command`, its name, and `arguments`, all of them."""
    arguments = typed = sys.argv[1:] if arguments is None else arguments
    if list(arguments[:2]) == ["bench", "serve"]:
        arguments = ["bench serve", *arguments[2:]]
    description = "Runs language models from GGUF files on this machine."
    parser = argparse.ArgumentParser(prog="tandem", description=description, formatter_class=formatter)
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog="tandem")
    name = arguments[0] if arguments else ""
    for add_command in [COMMANDS[name]] if name in COMMANDS else COMMANDS.values():  # all take milliseconds
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
