"""`tandem run MODEL` without a prompt on a terminal: a chat."""

from __future__ import annotations

import readline  # gives input() a line editor
import sys
from typing import TYPE_CHECKING, Any

from tandem.cli import interruptible
from tandem.cli.run import statistic, stream, system_message
from tandem.cli.terminal import dim, note, printable
from tandem.errors import RequestError, TandemError

if TYPE_CHECKING:
    from tandem.cli.remote import RemoteLLM
    from tandem.engine.llm import LLM, Usage

PROMPT = "\001\033[1m\002> \001\033[0m\002"  # bold; \001 and \002 mark what readline must not count as width
MORE = ". "
FENCE = '"""'
HELP = """\
/clear        clear the conversation
/image FILE   put an image before the next message
/stats        speed of the last answer, and context used
/help         show this help
/exit         exit, like Ctrl-D, or Ctrl-C on an empty line
End a line with \\ to continue on the next.
Begin and end a longer text with three double quotes.
Ctrl-C stops an answer."""


def chat(llm: LLM | RemoteLLM, system: str | None, parameters: dict[str, Any]) -> int:
    """Reads messages and prints answers until the user exits."""
    history = system_message(system)
    last: Usage | None = None
    images: list[dict[str, Any]] = []  # for the next message
    note("/help lists the commands; Ctrl-D exits.")
    while True:
        try:
            text = _read()
        except EOFError:
            print()
            return 0
        if text == "/exit":
            return 0
        if text == "/clear":
            history, last, images = system_message(system), None, []
            print(dim("conversation cleared"))
        elif text == "/stats":
            if last:
                print(dim(f"{statistic(llm, last)} · context {last.total_tokens} of {llm.context}"))
            else:
                print(dim("no complete answer yet"))
        elif text.startswith("/image "):
            if (image := _image(llm, text.removeprefix("/image").strip())) is not None:
                images.append(image)
        elif text.startswith("/"):
            unknown = "" if text == "/help" else f"unknown command {printable(text.split()[0])}\n"
            print(dim(unknown + HELP))
        elif text:
            content = [*images, {"type": "text", "text": text}] if images else text
            history.append({"role": "user", "content": content})
            try:
                answer = stream(llm, history, parameters)
                history.append({"role": "assistant", "content": answer.text})
                last, images = answer.usage or last, []
            except TandemError as error:
                history.pop()
                print(f"tandem: {printable(str(error))}", file=sys.stderr)


def _image(llm: LLM | RemoteLLM, path: str) -> dict[str, Any] | None:
    """The image of a file as a part of a message; None, and a message, if it cannot be used."""
    from tandem.cli.remote import RemoteLLM
    from tandem.model.image_file import read_image

    try:
        if isinstance(llm, RemoteLLM):  # it would have to read a file of this machine
            raise RequestError("a running server has this model: stop it to chat with images")
        if not llm.takes_images:
            raise RequestError(
                "this model was loaded without a vision encoder: name its mmproj file with --mmproj"
            )
        return {"type": "image", "image": read_image(path)}
    except TandemError as error:
        print(f"tandem: {printable(str(error))}", file=sys.stderr)
        return None


def _read() -> str:
    """Reads one message of one or more lines. Ctrl-C discards the typed text; on an empty line it exits."""
    lines: list[str] = []
    while True:
        with interruptible():
            try:
                lines.append(input(MORE if lines else PROMPT))
            except KeyboardInterrupt:
                print()
                if not lines and not readline.get_line_buffer():
                    raise
                lines.clear()
                continue
        fenced = lines[0].startswith(FENCE)
        if fenced and (len(lines) > 1 or len(lines[0]) > 5) and lines[-1].endswith(FENCE):
            return "\n".join(lines)[3:-3].strip("\n")
        if lines[-1].endswith("\\") and not fenced:
            lines[-1] = lines[-1][:-1]
        elif not fenced:
            return "\n".join(lines).strip()
