"""A streaming client of the OpenAI API that records the arrival time of each token."""

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

MAX_READ = 1 << 16  # bytes of one read from the socket
MAX_LINE, MAX_DOCUMENT = 1 << 20, 1 << 24  # bytes of an event or an error, and of a list of models
MAX_EVENTS, MAX_TOKENS = 1 << 20, 1 << 32  # of a response
MAX_MESSAGE = 200  # characters of what a server says


@dataclass
class StreamTimes:
    """When a request was due, and when the events of its response arrived (time.perf_counter)."""

    asked: float
    times: list[float] = field(default_factory=list)  # of each event with text: one token or more
    tokens: int = 0  # completion tokens by the server's usage; 0: not reported
    prompt_tokens: int = 0
    ended: float = 0.0  # 0: the response was cut off

    @property
    def ttft(self) -> float:
        return self.times[0] - self.asked


UNAUTHORISED = 401


class Refused(RequestError):
    """The server answered with an HTTP error. `status` 0: it closed the connection."""

    def __init__(self, status: int, body: bytes) -> None:
        try:
            message = " ".join(str(json.loads(body)["error"]["message"])[:MAX_MESSAGE].split())
        except (ValueError, KeyError, TypeError, RecursionError):
            text = body[:MAX_MESSAGE].decode(errors="replace").strip()
            message = (
                "check that the address is one of the OpenAI API"
                if text.startswith("<")
                else text.partition("\n")[0]
            )
        if status == UNAUTHORISED:
            message = "the API key is missing or wrong: give it with --api-key"
        problem = (
            f"answered {status}: {message}"
            if status
            else "closed the connection without an answer: see its log"
        )
        super().__init__(f"the server {problem}")
        self.status = status


class Unreadable(RequestError):
    """The response is not HTTP, or not a stream of the OpenAI API."""

    def __init__(self, problem: object) -> None:
        super().__init__(f"the server's response is not of the OpenAI API: check the address ({problem})")


class Client:
    """Opens a connection for each request, and closes it when the response is not read to its end."""

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

    async def stream(self, path: str, body: dict[str, Any], asked: float | None = None) -> StreamTimes:
        """Sends a request and reads its whole response. `asked`: when it was due, if it may be sent later."""
        times = StreamTimes(time.perf_counter() if asked is None else asked)
        async with aclosing(self.tokens(path, body, times)) as stream:  # type: ignore[type-var]
            async for at in stream:
                times.times.append(at)
                if len(times.times) > MAX_EVENTS:
                    raise Unreadable("it does not end")
        return times

    async def tokens(
        self, path: str, body: dict[str, Any], times: StreamTimes | None = None
    ) -> AsyncIterator[float]:
        """Yields the arrival time of each event with text. Usage and the end of the stream go to `times`."""
        times = times or StreamTimes(0.0)
        async with aclosing(self.lines("POST", path, body)) as lines:  # type: ignore[type-var]
            async for at, line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    times.ended = times.ended or at
                    continue
                try:
                    has_text = _read_event(json.loads(data), data, at, times)
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    raise Unreadable(type(error).__name__) from None
                if has_text:
                    yield at

    async def get(self, path: str) -> Any:
        document = bytearray()
        async with aclosing(self.lines("GET", path)) as lines:  # type: ignore[type-var]
            async for _, line in lines:
                document += line + b"\n"
                if len(document) > MAX_DOCUMENT:
                    raise Unreadable("it does not end")
        return json.loads(document)

    async def lines(self, method: str, path: str, body: Any = None) -> AsyncIterator[tuple[float, bytes]]:
        """Yields the lines of the response with their arrival times."""
        from httptools import HttpParserError, HttpResponseParser

        sent = b"" if body is None else json.dumps(body).encode()
        kind = f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n" if sent else ""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls or None)
        try:
            writer.write(f"{method} {self._folder}{path} HTTP/1.1\r\n{self._head}{kind}\r\n".encode() + sent)
            received = _Received()
            parser, rest, head = HttpResponseParser(received), b"", 0
            while not received.complete and (data := await reader.read(MAX_READ)):
                parser.feed_data(data)
                head += 0 if received.begun else len(data)
                if head > MAX_LINE:
                    raise Unreadable(f"a head of more than {MAX_LINE} bytes")
                if len(rest) + len(received.body) > MAX_LINE:
                    raise Unreadable(f"a line of more than {MAX_LINE} bytes")
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
    """Callbacks of httptools' parser."""

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


def _read_event(event: dict[str, Any], data: bytes, at: float, times: StreamTimes) -> bool:
    """Records the usage and the end that an event reports. True: it has text."""
    if "error" in event:
        code = event["error"].get("code")
        raise Refused(code if isinstance(code, int) else 500, data)
    if usage := event.get("usage"):
        times.tokens, times.prompt_tokens = (
            _token_count(usage[f"{kind}_tokens"]) for kind in ("completion", "prompt")
        )
    choices = event.get("choices", ())
    if any(choice.get("finish_reason") for choice in choices):
        times.ended = at
    return any(map(_has_text, choices))


def _token_count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < MAX_TOKENS:
        raise ValueError("a count of tokens is not one")
    return value


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))
