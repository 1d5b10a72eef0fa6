"""Requests that would stall a server. `run` sends one kind over and over, from four connections at a time, or 16 that
do not pause."""

from __future__ import annotations

import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

MB = 1_000_000
CLIENTS, FLOOD_CLIENTS = 4, 16
PAUSE = 0.1  # s between two requests of a client: their cost counts here, not their number
USER = {"role": "user", "content": "Hi"}


def chat(text: str = "Hi", **more: Any) -> bytes:
    return _json({"messages": [{"role": "user", "content": text}], "max_tokens": 1, **more})


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _tool(i: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}}


def _pairs(count: int) -> dict[str, Any]:
    return {f"w{i}": {"type": "integer"} for i in range(count)}


def _lark(source: str) -> bytes:
    return chat(structured_outputs={"grammar": source})


INTERSECTION = " & ".join(f"/.*a{i}.*/" for i in range(22))
PATTERNS = {"allOf": [{"type": "string", "pattern": f"^.*a{i}.*$"} for i in range(200)]}
# name -> (path, body): the largest that the server accepts, and those of 15 MB that it refuses
ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "text of 15 MB": ("/tokenize", lambda: _json({"content": "word " * (3 * MB)})),
    "spaces of 15 MB": ("/v1/chat/completions", lambda: chat(" " * (15 * MB))),
    "text": ("/tokenize", lambda: _json({"content": "word " * (4 * MB // 5)})),
    "spaces to tokenize": ("/tokenize", lambda: _json({"content": " " * (4 * MB)})),
    "escaped text": ("/tokenize", lambda: b'{"content": "' + b"\\u00e9 " * (4 * MB // 7) + b'"}'),
    "spaces": ("/v1/chat/completions", lambda: chat(" " * (4 * MB))),
    "letters": ("/v1/completions", lambda: _json({"prompt": "a" * (4 * MB)})),
    "control tokens": ("/v1/completions", lambda: _json({"prompt": "<|im_end|>" * (4 * MB // 10)})),
    "messages": ("/v1/chat/completions", lambda: _json({"messages": [USER] * 13_700})),
    "bad messages": ("/v1/chat/completions", lambda: _json({"messages": [{"role": "x"}] * 26_000})),
    "Anthropic's messages": ("/v1/messages/count_tokens", lambda: _json({"messages": [USER] * 13_700})),
    "Ollama's messages": ("/api/chat", lambda: _json({"model": "smollm2", "messages": [USER] * 13_700})),
    "input items": ("/v1/responses", lambda: _json({"input": [USER] * 13_700})),
    "ids to detokenize": ("/detokenize", lambda: _json({"tokens": list(range(260_000))})),
    "3 million ids": ("/detokenize", lambda: b'{"tokens": [' + b"1," * (2 * MB - 99) + b"1]}"),
    "bad ids": ("/v1/completions", lambda: _json({"prompt": [[], "x"] * 80_000})),
    "prompts": ("/v1/completions", lambda: _json({"prompt": ["a"] * 2048, "n": 128, "max_tokens": 1})),
    "inputs": ("/v1/embeddings", lambda: _json({"input": ["word " * 300] * 2048})),
    "empty objects": ("/v1/chat/completions", lambda: chat(metadata=[{}] * 130_000)),
    "an ignored field": ("/v1/chat/completions", lambda: chat(user="x" * (4 * MB))),
    "deep JSON": ("/v1/chat/completions", lambda: b"[" * (4 * MB)),
    "logit_bias": ("/v1/chat/completions", lambda: chat(logit_bias={str(i): 1 for i in range(29_000)})),
    "stop strings": ("/v1/chat/completions", lambda: chat(stop=[f"s{i}" for i in range(100_000)])),
    "tools": ("/v1/chat/completions", lambda: chat(tools=[_tool(i) for i in range(5_600)])),
    "required tools": (
        "/v1/chat/completions",
        lambda: chat(tools=[_tool(i) for i in range(5_600)], tool_choice="required"),
    ),
    "alternatives": (
        "/v1/chat/completions",
        lambda: _lark("start: " + " | ".join(f'"w{i}"' for i in range(60_000))),
    ),
    "an intersection": ("/v1/chat/completions", lambda: _lark(f"start: T\nT: {INTERSECTION}\n")),
    "patterns": ("/v1/chat/completions", lambda: chat(structured_outputs={"json": PATTERNS})),
    "required properties": (
        "/v1/chat/completions",
        lambda: chat(structured_outputs={"json": {"properties": _pairs(3000), "required": [*_pairs(3000)]}}),
    ),
    "log-probabilities": (
        "/v1/completions",
        lambda: _json({"prompt": "a " * 1000, "echo": True, "logprobs": 20, "max_tokens": 0}),
    ),
}


def slow_grammar(i: int) -> dict[str, Any]:
    """One of many that take hours to compile."""
    return {"grammar": f"start: T\nT: {' & '.join(f'/.*a{i}b{j}.*/' for j in range(22))}\n"}


_numbers = itertools.count()
# Of 64 KiB at most, from 16 connections without a pause: their number counts.
FLOODS: dict[str, tuple[str, Callable[[], bytes | None]]] = {
    "many texts": ("/tokenize", lambda: _json({"content": " " * 64_000})),
    "many marks": ("/tokenize", lambda: _json({"content": "\u0301" * 10_000})),
    "many chats": ("/v1/chat/completions", lambda: chat(" " * 64_000)),
    "many messages": (
        "/v1/chat/completions",
        lambda: _json({"messages": [{"role": "user", "content": ""}] * 1900, "max_tokens": 1}),
    ),
    "many grammars": (
        "/v1/chat/completions",
        lambda: chat(structured_outputs=slow_grammar(next(_numbers))),
    ),
    "documents": ("/openapi.json", lambda: None),
    "metadata": ("/api/show", lambda: _json({"model": "smollm2"})),
}


def send(url: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    """(status, response); status 0: the server closed the connection."""
    request = urllib.request.Request(url + path, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def run(url: str, name: str) -> None:
    flood = name in FLOODS
    path, make = FLOODS[name] if flood else ATTACKS[name]
    body = make()

    def attack() -> None:
        while True:
            status, answer = send(url, path, make() if flood else body)
            if status >= 500:
                print(f"{name}: {status} {answer[:300]!r}", flush=True)
            time.sleep(0 if flood else PAUSE)

    threads = [threading.Thread(target=attack) for _ in range(FLOOD_CLIENTS if flood else CLIENTS)]
    for thread in threads:
        thread.start()
