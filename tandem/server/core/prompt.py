"""A conversation as a prompt: the model's template, its tools, its thoughts, and the form its answer must have."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.engine.llm import LLM
from tandem.errors import RequestError
from tandem.model.chat_formats import BY_TOKEN
from tandem.server.core import tool_calls
from tandem.server.core.generation import GenerationRequest, Message, Tool
from tandem.server.core.output_parser import THINK_END, THINK_START, OutputParser

OURS = {"messages", "tools", "self"}  # variables that a request may not set
# Between the parts of JSON: a space, or a new line. A weak model would fill its answer with them if it could.
GAPS = {"whitespace_pattern": r"( |\r?\n[ \t]{0,24})?"}
FORMS = ("json_schema", "regex", "grammar", "choices")


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    params: dict[str, Any]  # of SamplingParams
    new_parser: Callable[[], OutputParser]  # for each answer
    echoes: bool = False  # it is part of the answer
    text: str = ""


def build_prompt(llm: LLM, request: GenerationRequest) -> Prompt:
    """What the engine gets for a request."""
    schema = request.params.get("json_schema")
    if isinstance(schema, dict):
        request.params["json_schema"] = {"x-guidance": GAPS, **schema}
    if request.prompt is None:
        return _chat(llm, request)
    text, ids = "", request.prompt
    if isinstance(ids, str):
        text, ids = ids, llm.tokenize(ids, special=True)
    elif request.echo:
        text = llm.tokenizer.decode(ids, special=True)
    return Prompt(ids, request.params, OutputParser, request.echo, text)


def _chat(llm: LLM, request: GenerationRequest) -> Prompt:
    source = llm.chat_template or " ".join(text for text in BY_TOKEN if llm.tokenizer.find(text) is not None)
    tools = request.tools if request.tool_choice != "none" else ()
    format = tool_calls.tool_format_for(source)
    messages, variables = _for_template(request.messages), dict(request.template)
    if taken := OURS & variables.keys():
        raise RequestError(f"chat_template_kwargs may not set {min(taken)}")
    if tool_calls.supports_tools(source):
        variables["tools"] = [tool_calls.as_json(tool) for tool in tools] or None
    else:
        messages = tool_calls.render_tools_as_text(messages, tools, format)
    begun = messages.pop()["content"] if _continues(request) else ""
    ids = llm.chat_ids(messages, **variables)
    if begun:
        ids += llm.tokenizer.encode(begun, bos=False)
    thinking = _ends_with_thought(llm, ids)
    may_think = thinking or (
        THINK_START in source and variables.get("enable_thinking") is not False and not begun
    )
    params = _formed(request, tools, format, thinking=thinking, may_think=may_think)
    names = {tool.name for tool in tools}
    how: dict[str, Any] = {
        "several": request.parallel_tools,
        "thinking": thinking,
        "id_length": format.id_length,
    }
    return Prompt(ids, params, lambda: OutputParser(names, **how))


def _continues(request: GenerationRequest) -> bool:
    return request.continue_last and len(request.messages) > 1 and request.messages[-1]["role"] == "assistant"


def _for_template(messages: Sequence[Message]) -> list[Message]:
    """Arguments of calls as objects, which templates write as they should be."""
    return [{**message, **_calls(message)} for message in messages]


def _calls(message: Message) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return {}
    return {"tool_calls": [{**call, "function": _parsed(call["function"])} for call in message["tool_calls"]]}


def _parsed(function: dict[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"] or "{}")}
    except (ValueError, RecursionError):
        return function


def _ends_with_thought(llm: LLM, ids: list[int]) -> bool:
    return llm.tokenizer.decode(ids[-8:], special=True).rstrip().endswith(THINK_START)


def _formed(
    request: GenerationRequest,
    tools: Sequence[Tool],
    format: tool_calls.ToolFormat,
    *,
    thinking: bool,
    may_think: bool,
) -> dict[str, Any]:
    """The parameters with a grammar for calls that are required, or whose arguments must fit (`strict`), or that may
    come instead of JSON. A thought may come before what has a form."""
    params = dict(request.params)
    required, strict = request.tool_choice == "required", any(tool.strict for tool in tools)
    if required and not tools:
        raise RequestError("tool_choice says that a tool must be called, and there are no tools: give some")
    schema = params.get("json_schema")
    if required or (strict and schema is None):
        if any(params.get(form) is not None for form in FORMS):
            raise RequestError("give a form of the answer, or tools that are required or strict, not both")
        params["grammar"] = format.grammar(tools, several=request.parallel_tools, optional=not required)
    elif schema is not None and (tools or may_think):
        schema = params.pop("json_schema")
        params["grammar"] = (
            f"start: json\njson: %json {schema if isinstance(schema, str) else json.dumps(schema)}\n"
        )
        if tools:
            calls = format.grammar(tools, several=request.parallel_tools, optional=False)
            params["grammar"] = params["grammar"].replace("json\n", "json | called\n", 1)
            params["grammar"] += calls.replace("start:", "called:", 1)
    if may_think and (required or schema is not None):
        params["grammar"] = _after_thought(params["grammar"], begun=thinking)
    return params


def _after_thought(grammar: str, *, begun: bool) -> str:
    thought = "thought" if begun else f'("{THINK_START}" thought)?'
    rules = f'thought[suffix="{THINK_END}"]: /(?s:.*)/\nSPACE: /\\s+/\n'
    return f"start: {thought} SPACE? rest\n{rules}{grammar.replace('start:', 'rest:', 1)}"
