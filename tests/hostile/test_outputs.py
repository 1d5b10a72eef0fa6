"""What a model writes is hostile too: a client can make it write anything, with a grammar or a bias."""

from __future__ import annotations

import json
import random
import time

import pytest

from tandem.engine.output import StopSearch
from tandem.server.core.output_parser import REASONING, Delta, OutputParser
from tandem.server.core.tool_calls import parse_calls
from tandem.server.openai.chat import StreamedUsages, StreamOptions

pytestmark = pytest.mark.fast

TOKENS = 3000
# How a response begins, and the token that it then repeats.
LONG = {
    "spaces in a call": ("<tool_call>", " " * 16),
    "spaces before a call": (" " * 16, " " * 16),
    "spaces in the name": ('<tool_call>{"name"', "\n\t  "),
    "a name": ('{"name": "f', "\\\\\\\\"),
    "a text after the arguments": ('{"name": "f", "arguments": {}, "x": "', "word "),
    "brackets after the arguments": ('<tool_call>{"name": "f", "arguments": {}', "[[[["),
    "values": ("<tool_call>", "1 1 1 1 "),
    "a sum": ("<tool_call>f(x=1", "+1+1"),
    "spaces after a call": ('<tool_call>{"name": "f", "arguments": {}}', " " * 16),
    "reasoning": ("<think>", " " * 16),
}
PIECES = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "```json", "```", "[", "]", "{", "}", ", ", "\n"),
    *(
        '{"name": ',
        '"f"',
        '"g"',
        "null",
        '["f"]',
        '"arguments": ',
        '"parameters": ',
        '{"x": ',
        "NaN",
        "1e999",
    ),
    *('"\\ud800"', "-Infinity", '"a', '"', "\\", "\x00", "f(x=", "'\\ud800'", ")", "print(", "é", "9" * 5000),
    *("[" * 990, "{1: 2}", "**y", "x=", " "),
)


@pytest.mark.parametrize("name", LONG)
def test_a_long_output_takes_little_time(name: str) -> None:
    """The event loop parses it: what it takes for one response, all others wait."""
    begin, token = LONG[name]
    parser, longest, before = OutputParser({"f": {}}), 0.0, time.process_time()
    for i in range(TOKENS):
        parser.push(begin if not i else token, last=i == TOKENS - 1)
        longest, before = max(longest, time.process_time() - before), time.process_time()
    assert longest < 0.1


@pytest.mark.parametrize("name", ['["f"]', '{"f": 1}', "null", "1", "true"])
def test_a_name_that_is_no_text_names_no_tool(name: str) -> None:
    text = f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>'
    delta = OutputParser({"f": {}}).push(text, last=True)
    assert not delta.tool_calls and delta.text == text


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"', '{"a": ["\\udfff", 1e999]}'])
@pytest.mark.parametrize(
    "order", ['"name": "f", "arguments": {{"x": {}}}', '"arguments": {{"x": {}}}, "name": "f"']
)
def test_arguments_that_are_no_json_can_be_sent(value: str, order: str) -> None:
    text = "<tool_call>{" + order.format(value) + "}</tool_call>"
    [call] = OutputParser({"f": {}}).push(text, last=True).tool_calls
    send([call.arguments, call.as_object()])


def test_random_outputs() -> None:
    chance = random.Random(16)
    for _ in range(2000):
        parser = OutputParser(
            {"f": {}, "g": {}},
            parallel=chance.random() < 0.5,
            reasoning=REASONING[0] if chance.random() < 0.2 else None,
        )
        texts = chance.choices(PIECES, k=chance.randrange(1, 12))
        for i, text in enumerate(texts):
            delta = parser.push(text, last=i == len(texts) - 1)
            objects = [call.as_object() for call in delta.tool_calls]
            send([delta.text, delta.reasoning, delta.arguments, objects])
        send([call.as_object() for call in parse_calls("".join(texts), {"f", "g"})])


def test_usage_in_every_chunk_takes_little_time() -> None:
    """Of a stream of 4,096 responses: their sum would take milliseconds for each token."""
    options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    usages, before = StreamedUsages(options, n=2), time.process_time()
    for token in range(3):
        for index in range(4096):
            usages.add(Delta(index, "a", token_ids=[token], prompt_tokens=5, cached_tokens=index % 2))
            assert usages.in_chunk()
    assert time.process_time() - before < 2
    assert (usages.total.prompt_tokens, usages.total.completion_tokens) == (5 * 2048, 3 * 4096)
    assert usages.total.cached_tokens == 0  # those of the first response to each prompt


def send(value: object) -> None:
    """Encodes a value as the server does."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def test_stop_strings_are_found_like_by_find() -> None:
    chance = random.Random(16)
    for _ in range(3000):
        stop, text = (
            "".join(chance.choices("ab", k=chance.randrange(least, most)))
            for least, most in ((1, 7), (0, 15))
        )
        search, at, found = StopSearch(stop), 0, None
        while at < len(text) and found is None:
            end = at + chance.randrange(1, 5)
            found = search.find(text[at:end])
            found = None if found is None else at + found
            at = end
            if found is None:
                begun = text[:at]
                held = [n for n in range(len(stop)) if n <= len(begun) and begun.endswith(stop[:n])]
                assert search.matched == max(held)
        assert (-1 if found is None else found) == text.find(stop)


def test_long_stop_strings_take_little_time() -> None:
    """All of the output is held back for the first, and is the beginning of none of the others."""
    stops = ["a" * 20_000, *("a" * (4000 + i) + "b" * 20_000 for i in range(63))]
    searches, before = [StopSearch(stop) for stop in stops], time.process_time()
    for _ in range(1000):
        assert all(search.find("a" * 16) is None for search in searches)
    assert searches[0].matched == 16_000 and time.process_time() - before < 3
