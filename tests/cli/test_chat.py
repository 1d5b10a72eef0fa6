"""A chat as a person sees it, on a pseudo-terminal; and what it tells the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from tandem.cli import chat as chat_module
from tandem.errors import ContextError
from tests.cli.processes import Terminal, environment, on_terminal
from tests.models.test_vision import GOLDENS as VISION

CTRL_C, CTRL_D = b"\x03", b"\x04"
PROMPT = r"> \x1b\[0m$|> $"


@pytest.fixture
def chat(tiny: Path, tmp_path: Path) -> Iterator[Terminal]:
    with on_terminal("run", tiny, "-n", "30000", "-c", "40000", env=environment(tmp_path)) as terminal:
        terminal.expect(PROMPT)
        yield terminal


def test_commands_and_an_answer(tiny: Path, tmp_path: Path) -> None:
    with on_terminal("run", tiny, "-n", "20", env=environment(tmp_path)) as chat:
        assert "/help lists" in chat.expect(PROMPT)
        chat.send(b"/stats\n")
        assert "no complete answer yet" in chat.expect(PROMPT)
        chat.send(b"/help\n")
        assert "clear the conversation" in chat.expect(PROMPT)
        chat.send(b"hello\n")
        shown = chat.expect(PROMPT)
        assert "answer 20 tokens" in shown and "GB/s" in shown and "stopped after 20 tokens" in shown
        chat.send(b"/stats\n")
        shown = chat.expect(PROMPT)
        assert "answer 20 tokens" in shown and "of 4096" in shown
        chat.send(b"/exit\n")
        assert chat.exit_code() == 0


def test_ctrl_c_stops_an_answer_without_leaving(chat: Terminal) -> None:
    for _ in range(2):
        chat.send(b"hello\n")
        chat.expect(r"hello\r\n[a-z]")
        chat.send(CTRL_C)
        assert "stopped" in chat.expect(PROMPT)
    chat.send(CTRL_D)
    assert chat.exit_code() == 0


def test_ctrl_c_clears_a_line_and_leaves_from_an_empty_one(chat: Terminal) -> None:
    chat.send(b"abc")
    chat.expect("abc")
    chat.wait_for_rest()  # Python's line editor overlooks a signal that comes before it waits for the next key
    chat.send(CTRL_C)
    chat.expect(PROMPT)
    chat.wait_for_rest()
    chat.send(CTRL_C)
    assert chat.exit_code() == 130 and b"Traceback" not in chat.seen


class FakeLLM:
    """Answers each message with "yes", and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def stream(self, messages: list[dict[str, str]], **_: Any) -> Iterator[Any]:
        self.asked.append([f"{message['role']}: {message['content']}" for message in messages])
        if messages[-1]["content"] == "too long":
            raise ContextError("the prompt is too long")
        yield SimpleNamespace(text="y", usage=None, finish_reason=None)
        yield SimpleNamespace(text="es", usage=None, finish_reason="stop")


def converse(monkeypatch: pytest.MonkeyPatch, *lines: str, system: str | None = None) -> list[list[str]]:
    """What the model is asked when a person types `lines`."""
    typed = iter(lines)

    def read(_prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    llm = FakeLLM()
    assert chat_module.chat(llm, system, {}) == 0  # type: ignore[arg-type]
    return llm.asked


@pytest.mark.fast
def test_the_model_sees_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = converse(monkeypatch, "one", "two", "/clear", "three", system="be brief")
    assert asked == [
        ["system: be brief", "user: one"],
        ["system: be brief", "user: one", "assistant: yes", "user: two"],
        ["system: be brief", "user: three"],
    ]


@pytest.mark.fast
def test_a_message_that_was_refused_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = converse(monkeypatch, "too long", "short")
    assert asked[1] == ["user: short"] and "tandem: the prompt is too long" in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""one', "two \\", 'three"""'], "one\ntwo \\\nthree"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (['"""one"""'], "one"),
        (["", "  ", " one "], "one"),
    ],
)
def test_messages_of_several_lines(monkeypatch: pytest.MonkeyPatch, lines: list[str], message: str) -> None:
    assert converse(monkeypatch, *lines) == [[f"user: {message}"]]


def test_an_image_comes_before_the_next_message(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    Image.new("RGB", (9, 7), "red").save(picture)
    with on_terminal("run", VISION / "gemma3.gguf", "-n", "5", env=environment(tmp_path)) as chat:
        chat.expect(PROMPT)
        chat.send(b"/image nothing.png\n")
        assert "cannot be read" in chat.expect(PROMPT)
        tokens = []
        for command in ("/clear", f"/image {picture}"):
            chat.send(f"{command}\n".encode())
            chat.expect(PROMPT)
            chat.send(b"What is this?\n")
            found = re.search(r"prompt (\d+) tokens", chat.expect(PROMPT))
            assert found
            tokens.append(int(found[1]))
            chat.send(b"/clear\n")
            chat.expect(PROMPT)
        assert tokens[1] > tokens[0] + 5


def test_an_image_without_an_encoder(tiny: Path, tmp_path: Path) -> None:
    with on_terminal("run", tiny, env=environment(tmp_path)) as chat:
        chat.expect(PROMPT)
        chat.send(b"/image a.png\n")
        assert "without a vision encoder" in chat.expect(PROMPT)
