"""Runs the GenerationRequests of all APIs on the models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, Literal, TypeVar

import numpy as np
from fastapi import Request

from tandem.devices.host_memory import require_memory
from tandem.engine.async_llm import AsyncLLM
from tandem.engine.grammar_checker import GrammarChecker
from tandem.engine.llm import LLM
from tandem.engine.model_manager import ModelManager
from tandem.engine.output import Token, TokenLogprob, Usage
from tandem.engine.params import TextTokens
from tandem.errors import (
    ContextError,
    DeadlineError,
    ModelNotFoundError,
    OutOfMemoryError,
    RequestError,
    TandemError,
)
from tandem.kernels.kernel import Array
from tandem.server.core.images import RequestImages
from tandem.server.core.output_parser import Delta, GenerationResult, GenerationUsage, OutputParser
from tandem.server.core.prompt import (
    GenerationRequest,
    Prompt,
    build_prompt,
    drop_oldest,
    mixed_ids,
    with_preset,
)
from tandem.server.core.response_store import ResponseStore
from tandem.server.http.background import add_stored, run_in_thread
from tandem.server.http.errors import LOG, message_of
from tandem.server.mcp.tool_programs import ToolPrograms
from tandem.server.monitoring.metrics import Metrics, monitor_of
from tandem.server.settings import ServerSettings
from tandem.threads import throttled

MAX_RESPONSES = 4096  # to one HTTP request
MAX_TOKENS = 4 << 20  # of all texts that one HTTP request embeds or ranks; a query counts with each document
T = TypeVar("T")


class Server:
    """The state behind all endpoints, `app.state.server`: models, settings, metrics."""

    def __init__(self, models: ModelManager, settings: ServerSettings) -> None:
        self.models, self.settings = models, settings
        self.metrics = Metrics(models)
        self.grammars, self.images = GrammarChecker(), RequestImages(settings.allow_image_urls)
        self.responses = ResponseStore(settings.responses)
        self.tools = ToolPrograms(settings.mcp)
        self.presets = {preset.name: preset for preset in settings.presets}
        self.created: dict[
            str, str
        ] = {}  # names of models that clients have made -> the model that they are made of
        self.pulls: dict[str, Any] = {}  # comparable name of a model -> download in progress
        self.failure: Exception | None = None  # why the first model could not be loaded at startup
        self._first: asyncio.Task[None] | None = None  # loads the first model
        self._pinned: list[asyncio.Task[None]] = []  # load those that stay loaded

    def start(self) -> None:
        """Starts to load the first model, before the first request needs it, and those that stay loaded."""
        start = asyncio.get_running_loop().create_task
        if names := self.models.names():
            self._first = start(self._load(names[0]))
            self._pinned = [start(self._load(name)) for name in names[1:] if self.models.spec(name).pinned]

    async def _load(self, name: str) -> None:
        try:
            async with self.models.use(name) as llm:
                LOG.info("%s is ready on %s", name, llm.llm.device.describe())
        except Exception as error:
            if [name] == self.models.names()[:1]:  # a client may have deleted it meanwhile
                self.failure = error
            unexpected = None if isinstance(error, TandemError) else error
            LOG.error("%s cannot be loaded: %s", name, error, exc_info=unexpected)

    def fatal(self) -> Exception | None:
        """The error that ends the server: its only model cannot be loaded."""
        return self.failure if len(self.models.names()) == 1 else None

    def health(self) -> tuple[Literal["ok", "loading", "failed"], str]:
        """(status, reason) for /health."""
        failures = [message_of(one.llm.failure) for one in self.models.loaded() if one.llm.failure]
        if failures:
            return "failed", failures[0]
        if self._first and not self._first.done():
            return "loading", "the model is being loaded"
        first = self.models.names()[:1]
        if self.failure and not any(one.name in first for one in self.models.loaded()):
            return "failed", message_of(self.failure)
        try:
            require_memory(0)
        except OutOfMemoryError:
            return "ok", "there is little memory: requests are refused until some is free"
        return "ok", ""

    def model_name(self, name: str | None) -> str:
        """The model of a request; the first one if the request names none."""
        names = self.models.names()
        if not name and not names:
            raise ModelNotFoundError("this server has no models: start it with `tandem serve MODEL`")
        return self.known_name(name) if name else names[0]

    def known_name(self, name: str) -> str:
        """The name of a served model for one of its names; an unknown name unchanged."""
        known, names = self.models.known_name(name), self.models.names()
        aliases = self.settings.aliases
        return names[0] if known not in names and names and (name in aliases or "*" in aliases) else known

    async def stream(self, *requests: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """The deltas of all responses to requests to one model; `Delta.index` counts the responses. Closing the
        generator cancels them."""
        _check_count(requests)
        name = self.model_name(requests[0].model)
        counted = self.created.get(
            name, name
        )  # metrics stay: they must not grow with names that clients make up
        self._apply_preset(name, *requests)
        async with (
            self.models.use(name, keep_alive=requests[0].keep_alive) as llm,
            AsyncExitStack() as images,
        ):
            monitor_of(llm)  # starts the monitor on first use
            streams: list[AsyncGenerator[Delta, None]] = []
            for request in requests:
                if any(isinstance(message["content"], list) for message in request.messages):
                    limit = None if request.truncate else self._max_prompt(llm)
                    await images.enter_async_context(self.images.read(llm.llm, request.messages, limit))
                prompt = await run_in_thread(self._checked_prompt, llm, request)
                if prompt.grammar is not None:
                    await self.grammars.check(prompt.grammar)
                streams += [
                    self._stream_one(llm, counted, prompt, len(streams), nth) for nth in range(request.n)
                ]
            async with aclosing(_merge(streams, self.settings.batch)) as deltas:
                async for delta in deltas:
                    yield delta

    async def generate(self, *requests: GenerationRequest) -> list[GenerationResult]:
        """The complete responses, in the order of `Delta.index`."""
        _check_count(requests)
        results = [GenerationResult() for request in requests for _ in range(request.n)]
        async with aclosing(self.stream(*requests)) as deltas:
            async for delta in deltas:
                results[delta.index].add(delta)
        return results

    def _apply_preset(self, name: str, *requests: GenerationRequest) -> None:
        if preset := self.presets.get(name):
            add_stored(len(requests) * preset.characters)
            for request in requests:
                with_preset(request, preset)

    async def prompt_ids(self, llm: AsyncLLM, request: GenerationRequest) -> list[int]:
        """The tokens of a request's prompt, which may be longer than the context."""
        self._apply_preset(self.model_name(request.model), request)
        async with self.images.read(llm.llm, request.messages):
            return (await run_in_thread(build_prompt, llm.llm, request)).ids

    async def count(self, request: GenerationRequest) -> int:
        """The number of tokens of a request's prompt."""
        async with self.models.use(self.model_name(request.model)) as llm:
            return len(await self.prompt_ids(llm, request))

    async def embed(
        self,
        model: str,
        prompts: Sequence[str | Sequence[int | str]],
        keep_alive: float | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> tuple[Array, int]:
        """(vectors [prompts, width], number of tokens of all prompts). With `dimensions`, only the first values
        of each vector, normalised again. `truncate`: a text that is too long loses its end."""
        async with self.models.use(model, keep_alive=keep_alive) as llm, self._in_time():
            ids = await run_in_thread(_embedding_ids, llm.llm, prompts, truncate)
            vectors = _shortened(model, await llm.embed(ids), dimensions)
        return vectors, sum(map(len, ids))

    async def rerank(
        self, model: str, query: str, documents: Sequence[str], truncate: bool
    ) -> tuple[Array, int]:
        """(scores [documents], number of tokens of all pairs)."""
        async with self.models.use(model) as llm, self._in_time():
            pairs = await run_in_thread(_pairs, llm.llm, query, documents, truncate)
            return await llm.rerank(pairs), sum(len(pair.ids) for pair in pairs)

    @asynccontextmanager
    async def _in_time(self) -> AsyncGenerator[None, None]:
        try:
            async with asyncio.timeout(self.settings.timeout):
                yield
        except TimeoutError:
            seconds = self.settings.timeout
            raise DeadlineError(
                f"the texts were not computed within {seconds:g} s: send fewer texts in a request"
            ) from None

    def _checked_prompt(self, llm: AsyncLLM, request: GenerationRequest) -> Prompt:
        """The prompt of a request, if it is short enough; with `truncate`, without its oldest messages if need be."""
        while True:
            try:
                prompt = self._short_prompt(llm, request)
                request.prompt_ids = prompt.ids
                return prompt
            except ContextError:
                if not request.truncate or not drop_oldest(request):
                    raise

    def _max_prompt(self, llm: AsyncLLM) -> int:
        """The tokens that a prompt may have."""
        return min(llm.llm.context, self.settings.max_prompt or llm.llm.context)

    def _short_prompt(self, llm: AsyncLLM, request: GenerationRequest) -> Prompt:
        model, limit = llm.llm, self._max_prompt(llm)
        prompt = build_prompt(model, request, limit)
        count = len(prompt.ids)  # of a prompt that is too long: a lower bound
        # Clients recognise these errors by OpenAI's and Anthropic's words, and then shorten the prompt.
        if limit < min(count, model.context):
            raise ContextError(
                f"the prompt is too long: {count} or more input tokens exceed the configured limit of {limit}: "
                "shorten it",
                count,
                limit,
            )
        if count >= model.context:
            trained = model.trained_context
            raise ContextError(
                f"the prompt is too long: this model's maximum context length is {model.context} tokens, and it has "
                f"{count} or more: shorten it, or serve the model with a larger context (up to {trained})",
                count,
                model.context,
            )
        return prompt

    async def _stream_one(
        self, llm: AsyncLLM, model: str, prompt: Prompt, first: int, nth: int
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of response `nth` of a request; `first` is the index of the request's first response."""
        params, parser = {"timeout": self.settings.timeout, **prompt.params}, prompt.new_parser()
        index, ids, length, cached = first + nth, list[int](), len(prompt.ids), 0
        if nth and params.get("seed") is not None:
            params["seed"] += nth  # otherwise all responses would be equal
        if only_echo := params.get("max_tokens") == 0:
            params["max_tokens"] = 1
        if prompt.echo and params.get("logprobs") is not None:
            params["prompt_logprobs"] = params["logprobs"]
        with self.metrics.request(model) as timer:
            async with aclosing(llm.stream(prompt.ids, **params)) as tokens:  # type: ignore[type-var]
                async for token in tokens:
                    timer.token()
                    if prompt.echo and not ids:
                        logprobs = _prompt_logprobs(llm, prompt.ids, token)
                        yield Delta(index, prompt.text, logprobs=logprobs, prompt_tokens=length)
                    ids.append(token.id)
                    cached = cached or token.cached_tokens
                    delta = Delta(finish_reason=token.finish_reason) if only_echo else _parse(token, parser)
                    delta.index, delta.prompt_tokens, delta.cached_tokens = index, length, cached
                    if delta.finish_reason == "stop" and params.get("stop"):
                        delta.stop_string = _find_stop_string(llm, ids, params["stop"])
                    usage = token.usage
                    if usage is None and delta.finish_reason:  # it ends before the model's end of turn
                        usage = Usage(length, len(ids), *timer.seconds(), cached)
                    if usage:
                        delta.usage = GenerationUsage(**vars(usage), reasoning_tokens=parser.reasoning_tokens)
                        timer.done(delta.usage, delta.finish_reason or "")
                    yield delta
                    if delta.finish_reason:
                        return


def _check_count(requests: Sequence[GenerationRequest]) -> None:
    if sum(request.n for request in requests) > MAX_RESPONSES:
        raise RequestError(f"the request asks for more than {MAX_RESPONSES} responses: send several requests")


def _shortened(model: str, vectors: Array, dimensions: int | None) -> Array:
    width = vectors.shape[1]
    if dimensions is None or dimensions == width:
        return vectors
    if dimensions > width:
        raise RequestError(f"dimensions: {model} has {width}: ask for as many at most")
    part: Array = vectors[:, :dimensions].copy()
    part /= np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12)
    return part


def _embedding_ids(llm: LLM, prompts: Sequence[str | Sequence[int | str]], truncate: bool) -> list[list[int]]:
    given = (one if isinstance(one, str) else mixed_ids(llm.tokenizer, one, llm.context) for one in prompts)
    return _few((llm.embedding_ids(prompt, truncate=truncate) for prompt in throttled(given)), len)


def _pairs(llm: LLM, query: str, documents: Sequence[str], truncate: bool) -> list[TextTokens]:
    pairs = llm.pairs(query, throttled(documents), truncate=truncate)
    return _few(pairs, lambda pair: len(pair.ids))


def _few(texts: Iterable[T], tokens: Callable[[T], int]) -> list[T]:
    """The texts, if they have few `tokens` together: a short request can have gigabytes of them."""
    found, total = list[T](), 0
    for one in texts:
        found.append(one)
        total += tokens(one)
        if total > MAX_TOKENS:
            raise RequestError(
                f"the texts have more than {MAX_TOKENS} tokens together: send fewer in a request"
            )
    return found


def _parse(token: Token, parser: OutputParser) -> Delta:
    """The delta that one token adds to the response."""
    delta = parser.push(token.text, token.finish_reason is not None)
    delta.token_ids = [token.id]
    delta.logprobs = [token.logprob] if token.logprob else []
    delta.finish_reason = token.finish_reason
    if parser.complete or (delta.finish_reason == "stop" and parser.called):
        delta.finish_reason = "tool_calls"
    return delta


def _prompt_logprobs(llm: AsyncLLM, ids: list[int], token: Token) -> list[TokenLogprob]:
    """The log-probabilities of an echoed prompt, if requested; NaN for its first token."""
    if token.prompt_logprobs is None:
        return []
    first = TokenLogprob(ids[0], llm.llm.tokenizer.piece(ids[0]), math.nan)
    found = [first, *(one for one in token.prompt_logprobs if one)]
    token.prompt_logprobs.clear()  # otherwise they would be kept while the client reads
    return found


def _find_stop_string(llm: AsyncLLM, ids: list[int], stops: Sequence[str]) -> str | None:
    """The stop string that ended a response; the response's text does not contain it any more."""
    if ids[-1] in llm.llm.tokenizer.eos_ids:
        return None
    text = llm.llm.tokenizer.decode(ids, continues=True)
    found = [stop for stop in stops if stop in text]
    return min(found, key=text.index, default=None)


def get_server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


async def _merge(
    streams: Sequence[AsyncGenerator[Delta, None]], max_concurrent: int
) -> AsyncGenerator[Delta, None]:
    """The deltas of all streams in the order of arrival; `max_concurrent` streams run at a time. They wait for a client
    that does not read."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield delta
        return
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(max_concurrent)
    capacity = asyncio.Semaphore(max_concurrent)

    async def pump(stream: AsyncGenerator[Delta, None]) -> None:
        end: BaseException | None = None
        try:
            async with capacity, aclosing(stream) as deltas:
                async for delta in deltas:
                    await queue.put(delta)
        except Exception as error:
            end = error
        await queue.put(end)

    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
