"""Tool calls in the formats of the model families: what a family's own chat template writes is parsed, however it is
cut, and allowed by the grammar; what the grammar allows is a call that fits its schema."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tandem.engine.output import Detokenizer
from tandem.engine.params import SamplingParams
from tandem.engine.structured_output import ConstraintCompiler
from tandem.gguf.file import GGUF
from tandem.model.chat_template import ChatTemplate
from tandem.model.tokenizer import MARKUP, Tokenizer
from tandem.server.core import tool_formats
from tandem.server.core.conversation import for_template
from tandem.server.core.output_parser import FORMATS, REASONING, GenerationResult, OutputParser
from tandem.server.core.prompt import _with_analysis
from tandem.server.core.tool_calls import Message, Tool
from tandem.server.core.tool_formats import ToolFormat, tool_format_for
from tests.cli.tiny_model import write_tiny_model
from tests.packages import package_members

WEATHER = Tool(
    "get_weather",
    "Weather in a city",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "wind": {"type": "number"},
            "metric": {"type": "boolean"},
            "unit": {"enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {
                "type": "object",
                "properties": {"lat": {"type": "number"}, "note": {"type": "string"}},
                "required": ["lat"],
            },
            "label": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city"],
    },
)
CLOCK = Tool("clock", "The time", {"type": "object", "properties": {}})
SEARCH = Tool(
    "search-web.v2",
    "Search",
    {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["query"],
    },
)
TOOLS = [WEATHER, CLOCK, SEARCH]
REASON = "They ask for the weather, so {I} look."
HARMONY_TOKENS = (
    *("<|start|>", "<|return|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"),
)
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
TEXTS = (
    *(
        "Köln",
        "",
        "New York, NY",
        'a "quoted" one',
        "\\d+ \\ n",
        "two\nlines\n\n  indented",
        "日本 🤗",
        "a=b, c:d",
    ),
    *("<b>bold</b> & more", "{not: json", "[1, 2", "True", "42", "f(x)", "# Title\n```python\nprint(1)\n```"),
    *(" spaces ", "</function", "say <tool", "x" * 300, "null and void", "a\tb"),
)
# Tiny ones of our own, for families whose templates are in no package.
PHI_4 = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'system' and message['tools'] %}<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}"
    "{% if message.tool_calls %}<|tool_call|>[{% for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]<|/tool_call|>{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OLMO_3 = (
    "<functions>{{ tools | tojson }}</functions>{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% if m.tool_calls %}<function_calls>{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
    "{{ '\n' if not loop.last }}{% endfor %}</function_calls>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OWN = {"phi-4-mini": PHI_4, "olmo-3": OLMO_3}
# A template of llama.cpp's collection, or one of our own -> its format.
TEMPLATES = {
    "Qwen-Qwen2.5-7B-Instruct": "HERMES",
    "Qwen-Qwen3-0.6B": "HERMES",
    "HuggingFaceTB-SmolLM3-3B": "HERMES",
    "ibm-granite-granite-4.0": "HERMES",
    "Qwen3-Coder": "QWEN3_CODER",
    "Qwen3.5-4B": "QWEN3_CODER",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "QWEN3_CODER",
    "ByteDance-Seed-OSS": "SEED_OSS",
    "GLM-4.6": "GLM_4_5",
    "GLM-4.7-Flash": "GLM_4_7",
    "google-gemma-4-31B-it": "GEMMA_4",
    "mistralai-Mistral-Nemo-Instruct-2407": "MISTRAL",
    "Mistral-Small-3.2-24B-Instruct-2506": "MISTRAL_CALL_ID",
    "mistralai-Ministral-3-14B-Reasoning-2512": "MISTRAL_ARGS",
    "unsloth-mistral-Devstral-Small-2507": "MISTRAL_ARGS",
    "meta-llama-Llama-3.1-8B-Instruct": "LLAMA_3",
    "meta-llama-Llama-3.2-3B-Instruct": "LLAMA_3",
    "meta-llama-Llama-3.3-70B-Instruct": "LLAMA_3",
    "ibm-granite-granite-3.3-2B-Instruct": "GRANITE_3",
    "phi-4-mini": "PHI_4",
    "LFM2-8B-A1B": "LFM2",
    "LFM2.5-Instruct": "LFM2",
    "olmo-3": "OLMO_3",
    "deepseek-ai-DeepSeek-V3.1": "DEEPSEEK_3_1",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "DEEPSEEK_3",
    "llama-cpp-deepseek-r1": "DEEPSEEK_3",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "COMMAND",
    "openai-gpt-oss-120b": "HARMONY",
}
ENDS = (
    *(
        "<|im_end|>",
        "<|end_of_text|>",
        "<seed:eos>",
        "<|tool_response>",
        "<turn|>",
        "</s>",
        "<|eot_id|>",
        "<|end|>",
    ),
    *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|call|>", "<|observation|>", "<|user|>"),
)
# With calls.
WITHOUT_TEXT = "MISTRAL", "MISTRAL_CALL_ID", "LLAMA_3", "DEEPSEEK_3", "COMMAND", "GEMMA_4", "HARMONY"
# What a tag or a call without a tag begins with: as long as it is no more than that, it may be text.
BEGINNINGS = [*FORMATS, *(tags.start for tags in REASONING), *(f'{{"name": "{tool.name}' for tool in TOOLS)]


@cache
def template(name: str) -> ChatTemplate:
    source = OWN.get(name)
    if source is None:
        [path] = package_members("modelpulse", "0.4.6", f"*/models/templates/{name}.jinja")
        source = path.read_text()
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def format_of(name: str) -> ToolFormat:
    format: ToolFormat = getattr(tool_formats, TEMPLATES[name])
    return format


def arguments(chance: Random, tool: Tool) -> dict[str, Any]:
    """Arguments that fit the schema, in its order."""
    values: dict[str, Callable[[], Any]] = {
        "days": lambda: chance.choice([0, -3, 12345678]),
        "limit": lambda: chance.randint(1, 9),
        "wind": lambda: chance.choice([1.5, -0.25, 3]),
        "metric": lambda: chance.random() < 0.5,
        "unit": lambda: chance.choice("CF"),
        "tags": lambda: chance.sample(TEXTS, chance.randint(0, 3)),
        "place": lambda: {"lat": 50.9, **({"note": chance.choice(TEXTS)} if chance.random() < 0.5 else {})},
        "label": lambda: chance.choice([None, *TEXTS[:8]]),
    }
    properties = tool.parameters["properties"]
    required = tool.parameters.get("required", [])
    chosen = [name for name in properties if name in required or chance.random() < 0.5]
    return {name: values.get(name, lambda: chance.choice(TEXTS))() for name in chosen}


def conversation(seed: int, format: str) -> tuple[list[Message], Message]:
    """(the conversation so far, the assistant's next message)."""
    chance = Random(seed)

    def calls(most: int) -> list[dict[str, Any]]:
        chosen = chance.choices(TOOLS, k=1 if format in ("LLAMA_3", "HARMONY") else chance.randint(1, most))
        return [
            {
                "id": f"{format[:2].lower()}{chance.randrange(10**7):07}",
                "type": "function",
                "function": {
                    "name": tool.name,
                    "arguments": json.dumps(arguments(chance, tool), ensure_ascii=False),
                },
            }
            for tool in chosen
        ]

    messages: list[Message] = [{"role": "user", "content": "Weather?"}]
    if chance.random() < 0.5:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    for _ in range(chance.randint(0, 2)):  # earlier calls and their results
        said: Message = {"role": "assistant", "content": "", "tool_calls": calls(2)}
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": '{"t": 20}',
            }
            for call in said["tool_calls"]
        ]
        messages += [said, *results]
        if chance.random() < 0.5:
            messages += [{"role": "assistant", "content": "20"}, {"role": "user", "content": "And now?"}]
    content = "" if format in WITHOUT_TEXT or chance.random() < 0.5 else "I look it up."
    message: Message = {"role": "assistant", "content": content, "tool_calls": calls(3)}
    if chance.random() < 0.5:
        message["reasoning_content"] = REASON
    return messages, message


