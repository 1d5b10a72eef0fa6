"""A conversation with tools as a chat template can render it.

A template renders what it names: tools, calls, results, reasoning. What it does not name becomes text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from tandem.errors import RequestError
from tandem.server.core.images import Content, joined
from tandem.server.core.tool_calls import Message, Tool
from tandem.server.core.tool_formats import DEEPSEEK_3, DEEPSEEK_3_1, HARMONY, ToolFormat
from tandem.server.http.bodies import MAX_VALUES, count_values
from tandem.threads import throttle

REASONING_NAMES = ("thinking", "tool_plan")  # of templates, for `reasoning_content`


class Arguments(dict[str, Any]):
    """The arguments of a call: an object, and JSON for a template that puts them between texts."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def for_template(
    messages: Sequence[Message], tools: Sequence[Tool], template: str, format: ToolFormat
) -> tuple[list[Message], dict[str, Any]]:
    """(the messages, variables of the template)."""
    messages, variables = with_parsed_arguments(messages), dict[str, Any]()
    renders_tools, renders_calls = "tools" in template, "tool_calls" in template
    if not renders_calls:
        messages = _calls_as_text(messages, format)
        messages = messages if renders_tools else _results_as_text(messages, format)
    else:
        messages = _for_its_calls(messages, template, format)
    if tools and renders_tools:
        variables["tools"] = [as_json(tool) for tool in tools]
    if tools and "message['tools']" in template:  # Phi 4 mini
        listed = json.dumps([as_json(tool)["function"] for tool in tools], ensure_ascii=False)
        messages = _with_system(messages, tools=listed)
    elif tools and not renders_tools:
        messages = _with_system(messages, content=_instructions(tools, format))
    return messages, variables


def as_json(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates expect it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def with_parsed_arguments(messages: Sequence[Message]) -> list[Message]:
    """Messages whose tool calls have their arguments as objects."""
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
    text = function["arguments"] or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    return {
        **function,
        "arguments": Arguments(arguments if isinstance(arguments, dict) else {"arguments": text}),
    }


def _calls_as_text(messages: Sequence[Message], format: ToolFormat) -> list[Message]:
    written = []
    for message in messages:
        if calls := message.get("tool_calls"):
            text = format.write([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
            content = joined(message["content"], f"\n{text}") if message["content"] else text
            message = {**message, "content": content}
            del message["tool_calls"]
        written.append(message)
    return written


def _results_as_text(messages: Sequence[Message], format: ToolFormat) -> list[Message]:
    """Messages of the user instead of results; without the fields that such a template may not know."""
    written: list[tuple[str, list[Content]]] = []  # the contents of each message are joined at the end
    for message in messages:
        role, contents = message["role"], [message["content"]]
        if role == "tool":
            begin, end = format.result_tags
            role, contents = "user", [begin, *contents, end]
            # Several results: templates require alternating roles.
            if written and written[-1][0] == "user":
                written[-1][1].extend(["\n", *contents])
                continue
        written.append((role, contents))
    return [
        {"role": role, "content": joined(*contents) if len(contents) > 1 else contents[0]}
        for role, contents in written
    ]


def _for_its_calls(messages: Sequence[Message], template: str, format: ToolFormat) -> list[Message]:
    """Calls and their results as the template demands them."""
    adapted = list(messages)
    if "single tool-calls at once" in template:  # Llama 3
        adapted = _with_single_calls(adapted)
    if format.id_length == 9:
        adapted = [_with_short_ids(message) for message in adapted]
    if format in (DEEPSEEK_3, DEEPSEEK_3_1):  # they take calls or a content
        adapted = [
            {**message, "content": message["content"] or None} if message.get("tool_calls") else message
            for message in adapted
        ]
    for name in REASONING_NAMES if format is not HARMONY else ():
        if f"message.{name}" in template or f"message['{name}']" in template:
            adapted = [
                {name: one["reasoning_content"], **one} if one.get("reasoning_content") else one
                for one in adapted
            ]
    return adapted


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """One message for each call, before the result of this call."""
    results = {m["tool_call_id"]: m for m in messages if m["role"] == "tool" and m.get("tool_call_id")}
    apart, moved = list[Message](), set[str]()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            apart += [] if message.get("tool_call_id") in moved else [message]
            continue
        for call in calls:
            apart.append({**message, "tool_calls": [call]})
            if result := results.get(call.get("id")):
                apart.append(result)
                moved.add(call["id"])
    return apart


def _with_short_ids(message: Message) -> Message:
    """Call ids of 9 letters and digits, which Mistral's templates demand."""
    adapted = dict(message)
    if message.get("tool_calls"):
        adapted["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in message["tool_calls"]]
    if message["role"] == "tool":
        adapted["tool_call_id"] = _short_id(message.get("tool_call_id"))
    return adapted


def _short_id(id: str | None) -> str:
    id = id or ""
    is_short = len(id) == 9 and id.isascii() and id.isalnum()
    return id if is_short else hashlib.sha256(id.encode(errors="replace")).hexdigest()[:9]


def _with_system(messages: Sequence[Message], content: str = "", **fields: Any) -> list[Message]:
    """The conversation with more in its system message."""
    if messages and messages[0]["role"] == "system":
        before = messages[0]["content"]
        both = joined(before, "\n\n" * bool(before and content), content)
        return [{**messages[0], "content": both, **fields}, *messages[1:]]
    return [{"role": "system", "content": content, **fields}, *messages]


def _instructions(tools: Sequence[Tool], format: ToolFormat) -> str:
    known = "\n".join(json.dumps(as_json(tool)["function"]) for tool in tools)
    example = format.write([("the function", {"its": "arguments"})])
    return f"You can call these functions:\n{known}\n\nTo call one, answer with nothing but this:\n{example}"
