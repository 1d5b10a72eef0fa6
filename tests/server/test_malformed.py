"""Every malformed request gets a clear error in its API's format, and the server keeps running."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.server.servers import PATIENCE, Running

CHAT = "/v1/chat/completions"
DEEP = 100_000
USER: Any = {"role": "user", "content": "Hi"}


def send(server: Running, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(server.url + path, body, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def chat(**more: Any) -> bytes:
    return json.dumps({"messages": [USER], "max_tokens": 3, **more}).encode()


BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"hello",
    "cut": b'{"messages": [',
    "trailing": chat() + b"}",
    "no UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "lone surrogate": rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
    "raw NUL": b'{"messages": [{"role": "user", "content": "\x00"}]}',
    "NaN": b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
    "infinity": b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": 1e999}',
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep and open": b"[" * DEEP,
    "deep in a field": chat(metadata=0).replace(b": 0", b": " + b"[" * DEEP + b"]" * DEEP),
    "a number of 5,000 digits": chat(seed=0).replace(b'"seed": 0', b'"seed": ' + b"9" * 5000),
    "a list": b"[]",
    "a text": b'"hello"',
    "null": b"null",
}

WRONG: dict[str, dict[str, Any]] = {
    "messages": {"messages": "Hi"},
    "no messages": {"messages": []},
    "role": {"messages": [{"role": "king", "content": "Hi"}]},
    "content": {"messages": [{"role": "user", "content": 5}]},
    "number as text": {"temperature": "1"},
    "truth as number": {"max_tokens": True},
    "fraction": {"max_tokens": 1.5},
    "negative": {"max_tokens": -1},
    "huge": {"max_tokens": 10**30},
    "huge seed": {"seed": 2**64},
    "huge float": {"temperature": 1e300},
    "stop": {"stop": [1]},
    "stop, empty": {"stop": [""]},
    "bias of no token": {"logit_bias": {"x": 1}},
    "bias of an unknown token": {"logit_bias": {"99999": 1}},
    "bias too large": {"logit_bias": {"1": 1e9}},
    "model": {"model": 5},
    "unknown field": {"surprise": 1},
    "unknown field of a message": {"messages": [{**USER, "surprise": 1}]},
    "tool": {"tools": [{"type": "function"}]},
    "tool_choice": {"tool_choice": "required"},
    "top_logprobs": {"top_logprobs": 3},
    "tool that is none": {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
    "no schema": {"response_format": {"type": "json_schema"}},
    "regex": {"structured_outputs": {"regex": "("}},
    "grammar": {"structured_outputs": {"grammar": "start: nothing"}},
    "two constraints": {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    "template's own names": {"chat_template_kwargs": {"messages": []}},
    "this": {"chat_template_kwargs": {"self": 1}},
    "deep template value": {"chat_template_kwargs": {"a": json.loads("[" * 150 + "]" * 150)}},
    "n": {"n": 1000},
}  # fmt: skip


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat", "/tokenize"])
def test_a_malformed_body_is_rejected(tiny: Running, path: str, body: bytes) -> None:
    status, answer = send(tiny, path, body)
    assert status == 400
    message = answer["error"] if path == "/api/chat" else answer["error"]["message"]
    assert message and len(message) < 500 and "Traceback" not in message
    assert tiny.ask("/health")[0] == 200


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_field_is_rejected_by_name(tiny: Running, fields: dict[str, Any]) -> None:
    status, answer = send(tiny, CHAT, chat(**fields))
    if fields == WRONG["deep template value"]:  # the template does not use it
        assert status in (200, 400)
        return
    assert status == 400, answer
    error = answer["error"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 500
    names = {
        "response_format": "schema|form",
        "structured_outputs": "regex|grammar|give one of",
        "messages": "messages",
    }
    name = next(iter(fields))
    assert re.search(names.get(name, name), f"{error['message']} {error['param']}")


def test_unusual_but_valid_requests_are_accepted(tiny: Running) -> None:
    odd = [
        {"messages": [{"role": "user", "content": "\x00 \ufeff \U0001f600 \u202e"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
            ]
        },
        {"user": "x" * 10_000, "metadata": {"deep": [[[[]]]]}, "store": None, "functions": None},
        {"temperature": 0, "top_p": 0, "top_k": -1, "stop": None, "n": None},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1, "n": 3},
    ]
    for fields in odd:
        status, answer = send(tiny, CHAT, chat(**fields))
        assert status == 200 and answer["choices"][0]["message"]["content"], answer
    form = send(tiny, CHAT, chat(), **{"content-type": "application/x-www-form-urlencoded"})
    assert form[0] == 200, "curl -d sends this content type with JSON"


def test_paths_and_methods(tiny: Running) -> None:
    for path in (
        "/nothing",
        "/v1/nothing",
        "/v1/models/nothing",
        "/v1/models/%00",
        "/v1/models/..%2f..%2fetc",
    ):
        assert tiny.ask(path)[0] == 404
    assert tiny.ask(CHAT)[0] == 405
    assert tiny.ask("/v1/models", {})[0] == 405
    assert tiny.ask("/api/show", {"model": "../../etc/passwd"})[0] == 404