def written(name: str, messages: list[Message], message: Message) -> tuple[str, str]:
    """(the prompt, the response) as the template writes the conversation with the message."""
    source, format = template(name).source, format_of(name)

    def render(message: Message) -> str:
        if format is tool_formats.HARMONY:
            message = _with_analysis(message)
        given, about_tools = for_template(copy.deepcopy([*messages, message]), TOOLS, source, format)
        return template(name).render(given, **about_tools, add_generation_prompt=False)

    # The response begins where another one would differ.
    whole, other = render(message), render({"role": "assistant", "content": "@"})
    same = next(at for at, letters in enumerate(zip(whole, other, strict=False)) if letters[0] != letters[1])
    if begun := re.search(r"[<\[][^<>\[\]\s]*$", whole[:same]):  # in a tag
        same = begun.start()
    ends = ("<|call|>",) if format is tool_formats.HARMONY else ENDS
    found = [at for end in ends if (at := whole.find(end, same)) >= 0]
    return whole[:same], whole[same : min(found, default=len(whole))]


@cache
def harmony() -> Tokenizer:
    path = write_tiny_model(Path(tempfile.mkdtemp()) / "harmony.gguf", control=HARMONY_TOKENS)
    with GGUF.open(path) as gguf:
        return Tokenizer.from_gguf(gguf)


