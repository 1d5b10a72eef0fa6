"""Builds a prompt from a request: chat template, tools, reasoning, and the grammar of a structured output."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tandem.engine.llm import LLM
from tandem.engine.params import CONSTRAINTS, SamplingParams
from tandem.engine.structured_output import grammar_text, is_simple
from tandem.errors import ContextError, RequestError
from tandem.model.chat_formats import BY_TOKEN
from tandem.server.core import tool_calls
from tandem.server.core.generation import GenerationRequest, Message, Tool
from tandem.server.core.output_parser import THINK_END, THINK_START, OutputParser

RESERVED_VARIABLES = {"messages", "tools", "self"}  # template variables that a request may not set
# Whitespace allowed between JSON tokens: one space, or a line break with indentation. With free whitespace a weak model
# would fill its response with it.
JSON_WHITESPACE = {"whitespace_pattern": r"( |\r?\n[ \t]{0,24})?"}


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    params: dict[str, Any]  # for SamplingParams
    new_parser: Callable[[], OutputParser]  # called once for each response
    echo: bool = False  # return the prompt before the completion
    text: str = ""  # with `echo`
    grammar: str | None = None  # the output constraint, in llguidance's form, if it needs a check


def build_prompt(llm: LLM, request: GenerationRequest, limit: int | None = None) -> Prompt:
    """The prompt's token ids, sampling parameters and output parser of a request. `limit`: of a longer prompt, only so
    much as shows that it has more ids."""
    schema = request.params.get("json_schema")
    if isinstance(schema, dict):
        request.params["json_schema"] = {"x-guidance": JSON_WHITESPACE, **schema}
    if request.prompt is None:
        return _build_chat_prompt(llm, request, limit)
    text, ids = "", request.prompt
    if isinstance(ids, str):
        text, ids = ids, llm.tokenizer.encode(ids, special=True, limit=limit)
    elif request.echo and (limit is None or len(ids) <= limit):
        text = llm.tokenizer.decode(ids, special=True)
    return Prompt(ids, request.params, OutputParser, request.echo, text, _grammar(request.params))


def _build_chat_prompt(llm: LLM, request: GenerationRequest, limit: int | None) -> Prompt:
    if limit is not None and len(request.messages) > limit:  # each has at least one token
        raise ContextError(
            f"the prompt is too long: this model's maximum context length is {llm.context} tokens, and it has "
            f"{len(request.messages)} messages: shorten it"
        )
    # A model without a template is recognised by its control tokens.
    template = llm.chat_template or " ".join(
        text for text in BY_TOKEN if llm.tokenizer.find(text) is not None
    )
    tools = request.tools if request.tool_choice != "none" else ()
    format = tool_calls.tool_format_for(template)
    messages, variables = _with_parsed_arguments(request.messages), dict(request.template_kwargs)
    if reserved := RESERVED_VARIABLES & variables.keys():
        raise RequestError(f"chat_template_kwargs may not set {min(reserved)}: remove it")
    if tool_calls.supports_tools(template):
        variables["tools"] = [tool_calls.as_json(tool) for tool in tools] or None
    else:
        messages = tool_calls.render_tools_as_text(messages, tools, format)
    prefill = messages.pop()["content"] if _continues(request) else ""
    ids = llm.chat_ids(messages, limit, **variables)
    if prefill:
        ids += llm.tokenizer.encode(prefill, bos=False, limit=limit)
    thinking = llm.tokenizer.decode(ids[-8:], special=True).rstrip().endswith(THINK_START)
    may_think = thinking or (
        THINK_START in template and variables.get("enable_thinking") is not False and not prefill
    )
    params = _constrained_params(request, tools, format, thinking=thinking, may_think=may_think)
    new_parser = partial(
        OutputParser,
        {tool.name for tool in tools},
        parallel=request.parallel_tool_calls,
        thinking=thinking,
        id_length=format.id_length,
    )
    return Prompt(ids, params, new_parser, grammar=_grammar(params))


def _grammar(params: dict[str, Any]) -> str | None:
    given = {name: params[name] for name in CONSTRAINTS if params.get(name) is not None}
    constraint = SamplingParams(**given)
    if not constraint.constraint:
        return None
    text = grammar_text(constraint)
    schema = constraint.json_schema
    if isinstance(schema, dict) and schema.get("x-guidance") is JSON_WHITESPACE:
        plain = {name: value for name, value in schema.items() if name != "x-guidance"}
        constraint = replace(constraint, json_schema=plain)
    return None if is_simple(constraint) else text


def _continues(request: GenerationRequest) -> bool:
    messages = request.messages
    return request.continue_final_message and len(messages) > 1 and messages[-1]["role"] == "assistant"


def _with_parsed_arguments(messages: Sequence[Message]) -> list[Message]:
    """Messages whose tool calls have their arguments as objects, which templates render as JSON."""
    return [{**message, **_parsed_calls(message)} for message in messages]


def _parsed_calls(message: Message) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return {}
    return {"tool_calls": [{**call, "function": _parsed(call["function"])} for call in message["tool_calls"]]}


def _parsed(function: dict[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"] or "{}")}
    except (ValueError, RecursionError):
        return function


def _constrained_params(
    request: GenerationRequest,
    tools: Sequence[Tool],
    format: tool_calls.ToolFormat,
    *,
    thinking: bool,
    may_think: bool,
) -> dict[str, Any]:
    """The sampling parameters, with a grammar where tool calls are required, `strict`, or an alternative to JSON.
    Reasoning may come before the constrained output."""
    params = dict(request.params)
    required, strict = request.tool_choice == "required", any(tool.strict for tool in tools)
    if required and not tools:
        raise RequestError(
            "tool_choice requires a tool call, but there are no tools: add some to the request"
        )
    schema = params.get("json_schema")
    if required or (strict and schema is None):
        if any(params.get(constraint) is not None for constraint in CONSTRAINTS):
            raise RequestError(
                "structured output and required or strict tools exclude each other: use one, not both"
            )
        params["grammar"] = format.grammar(tools, parallel=request.parallel_tool_calls, optional=not required)
    elif schema is not None and (tools or may_think):
        schema = params.pop("json_schema")
        params["grammar"] = (
            f"start: json\njson: %json {schema if isinstance(schema, str) else json.dumps(schema)}\n"
        )
        if tools:
            calls = format.grammar(tools, parallel=request.parallel_tool_calls, optional=False)
            params["grammar"] = params["grammar"].replace("json\n", "json | called\n", 1)
            params["grammar"] += calls.replace("start:", "called:", 1)
    if may_think and (required or schema is not None):
        params["grammar"] = _with_reasoning(params["grammar"], started=thinking)
    return params


def _with_reasoning(grammar: str, *, started: bool) -> str:
    """A grammar with reasoning before `grammar`: optional, or required if the prompt has `started` it."""
    reasoning = "reasoning" if started else f'("{THINK_START}" reasoning)?'
    rules = f'reasoning[suffix="{THINK_END}"]: /(?s:.*)/\nSPACE: /\\s+/\n'
    return f"start: {reasoning} SPACE? rest\n{rules}{grammar.replace('start:', 'rest:', 1)}"
