"""How each model family writes tool calls: as text, as a grammar, and how the output parser recognises them.

A format is a row of a table. The calls of a response are `tag open CALL between CALL ... close`, and a CALL is `head
ARGUMENTS tail`. In the head and the tail `%name` stands for the tool's name, `%n` for a number, `%id` for a call id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import regex

from tandem.errors import RequestError
from tandem.server.core.argument_scanners import loosely
from tandem.server.core.argument_syntax import (
    GEMMA_4_LITERALS,
    JSON,
    PYTHON,
    ArgumentSyntax,
    Rules,
    TaggedArguments,
)
from tandem.server.core.schemas import ANY_TEXT, quoted
from tandem.server.core.tool_calls import Tool

# {"name": ..., "arguments": { as nearly all models write it; Qwen 2.5 copies the double brace of its template. Calls
# with their keys in another order are parsed when they are complete. No repetition is tried at a second length (*+):
# after 2,000 spaces that would take seconds for each token.
JSON_HEAD = (
    r'(?:\[\s*+)?+(?:\{\s*+)?\{\s*+(?:"(?:id|type|tool_call_id)"\s*+:\s*+"[^"\\]*+"\s*+,\s*+)*+'
    r'"(?:tool_)?name"\s*+:\s*+"(?P<name>(?:[^"\\]|\\.)*+)"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)
NAME = r"(?P<name>[^\s\[\](){}<>\"'=][^\n\[\](){}<>\"'=]{0,255}?)"
PARTS = {"%id": "/[a-zA-Z0-9]{9}/", "%n": "/[0-9]+/"}  # of heads and tails -> as a terminal of Lark


@dataclass(frozen=True)
class ToolFormat:
    """How a model family writes tool calls and reads their results."""

    tag: str  # begins the calls; "": they are the whole content of a response
    head: str
    arguments: ArgumentSyntax = JSON
    tail: str = ""
    open: str = ""
    close: str = ""
    between: str = "\n"
    each: bool = False  # each call has a tag and a close of its own
    single: bool = False  # a response has one call at most
    mark: str = ""  # what text before the calls does not have, if it is not the tag
    id_length: int = 24  # characters of a call id
    result_tags: tuple[str, str] = ("<tool_response>\n", "\n</tool_response>")  # around the result of a call

    @property
    def is_json(self) -> bool:
        """A call is a JSON object."""
        return self.head.startswith("{")

    # ---- text and grammar

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, as (name, arguments)."""
        try:
            written = [(self._head(name), self.arguments.write(arguments)) for name, arguments in calls]
        except RecursionError:
            raise RequestError(
                "the arguments of a tool call are nested too deeply: make them flatter"
            ) from None
        texts = [
            f"{head}{arguments}{self.tail}".replace("%id", f"{i:09}").replace("%n", str(i))
            for i, (head, arguments) in enumerate(written)
        ]
        texts = texts if self.each else [self.between.join(texts)]
        return self.between.join(f"{self.tag}{self.open}{text}{self.close}" for text in texts)

    def _head(self, name: str) -> str:
        return self.head.replace("%name", json.dumps(name)[1:-1] if self.is_json else name)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, optional: bool) -> str:
        """A Lark grammar of tool calls; `optional`: of text, or of text and calls. Arguments fit their schema."""
        rules = Rules()
        try:
            call = rules.add(" | ".join(self._call(rules, tool) for tool in tools))
        except RecursionError:
            raise RequestError("the parameters of a tool are nested too deeply: make them flatter") from None
        parallel = parallel and not self.single
        tag, open, between, close = map(_expression, (self.tag, self.open, self.between, self.close))
        body = f"{open} {call}" + f" ({between} {call})*" * (parallel and not self.each) + f" {close}"
        more = f" ({between} {tag} {body})*" * (parallel and self.each)
        if not optional:
            return f"start: {tag} {body}{more}\n{rules}"
        if not self.tag:
            return f"start: TEXT? | {body}\nTEXT: /(?s:[^{{\\[].*)/\n{rules}"
        letters = "".join(f"\\x{{{ord(letter):x}}}" for letter in self.mark or self.tag)
        prose = rules.until(self.tag, "TEXT" if self.mark else ANY_TEXT)
        return f"start: TEXT | {prose} {body}{more}\nTEXT: {ANY_TEXT} & ~/(?s:.*{letters}.*)/\n{rules}"

    def _call(self, rules: Rules, tool: Tool) -> str:
        arguments = self.arguments.grammar(rules, tool.parameters)
        return rules.add(f"{_expression(self._head(tool.name))} {arguments} {_expression(self.tail)}")

    # ---- parsing

    @cached_property
    def close_tag(self) -> str:
        """The tag that ends the calls."""
        return self.close.strip().removeprefix("]").strip()

    @cached_property
    def begins(self) -> Any:
        """The expression of the first call, after the tag and up to the arguments."""
        opened = loosely(self.open).pattern
        return regex.compile(rf"\s*+(?:{opened})?+{self._head_expression}")

    @cached_property
    def continues(self) -> Any:
        """The expression of another call, from the end of the arguments before it."""
        tail = "" if self.is_json else loosely(self.tail.strip(), id=r"\w*+").pattern
        return regex.compile(rf"\s*+(?:{tail})?+[\s,;]*+{self._head_expression}")

    @cached_property
    def closes(self) -> Any:
        """The expression of what ends the calls, or begins others without an end of these."""
        tags = [regex.escape(tag) for tag in (self.close_tag, self.tag) if tag]
        return regex.compile("|".join(tags) or "(?!)")

    @property
    def _head_expression(self) -> str:
        if self.is_json:
            return JSON_HEAD
        follows = {"JSONArguments": r"(?=\{)", "TaggedArguments": "(?=<)"}
        head = loosely(self.head, name=NAME, id=r"\w{1,64}+", n=r"\d{1,9}+")
        return f"{head.pattern}{follows.get(type(self.arguments).__name__, '')}"


