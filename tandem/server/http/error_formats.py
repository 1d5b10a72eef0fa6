"""The error format of each API, by path prefix. A new API adds a row to APIS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tandem.server.anthropic.error_body import error_body as anthropic_error_body
from tandem.server.llama_cpp.error_body import error_body as llama_cpp_error_body
from tandem.server.ollama.error_body import error_body as ollama_error_body
from tandem.server.openai.error_body import error_body as openai_error_body


class Api(NamedTuple):
    prefix: str
    # From status, message, code, parameter and details (http/errors.py: details_of).
    error_body: Callable[[int, str, str | None, str | None, Mapping[str, int]], Any]
    stream_error: str  # the last event of a stream that failed; {} is the error body as JSON


# llama-server's own paths; without /v1, OpenAI's too.
LLAMA_CPP = (
    "/completion",
    "/infill",
    "/embedding",
    "/props",
    "/slots",
    "/apply-template",
    "/rerank",
    "/chat/",
    "/responses",
)
# The first match counts. All other paths, such as /tokenize, use OpenAI's formats.
APIS = (
    *(Api(path, llama_cpp_error_body, "data: {}\n\n") for path in LLAMA_CPP),
    Api("/api/", ollama_error_body, "{}\n"),
    Api("/v1/messages", anthropic_error_body, "event: error\ndata: {}\n\n"),
    Api("", openai_error_body, "data: {}\n\n"),
)
STREAMS = (b"text/event-stream", b"application/x-ndjson")  # content types of streams


def api_of(path: str) -> Api:
    return next(api for api in APIS if path.startswith(api.prefix))
