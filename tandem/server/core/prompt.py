"""GenerationRequest, which the requests of all APIs become, and the prompt that is built from it: chat template, tools,
reasoning, and the grammar of a structured output."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import BaseModel

from tandem.engine.images import with_context
from tandem.engine.llm import LLM
from tandem.engine.params import CONSTRAINTS, SamplingParams
from tandem.engine.structured_output import grammar_text, is_simple
from tandem.errors import ContextError, RequestError
from tandem.model.chat_formats import BY_TOKEN
from tandem.model.fill_in_middle import prompt_ids
from tandem.model.harmony import FINAL
from tandem.model.tokenizer import Tokenizer
from tandem.server.core import conversation
from tandem.server.core.images import joined, text_of
from tandem.server.core.output_parser import HARMONY, OutputParser, ReasoningTags, reasoning_for
from tandem.server.core.schemas import quoted
from tandem.server.core.tool_calls import Message, Tool
from tandem.server.core.tool_formats import HARMONY as HARMONY_CALLS
from tandem.server.core.tool_formats import HERMES, ToolFormat, tool_format_for
from tandem.server.presets import SAMPLING, Preset

WHOLE_CONTEXT = 2**31  # as `max_tokens`: generate until the context is full
DEFAULT_MIN_P = 0.1
VERBOSITY = {"low": "Answer briefly.", "high": "Answer in detail."}  # of a request -> what the model is told
RESERVED_VARIABLES = {"messages", "tools", "self"}  # template variables that a request may not set
# Whitespace allowed between JSON tokens: one space, or a line break with indentation. With free whitespace a weak model
# would fill its response with it.
JSON_WHITESPACE = {"whitespace_pattern": r"( |\r?\n[ \t]{0,24})?"}


@dataclass
class GenerationRequest:
    """One prompt or conversation, and how to generate `n` responses to it."""

    model: str | None  # None: the server's first model
    prompt: str | list[int] | list[int | str] | None = None  # text, token ids or both; None: use `messages`
    suffix: str | None = None  # of a text `prompt`: the response is to come between them (fill-in-the-middle)
    files: Sequence[tuple[str, str]] = ()  # with `suffix`: (name, text) of other files of the project
    messages: list[Message] = field(default_factory=list)
    # Fields of SamplingParams; max_tokens may be 0 with `echo`.
    params: dict[str, Any] = field(default_factory=dict)
    echo: bool = False  # return the prompt before the completion
    n: int = 1  # responses
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"  # auto, none or required
    parallel_tool_calls: bool = True  # a response may contain several calls
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables of the chat template
    continue_final_message: bool = False  # continue the last message if it is the assistant's
    context: Sequence[int] = ()  # token ids before the conversation, as Ollama's clients send them back
    prompt_ids: list[int] = field(default_factory=list)  # of the prompt, once it is built
    truncate: bool = False  # leave the oldest messages out if the prompt is too long
    dropped_messages: int = 0  # how many were left out
    keep_alive: float | None = None  # seconds that the model stays loaded; None: the server's setting
    given: frozenset[str] = frozenset()  # the `params` that the client has set; a preset may set the others


def sampling_params(
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
) -> dict[str, Any]:
    """The sampling parameters of a request as SamplingParams takes them.

    A request that sets none of them gets temperature 1 and min_p 0.1, without which small models sample from the long
    tail. `top_p` 0 means greedy and `top_k` -1 means off, as in other engines.
    """
    if temperature is None and top_p is None and top_k is None and min_p is None:
        return {"temperature": 1.0, "min_p": DEFAULT_MIN_P}
    top_k = 1 if top_p == 0 else max(0, top_k or 0)
    given = {"top_p": top_p or None, "top_k": top_k or None, "min_p": min_p}
    return {"temperature": 1.0 if temperature is None else temperature} | {
        name: value for name, value in given.items() if value is not None
    }


# Fields of requests -> those of SamplingParams.
PARAM_NAMES = {name: name for name in SAMPLING} | {
    "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "num_predict": "max_tokens",
    "n_predict": "max_tokens", "repetition_penalty": "repeat_penalty", "stop_sequences": "stop",
}  # fmt: skip


def given_params(body: BaseModel | None) -> frozenset[str]:
    """The parameters of SamplingParams that a request sets."""
    values = {} if body is None else {name: getattr(body, name) for name in body.model_fields_set}
    given = {PARAM_NAMES[name] for name, value in values.items() if value is not None and name in PARAM_NAMES}
    return frozenset(given | ({"top_k"} if values.get("top_p") == 0 else set()))  # greedy


def with_preset(request: GenerationRequest, preset: Preset) -> None:
    """Sets what a preset has and the request has not."""
    defaults = {name: value for name, value in preset.sampling.items() if name not in request.given}
    request.params = {**request.params, **defaults}
    request.template_kwargs = {**preset.chat_template_kwargs, **request.template_kwargs}
    if request.prompt is None and not request.context:
        begun = [dict(message) for message in preset.messages]
        if preset.system and not any(one["role"] == "system" for one in request.messages):
            begun.insert(0, {"role": "system", "content": preset.system})
        request.messages = [*begun, *request.messages]


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    params: dict[str, Any]  # for SamplingParams
    new_parser: Callable[[], OutputParser]  # called once for each response
    echo: bool = False  # return the prompt before the completion
    text: str = ""  # with `echo`
    grammar: str | None = None  # the output constraint, in llguidance's form, if it needs a check


def build_prompt(llm: LLM, request: GenerationRequest, limit: int | None = None) -> Prompt:
    """The prompt's token ids, sampling parameters and output parser of a request. `limit`: stops encoding
    once there are more than `limit` tokens."""
    schema = request.params.get("json_schema")
    if isinstance(schema, dict):
        request.params["json_schema"] = {"x-guidance": JSON_WHITESPACE, **schema}
    if request.prompt is None:
        return _build_chat_prompt(llm, request, limit)
    text, ids = "", _text_ids(llm, request, limit)
    if request.echo and isinstance(request.prompt, str):
        text = request.prompt
    elif request.echo and (limit is None or len(ids) <= limit):
        text = llm.tokenizer.decode(ids, special=True)
    return Prompt(ids, request.params, OutputParser, request.echo, text, _grammar(request.params))


def drop_oldest(request: GenerationRequest) -> bool:
    """Drops a quarter of the oldest messages of a conversation, up to a user's; never system messages or the last of
    the user. Returns whether there was one to drop."""
    system = [one for one in request.messages if one["role"] == "system"]
    others = [one for one in request.messages if one["role"] != "system"]
    starts = [place for place, one in enumerate(others) if place and one["role"] == "user"]
    if not starts:
        return False
    cut = next(place for place in starts if place >= len(others) // 4 or place == starts[-1])
    request.messages, request.dropped_messages = [*system, *others[cut:]], request.dropped_messages + cut
    return True


def with_verbosity(messages: list[Message], verbosity: str | None) -> list[Message]:
    """The conversation, with what `verbosity` asks for at the end of the system message."""
    return messages if verbosity not in VERBOSITY else with_system(messages, VERBOSITY[verbosity])


def with_system(messages: list[Message], text: str) -> list[Message]:
    """The conversation, with a text at the end of the system message."""
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": joined(messages[0]["content"], f"\n\n{text}")}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _text_ids(llm: LLM, request: GenerationRequest, limit: int | None) -> list[int]:
    """The token ids of a prompt that is no conversation."""
    given = request.prompt if isinstance(request.prompt, list) else [request.prompt or ""]
    if request.suffix is not None:
        if not isinstance(request.prompt, str):
            raise RequestError("suffix needs a prompt that is a text: send no token ids with it")
        return prompt_ids(llm.tokenizer, request.prompt, request.suffix, request.files, limit)
    return mixed_ids(llm.tokenizer, given, limit)


def mixed_ids(tokenizer: Tokenizer, parts: Sequence[int | str], limit: int | None) -> list[int]:
    """The token ids of a prompt of token ids and texts."""
    ids: list[int] = []
    for place, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
        else:
            follows: dict[str, Any] = {"bos": False, "continues": True} if place else {}
            ids += tokenizer.encode(part, special=True, limit=limit, **follows)
        if limit is not None and len(ids) > limit:
            break
    return ids


def _build_chat_prompt(llm: LLM, request: GenerationRequest, limit: int | None) -> Prompt:
    if limit is not None and len(request.messages) > limit:  # each has at least one token
        raise ContextError(
            f"the prompt is too long: this model's maximum context length is {llm.context} tokens, and it has "
            f"{len(request.messages)} messages: shorten it",
            len(request.messages),
            llm.context,
        )
    # A model without a template is recognised by its control tokens.
    template = llm.chat_template or " ".join(
        text for text in BY_TOKEN if llm.tokenizer.find(text) is not None
    )
    tools = request.tools if request.tool_choice != "none" else ()
    messages, variables = list(request.messages), dict(request.template_kwargs)
    if reserved := RESERVED_VARIABLES & variables.keys():
        raise RequestError(f"chat_template_kwargs may not set {min(reserved)}: remove it")
    is_harmony = llm.tokenizer.harmony is not None
    has_tools = bool(tools) or any(
        message["role"] == "tool" or message.get("tool_calls") for message in messages
    )
    format = HARMONY_CALLS if is_harmony else tool_format_for(template) if has_tools else HERMES
    reasoning = HARMONY if is_harmony else reasoning_for(template)
    final = reasoning.final if reasoning else ""
    if is_harmony:
        messages = [_with_analysis(message) for message in messages]
    if has_tools:
        messages, about_tools = conversation.for_template(messages, tools, template, format)
        variables |= about_tools
    elif "tools" not in template:  # without the fields that such a template may not know
        messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    prefill = text_of(messages.pop()["content"], "a message that is continued") if _continues(request) else ""
    ids = llm.chat_ids(messages, limit, **variables)
    if request.context:
        ids = with_context(request.context, ids, llm.tokenizer.bos_id)
    if prefill:
        ids += _answer_header(llm) + llm.tokenizer.encode(prefill, bos=False, limit=limit)
    end = llm.tokenizer.decode(ids[-8:], special=True).rstrip()
    begun = reasoning is not None and end.endswith(reasoning.start)
    is_off = (
        prefill or variables.get("enable_thinking") is False or (reasoning and end.endswith(reasoning.end))
    )
    if is_off and not begun:
        reasoning = None
    params = _constrained_params(request, tools, format, reasoning, begun=begun, final=final)
    # A constraint does not begin with a header.
    is_answer = params.get("grammar") == request.params.get("grammar")
    constrained = is_answer and any(params.get(constraint) is not None for constraint in CONSTRAINTS)
    at_once = variables.get("enable_thinking") is False and not tools
    if not prefill and (constrained or at_once):
        ids += _answer_header(llm)
    new_parser = partial(
        OutputParser,
        {tool.name: tool.parameters for tool in tools},
        parallel=request.parallel_tool_calls,
        reasoning=reasoning if begun else None,
        id_length=format.id_length,
    )
    return Prompt(ids, params, new_parser, grammar=_grammar(params))


def _with_analysis(message: Message) -> Message:
    """A message with the reasoning before its tool calls under the name that Harmony's template has for it; the
    template takes reasoning or text, not both."""
    reasoning = message.get("reasoning_content")
    if not reasoning or not message.get("tool_calls"):
        return message
    content = text_of(message["content"], "a message with tool calls")
    said = [text for text in (reasoning, content) if text]
    return {**message, "thinking": "\n\n".join(said), "content": ""}


def _answer_header(llm: LLM) -> list[int]:
    """The tokens before an answer that begins without reasoning, in Harmony."""
    return llm.tokenizer.encode(FINAL, special=True, bos=False) if llm.tokenizer.harmony else []


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
    """Whether the response continues the last message: an assistant's text, not its calls."""
    messages = request.messages
    if not request.continue_final_message or len(messages) < 2 or messages[-1].get("tool_calls"):
        return False
    return bool(messages[-1]["role"] == "assistant" and messages[-1]["content"])


