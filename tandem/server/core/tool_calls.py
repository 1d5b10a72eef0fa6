"""How the families of models write a call of a tool, and how calls are read back.

Templates that know tools tell the model how to call them; for others, the conversation is rewritten so that it says so.
Models do not always write as they were told, so what is read is what any family writes, if it names a tool there is.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from tandem.server.core.generation import Message, Tool, ToolCall

# JSON as models learned to write it: a weak one would fill its answer with spaces if it could.
PLAIN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


# What a call stands between. One without marks is all of an answer.
MARKS = {"<tool_call>": "</tool_call>", "```tool_call": "```", "```tool_code": "```", "```json": "```"}
BARE = ("{", "[{")
SIMPLE = {
    "type",
    "properties",
    "required",
    "title",
    "description",
}  # keys of a schema that says all properties itself


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls."""

    mark: str = ""  # one of MARKS
    arguments: str = "arguments"  # their key
    listed: bool = False  # calls are a JSON list
    id_length: int = 24
    result: tuple[str, str] = ("<tool_response>\n", "\n</tool_response>")  # around what a tool gave back

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls as the model writes them."""
        texts = [json.dumps({"name": name, self.arguments: arguments}) for name, arguments in calls]
        end = MARKS.get(self.mark, "")
        return "\n".join(f"{self.mark}\n{text}\n{end}".strip() for text in texts)

    def grammar(self, tools: Sequence[Tool], *, several: bool, optional: bool) -> str:
        """In Lark's notation: an answer of calls; `optional`: of any text, and calls that are as they should be."""
        calls = " | ".join(f"call{i}" for i in range(len(tools)))
        rules = f"call: {calls}\n" + "".join(self._rule(i, tool) for i, tool in enumerate(tools))
        if not self.mark:
            more = ' (", " call)*' if several else ""
            text = "TEXT: /(?s:[^{\\[].*)/\n" if optional else ""
            choice = "TEXT? | calls" if optional else "calls"
            calls = f'"[" call{more} "]"' if self.listed else "call"
            return f"start: {choice}\ncalls: {calls}\n{text}{rules}"
        begin, end = json.dumps(self.mark), json.dumps(f"\n{MARKS[self.mark]}")
        rules = f'body: "\\n" call {end}\n{rules}'
        more = f' ("\\n" {begin} body)*' if several else ""
        if not optional:
            return f"start: {begin} body{more}\n{rules}"
        mark = "".join(f"\\x{ord(letter):02x}" for letter in self.mark)
        text = f"TEXT: /(?s:.*)/ & ~/(?s:.*{mark}.*)/\nprose[suffix={begin}]: /(?s:.*)/\n"
        return f"start: TEXT | prose body{more}\n{text}{rules}"

    def _rule(self, i: int, tool: Tool) -> str:
        """Its arguments are a schema of their own: references in it begin there."""
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{self.arguments}": ')
        given = tool.parameters or {"type": "object"}
        closed = (
            {"additionalProperties": False} if "properties" in given and given.keys() <= SIMPLE else {}
        )  # what is not declared is not meant
        schema = {"x-guidance": PLAIN, **closed, **given}
        return f'call{i}: {head} arguments{i} "}}"\narguments{i}: %json {json.dumps(schema)}\n'


HERMES = ToolFormat("<tool_call>")  # Qwen's, too
LLAMA3 = ToolFormat(arguments="parameters")
MISTRAL = ToolFormat(listed=True, id_length=9)
GEMMA = ToolFormat("```tool_call", result=("```tool_output\n", "\n```"))
BY_TEXT = {
    "<tool_call>": HERMES, "[TOOL_CALLS]": MISTRAL, "<|python_tag|>": LLAMA3, "ipython": LLAMA3,
    "<start_of_turn>": GEMMA,
}  # fmt: skip


def tool_format_for(template: str) -> ToolFormat:
    """By what a chat template has in it."""
    return next((format for text, format in BY_TEXT.items() if text in template), HERMES)


def parse_calls(text: str, tools: set[str], id_length: int = 24) -> list[ToolCall]:
    """The calls that a text is; none if it is something else."""
    found = []
    for value in _values(text):
        name = value.get("name") if isinstance(value, dict) else None
        if name not in tools:
            return []
        given = value.get("arguments", value.get("parameters", {}))
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        found.append(ToolCall(new_id(id_length), name, arguments))
    return found


def supports_tools(template: str) -> bool:
    return "tools" in template


def as_json(tool: Tool) -> dict[str, Any]:
    """As templates expect it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def render_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Tool], format: ToolFormat
) -> list[Message]:
    """The conversation for a template that knows no tools: what they are is told first, and the rest is text."""
    turns: list[Message] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if calls := message.get("tool_calls"):
            written = format.write(
                [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            )
            text = f"{text}\n{written}" if text else written
        if role == "tool":
            role, text = "user", text.join(format.result)
            if turns and turns[-1]["role"] == "user":  # several results: templates want roles to alternate
                turns[-1]["content"] += f"\n{text}"
                continue
        turns.append({"role": role, "content": text})
    if not tools:
        return turns
    told = _instructions(tools, format)
    if turns and turns[0]["role"] == "system":
        turns[0]["content"] += f"\n\n{told}"
        return turns
    return [{"role": "system", "content": told}, *turns]


def _instructions(tools: Sequence[Tool], format: ToolFormat) -> str:
    known = "\n".join(json.dumps(as_json(tool)["function"]) for tool in tools)
    example = format.write([("the function", {"its": "arguments"})])
    return f"You can call these functions:\n{known}\n\nTo call one, answer with nothing but this:\n{example}"


def _values(text: str) -> list[Any]:
    """What a text says in JSON, one or several values; or in Python, one call."""
    decoder, found, at = json.JSONDecoder(strict=False), list[Any](), 0
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return found or _python_call(text)
        found += value if isinstance(value, list) else [value]
        at += len(text[at:]) - len(text[at:].lstrip(" \n;,"))
    return found


def _python_call(text: str) -> list[Any]:
    try:
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


def new_id(length: int) -> str:
    return f"call_{uuid4().hex[:length]}" if length > 9 else uuid4().hex[:length]
