"""`tandem run` on a running server that serves the model, instead of loading it again."""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from tandem.cli.terminal import note
from tandem.errors import DeviceLostError, QueueFullError, RequestError, TandemError
from tandem.server.instances import Instance, running

# Options about loading: with one of them, `tandem run` loads its own model.
LOAD_OPTIONS = ("context", "threads", "split", "gpu_memory", "kv_memory", "draft")
TIMEOUT = 600.0  # seconds without a token
MAX_LIVE = 16 << 20  # bytes of `/live`
CONNECT_TIMEOUT = 5.0  # seconds to say which models it has: a stopped or overloaded server is passed over
NOT_JSON = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # or not of the right form
NOT_A_SERVER = (http.client.HTTPException, *NOT_JSON)
CUT = "the server closed the connection before the response was complete: try again"


def find_server(options: argparse.Namespace) -> RemoteLLM | None:
    """A running server of this model, if no option requires to load it here."""
    if (options.device, options.kv, options.prompt_lookup) != ("auto", "f16", False) or any(
        getattr(options, name) for name in LOAD_OPTIONS
    ):
        return None
    try:
        found_servers = running()
    except RequestError:  # of `tandem ps`; the model can be loaded here
        return None
    for instance in found_servers:
        if options.model in instance.models:
            found = RemoteLLM(instance, options.model)
            if found.is_available():
                note(f"using the server at {found.url}")
                return found
    return None


class RemoteLLM:
    """The part of the LLM interface that `tandem run` uses, over HTTP."""

    def __init__(self, instance: Instance, model: str) -> None:
        self.url, self.model, self.context = instance.url, model, 0
        self._headers = {"content-type": "application/json", **_authorization(instance)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def is_available(self) -> bool:
        try:
            with self._request("GET", "/live", timeout=CONNECT_TIMEOUT) as response:
                live = json.loads(response.read(MAX_LIVE))["models"]
            self.context = int(live[self.model]["context"]) if self.model in live else 0
        except (OSError, TandemError, *NOT_A_SERVER):
            return False
        return True

    def chat(self, messages: Iterable[Mapping[str, Any]], **params: Any) -> Any:
        return self._whole(messages, params)

    def generate(self, prompt: str, **params: Any) -> Any:
        return self._whole(prompt, params)

    def stream(self, prompt: str | Iterable[Mapping[str, Any]], **params: Any) -> Iterator[Any]:
        """The chunks that the server sends, as Tokens; the last one has the usage."""
        from tandem.engine.output import Token, Usage

        path, body = _body(self.model, prompt, params)
        begun, first, finish = time.perf_counter(), 0.0, None
        try:
            with self._request("POST", path, body) as response:
                for data in _events(response):
                    for choice in data["choices"]:
                        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                        first, finish = first or time.perf_counter(), choice["finish_reason"] or finish
                        yield Token(-1, text)
                    if data.get("usage"):
                        used, now = data["usage"], time.perf_counter()
                        counts = used["prompt_tokens"], used["completion_tokens"]
                        seconds = (first or now) - begun, now - (first or now)
                        yield Token(-1, "", None, finish, Usage(*counts, *seconds))
        except (OSError, *NOT_A_SERVER):
            raise DeviceLostError(CUT) from None

    def _whole(self, prompt: str | Iterable[Mapping[str, Any]], params: dict[str, Any]) -> Any:
        from tandem.engine.output import Result

        tokens = list(self.stream(prompt, **params))
        last = tokens[-1]
        return Result("".join(token.text for token in tokens), [], last.finish_reason, last.usage)

    def _request(
        self, method: str, path: str, body: Any = None, timeout: float = TIMEOUT
    ) -> http.client.HTTPResponse:
        host = urlsplit(self.url)
        connection = http.client.HTTPConnection(host.hostname or "", host.port, timeout=timeout)
        try:
            connection.request(method, path, body and json.dumps(body), self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise DeviceLostError(
                f"the server at {self.url} does not respond: {error}: check `tandem ps`"
            ) from None
        if response.status >= 400:
            raise _error(response.status, response.read())
        return response


def _authorization(instance: Instance) -> dict[str, str]:
    if not instance.api_keys:
        return {}
    from tandem.server.settings import read_api_keys

    try:
        return {"authorization": f"Bearer {read_api_keys(Path(instance.api_keys))[0]}"}
    except RequestError:  # the file belongs to another user
        return {}


def _body(
    model: str, prompt: str | Iterable[Mapping[str, Any]], params: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """(path, body) of an OpenAI request."""
    body = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        **params,
    }
    constraint = {"json": body.pop("json_schema", None), "regex": body.pop("regex", None)}
    if constraint := {name: value for name, value in constraint.items() if value is not None}:
        body["structured_outputs"] = constraint
    if isinstance(prompt, str):
        return "/v1/completions", {**body, "prompt": prompt}
    return "/v1/chat/completions", {**body, "messages": list(prompt)}


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    for line in response:
        data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            return
        if data:
            event = json.loads(data)
            if "error" in event:
                raise _error(event["error"].get("code") or 500, data)
            yield event
    raise DeviceLostError(CUT)


def _error(status: Any, body: bytes) -> TandemError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except NOT_JSON:
        message = f"the server returned status {status}: see its log"
    return QueueFullError(message) if status in (429, 503) else RequestError(message)