def decoded(name: str, prompt: str, response: str) -> str:
    """The text that the parser gets."""
    if TEMPLATES[name] != "HARMONY":
        return response
    tokenizer = harmony()
    decoder = Detokenizer(tokenizer, (), tokenizer.encode(prompt, special=True))
    ids = tokenizer.encode(response, special=True)
    return "".join(decoder.push(id) for id in ids) + decoder.flush()


def parsed(name: str, prompt: str, parts: Iterable[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(text, reasoning, calls) of a response that arrives in parts."""
    reasoning = next((tags for tags in REASONING if prompt.rstrip().endswith(tags.start)), None)
    parser, result = OutputParser(SCHEMAS, reasoning=reasoning), GenerationResult()
    for part in parts:
        result.add(parser.push(part))
    result.add(parser.push("", last=True))
    return result.text, result.reasoning, [(call.name, call.arguments) for call in result.tool_calls]


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_parsed_however_it_is_cut(name: str) -> None:
    """50 conversations with each template."""
    for seed in range(50):
        messages, message = conversation(seed, TEMPLATES[name])
        prompt, response = written(name, messages, message)
        text = decoded(name, prompt, response)
        said, reasoning, calls = parsed(name, prompt, [text])
        expected = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message["tool_calls"]
        ]
        assert [(name, json.loads(arguments)) for name, arguments in calls] == expected, text
        assert said.strip() == (message["content"] if message["content"] in response else ""), text
        assert reasoning.strip() == (REASON if REASON in response else ""), text
        for size in (1, 2, 7):
            assert parsed(name, prompt, cut(text, size)) == (said, reasoning, calls), text
        for at in range(len(text)) if seed == 0 else ():
            assert parsed(name, prompt, [text[:at], text[at:]]) == (said, reasoning, calls), text[at:]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_cut_call_is_no_text(name: str) -> None:
    """A response that ends in a call has the arguments so far, and nothing of the call in its text."""
    for seed in range(3):
        messages, message = conversation(seed, TEMPLATES[name])
        prompt, response = written(name, messages, message)
        text = decoded(name, prompt, response)
        said, _, calls = parsed(name, prompt, [text])
        for end in range(len(text)):
            got, _, so_far = parsed(name, prompt, [text[:end]])
            assert so_far[:-1] == calls[: max(0, len(so_far) - 1)]
            more = got.removeprefix(said).strip()
            assert said.startswith(got) or any(begin.startswith(more) for begin in BEGINNINGS), text[:end]


def test_formats_are_known_by_their_templates() -> None:
    for name in TEMPLATES.keys() - {"openai-gpt-oss-120b"}:  # known by its tokens
        assert tool_format_for(template(name).source) is format_of(name), name
    tags = {text for format in tool_formats.ACCEPTED for text in (format.tag, format.close_tag)}
    assert tags - set(MARKUP) <= {
        "",
        "```",
        "</function>",
        "<function=",
        "```json",
        "```tool_code",
        "```tool_call",
    }
    assert {text for tags in REASONING for text in tags[:2]} <= set(MARKUP)


@cache
def compiler() -> ConstraintCompiler:
    """Compiles grammars for a vocabulary of bytes and Harmony's tokens."""
    return ConstraintCompiler(harmony(), harmony().vocab_size)


def grammar(format: ToolFormat, tools: list[Tool], *, parallel: bool = True, optional: bool = False) -> Any:
    """The matcher of a grammar of calls."""
    text = format.grammar(tools, parallel=parallel, optional=optional)
    return compiler().compile(SamplingParams(grammar=text))._matcher


def accepts(matcher: Any, text: str) -> bool:
    matcher, ids = matcher.deep_copy(), harmony().encode(text, special=True, bos=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def calls_only(name: str, response: str) -> str:
    """A response from its first call on, as the grammar writes it."""
    format = format_of(name)
    if format is tool_formats.HARMONY:  # the template's header is another than the one that models write
        name, _, written = response.partition(" to=functions.")[2].partition(
            "<|channel|>commentary json<|message|>"
        )
        return f"{format.tag}{name} <|constrain|>json<|message|>{written}"
    return response[response.find(format.tag) :].rstrip()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_grammar_allows_what_a_template_writes(name: str) -> None:
    format = format_of(name)
    required, strict = grammar(format, TOOLS), grammar(format, TOOLS, optional=True)
    one = grammar(format, TOOLS, parallel=False)
    for seed in range(50):
        messages, message = conversation(seed, TEMPLATES[name])
        text = calls_only(name, written(name, messages, message)[1])
        if name == "ByteDance-Seed-OSS" and ("{'" in text or "['" in text):
            continue  # it writes lists and objects in Python, not in JSON
        if name.startswith("deepseek-ai-DeepSeek-R1") and not text.startswith(format.tag):
            continue  # it writes this tag only once in a conversation
        assert accepts(required, text) and accepts(strict, text), text
        assert accepts(one, text) == (len(message["tool_calls"]) == 1)
        if format.tag:
            before = (
                "<|channel|>commentary<|message|>I look.<|end|>" if name.startswith("openai") else "I look. "
            )
            assert accepts(strict, before + text) and not accepts(required, before + text)
    assert accepts(strict, "No call.") and not accepts(required, "No call.")


WRONG = (
    ("clock", {"x": 1}),  # an argument that is not declared
    ("get_weather", {}),  # one that is required
    ("get_weather", {"city": "Köln", "days": "three"}),
    ("get_weather", {"city": "Köln", "unit": "K"}),
    ("get_weather", {"city": "Köln", "tags": [1]}),
    ("get_weather", {"city": "Köln", "place": {"lat": 1, "note": None}}),
    ("other", {}),
)


@pytest.mark.parametrize("name", sorted(set(TEMPLATES.values())))
def test_the_grammar_allows_no_other_calls(name: str) -> None:
    format: ToolFormat = getattr(tool_formats, name)
    required, strict = grammar(format, TOOLS), grammar(format, TOOLS, optional=True)
    right = format.write([("get_weather", {"city": "Köln"})])
    assert accepts(required, right) and accepts(strict, right)
    for call in WRONG:
        text = format.write([call])
        assert not accepts(required, text) and not accepts(strict, text), text
    for end in range(1, len(right) - 1):
        assert not accepts(required, right[:end]) or right[end:].isspace()


HARD = {
    "type": "object",
    "properties": {
        "mode": {"enum": ["a", "b c", 1, None, True]},
        "count": {"type": "integer", "minimum": 3, "maximum": 5},
        "node": {"$ref": "#/$defs/Node"},
        "code": {"type": "string", "pattern": "^[a-c]{2}$"},
        "short": {"type": "string", "maxLength": 3},
        "either": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 1}, {"type": "null"}, {"const": "x"}]},
        "few": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["mode", "node", "code", "few"],
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
}  # fmt: skip


# They end a text; letters at random would take long to be one of them.
TEXT_ENDS = ("</arg_value>\n", "</arg_value>", "\n</parameter>\n", "</parameter>\n", '<|"|>', '"', "'")


def generated(matcher: Any, chance: Random) -> str:
    """A text that the grammar allows; it ends when it may."""
    matcher, ids = matcher.deep_copy(), list[int]()
    mask = np.zeros(-(-harmony().vocab_size // 32), np.int32)
    while not matcher.is_stopped():
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
        if allowed & harmony().eos_ids and (allowed <= harmony().eos_ids or chance.random() < 0.7):
            break
        letters = sorted(allowed - harmony().eos_ids)
        next = [chance.choice(letters)]
        for end in TEXT_ENDS if len(letters) > 100 else ():
            closing = harmony().encode(end, bos=False)
            if chance.random() < 0.5 and matcher.deep_copy().try_consume_tokens(closing) == len(closing):
                next = closing
                break
        assert matcher.try_consume_tokens(next) == len(next) and len(ids) < 5000
        ids += next
    return b"".join(map(harmony().token_bytes, ids)).decode(errors="replace")


@pytest.mark.parametrize("name", sorted(set(TEMPLATES.values())))
def test_what_the_grammar_allows_is_a_call_that_fits_its_schema(name: str) -> None:
    format: ToolFormat = getattr(tool_formats, name)
    tool, chance = Tool("hard", "", HARD), Random(name)
    matcher = grammar(format, [tool, CLOCK])
    for _ in range(12):
        text = generated(matcher, chance)
        whole = decoded("openai-gpt-oss-120b", "<|start|>assistant", text) if name == "HARMONY" else text
        parser, result = OutputParser({"hard": HARD, "clock": CLOCK.parameters}), GenerationResult()
        for part in cut(whole, chance.randint(1, 9)):
            result.add(parser.push(part))
        result.add(parser.push("", last=True))
        assert result.tool_calls and not result.text.strip(), text
        for call in result.tool_calls:
            schema = HARD if call.name == "hard" else {**CLOCK.parameters, "additionalProperties": False}
            Draft202012Validator({**schema, "additionalProperties": False}).validate(
                json.loads(call.arguments)
            )


@pytest.mark.parametrize("name", TEMPLATES)
def test_damaged_responses_are_no_errors(name: str) -> None:
    """Whole and in parts they give the same, and no call of a tool that there is not."""
    chance = Random(name)
    tags = [
        *FORMATS,
        *(format.close_tag for format in tool_formats.ACCEPTED),
        "<think>",
        "</think>",
        "{",
        '"',
        "\\",
    ]
    for seed in range(30):
        messages, message = conversation(seed, TEMPLATES[name])
        prompt, response = written(name, messages, message)
        text = decoded(name, prompt, response)
        for _ in range(chance.randint(1, 6)):
            at, to = chance.randrange(len(text) + 1), chance.randrange(len(text) + 1)
            change = chance.randrange(4)
            if change == 0:  # leave out
                text = text[:at] + text[at + chance.randint(1, 20) :]
            elif change == 1:  # insert
                text = text[:at] + chance.choice(tags) + text[at:]
            elif change == 2:  # repeat
                text = text[:at] + text[to : to + 30] + text[at:]
            else:  # cut
                text = text[: max(at, 1)]
        said, reasoning, calls = parsed(name, prompt, [text])
        assert {name for name, _ in calls} <= SCHEMAS.keys()
        for size in (1, 3, chance.randint(4, 40)):
            assert parsed(name, prompt, cut(text, size)) == (said, reasoning, calls), repr(text)
