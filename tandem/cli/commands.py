"""Declares every command and its options. The code of a command is in the module that `add` names."""

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
    run = add(commands, "run", "run", "answer a prompt, or start a chat if there is none")
    run.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="the prompt; read from stdin if that is a pipe or a file"
    )
    run.add_argument(
        "--raw", action="store_true", help="complete the prompt as it is, without the chat template"
    )
    run.add_argument("--system", metavar="TEXT", help="system prompt")
    run.add_argument(
        "-n",
        "--max-tokens",
        type=positive,
        default=1024,
        metavar="N",
        help="maximum tokens to generate (1024)",
    )
    run.add_argument("--stop", action="append", metavar="TEXT", help="stop at this text (may be repeated)")
    run.add_argument(
        "--json-schema", metavar="JSON", help="constrain the answer to this JSON schema ('{}': any JSON)"
    )
    run.add_argument("--regex", metavar="R", help="constrain the answer to this regular expression")
    sampling = run.add_argument_group("sampling")
    sampling.add_argument("-t", "--temperature", type=float, metavar="X", help="0 is greedy decoding (0)")
    sampling.add_argument("--top-k", type=int, metavar="N", help="sample from the N likeliest tokens")
    sampling.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the likeliest tokens with total probability P"
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="drop tokens with less than P times the probability of the likeliest",
    )
    sampling.add_argument(
        "--repeat-penalty", type=float, metavar="X", help="divide the logits of tokens already used by X"
    )
    sampling.add_argument(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="subtract X from the logits of tokens already used",
    )
    sampling.add_argument(
        "--frequency-penalty", type=float, metavar="X", help="subtract X for each time a token was used"
    )
    sampling.add_argument(
        "--seed", type=int, metavar="N", help="sampler seed: the same seed gives the same answer"
    )
    run.add_argument(
        "--image", action="append", metavar="FILE", help="an image before the prompt (may be repeated)"
    )
    run.add_argument(
        "--mmproj",
        metavar="FILE",
        help="the file of the model's vision encoder, or none (the one beside the model)",
    )
    add_speculation(run)
    add_device(run)
    add_npu(run)


def _serve(commands: Any) -> None:
    from pathlib import Path  # imported here: it takes milliseconds that other commands need not spend

    summary = "serve models over HTTP (OpenAI, Anthropic, Ollama and llama-server APIs), with a chat page"
    serve = add(commands, "serve", "serve", summary, model=None, prints_data=False)
    serve.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        help=f"{MODEL_HELP}; requests that name no model get the first (all models in the cache)",
    )
    serve.add_argument(
        "--synthetic",
        metavar="SHAPE:FORMAT",
        help="for load tests: random weights, such as gemma-3-27b:q4_k_m; its output makes no sense",
    )
    serve.add_argument(
        "--host", metavar="H", help="address to listen on; 0.0.0.0: all interfaces (127.0.0.1)"
    )
    serve.add_argument("--port", type=int, metavar="N", help="port to listen on (8000)")
    serve.add_argument(
        "--api-keys", type=Path, metavar="FILE", help="file of accepted API keys, one per line"
    )
    serve.add_argument("--settings", type=Path, metavar="FILE", help="TOML file with server settings")
    serve.add_argument(
        "--cors-origin",
        action="append",
        dest="cors_origins",
        metavar="URL",
        help="allow browser requests from this origin (may be repeated)",
    )
    serve.add_argument(
        "--allow-image-urls",
        action="append",
        metavar="HOST",
        help="fetch images that requests name by an address of this host (may be repeated)",
    )
    serve.add_argument(
        "--responses",
        type=Path,
        metavar="FILE",
        help="SQLite file of the Responses API's stored responses (in memory, until the server ends)",
    )
    serve.add_argument(
        "--alias",
        action="append",
        dest="aliases",
        metavar="NAME",
        help="another name of the first model in requests (may be repeated); '*': any name that no model has",
    )
    serve.add_argument("--batch", type=positive, metavar="N", help="maximum requests in a batch (64)")
    serve.add_argument(
        "--max-queue", type=positive, metavar="N", help="maximum requests waiting for the batch (128)"
    )
    serve.add_argument("--timeout", type=float, metavar="S", help="maximum seconds for a request (600)")
    serve.add_argument(
        "--keep-alive",
        type=float,
        metavar="S",
        help="unload a model S seconds after its last use (only when another model needs its memory)",
    )
    serve.add_argument(
        "--disk-cache",
        metavar="SIZE",
        help="keep the prefix cache on disk too, in at most SIZE, such as 20G: a restart computes no prompt again",
    )
    serve.add_argument(
        "--ray",
        type=replicas,
        nargs="?",
        const="2",
        metavar="N",
        help="serve with N replicas on a Ray cluster (2), or with an autoscaled range such as 1-4",
    )
    add_speculation(serve, "[NAME=]MODEL")
    add_device(serve)
    add_npu(serve)
    serve.set_defaults(device=None, kv=None, prompt_lookup=None)  # the settings' own


