"""The one place that runs requests, whichever dialect they came in."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from fastapi import Request

from tandem.engine.async_llm import AsyncLLM
from tandem.engine.models import Models
from tandem.engine.reply import Token, TokenLogprob
from tandem.errors import ContextError, DeadlineError, ModelNotFoundError, TandemError
from tandem.kernels.kernel import Array
from tandem.server.conversation import Prompt, prepare
from tandem.server.generation import Answer, Generation, Piece, Spent
from tandem.server.http.errors import LOG, message_of
from tandem.server.metrics import Metrics
from tandem.server.page.live import live_of
from tandem.server.reading import Reader
from tandem.server.settings import ServerSettings


class Server:
    """What handlers find in `app.state.server`."""

    def __init__(self, models: Models, settings: ServerSettings) -> None:
        self.models, self.settings = models, settings
        self.metrics = Metrics(models)
        self.pulls: dict[str, Any] = {}  # models that are being fetched, by their names
        self.failure: Exception | None = None  # why the first model could not be loaded at the start
        self._first: asyncio.Task[None] | None = None  # loads it

    def start(self) -> None:
        """Begins to load the first model, so that it is there when it is asked for."""
        if self.models.names():
            self._first = asyncio.get_running_loop().create_task(self._load(self.models.names()[0]))

    async def _load(self, name: str) -> None:
        try:
            async with self.models.use(name) as llm:
                LOG.info("%s is ready on %s", name, llm.llm.device.describe())
        except Exception as error:
            self.failure = error
            unforeseen = None if isinstance(error, TandemError) else error
            LOG.error("%s cannot be loaded: %s", name, message_of(error), exc_info=unforeseen)

    def fatal(self) -> Exception | None:
        """What makes it useless to go on: its only model cannot be loaded."""
        return self.failure if len(self.models.names()) == 1 else None

    def health(self) -> tuple[Literal["ok", "loading", "failed"], str]:
        """Whether requests are answered, and why not."""
        failures = [str(one.llm.failure) for one in self.models.loaded() if one.llm.failure]
        if failures:
            return "failed", failures[0]
        if self._first and not self._first.done():
            return "loading", "the model is being loaded"
        first = self.models.names()[:1]
        if self.failure and not any(one.name in first for one in self.models.loaded()):
            return "failed", message_of(self.failure)
        return "ok", ""

    def model_name(self, name: str | None) -> str:
        """The model a request asks for: the first if it does not say."""
        names = self.models.names()
        if not name and not names:
            raise ModelNotFoundError("this server has no models: name some when it is started")
        return name or names[0]

    async def run(self, *requests: Generation) -> AsyncGenerator[Piece, None]:
        """The answers to requests to one model, piece by piece, counted through. Closing the iterator stops them."""
        name = self.model_name(requests[0].model)
        async with self.models.use(name, keep_alive=requests[0].keep_alive) as llm:
            live_of(llm)  # begins to watch it, if nobody has yet
            streams: list[AsyncGenerator[Piece, None]] = []
            for request in requests:
                prompt = await asyncio.to_thread(self._prepare, llm, request)
                streams += [
                    self._answer(llm, name, prompt, len(streams), nth) for nth in range(request.count)
                ]
            async with aclosing(_merged(streams, self.settings.batch)) as pieces:
                async for piece in pieces:
                    yield piece

    async def answers(self, *requests: Generation) -> list[Answer]:
        """The answers when they are whole."""
        found = [Answer() for request in requests for _ in range(request.count)]
        async with aclosing(self.run(*requests)) as pieces:
            async for piece in pieces:
                found[piece.index].add(piece)
        return found

    async def count(self, request: Generation) -> int:
        """The tokens of a prompt."""
        async with self.models.use(self.model_name(request.model)) as llm:
            return len((await asyncio.to_thread(prepare, llm.llm, request)).ids)

    async def embed(
        self, model: str, prompts: Sequence[str | list[int]], keep_alive: float | None = None
    ) -> tuple[list[Array], int]:
        """A vector for each prompt, and how many tokens they have."""
        vectors, count = list[Array](), 0
        async with self.models.use(model, keep_alive=keep_alive) as llm:
            try:
                async with asyncio.timeout(self.settings.timeout):
                    for text in prompts:
                        ids = (
                            await asyncio.to_thread(llm.llm.tokenize, text) if isinstance(text, str) else text
                        )
                        vectors.append(await llm.embed(ids))
                        count += len(ids)
            except TimeoutError:
                seconds = self.settings.timeout
                raise DeadlineError(
                    f"the texts were not done in {seconds:g} s: send fewer at a time"
                ) from None
        return vectors, count

    def _prepare(self, llm: AsyncLLM, request: Generation) -> Prompt:
        """A prompt that fits."""
        prompt, model = prepare(llm.llm, request), llm.llm
        count, most = len(prompt.ids), self.settings.max_prompt or math.inf
        # Clients know such errors by the words of OpenAI and Anthropic, and then send less.
        if count > most:
            raise ContextError(
                f"the prompt is too long: {count} input tokens exceed the configured limit of {most}: shorten it"
            )
        if count >= model.context:
            trained = model.engine.model.config.trained_context
            raise ContextError(
                f"the prompt is too long: this model's maximum context length is {model.context} tokens, and it has "
                f"{count}: shorten it, or serve the model with a larger context (up to {trained})"
            )
        return prompt

    async def _answer(
        self, llm: AsyncLLM, model: str, prompt: Prompt, first: int, nth: int
    ) -> AsyncGenerator[Piece, None]:
        """One answer, the n-th of those that the request asks for; `first` is the index of the first of them."""
        params, reader = {"timeout": self.settings.timeout, **prompt.params}, prompt.reader()
        index, ids, length = first + nth, list[int](), len(prompt.ids)
        if nth and params.get("seed") is not None:
            params["seed"] += nth  # or all would be the same
        if only_echo := params.get("max_tokens") == 0:
            params["max_tokens"] = 1
        if prompt.echoes and params.get("logprobs") is not None:
            params["prompt_logprobs"] = params["logprobs"]
        with self.metrics.request(model) as watch:
            async with aclosing(llm.stream(prompt.ids, **params)) as tokens:  # type: ignore[type-var]
                async for token in tokens:
                    watch.token()
                    if prompt.echoes and not ids:
                        logprobs = _prompt_logprobs(llm, prompt.ids, token)
                        yield Piece(index, prompt.text, logprobs=logprobs, prompt_tokens=length)
                    ids.append(token.id)
                    piece = Piece(index, prompt_tokens=length, finish=token.finish_reason)
                    if not only_echo:
                        _fill(piece, token, reader)
                    if piece.finish == "stop" and params.get("stop"):
                        piece.stopped_by = _stop_text(llm, ids, params["stop"])
                    if token.usage:
                        piece.usage = Spent(**vars(token.usage), reasoning_tokens=reader.thoughts)
                        watch.done(piece.usage, piece.finish or "")
                    yield piece


def _fill(piece: Piece, token: Token, reader: Reader) -> None:
    """What a token adds to an answer."""
    news = reader.push(token.text, piece.finish is not None)
    piece.text, piece.reasoning = news.text, news.reasoning
    piece.arguments, piece.calls = news.arguments, news.calls
    piece.token_ids = [token.id]
    piece.logprobs = [token.logprob] if token.logprob else []
    if piece.finish == "stop" and reader.called:
        piece.finish = "tool_calls"


def _prompt_logprobs(llm: AsyncLLM, ids: list[int], token: Token) -> list[TokenLogprob]:
    """Of a prompt that is echoed, if they were asked for; nothing is known of its first token."""
    if token.prompt_logprobs is None:
        return []
    first = TokenLogprob(ids[0], llm.llm.tokenizer.piece(ids[0]), math.nan)
    return [first, *(one for one in token.prompt_logprobs if one)]


def _stop_text(llm: AsyncLLM, ids: list[int], stops: Sequence[str]) -> str | None:
    """The stop string that an answer came to, which is not in its text any more."""
    if ids[-1] in llm.llm.tokenizer.stop_ids:
        return None
    text = llm.llm.tokenizer.decode(ids, continues=True)
    found = [stop for stop in stops if stop in text]
    return min(found, key=text.index, default=None)


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


async def _merged(streams: Sequence[AsyncGenerator[Piece, None]], most: int) -> AsyncGenerator[Piece, None]:
    """The pieces of all streams as they come, `most` streams at a time."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for piece in only:
                yield piece
        return
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
    turn = asyncio.Semaphore(most)

    async def pump(stream: AsyncGenerator[Piece, None]) -> None:
        end: BaseException | None = None
        try:
            async with turn, aclosing(stream) as pieces:
                async for piece in pieces:
                    queue.put_nowait(piece)
        except Exception as error:
            end = error
        queue.put_nowait(end)

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
