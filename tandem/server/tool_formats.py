"""How the families of models write a call of a tool, and how it is read back.

Templates that know tools tell the model how to call them; for others, the conversation is rewritten so that it says so.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from tandem.server.generation import Message, Tool, ToolCall

# JSON as models learned to write it: a weak one would fill its answer with spaces if it could.
PLAIN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class ToolFormat:
    begins: tuple[str, ...]  # what a call begins with; the first is what our grammars and instructions write
    end: str  # and ends with; "": the end of the answer
    at_start: bool = False  # calls come first in an answer or not at all
    arguments: str = "arguments"  # their key
    listed: bool = False  # calls are a JSON list
    id_length: int = 24
    result: tuple[str, str] = ("<tool_response>\n", "\n</tool_response>")  # around what a tool gave back

    @property
    def is_marked(self) -> bool:
        """A call cannot be taken for anything else."""
        return bool(self.end)

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls as the model writes them."""
        texts = [json.dumps({"name": name, self.arguments: arguments}) for name, arguments in calls]
        return "\n".join(f"{self.begins[0]}\n{text}\n{self.end}" for text in texts)

    def read(self, text: str, names: set[str]) -> list[ToolCall]:
        """The calls in a text between the marks; none if it is something else."""
        found = []
        for value in _values(text):
            name = value.get("name") if isinstance(value, dict) else None
            if not isinstance(name, str) or not (self.is_marked or name in names):
                return []
            given = value.get("arguments", value.get("parameters", {}))
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            found.append(ToolCall(_new_id(self.id_length), name, arguments))
        return found

    def grammar(self, tools: Sequence[Tool], *, several: bool, optional: bool) -> str:
        """In Lark's notation: an answer of calls; `optional`: of any text, and calls that are as they should be."""
        schema = {"anyOf": [self._schema(tool) for tool in tools], "x-guidance": PLAIN}
        call = f"call: %json {json.dumps(schema)}\n"
        if not self.is_marked:
            listed = 'start: "[" call (", " call)* "]"\n' if several else 'start: "[" call "]"\n'
            return (listed if self.listed else "start: call\n") + call
        begin, end = json.dumps(self.begins[0]), json.dumps(f"\n{self.end}")
        body = f'body: "\\n" call {end}\n{call}'
        more = f' ("\\n" {begin} body)*' if several else ""
        if not optional:
            return f"start: {begin} body{more}\n{body}"
        mark = "".join(f"\\x{ord(letter):02x}" for letter in self.begins[0])
        text = f"TEXT: /(?s:.*)/ & ~/(?s:.*{mark}.*)/\nprose[suffix={begin}]: /(?s:.*)/\n"
        return f"start: TEXT | prose body{more}\n{text}{body}"

    def _schema(self, tool: Tool) -> dict[str, Any]:
        arguments = tool.parameters or {"type": "object"}
        return {
            "type": "object",
            "properties": {"name": {"const": tool.name}, self.arguments: arguments},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


HERMES = ToolFormat(("<tool_call>",), "</tool_call>")  # Qwen's, too
LLAMA3 = ToolFormat(("{",), "", at_start=True, arguments="parameters")
MISTRAL = ToolFormat(("[{",), "", at_start=True, listed=True, id_length=9)
FENCED = ToolFormat(
    ("```tool_call", "```tool_code", "```json"), "```", result=("```tool_output\n", "\n```")
)  # what Gemma was taught to write, by its own words


def format_of(template: str) -> ToolFormat:
    """By what a chat template has in it."""
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or "ipython" in template:
        return LLAMA3
    return FENCED if "<start_of_turn>" in template else HERMES


def knows_tools(template: str) -> bool:
    return "tools" in template


def as_json(tool: Tool) -> dict[str, Any]:
    """As templates expect it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def without_tools(messages: Sequence[Message], tools: Sequence[Tool], format: ToolFormat) -> list[Message]:
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
    example = (
        f'{format.begins[0]}\n{{"name": "the function", "arguments": {{"its": "arguments"}}}}\n{format.end}'
    )
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


def _new_id(length: int) -> str:
    return f"call_{uuid4().hex[:length]}" if length > 9 else uuid4().hex[:length]
