"""The output parser finds reasoning and tool calls however the text is cut into tokens, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.server.core.conversation import for_template
from tandem.server.core.output_parser import NO_USAGE, REASONING, Delta, GenerationResult, OutputParser
from tandem.server.core.prompt import GenerationRequest
from tandem.server.core.tool_calls import Tool, ToolCall
from tandem.server.core.tool_formats import GEMMA, HERMES, LLAMA_3, MISTRAL, tool_format_for
from tandem.server.ollama import chat as ollama

pytestmark = pytest.mark.fast

TOOLS: dict[str, Any] = {"f": {}, "g": {}}
F3 = ("f", {"x": 3})
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>'
PYTHON = "```tool_code\nprint(f(x=3))\n```"

# (has tools, prompt ends with <think>, output, text, reasoning, calls)
ANSWERS: list[tuple[bool, bool, str, str, str, list[tuple[str, Any]]]] = [
    (False, False, "Hello there.", "Hello there.", "", []),
    (False, False, "  a < b <tool_call>", "  a < b <tool_call>", "", []),
    (False, False, "<think>\nhm, <b>\n</think>\n\nYes.\n", "Yes.\n", "hm, <b>", []),
    (False, True, "so</think>Yes", "Yes", "so", []),
    (False, True, "never ends", "", "never ends", []),
    (False, False, "<thin> air", "<thin> air", "", []),
    (False, False, "I <think> so</think>", "I <think> so</think>", "", []),
    (False, False, '{"name": "f"}', '{"name": "f"}', "", []),
    (True, False, CALL, "", "", [F3]),
    (True, False, f"Well.\n{CALL}\n{CALL}\n", "Well.", "", [F3, F3]),
    (True, False, f"<think>\nlook\n</think>\n\n{CALL}", "", "look", [F3]),
    (True, False, '<tool_call>[{"name": "f", "arguments": {"x": 3}}]</tool_call>', "", "", [F3]),
    (True, False, '<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', "", "", [("g", {})]),
    (True, False, '<tool_call>{"name": "new"}</tool_call>', '<tool_call>{"name": "new"}</tool_call>', "", []),
    (True, False, "<tool_call>what?</tool_call> no", "<tool_call>what?</tool_call> no", "", []),
    (True, False, 'Well. <tool_call>{"name": "f", "arg', "Well.", "", []),  # cut
    (True, False, '{"name": "f", "arg', "", "", []),
    (True, False, "a <tool_call", "a <tool_call", "", []),
    (True, False, '<tool_call>{"name": "f", "arguments": {"x": 3}}', "", "", [F3]),
    (True, False, "a <tool b\n", "a <tool b\n", "", []),
    (True, False, '{"name": "f", "parameters": {"x": 3}}', "", "", [F3]),  # Llama 3
    (True, False, '\n{"name": "f", "parameters": {"x": 3}}; {"name": "g"}', "", "", [F3, ("g", {})]),
    (True, False, '{"name": "unknown"}', '{"name": "unknown"}', "", []),
    (True, False, 'Use {"name": "f"}', 'Use {"name": "f"}', "", []),
    (True, False, ' [{"name": "f", "arguments": {"x": 3}}]', "", "", [F3]),  # Mistral
    (True, False, "[1, 2]", "[1, 2]", "", []),
    (True, False, '```tool_call\n{"name": "f", "arguments": {"x": 3}}\n```', "", "", [F3]),  # Gemma
    (True, False, '```json\n{"name": "f", "parameters": {"x": 3}}\n```\n', "", "", [F3]),
    (True, False, f"Sure:\n{PYTHON}", "Sure:", "", [F3]),
    (True, False, "```tool_code\nimport os\n```", "```tool_code\nimport os\n```", "", []),
    (True, False, "```python\nf(x=3)\n```", "```python\nf(x=3)\n```", "", []),
    (True, False, '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', "", []),
    (True, False, "", "", "", []),
    (True, False, CALL.replace("3", '"}]</tool_call>\\"{"'), "", "", [("f", {"x": '}]</tool_call>"{'})]),
    (True, False, CALL.replace("3", '"a\n\tb"'), "", "", [("f", {"x": "a\n\tb"})]),  # invalid JSON with a clear meaning
    (True, False, CALL.replace("3}}", "3}") + " Yes.", "Yes.", "", [F3]),  # a missing brace
    (True, False, CALL.replace("3}}", '3}, "id": {"y": 4}}') + CALL, "", "", [F3, F3]),
    (True, False, '[{"name": "f", "arguments": {"x": 3}, "id": "1"}, {"name": "g"}]', "", "", [F3, ("g", {})]),
    (True, False, '{"name": "f", "parameters": {"x": [{}, 3]}}\n{"name": "f", "parameters": {"x": 3}} .', "", "",
     [("f", {"x": [{}, 3]}), F3]),
    (True, False, '{{"name": "f", "arguments": {"x": 3}}}', "", "", [F3]),
    (True, False, '{"arguments": {"x": 3}, "name": "f"}', "", "", [F3]),
]  # fmt: skip


def gathered(deltas: list[Delta]) -> list[ToolCall]:
    answer = GenerationResult()
    for one in deltas:
        answer.add(Delta(arguments=one.arguments, tool_calls=one.tool_calls))
    return answer.tool_calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer[2][:30])
def test_responses_are_parsed(answer: Any, size: int) -> None:
    has_tools, thinking, output, text, reasoning, calls = answer
    parser = OutputParser(TOOLS if has_tools else None, reasoning=REASONING[0] if thinking else None)
    parts = [output[i : i + size] for i in range(0, len(output), size)]
    delta = [parser.push(part) for part in parts] + [parser.push("", last=True)]
    assert "".join(one.text for one in delta) == text
    assert "".join(one.reasoning for one in delta).rstrip() == reasoning
    found = gathered(delta)
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert len({call.id for call in found}) == len(found) and parser.called == bool(calls)


def test_text_is_not_held_back_without_need() -> None:
    parser = OutputParser(TOOLS)
    assert parser.push("Hello").text == "Hello"
    assert parser.push(" <to").text == ""
    assert parser.push("day").text == " <today"


def test_arguments_are_streamed() -> None:
    parser = OutputParser(TOOLS)
    delta = [parser.push(letter) for letter in f"{CALL}\n{CALL}"]
    begun = [i for i, one in enumerate(delta) if one.tool_calls]
    assert [delta[i].tool_calls[0].arguments for i in begun] == ["{", "{"]  # sent with their names
    for i in begun:
        assert [one.arguments for one in delta[i + 1 : i + 8]] == list('"x": 3}')
    cut = [OutputParser(TOOLS).push(CALL[: CALL.index("3")], last=True)]
    assert [(call.name, call.arguments) for call in gathered(cut)] == [("f", '{"x": ')]


def test_ollama_gets_complete_calls() -> None:
    async def stream(_: GenerationRequest) -> AsyncGenerator[Delta, None]:
        yield Delta(tool_calls=[ToolCall("1", "f", "{")])
        yield Delta(arguments='"x": 3')
        yield Delta(arguments="}", tool_calls=[ToolCall("2", "g", "{}")])
        yield Delta(finish_reason="tool_calls", usage=NO_USAGE)

    async def lines() -> list[Any]:
        server: Any = SimpleNamespace(stream=stream)
        body: Any = SimpleNamespace(model="m")
        found = ollama._lines(server, GenerationRequest("m"), body, 0.0, ollama._chat_body)
        return [json.loads(line) async for line in found]

    messages = [line["message"] for line in asyncio.run(lines())]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    assert calls == [{"name": "f", "arguments": {"x": 3}}, {"name": "g", "arguments": {}}]


def test_parallel_calls_can_be_disabled() -> None:
    delta = OutputParser(TOOLS, parallel=False).push(f"{CALL}\n{CALL}", last=True)
    assert len(delta.tool_calls) == 1 and not delta.text


def test_formats_by_template() -> None:
    assert tool_format_for("... <tool_call> ...") is HERMES and tool_format_for("<|im_start|>") is HERMES
    assert tool_format_for("<|start_header_id|> <|python_tag|>") is LLAMA_3
    assert tool_format_for("[INST] [TOOL_CALLS]") is MISTRAL and tool_format_for("<start_of_turn>") is GEMMA


def test_undeclared_arguments_are_excluded() -> None:
    def grammar(parameters: dict[str, Any]) -> str:
        return HERMES.grammar([Tool("f", parameters=parameters)], parallel=False, optional=False)

    declared: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
    assert '"additionalProperties": false' in grammar(declared)
    for free in ({"type": "object"}, declared | {"anyOf": [{}]}, declared | {"additionalProperties": True}):
        assert '"additionalProperties": false' not in grammar(free)


def test_a_conversation_for_a_template_without_tools() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 3}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    for message in messages:
        for one in message.get("tool_calls", []):
            one["function"]["arguments"] = json.dumps({"x": 3})
    rendered, variables = for_template(messages, [Tool("f", "Does it.")], "<|im_start|>", HERMES)
    assert not variables
    assert [message["role"] for message in rendered] == ["system", "user", "assistant", "user"]
    assert (
        rendered[0]["content"].startswith("Be kind.\n\nYou can call")
        and '"Does it."' in rendered[0]["content"]
    )
    assert rendered[2]["content"] == f"{CALL}\n{CALL}"
    assert rendered[3]["content"].count("<tool_response>") == 2
    assert messages[0]["content"] == "Be kind.", "the request itself is unchanged"