def _ps(commands: Any) -> None:
    add(commands, "ps", "servers", "list the running servers of this machine", model=None)


def _stop(commands: Any) -> None:
    stop = add(commands, "stop", "servers", "stop servers after their running requests", model=None)
    stop.add_argument(
        "server", metavar="SERVER", nargs="?", help="port, address or model of a server (all servers)"
    )
    stop.add_argument("--wait", type=float, default=60.0, metavar="S", help="maximum seconds to wait (60)")


def _pull(commands: Any) -> None:
    pull = add(commands, "pull", "models", "download a model into the cache", model=NAME_HELP)
    pull.epilog = "Short names: " + ", ".join(SHORT_NAMES) + "."


def _list(commands: Any) -> None:
    add(commands, "list", "models", "list the models in the cache", model=None)


def _rm(commands: Any) -> None:
    summary, model = "delete a model from the cache", "its name in `tandem list`"
    remove = add(commands, "rm", "models", summary, model=model)
    remove.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")


def _convert(commands: Any) -> None:
    from pathlib import Path

    summary = "convert a Hugging Face folder (config.json, safetensors, tokenizer) to a GGUF file"
    convert = add(commands, "convert", "convert", summary, model=None)
    convert.add_argument("folder", metavar="FOLDER", type=Path, help="the folder of the model")
    convert.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file to write (FOLDER's name with the type, here)"
    )
    convert.add_argument(
        "--type",
        choices=("f32", "f16", "bf16", "q8_0", "q4_0"),
        default="f16",
        help="format of the matrices (f16)",
    )


def _inspect(commands: Any) -> None:
    summary = "show a model's configuration and tensors, or the devices of this machine"
    inspect = add(commands, "inspect", "inspect", summary, model=None)
    inspect.add_argument(
        "model", metavar="MODEL", nargs="?", help=f"{MODEL_HELP}; without it, the devices are shown"
    )
    inspect.add_argument("--program", action="store_true", help="list the kernel launches of a step")
    add_device(inspect, value_optional=True)


def _perplexity(commands: Any) -> None:
    perplexity = add(commands, "perplexity", "perplexity", "measure a model's perplexity on a text")
    perplexity.add_argument("file", metavar="FILE", help="UTF-8 text file")
    perplexity.add_argument(
        "--chunk", type=positive, default=512, metavar="N", help="tokens in a chunk (512)"
    )
    perplexity.add_argument("--chunks", type=positive, metavar="N", help="maximum chunks to score (all)")
    add_device(perplexity, context=False)


