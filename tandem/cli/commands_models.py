"""Commands that run models, serve them, and look after them and their files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.cli.options import MODEL_HELP, NAME_HELP, add, add_device, add_npu, add_speculation
from tandem.cli.values import positive, replicas
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
}