def _expression(text: str) -> str:
    """A text with %n and %id as an expression of Lark."""
    parts = (PARTS.get(part) or (quoted(part) if part else "") for part in regex.split("(%id|%n)", text))
    return " ".join(parts)


XML_PARAMETERS = TaggedArguments("<parameter=%key>\n", "\n</parameter>\n")
GLM_PARAMETERS = TaggedArguments("<arg_key>%key</arg_key>\n<arg_value>", "</arg_value>\n")
HERMES = ToolFormat(  # and Qwen 2.5 and 3, Granite 4, SmolLM3, EXAONE 4, Ernie 4.5
    "<tool_call>", '{"name": "%name", "arguments": ', tail="}", open="\n", close="\n</tool_call>", each=True
)
QWEN3_CODER = ToolFormat(  # and Qwen 3.5, 3.6
    "<tool_call>",
    "<function=%name>\n",
    XML_PARAMETERS,
    tail="</function>",
    open="\n",
    close="\n</tool_call>",
    each=True,
)
# Without <tool_call>, which the models sometimes forget.
QWEN3_CODER_BARE = ToolFormat("<function=", "%name>\n", XML_PARAMETERS, close="</function>", each=True)
SEED_OSS = replace(
    QWEN3_CODER,
    tag="<seed:tool_call>",
    arguments=TaggedArguments("<parameter=%key>", "</parameter>\n"),
    close="\n</seed:tool_call>",
)
GLM_4_5 = ToolFormat("<tool_call>", "%name\n", GLM_PARAMETERS, close="</tool_call>", each=True)
GLM_4_7 = replace(
    GLM_4_5,
    head="%name",
    arguments=TaggedArguments("<arg_key>%key</arg_key><arg_value>", "</arg_value>"),
    between="",
)
GEMMA_4 = ToolFormat(
    "<|tool_call>", "call:%name{", GEMMA_4_LITERALS, tail="}", close="<tool_call|>", between="", each=True
)
GEMMA = ToolFormat(  # 2 and 3, whose templates have no tools
    "```tool_call",
    '{"name": "%name", "arguments": ',
    tail="}",
    open="\n",
    close="\n```",
    each=True,
    result_tags=("```tool_output\n", "\n```"),
)
MISTRAL = ToolFormat(
    "[TOOL_CALLS]",
    '{"name": "%name", "arguments": ',
    tail=', "id": "%id"}',
    open="[",
    close="]",
    between=", ",
    id_length=9,
)
MISTRAL_ARGS = ToolFormat("[TOOL_CALLS]", "%name[ARGS]", between="", each=True, id_length=9)
MISTRAL_CALL_ID = replace(MISTRAL_ARGS, head="%name[CALL_ID]%id[ARGS]")
LLAMA_3 = ToolFormat("", '{"name": "%name", "parameters": ', tail="}", single=True)
GRANITE_3 = replace(MISTRAL, tag="<|tool_call|>", tail="}", id_length=24)
PHI_4 = replace(GRANITE_3, close="]<|/tool_call|>")
LFM2 = ToolFormat(
    "<|tool_call_start|>", "%name(", PYTHON, tail=")", open="[", close="]<|tool_call_end|>", between=", "
)
OLMO_3 = replace(LFM2, tag="<function_calls>", open="", close="</function_calls>", between="\n")
DEEPSEEK_3_1 = ToolFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>%name<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    close="<｜tool▁calls▁end｜>",
    between="",
)
DEEPSEEK_3 = replace(  # and R1
    DEEPSEEK_3_1,
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>%name\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    between="\n",
)
COMMAND = ToolFormat(
    "<|START_ACTION|>",
    '{"tool_call_id": "%n", "tool_name": "%name", "parameters": ',
    tail="}",
    open="[\n    ",
    close="\n]<|END_ACTION|>",
    between=",\n    ",
)
# gpt-oss, whose responses reach the parser in the format of Hermes (model/harmony.py).
HARMONY = ToolFormat(
    "<|channel|>commentary to=functions.",
    "%name <|constrain|>json<|message|>",
    single=True,
    mark="to=functions.",
)