def _constrained_params(
    request: GenerationRequest,
    tools: Sequence[Tool],
    format: ToolFormat,
    reasoning: ReasoningTags | None,
    *,
    begun: bool,
    final: str,
) -> dict[str, Any]:
    """The sampling parameters, with a grammar where tool calls are required, `strict`, or an alternative to JSON.
    `reasoning` may come before the constrained output; `begun`: the prompt ends with its start. `final`: the header
    of a text."""
    params = dict(request.params)
    required, strict = request.tool_choice == "required", any(tool.strict for tool in tools)
    if required and not tools:
        raise RequestError(
            "tool_choice requires a tool call, but there are no tools: add some to the request"
        )
    schema = params.get("json_schema")
    if required:  # the response is a call: a schema for its text has nothing to say
        schema = params.pop("json_schema", None) and None
    if required or (strict and schema is None):
        if any(params.get(constraint) is not None for constraint in CONSTRAINTS):
            kind = "tool_choice: required" if required else "strict tools"
            raise RequestError(
                f"{kind} and a regex, grammar or choice for the response exclude each other: use one, not both"
            )
        params["grammar"] = format.grammar(tools, parallel=request.parallel_tool_calls, optional=not required)
    elif schema is not None and (tools or reasoning):
        schema = params.pop("json_schema")
        text = schema if isinstance(schema, str) else json.dumps(schema)
        params["grammar"] = f"start: {quoted(final) if final else ''} json\njson: %json {text}\n"
        if tools:
            calls = format.grammar(tools, parallel=request.parallel_tool_calls, optional=False)
            params["grammar"] = params["grammar"].replace("json\n", "json | called\n", 1)
            params["grammar"] += calls.replace("start:", "called:", 1)
    if reasoning and (required or schema is not None):
        params["grammar"] = _with_reasoning(params["grammar"], reasoning, begun=begun)
    return params


def _with_reasoning(grammar: str, reasoning: ReasoningTags, *, begun: bool) -> str:
    """A grammar with reasoning before `grammar`: optional, or required if the prompt has `begun` it."""
    before = f"reasoning {quoted(reasoning.answer) if reasoning.answer else ''}"
    if not begun:
        before = f"({quoted(reasoning.start)} {before})?"
    space = "" if reasoning.answer else "SPACE?"
    rules = f"reasoning[suffix={quoted(reasoning.end)}]: /(?s:.*)/\nSPACE: /\\s{{1,4}}/\n"
    return f"start: {before} {space} rest\n{rules}{grammar.replace('start:', 'rest:', 1)}"
