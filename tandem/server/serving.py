"""The one place that runs requests, whichever dialect they came in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from tandem.engine.async_llm import AsyncLLM
from tandem.engine.models import Models
from tandem.errors import ModelNotFoundError, RequestError
from tandem.server.generation import Answer, Generation, Piece
from tandem.server.settings import ServerSettings

MOST_ANSWERS = 128  # of one request


@dataclass
class Server:
    """What handlers find in `app.state.server`."""

    models: Models
    settings: ServerSettings

    def model_name(self, name: str | None) -> str:
        """The model a request asks for: the first if it does not say."""
        names = self.models.names()
        if not name and not names:
            raise ModelNotFoundError("this server has no models: name some when it is started")
        return name or names[0]

    async def run(self, request: Generation) -> AsyncGenerator[Piece, None]:
        """The answers, piece by piece. Closing the iterator stops them."""
        if not 1 <= request.count <= MOST_ANSWERS:
            raise RequestError(f"n = {request.count}: ask for 1 to {MOST_ANSWERS} answers")
        name = self.model_name(request.model)
        async with self.models.use(name, keep_alive=request.keep_alive) as llm:
            prompt = await asyncio.to_thread(_prompt_ids, llm, request)
            streams = [_one(llm, prompt, request, index) for index in range(request.count)]
            async with aclosing(_merged(streams)) as pieces:
                async for piece in pieces:
                    yield piece

    async def answers(self, request: Generation) -> list[Answer]:
        """The answers when they are whole."""
        found = [Answer() for _ in range(request.count)]
        async with aclosing(self.run(request)) as pieces:
            async for piece in pieces:
                found[piece.index].add(piece)
        return found


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def _prompt_ids(llm: AsyncLLM, request: Generation) -> list[int] | str:
    if request.prompt is not None:
        return request.prompt
    return llm.llm.chat_ids(request.messages, **request.template)


async def _one(
    llm: AsyncLLM, prompt: list[int] | str, request: Generation, index: int
) -> AsyncGenerator[Piece, None]:
    params = dict(request.params)
    if index and params.get("seed") is not None:
        params["seed"] += index  # or all answers would be the same
    async with aclosing(llm.stream(prompt, **params)) as tokens:  # type: ignore[type-var]
        async for token in tokens:
            logprobs = [token.logprob] if token.logprob else []
            yield Piece(
                index, token.text, token_ids=[token.id], logprobs=logprobs, finish=token.finish_reason,
                usage=token.usage,
            )  # fmt: skip


async def _merged(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """The pieces of all streams, as they come."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for piece in only:
                yield piece
        return
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Piece, None]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(stream) as pieces:
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