# Texts in a chat template that identify its format: the first row whose texts are all there.
BY_TEMPLATE: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<seed:tool_call>",), SEED_OSS),
    (("</arg_key>\n<arg_value>",), GLM_4_5),
    (("</arg_key>\\n<arg_value>",), GLM_4_5),
    (("<arg_key>",), GLM_4_7),
    (("<parameter=",), QWEN3_CODER),
    (("<|tool_call>",), GEMMA_4),
    (("[CALL_ID]",), MISTRAL_CALL_ID),
    (("[ARGS]",), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|tool_call_start|>",), LFM2),
    (("<|tool_list_start|>",), LFM2),
    (("List of tools: [",), LFM2),
    (("<function_calls>",), OLMO_3),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_3_1),
    (("<|START_ACTION|>",), COMMAND),
    (("<|/tool|>",), PHI_4),
    (("<|/tool_call|>",), PHI_4),
    (("<|tool_call|>",), GRANITE_3),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), LLAMA_3),
    (("ipython",), LLAMA_3),
    (("<start_of_turn>",), GEMMA),
)
# What the output parser accepts from every model: models do not always follow their own format.
CODE_FENCES = tuple(replace(GEMMA, tag=f"```{name}") for name in ("tool_call", "tool_code", "json"))
ACCEPTED = (
    *(
        HERMES,
        QWEN3_CODER,
        SEED_OSS,
        GLM_4_5,
        GEMMA_4,
        MISTRAL,
        MISTRAL_ARGS,
        MISTRAL_CALL_ID,
        PHI_4,
    ),
    *(LFM2, OLMO_3, DEEPSEEK_3, DEEPSEEK_3_1, COMMAND, LLAMA_3, *CODE_FENCES),
    replace(LLAMA_3, tag="<|python_tag|>"),
    ToolFormat("<|python_tag|>", "%name.call(", PYTHON, tail=")"),
    QWEN3_CODER_BARE,
    ToolFormat("<function=", "%name>", close="</function>"),  # functions of Llama 3.1's prompts
    ToolFormat("", "%name(", PYTHON, tail=")", open="[", between=", "),
    replace(DEEPSEEK_3, tag="<｜tool▁call▁begin｜>", head="function<｜tool▁sep｜>%name\n```json\n"),
    replace(DEEPSEEK_3_1, tag="<｜tool▁call▁begin｜>", head="%name<｜tool▁sep｜>"),
)


def tool_format_for(template: str) -> ToolFormat:
    """The tool format of the family that a chat template belongs to; Hermes if it is unknown."""
    found = (format for texts, format in BY_TEMPLATE if all(text in template for text in texts))
    return next(found, HERMES)
