"""Tools with hostile schemas, and calls with hostile arguments: a grammar or a text of little size, or an error."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tandem.errors import RequestError
from tandem.server.core.argument_syntax import MAX_WRITTEN
from tandem.server.core.conversation import for_template
from tandem.server.core.images import joined
from tandem.server.core.tool_calls import Tool, named_tools
from tandem.server.core.tool_formats import ACCEPTED, GEMMA_4, ToolFormat
from tandem.server.openai import chat, responses

pytestmark = pytest.mark.fast

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        2,
        1.5,
        2**60,
        -(2**63),
        1e300,
        "",
        "x",
        "a/b",
        "#",
        "(",
        "2",
        [],
        {},
        [[]],
        [None],
    ),
    *([{}], {"": None}, ["a", 1], {"type": "string"}, ["a", {}]),
)
NAMED = ("properties", "$defs", "definitions", "patternProperties")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
NUMBERS = ("minItems", "maxItems", "minLength", "maxLength", "minimum")
OTHERS = ("items", "const", "pattern", "format", "additionalProperties", "not", "x-guidance", "title", "if")
KEYS = ("type", "required", "enum", "$ref", *NAMED, *LISTS, *NUMBERS, *OTHERS)
TYPES = ("string", "object", "array", "integer", "number", "boolean", "null", "x", ["string", "null"])
REFERENCES = ("#", "#/$defs/a", "#/properties/a", "#/x", "http://x", "#/$defs/b/anyOf/0", "#" + "/a" * 9999)


def odd_schema(rng: random.Random, depth: int = 0) -> Any:
    if rng.random() < 0.15 or depth > 4:
        return rng.choice(ODD)
    schema: dict[str, Any] = {}
    for key in rng.sample(KEYS, rng.choice((0, 1, 1, 2, 3, 5))):
        if rng.random() < 0.25:
            schema[key] = rng.choice(ODD)
        elif key in NAMED:
            names = rng.choices(("a", "b", "", "c d", '"', "é"), k=rng.randrange(4))
            schema[key] = {name: odd_schema(rng, depth + 1) for name in names}
        elif key in LISTS:
            schema[key] = [odd_schema(rng, depth + 1) for _ in range(rng.randrange(4))]
        else:
            chosen: dict[str, Any] = {
                "type": rng.choice(TYPES), "$ref": rng.choice(REFERENCES), "enum": rng.choices(ODD, k=3),
                "required": rng.choice((["a"], ["a", "b", "zz"], [1], [{}])),
            } | dict.fromkeys(NUMBERS, rng.choice((0, 1, 2, 5, 10**9, 2.0)))  # fmt: skip
            schema[key] = chosen[key] if key in chosen else odd_schema(rng, depth + 1)
    return schema


def grammar(format: ToolFormat, schema: Any, *, optional: bool = False) -> str:
    return format.grammar([Tool("f", "", schema, strict=True)], parallel=True, optional=optional)


def test_any_schema_makes_a_grammar_or_an_error() -> None:
    for number in range(300):
        rng = random.Random(number)
        schema = odd_schema(rng)
        for format in ACCEPTED if isinstance(schema, dict) else ():
            format.arguments.scan(schema)
            try:
                assert grammar(format, schema, optional=rng.random() < 0.5)
            except RequestError as error:
                assert "\n" not in str(error)


def copied_definitions() -> Any:
    """Of 1 MB: each property would get a copy."""
    properties = {f"p{i}": {"type": "integer", "title": str(i)} for i in range(1000)}
    return {"properties": properties, "$defs": {"x": {"description": "d" * 1_000_000}}}


def shared_alternatives() -> Any:
    """Each of 2,000 properties may be any of 2,000."""
    properties = {f"p{i}": {"$ref": "#/$defs/all"} for i in range(2000)}
    return {"properties": properties, "$defs": {"all": {"anyOf": [{"minimum": i} for i in range(2000)]}}}


def long_references() -> Any:
    """Each of 1,000 properties names what has a long reference."""
    properties = {f"p{i}": {"$ref": "#/$defs/a"} for i in range(1000)}
    return {"properties": properties, "$defs": {"a": {"$ref": "#" + "/a" * 1_000_000}}}


@pytest.mark.parametrize("make", [copied_definitions, shared_alternatives, long_references])
def test_a_schema_that_repeats_itself_makes_no_large_grammar(make: Callable[[], Any]) -> None:
    """One request would take gigabytes, and minutes."""
    schema = make()
    for format in ACCEPTED:
        begin, size = time.process_time(), 0
        try:
            size = len(grammar(format, schema))
        except RequestError as error:
            assert "are too large for a grammar" in str(error)
        assert size < MAX_WRITTEN and time.process_time() - begin < 0.5, format


def test_deep_arguments_are_refused_in_a_sentence() -> None:
    arguments: Any = []
    for _ in range(900):
        arguments = [arguments]
    with pytest.raises(RequestError, match="nested too deeply"):
        GEMMA_4.write([("f", {"a": arguments})])


def test_results_for_a_template_without_tools_are_joined_once() -> None:
    """Each copied those before it: 4 MB of a request took seconds."""
    user = {"role": "user", "content": "y" * 2_000_000}
    results = [{"role": "tool", "content": f"r{i}"} for i in range(4000)]
    begin, end = GEMMA_4.result_tags
    begun = time.thread_time()
    [message, last], _ = for_template(
        [user, *results, {"role": "assistant", "content": "z"}], (), "", GEMMA_4
    )
    assert time.thread_time() - begun < 0.5 and last == {"role": "assistant", "content": "z"}
    assert message["content"] == "\n".join([user["content"], *(f"{begin}r{i}{end}" for i in range(4000))])


def test_texts_beside_an_image_are_joined_once() -> None:
    image = {"type": "image", "image": b""}
    texts = [{"type": "text", "text": text} for text in ("y" * 2_000_000, *["z"] * 10_000)]
    begun = time.thread_time()
    assert joined("a", [*texts, image, *texts], "b") == [
        {"type": "text", "text": "a" + "y" * 2_000_000 + "z" * 10_000},
        image,
        {"type": "text", "text": "y" * 2_000_000 + "z" * 10_000 + "b"},
    ]
    assert time.thread_time() - begun < 0.5


def test_a_tool_that_is_allowed_often_is_written_once() -> None:
    """Each time it was written again: a request of 4 MB became 4 GB of prompt."""
    tools = [Tool("a", "x" * 1000), Tool("b"), Tool("a", "another")]
    assert named_tools(tools, *["a"] * 1000) == [tools[0], tools[2]]
    assert named_tools(tools, "b", "a", "b") == tools
    with pytest.raises(RequestError, match="names c, which is not in tools"):
        named_tools(tools, "a", "c")
    body = chat.ChatRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {"name": "a"}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "a"}}] * 1000,
                },
            },
        }
    )
    given = {
        "model": "m",
        "input": "hi",
        "tools": [{"type": "function", "name": "a"}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "a"}] * 1000,
        },
    }
    assert len(chat.generation_request(body).tools) == 1
    assert len(responses.generation_request(responses.ResponsesRequest.model_validate(given), []).tools) == 1
