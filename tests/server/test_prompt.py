"""Prompts from conversations: chat template, tools, reasoning and structured output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM
from tandem.errors import RequestError
from tandem.server.core.prompt import GenerationRequest, build_prompt
from tandem.server.core.tool_calls import Tool
from tests.cli.tiny_model import CHATML, write_tiny_model

pytestmark = pytest.mark.fast

# Like Qwen 3's: tools in the system message, calls and results in tags, reasoning unless it is disabled.
QWEN = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call></tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>
{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>
{% endif %}"""
DEEPSEEK = CHATML + "{{ '<think>\\n' }}"
HI = [{"role": "user", "content": "hi"}]
TOOL = Tool("f", "Does it.", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
THINKING = {"template_kwargs": {"enable_thinking": True}}


@contextmanager
def opened(folder: Path, template: str) -> Iterator[LLM]:
    with LLM(write_tiny_model(folder / "m.gguf", template=template), threads=1, context=2048, batch=1) as llm:
        yield llm


def text(llm: LLM, **request: Any) -> str:
    return llm.tokenizer.decode(
        build_prompt(llm, GenerationRequest("m", messages=HI, **request)).ids, special=True
    )


def allows(llm: LLM, answer: str, **request: Any) -> bool:
    """Whether the grammar of a request accepts the whole response."""
    prompt = build_prompt(llm, GenerationRequest("m", messages=HI, **request))
    params = {**prompt.params, "max_tokens": 5000}
    constraint = llm.prepare(prompt.ids, **params).sequence.constraint
    assert constraint is not None
    matcher, ids = constraint._matcher, llm.tokenizer.encode(answer, bos=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_a_template_with_tool_support_renders_tools(tmp_path: Path) -> None:
    with opened(tmp_path, QWEN) as llm:
        assert '"name": "f"' in text(llm, tools=[TOOL]) and "f" not in text(
            llm, tools=[TOOL], tool_choice="none"
        )
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
        messages = [
            *HI,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "5"},
        ]
        ids = build_prompt(llm, GenerationRequest("m", messages=messages, tools=[TOOL])).ids
        assert '<tool_call>{"x": 3}</tool_call>' in llm.tokenizer.decode(ids, special=True)


def test_tools_are_described_if_the_template_has_no_support(tmp_path: Path) -> None:
    with opened(tmp_path, CHATML) as llm:
        prompt = text(llm, tools=[TOOL])
        assert (
            prompt.startswith("<|im_start|>system\nYou can call these functions:") and "<tool_call>" in prompt
        )


def test_the_grammar_of_calls(tmp_path: Path) -> None:
    good = '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>'
    wrong = good.replace("3", '"3"')
    with opened(tmp_path, CHATML) as llm:
        required: Any = {"tools": [TOOL], "tool_choice": "required"}
        assert allows(llm, good, **required) and allows(llm, f"{good}\n{good}", **required)
        assert not allows(llm, f"{good}\n{good}", **required, parallel_tool_calls=False)
        for answer in (wrong, "Hello", f"Hello {good}", good.replace('"f"', '"g"')):
            assert not allows(llm, answer, **required)
        strict: Any = {"tools": [Tool(TOOL.name, "", TOOL.parameters, strict=True)]}
        for answer in (good, "Hello", f"Hello {good}", "a <tool b"):
            assert allows(llm, answer, **strict)
        assert not allows(llm, wrong, **strict) and not allows(llm, f"Hello {wrong}", **strict)
        assert "grammar" not in build_prompt(llm, GenerationRequest("m", messages=HI, tools=[TOOL])).params
        assert allows(llm, good, **required, params={"json_schema": {}}), "the schema is for a text"
        with pytest.raises(RequestError, match="not both"):
            text(llm, **required, params={"regex": "a"})
        with pytest.raises(RequestError, match="there are no tools"):
            build_prompt(llm, GenerationRequest("m", messages=HI, tool_choice="required"))


@pytest.mark.parametrize("template", [CHATML, QWEN])
def test_a_response_in_json_or_calls(tmp_path: Path, template: str) -> None:
    """With tools and a JSON schema, the response is a call or JSON."""
    good = '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with opened(tmp_path, template) as llm:
        for strict in (False, True):
            request: Any = {"tools": [Tool(TOOL.name, "", TOOL.parameters, strict=strict)]}
            for answer in (good, '{"a": 1}', f"{good}\n{good}"):
                assert allows(llm, answer, **request, params={"json_schema": schema})
            for answer in ("Hello", '{"a": "b"}', good.replace("3", '"3"')):
                assert not allows(llm, answer, **request, params={"json_schema": schema})


@pytest.mark.parametrize("text", ["<|python_tag|>", "[TOOL_CALLS]"])
def test_the_grammar_of_calls_without_tags(tmp_path: Path, text: str) -> None:
    good = '{"name": "f", "parameters": {"x": 3}}'
    if text == "[TOOL_CALLS]":
        good = '[TOOL_CALLS][{"name": "f", "arguments": {"x": 3}, "id": "abc123XYZ"}]'
    with opened(tmp_path, CHATML + "{# " + text + " #}") as llm:
        required: Any = {"tools": [TOOL], "tool_choice": "required"}
        assert allows(llm, good, **required) and not allows(llm, "Hello", **required)
        strict: Any = {"tools": [Tool(TOOL.name, "", TOOL.parameters, strict=True)]}
        assert allows(llm, good, **strict) and allows(llm, "Hello {", **strict)
        assert not allows(llm, good.replace("3", '"3"'), **strict)


def test_schemas_of_tools_may_refer_to_themselves(tmp_path: Path) -> None:
    """Like pydantic's schemas."""
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
            "required": ["next"], "additionalProperties": False}  # fmt: skip
    tool = Tool('say "ü"', "", {"$ref": "#/$defs/Node", "$defs": {"Node": node}})
    call = json.dumps({"name": tool.name, "arguments": {"next": {"next": None}}})
    with opened(tmp_path, CHATML) as llm:
        required: Any = {"tools": [TOOL, tool], "tool_choice": "required"}
        assert allows(llm, f"<tool_call>\n{call}\n</tool_call>", **required)
        assert not allows(llm, f"<tool_call>\n{call.replace('null', '1')}\n</tool_call>", **required)


