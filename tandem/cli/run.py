"""`tandem run`: streams one answer, or starts a chat."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from tandem.cli import interruptible
from tandem.cli.loading import draft_file, model_file, resolve_npu
from tandem.cli.terminal import note, print_json, printable, read_text
from tandem.errors import RequestError
from tandem.settings import read_settings

if TYPE_CHECKING:
    from tandem.cli.remote import RemoteLLM
    from tandem.engine.llm import LLM, Usage

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)
PARAMETERS = ("max_tokens", "stop", "seed", "json_schema", "regex", *SAMPLING)


def main(options: argparse.Namespace) -> int:
    prompt = _prompt(options)
    parameters = {key: value for key in PARAMETERS if (value := getattr(options, key)) is not None}
    options.npu = resolve_npu(options.npu)
    images = [{"type": "image", "image": path} for path in options.image or ()]
    if images and (prompt is None or options.raw):
        raise RequestError("--image needs a prompt, and no --raw: write one after MODEL")
    # An image is a file of this machine: a running server cannot read it.
    with (not images and _server(options)) or open_llm(options) as llm:
        if prompt is None:
            from tandem.cli.chat import chat

            return chat(llm, options.system, parameters)
        content = [*images, {"type": "text", "text": prompt}] if images else prompt
        request = (
            prompt if options.raw else [*system_message(options.system), {"role": "user", "content": content}]
        )
        if options.json:
            _print_result(llm, options.model, request, parameters)
            return 0
        answer = stream(llm, request, parameters)
        return 130 if answer.stopped else 0


def _server(options: argparse.Namespace) -> RemoteLLM | None:
    """A running server that has loaded this model, if there is one."""
    servers = read_settings().pipelines / "servers"
    if not servers.is_dir() or not any(servers.iterdir()):  # the usual case, without further imports
        return None
    from tandem.cli.remote import find_server

    return find_server(options)


def open_llm(options: argparse.Namespace, context: int | None = None, batch: int = 1) -> LLM:
    """Loads the model. `batch`: sequences that the KV cache is allocated for."""
    from tandem.cli.loading import tune_at_first_use
    from tandem.devices.backends import check_device

    check_device(options.device, options.split, options.placement)
    path = model_file(options.model)
    from tandem.engine.llm import LLM

    tune_at_first_use(options.device, path, options.no_tune)
    llm = LLM(
        path,
        device=options.device,
        threads=options.threads,
        context=context or options.context,
        batch=batch,
        kv=options.kv,
        gpu_memory=options.gpu_memory and options.gpu_memory * 1e9,
        kv_memory=getattr(options, "kv_memory", None) and options.kv_memory * 1e9,
        prompt_lookup=getattr(options, "prompt_lookup", False),
        draft=draft_file(options.draft) if getattr(options, "draft", None) else None,
        split=options.split,
        placement=options.placement,
        npu=getattr(options, "npu", "off"),
        mmproj=getattr(options, "mmproj", None),
    )
    if options.device == "auto" or "," in options.device:
        note(f"on {llm.device.describe()}")
    return llm


def system_message(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []


@dataclasses.dataclass
class StreamedAnswer:
    text: str = ""
    usage: Usage | None = None  # None: the answer was stopped
    stopped: bool = False  # by Ctrl-C


def stream(
    llm: LLM | RemoteLLM, request: str | list[dict[str, Any]], parameters: dict[str, Any]
) -> StreamedAnswer:
    """Prints an answer token by token and, on a terminal, its speed. Ctrl-C stops it."""
    answer, on_terminal = StreamedAnswer(), sys.stdout.isatty()
    try:
        with interruptible():
            for token in llm.stream(request, **parameters):
                text = printable(token.text) if on_terminal else token.text
                answer.text += text
                sys.stdout.write(text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        answer.stopped = True
    if not answer.text.endswith("\n"):
        print(flush=True)
    if answer.stopped:
        note("stopped")
    elif token.usage:
        if token.finish_reason == "length":
            note(
                f"stopped after {token.usage.completion_tokens} tokens: raise --max-tokens or --context for more"
            )
        answer.usage = token.usage
        note(statistic(llm, token.usage))
    return answer


def statistic(llm: LLM | RemoteLLM, usage: Usage) -> str:
    """Token counts and speeds of prompt and answer in one line."""
    engine = getattr(llm, "engine", None)  # None: a server runs the model
    decoded, seconds = usage.completion_tokens - 1, usage.decode_seconds
    parts = [f"prompt {usage.prompt_tokens} tokens, {usage.prompt_tokens / usage.first_token_seconds:.0f}/s"]
    parts.append(f"answer {usage.completion_tokens} tokens")
    if decoded and seconds:
        parts[-1] += f", {decoded / seconds:.0f}/s"
        if engine:
            parts[-1] += f", {decoded / seconds * engine.step_bytes(1, 1) / 1e9:.1f} GB/s"
    parts.append(f"first after {usage.first_token_seconds:.2f} s")
    if engine and (found := engine.stats().speculation):
        parts.append(f"{found.accepted} of {found.drafted} draft tokens accepted")
        parts[-1] += f" in {found.steps} steps, {found.saved_seconds:.2f} s saved"
    return " · ".join(parts)


def _prompt(options: argparse.Namespace) -> str | None:
    """The prompt from the arguments or a pipe; None: start a chat."""
    prompt: str | None = options.prompt
    if prompt is None:
        if sys.stdin.isatty() and sys.stdout.isatty() and not options.json and not options.raw:
            return None
        prompt = read_text(None).removesuffix("\n")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # Python passes undecodable arguments as surrogates
        raise RequestError("the prompt is not UTF-8 text: check the terminal's encoding") from None
    if not prompt.strip():
        raise RequestError("the prompt is empty: write one after MODEL or pipe one in")
    return prompt


def _print_result(llm: LLM | RemoteLLM, model: str, request: Any, parameters: dict[str, Any]) -> None:
    result = (
        llm.generate(request, **parameters) if isinstance(request, str) else llm.chat(request, **parameters)
    )
    data = {key: value for key, value in dataclasses.asdict(result).items() if value is not None}
    print_json({"model": model, **data})
