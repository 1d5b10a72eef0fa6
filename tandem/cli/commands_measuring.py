"""Commands that measure, predict, tune and examine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.cli.options import MODEL_HELP, add, add_device, add_npu, add_one_device
from tandem.cli.values import above_zero, device_name, floats, numbers, positive, positives, words


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
    "bench": _bench,
    "bench serve": _bench_serve,
    "plan": _plan,
    "tune": _tune,
    "doctor": _doctor,
    "report": _report,
}
