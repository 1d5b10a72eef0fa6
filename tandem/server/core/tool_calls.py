"""Tools, tool calls, and the parser of complete calls in JSON or Python. How model families write calls is in
tool_formats.py; output_parser.py reads them while they arrive."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tandem.errors import RequestError

Message = dict[str, Any]  # a chat template's message: role, content, tool_calls, ...
BETWEEN_CALLS = (" ", "\n", ";", ",")
MAX_PYTHON = 64 << 10  # characters of a call in Python: its parser takes a second for a few million


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # constrain the arguments to the schema


@dataclass
class ToolCall:
    """A call that the model has written."""

    id: str
    name: str
    arguments: str  # JSON; in a stream, the part received so far

    def as_object(self) -> dict[str, Any]:
        """The parsed arguments; `{"arguments": text}` if the model did not write a JSON object."""
        try:
            parsed = json.loads(self.arguments)
            json.dumps(
                parsed, ensure_ascii=False, allow_nan=False
            ).encode()  # NaN, 1e999 and "\\ud800" are no JSON
        except (ValueError, RecursionError):
            parsed = None
        return parsed if isinstance(parsed, dict) else {"arguments": self.arguments}


def named_tools(tools: Sequence[Tool], *names: str | None) -> list[Tool]:
    """Only the tools that `tool_choice` names, each once however often it names them."""
    known, wanted = {tool.name for tool in tools}, set(names)
    for name in names:
        if name not in known:
            raise RequestError(
                f"tool_choice names {str(name)[:80]}, which is not in tools: add it, or choose another"
            )
    return [tool for tool in tools if tool.name in wanted]


def parse_calls(text: str, tools: Collection[str], id_length: int = 24) -> list[ToolCall]:
    """The calls that a text begins with; none if one of its JSON values is not a call of a known tool."""
    calls = []
    for value in _values(text):
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in tools:
            return []
        given = value.get("arguments", value.get("parameters", {}))
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        written = arguments.encode(errors="replace").decode()  # without half a character, such as "\\ud800"
        calls.append(ToolCall(new_call_id(id_length), name, written))
    return calls


def _values(text: str) -> list[Any]:
    """The JSON values of a text, or the call of a text in Python."""
    decoder, found, at = json.JSONDecoder(strict=False), list[Any](), 0
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return found or _python_call(text)
        found += value if isinstance(value, list) else [value]
        while text[at : at + 1] in BETWEEN_CALLS:
            at += 1
    return found


def _python_call(text: str) -> list[Any]:
    """The call in `f(x=3)` or `print(f(x=3))`, as Gemma writes it; nothing is evaluated but literals."""
    if len(text) > MAX_PYTHON:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the text's escapes, which would go to the log
            call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            if call.func.id == "print" and len(call.args) == 1 and isinstance(call.args[0], ast.Call):
                call = call.args[0]
            arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            if isinstance(call.func, ast.Name) and not call.args and json.dumps(arguments):
                return [{"name": call.func.id, "arguments": arguments}]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return []


def new_call_id(length: int) -> str:
    return f"call_{uuid4().hex[:length]}" if length > 9 else uuid4().hex[:length]
