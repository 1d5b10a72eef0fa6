"""Tool calls: how each model family writes them, their grammar, and the parser of complete calls
(streamed calls: output_parser.py).

A chat template that supports tools renders them itself; for other templates the tools, calls and results are rendered
as text. Models do not always follow their own format, so the parser accepts every family's format if it names a known
tool.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tandem.errors import RequestError
from tandem.server.core.images import joined
from tandem.server.http.bodies import MAX_VALUES, count_values
from tandem.threads import throttle

Message = dict[str, Any]  # a chat template's message: role, content, tool_calls, ...
# llguidance options for JSON with one space after "," and ":", as models learned to write it. With free whitespace a
# weak model would fill its response with spaces.
COMPACT_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Tags around a call: opening -> closing. A call without tags is the whole content of a response.
CALL_TAGS = {"<tool_call>": "</tool_call>", "```tool_call": "```", "```tool_code": "```", "```json": "```"}
BARE_CALL_STARTS = ("{", "[{")
BETWEEN_CALLS = (" ", "\n", ";", ",")
MAX_PYTHON = 64 << 10  # characters of a call in Python: its parser takes a second for a few million
# The only keys of a schema whose `properties` are complete, so that additional properties can be excluded.
SIMPLE_SCHEMA_KEYS = {"type", "properties", "required", "title", "description"}


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


@dataclass(frozen=True)
class ToolFormat:
    """How a model family writes tool calls and reads their results."""

    tag: str = ""  # opening tag, a key of CALL_TAGS; "": no tags
    arguments_key: str = "arguments"
    is_list: bool = False  # calls are elements of one JSON list
    id_length: int = 24  # characters of a call id
    result_tags: tuple[str, str] = ("<tool_response>\n", "\n</tool_response>")  # around the result of a call

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls, as (name, arguments), in the format of this family."""
        texts = [json.dumps({"name": name, self.arguments_key: arguments}) for name, arguments in calls]
        end = CALL_TAGS.get(self.tag, "")
        return "\n".join(f"{self.tag}\n{text}\n{end}".strip() for text in texts)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, optional: bool) -> str:
        """A Lark grammar of tool calls; `optional`: of text, or of text and calls. Arguments fit their schema."""
        calls = " | ".join(f"call{i}" for i in range(len(tools)))
        rules = f"call: {calls}\n" + "".join(self._rule(i, tool) for i, tool in enumerate(tools))
        if not self.tag:
            more = ' (", " call)*' if parallel else ""
            text = "TEXT: /(?s:[^{\\[].*)/\n" if optional else ""
            choice = "TEXT? | calls" if optional else "calls"
            calls = f'"[" call{more} "]"' if self.is_list else "call"
            return f"start: {choice}\ncalls: {calls}\n{text}{rules}"
        begin, end = json.dumps(self.tag), json.dumps(f"\n{CALL_TAGS[self.tag]}")
        rules = f'body: "\\n" call {end}\n{rules}'
        more = f' ("\\n" {begin} body)*' if parallel else ""
        if not optional:
            return f"start: {begin} body{more}\n{rules}"
        tag = "".join(f"\\x{ord(letter):02x}" for letter in self.tag)
        text = f"TEXT: /(?s:.*)/ & ~/(?s:.*{tag}.*)/\nprose[suffix={begin}]: /(?s:.*)/\n"
        return f"start: TEXT | prose body{more}\n{text}{rules}"

    def _rule(self, i: int, tool: Tool) -> str:
        """The rule of one tool. Its schema is a %json of its own, because `$ref`s in it are relative to the schema."""
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{self.arguments_key}": ')
        given = tool.parameters or {"type": "object"}
        is_simple = "properties" in given and given.keys() <= SIMPLE_SCHEMA_KEYS
        closed = {"additionalProperties": False} if is_simple else {}
        schema = {"x-guidance": COMPACT_JSON, **closed, **given}
        return f'call{i}: {head} arguments{i} "}}"\narguments{i}: %json {json.dumps(schema)}\n'


HERMES = ToolFormat("<tool_call>")  # and Qwen
LLAMA3 = ToolFormat(arguments_key="parameters")
MISTRAL = ToolFormat(is_list=True, id_length=9)
GEMMA = ToolFormat("```tool_call", result_tags=("```tool_output\n", "\n```"))
# Text in a chat template that identifies its family.
FORMAT_BY_TEMPLATE_TEXT = {
    "<tool_call>": HERMES,
    "[TOOL_CALLS]": MISTRAL,
    "<|python_tag|>": LLAMA3,
    "ipython": LLAMA3,
    "<start_of_turn>": GEMMA,
}


def named_tool(tools: Sequence[Tool], name: str | None) -> list[Tool]:
    """Only the tool that `tool_choice` requires."""
    found = [tool for tool in tools if tool.name == name]
    if not found:
        raise RequestError(
            f"tool_choice names {str(name)[:80]}, which is not in tools: add it, or choose another"
        )
    return found


def tool_format_for(template: str) -> ToolFormat:
    """The tool format of the family that a chat template belongs to; Hermes if it is unknown."""
    return next((format for text, format in FORMAT_BY_TEMPLATE_TEXT.items() if text in template), HERMES)


def parse_calls(text: str, tools: set[str], id_length: int = 24) -> list[ToolCall]:
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


def as_json(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates expect it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def with_parsed_arguments(messages: Sequence[Message]) -> list[Message]:
    """Messages whose tool calls have their arguments as objects, which templates render as JSON."""
    _check_arguments(messages)
    return [{**message, **_parsed_calls(message)} for message in messages]


def _check_arguments(messages: Sequence[Message]) -> None:
    """Refuses arguments with more values than a body may have: in its texts, the server did not count them."""
    texts = [call["function"]["arguments"] for one in messages for call in one.get("tool_calls") or ()]
    if sum(count_values(text.encode()) for text in texts) > MAX_VALUES:
        raise RequestError(f"the arguments of tool calls have more than {MAX_VALUES} values: shorten them")


def _parsed_calls(message: Message) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return {}
    return {"tool_calls": [{**call, "function": _parsed(call["function"])} for call in message["tool_calls"]]}


def _parsed(function: dict[str, Any]) -> dict[str, Any]:
    throttle()
    try:
        return {**function, "arguments": json.loads(function["arguments"] or "{}")}
    except (ValueError, RecursionError):
        return function


def render_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Tool], format: ToolFormat
) -> list[Message]:
    """The conversation for a chat template without tool support: the system message lists the tools, calls and their
    results become text."""
    rendered: list[Message] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if calls := message.get("tool_calls"):
            written = format.write(
                [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            )
            content = joined(content, f"\n{written}") if content else written
        if role == "tool":
            begin, end = format.result_tags
            role, content = "user", joined(begin, content, end)
            # Several results: templates require alternating roles.
            if rendered and rendered[-1]["role"] == "user":
                rendered[-1]["content"] = joined(rendered[-1]["content"], "\n", content)
                continue
        rendered.append({"role": role, "content": content})
    if not tools:
        return rendered
    instructions = _instructions(tools, format)
    if rendered and rendered[0]["role"] == "system":
        rendered[0]["content"] = joined(rendered[0]["content"], f"\n\n{instructions}")
        return rendered
    return [{"role": "system", "content": instructions}, *rendered]


def _instructions(tools: Sequence[Tool], format: ToolFormat) -> str:
    known = "\n".join(json.dumps(as_json(tool)["function"]) for tool in tools)
    example = format.write([("the function", {"its": "arguments"})])
    return f"You can call these functions:\n{known}\n\nTo call one, answer with nothing but this:\n{example}"


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