def _bench(commands: Any) -> None:
    from pathlib import Path

    summary = "measure prompt processing and token generation, compared with the roofline of the device"
    bench = add(commands, "bench", "bench", summary, model=None, prints_data=False)
    bench.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    bench.add_argument(
        "--synthetic",
        metavar="SHAPE:FORMAT",
        help="random weights instead of a file, such as gemma-3-27b:q4_0",
    )
    bench.add_argument(
        "--skew",
        type=above_zero,
        default=0.0,
        metavar="S",
        help="with --synthetic: how unevenly the tokens of a mixture choose experts; 0: uniformly (0)",
    )
    for short, name, kind, default, meaning in (
        ("-p", "prompt", numbers, 512, "prompt tokens; 0: no prefill test"),
        ("-n", "generate", numbers, 128, "tokens that each sequence generates; 0: no decode test"),
        ("-b", "batch", positives, 1, "batch size in decode tests"),
        ("-d", "depth", numbers, 0, "context depth: tokens already in the KV cache"),
    ):
        bench.add_argument(
            short, f"--{name}", type=kind, default=[default], metavar="N,N", help=f"{meaning} ({default})"
        )
    bench.add_argument(
        "-r", "--rounds", type=positive, default=5, metavar="N", help="rounds of each test (5)"
    )
    bench.add_argument("--profile", action="store_true", help="also time each kernel launch of a step")
    bench.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="compare with this earlier output of --json"
    )
    bench.add_argument(
        "--against",
        choices=("llama.cpp",),
        help="run llama.cpp in alternating rounds (needs llama-cpp-python)",
    )
    bench.add_argument(
        "--images",
        type=positives,
        default=(),
        metavar="N,N",
        help="also time the first token after an image of N x N pixels",
    )
    bench.add_argument("--peer", metavar="PYTHON", help="the Python that has llama-cpp-python (this one)")
    bench.add_argument("--html", type=Path, metavar="FILE", help="also write an HTML page with plots")
    form = bench.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print a line of CSV for each test")
    form.add_argument("--markdown", action="store_true", help="print Markdown tables")
    add_device(bench, context=False)
    add_npu(bench)


def _bench_serve(commands: Any) -> None:
    summary = "measure a running server under load: requests at random (Poisson) times, or N clients at once"
    serve = add(commands, "bench serve", "bench_serve", summary, model=None)
    serve.add_argument(
        "url", metavar="URL", help="any server with the OpenAI API, such as http://localhost:8000"
    )
    serve.add_argument("--model", metavar="NAME", help="model to request (the first that the server lists)")
    serve.add_argument("--api-key", metavar="KEY", help="API key of the server")
    serve.add_argument(
        "--rate", type=floats, default=[1.0], metavar="R,R", help="average requests per second (1)"
    )
    serve.add_argument(
        "--clients",
        type=positives,
        metavar="N,N",
        help="instead: that many clients, each of which sends its next request when it has its response",
    )
    serve.add_argument(
        "--requests", type=positive, default=32, metavar="N", help="requests at each load (32)"
    )
    serve.add_argument(
        "-p", "--prompt", type=positive, default=128, metavar="N", help="average words in a prompt (128)"
    )
    serve.add_argument(
        "-n", "--generate", type=positive, default=64, metavar="N", help="average tokens in an answer (64)"
    )
    serve.add_argument(
        "--timeout", type=above_zero, default=600.0, metavar="S", help="maximum seconds for a request (600)"
    )
    serve.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of arrival times and prompts (0)"
    )


def _plan(commands: Any) -> None:
    shape = "a shape such as gemma-3-27b:q4_0 (needs no file), a .gguf file, or a model in the cache"
    plan = add(
        commands,
        "plan",
        "plan",
        "predict the speed and memory of a model on a machine, without running it",
        model=shape,
    )
    plan.add_argument(
        "--hardware",
        metavar="NAME",
        help="a known machine such as phoenix-780m, or this: the machine at hand; without it, the names are listed",
    )
    plan.add_argument("--measure", action="store_true", help="measure this machine again")
    plan.add_argument(
        "--device", type=device_name, metavar="D", help="device of this machine: cpu, vulkan, auto (auto)"
    )
    plan.add_argument(
        "--memory", type=float, metavar="GIB", help="memory of the machine, or of a discrete GPU"
    )
    plan.add_argument("--npu", action="store_true", help="also predict what the machine's NPU would add")
    plan.add_argument(
        "--weights", type=words, metavar="F,F", help="weight formats to compare, such as q4_0,q6_k,q8_0"
    )
    plan.add_argument(
        "--kv", type=words, default=["f16"], metavar="K,K", help="KV cache types to compare: f16, q8 (f16)"
    )
    plan.add_argument(
        "-c", "--context", type=positive, default=4096, metavar="N", help="context length in tokens (4096)"
    )
    batches = "1,2,4,8,16,32,64"
    plan.add_argument(
        "-b",
        "--batch",
        type=numbers,
        default=numbers(batches),
        metavar="N,N",
        help=f"batch sizes ({batches})",
    )
    plan.add_argument(
        "-d",
        "--depth",
        type=numbers,
        metavar="N,N",
        help="tokens already in the KV cache (128, and the whole context)",
    )
    plan.add_argument("-p", "--prompt", type=positive, metavar="N", help="prompt tokens (512)")
    plan.add_argument(
        "--draft", metavar="SHAPE", help="also predict speculative decoding with this draft model"
    )
    plan.add_argument(
        "--mtp", action="store_true", help="also predict speculative decoding with the model's own draft head"
    )
    plan.add_argument(
        "--acceptance",
        type=floats,
        metavar="A,A",
        help="acceptance rates of draft tokens (0.6,0.7,0.8)",
    )
    plan.add_argument(
        "--target",
        type=above_zero,
        metavar="N",
        help="also find the batch size that reaches N tokens/s in total",
    )
    plan.add_argument(
        "--active",
        type=above_zero,
        metavar="B",
        help="also estimate a mixture of experts with B billion active parameters",
    )


