"""A client of servers with OpenAI's API, and what it sees: token by token, with the time of each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tandem.errors import RequestError

CHUNK = 1 << 16  # bytes read at a time, at most


@dataclass
class Answer:
    asked: float
    times: list[float] = field(default_factory=list)  # of each event with text: a token, or a few
    tokens: int = 0  # of the answer by the server's own count, if it tells
    prompt_tokens: int = 0
    ended: float = 0.0  # 0: it was cut off

    @property
    def first(self) -> float:
        return self.times[0] - self.asked


UNAUTHORISED = 401


class Refused(RequestError):
    """The server answered with an error. `status` is HTTP's; 0: it closed the connection."""

    def __init__(self, status: int, body: bytes) -> None:
        try:
            message = str(json.loads(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = body[:200].decode(errors="replace").strip()
            message = (
                "see that the address is one of OpenAI's API"
                if text.startswith("<")
                else text.partition("\n")[0]
            )
        if status == UNAUTHORISED:
            message = "it wants a key, or another one: give it with --api-key"
        said = (
            f"answered {status}: {message}"
            if status
            else "closed the connection without an answer: see its log"
        )
        super().__init__(f"the server {said}")
        self.status = status


class Unreadable(RequestError):
    """What came is not HTTP, or not the events of OpenAI's API."""

    def __init__(self, problem: object) -> None:
        super().__init__(
            f"what the server answers is not OpenAI's API: see that the address is right ({problem})"
        )


class Client:
    """Each request has a connection of its own; one that is not read to its end closes it, as people do."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:  # such as a port above 65535
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise RequestError(
                f"{url} is not the address of a server: give one such as http://localhost:8000"
            )
        self._tls = parts.scheme == "https"
        self._host, self._port = host, port or (443 if self._tls else 80)
        self._folder = parts.path.rstrip("/").removesuffix("/v1")
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nConnection: close\r\nAccept: */*\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    async def ask(self, path: str, body: dict[str, Any], asked: float | None = None) -> Answer:
        """`asked`: when it was to be sent, if it may have been sent later."""
        answer = Answer(time.perf_counter() if asked is None else asked)
        async with aclosing(self.tokens(path, body, answer)) as stream:  # type: ignore[type-var]
            async for at in stream:
                answer.times.append(at)
        return answer

    async def tokens(
        self, path: str, body: dict[str, Any], answer: Answer | None = None
    ) -> AsyncIterator[float]:
        """The time of each event with a text. The rest that is told goes to `answer`."""
        answer = answer or Answer(0.0)
        async with aclosing(self.lines("POST", path, body)) as lines:  # type: ignore[type-var]
            async for at, line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    answer.ended = answer.ended or at
                    continue
                try:
                    has_text = _take(json.loads(data), data, at, answer)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise Unreadable(error) from None
                if has_text:
                    yield at

    async def get(self, path: str) -> Any:
        async with aclosing(self.lines("GET", path)) as lines:  # type: ignore[type-var]
            return json.loads(b"\n".join([line async for _, line in lines]))

    async def lines(self, method: str, path: str, body: Any = None) -> AsyncIterator[tuple[float, bytes]]:
        """Of the response, each with the time of its arrival."""
        from httptools import HttpParserError, HttpResponseParser

        sent = b"" if body is None else json.dumps(body).encode()
        kind = f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n" if sent else ""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls or None)
        try:
            writer.write(f"{method} {self._folder}{path} HTTP/1.1\r\n{self._head}{kind}\r\n".encode() + sent)
            received = _Received()
            parser, rest = HttpResponseParser(received), b""
            while not received.complete and (data := await reader.read(CHUNK)):
                parser.feed_data(data)
                if not received.body or parser.get_status_code() >= 400:
                    continue
                *whole, rest = (rest + received.take()).split(b"\n")
                for line in whole:
                    yield time.perf_counter(), line
            if not received.begun:
                raise Refused(0, b"")
            if parser.get_status_code() >= 400:
                raise Refused(parser.get_status_code(), received.take())
            if rest:
                yield time.perf_counter(), rest
        except HttpParserError as error:
            raise Unreadable(error) from None
        finally:
            writer.close()


class _Received:
    """What httptools calls as it parses a response."""

    def __init__(self) -> None:
        self.body, self.begun, self.complete = b"", False, False

    def take(self) -> bytes:
        body, self.body = self.body, b""
        return body

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


def _take(event: dict[str, Any], data: bytes, at: float, answer: Answer) -> bool:
    """What an event tells of the answer; whether it has a text."""
    if "error" in event:
        raise Refused(event["error"].get("code") or 500, data)
    if usage := event.get("usage"):
        answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    choices = event.get("choices", ())
    if any(choice.get("finish_reason") for choice in choices):
        answer.ended = at
    return any(map(_text, choices))


def _text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))