def test_reasoning_comes_before_structured_output(tmp_path: Path) -> None:
    schema: Any = {
        "params": {"json_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    }
    with opened(tmp_path, QWEN) as llm:
        assert allows(llm, "{}", **schema) and allows(llm, "<think>\nhm {\n</think>\n\n{}", **schema)
        assert not allows(llm, "<think>hm</think>\nno", **schema)
        off = build_prompt(
            llm, GenerationRequest("m", messages=HI, template_kwargs={"enable_thinking": False}, **schema)
        )
        assert (
            off.params == schema["params"]
            and "json_schema" in off.params
            and not off.new_parser().push("x").reasoning
        )
        assert allows(llm, '<think>so</think><tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>',
                      tools=[TOOL], tool_choice="required")  # fmt: skip
    with opened(tmp_path, DEEPSEEK) as llm:  # its prompt ends with <think>
        assert allows(llm, "hm</think>\n{}", **schema) and not allows(llm, "{}", **schema)
        delta = (
            build_prompt(llm, GenerationRequest("m", messages=HI))
            .new_parser()
            .push("hm</think>yes", last=True)
        )
        assert (delta.reasoning, delta.text) == ("hm", "yes")


def test_a_final_assistant_message_is_continued(tmp_path: Path) -> None:
    with opened(tmp_path, CHATML) as llm:
        messages = [*HI, {"role": "assistant", "content": "Well,"}]
        for continues, end in ((True, "assistantWell,"), (False, "Well,<|im_end|>\n<|im_start|>assistant")):
            prompt = build_prompt(
                llm, GenerationRequest("m", messages=messages, continue_final_message=continues)
            )
            assert llm.tokenizer.decode(prompt.ids, special=True).endswith(end)


def test_variables_of_the_template(tmp_path: Path) -> None:
    with opened(tmp_path, QWEN) as llm:
        assert text(llm, template_kwargs={"enable_thinking": False}).endswith("<think></think>\n")
        with pytest.raises(RequestError, match="may not set messages"):
            text(llm, template_kwargs={"messages": []})


def test_a_required_call_from_prompt_to_parser(tmp_path: Path) -> None:
    """The grammar makes a random model write a call, and the parser reads it."""
    with opened(tmp_path, CHATML) as llm:
        tool = Tool("f", "", {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"],
                              "additionalProperties": False})  # fmt: skip
        request = GenerationRequest(
            "m", messages=HI, tools=[tool], tool_choice="required", parallel_tool_calls=False
        )
        prompt = build_prompt(llm, request)
        result = llm.generate(prompt.ids, **prompt.params, max_tokens=300)
        [call] = prompt.new_parser().push(result.text, last=True).tool_calls
        assert call.name == "f" and json.loads(call.arguments)["x"] in (1, 2)