def _tune(commands: Any) -> None:
    from pathlib import Path

    summary = "find the fastest kernel variants for a model on this machine, and save them"
    tune = add(commands, "tune", "tune", summary, model=None)
    tune.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    tune.add_argument(
        "--synthetic", metavar="SHAPE:FORMAT", help="a shape instead of a file, such as gemma-3-27b:q4_0"
    )
    tune.add_argument("--quick", action="store_true", help="only the largest matmuls, in a few seconds")
    tune.add_argument(
        "--seconds", type=above_zero, metavar="S", help="maximum seconds (140, or 3 with --quick)"
    )
    tune.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the results as JSON to this file"
    )
    tune.add_argument("--threads", type=positive, metavar="N", help="CPU threads (the best number found)")
    add_one_device(tune)
    tune.add_argument("--kv", choices=("f16", "q8"), default="f16", help="KV cache type (f16)")


def _doctor(commands: Any) -> None:
    add(
        commands,
        "doctor",
        "doctor",
        "check this machine and say how to fix what does not work",
        model=None,
    )


def _report(commands: Any) -> None:
    from pathlib import Path

    summary = "write a file about this machine to attach to an issue: checks, kernel tests and benchmarks"
    report = add(commands, "report", "report", summary, model=None, prints_data=False)
    report.add_argument(
        "--output",
        type=Path,
        default=Path("tandem-report.json"),
        metavar="FILE",
        help="file to write (tandem-report.json)",
    )
    report.add_argument("--full", action="store_true", help="also run larger models, as far as they fit")
    report.add_argument("--npu", action="store_true", help="also test the NPU")
    report.add_argument("--threads", type=positive, metavar="N", help="CPU threads (one per core)")
    add_one_device(report)


COMMANDS: dict[str, Callable[[Any], None]] = {
    "run": _run,
    "serve": _serve,
    "ps": _ps,
    "stop": _stop,
    "pull": _pull,
    "list": _list,
    "rm": _rm,
    "convert": _convert,
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
    """The parsed options, with `module` (the command's module in tandem.cli), `command` (its name) and `arguments` (as
    typed)."""
    arguments = typed = sys.argv[1:] if arguments is None else arguments
    if list(arguments[:2]) == ["bench", "serve"]:
        arguments = ["bench serve", *arguments[2:]]
    description = "Run language models from GGUF files on this machine."
    parser = argparse.ArgumentParser(prog="tandem", description=description, formatter_class=formatter)
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog="tandem")
    name = arguments[0] if arguments else ""
    # Only the requested command: declaring all of them takes milliseconds of each start.
    for add_command in [COMMANDS[name]] if name in COMMANDS else COMMANDS.values():
        add_command(commands)
    if not arguments:
        parser.print_help(sys.stderr)
        parser.exit(2)
    options, rest = parser.parse_known_args(arguments)
    if len(rest) == 1 and options.command == "run" and options.prompt is None and _is_text(rest[0]):
        options.prompt = rest.pop()  # argparse does not take a positional argument after an option
    if rest:
        hint = ": put the prompt in quotes" if options.command == "run" and _is_text(rest[0]) else ""
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    options.arguments = list(typed)
    return options


def _is_text(argument: str) -> bool:
    return not argument.startswith("-") or " " in argument


class _Version(argparse.Action):
    """Looks up the version only when `--version` is given."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print("tandem", version("tandem-llm"))
        parser.exit()
