"""`tandem bench serve`: requests that come at random times (Poisson), whether or not others are answered, as people do.

Times count from when a request was due, so that a server that holds everything up cannot hide it.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from typing import Any, TypedDict

import numpy as np

from tandem.bench.http_client import Answer, Client, Refused, Unreadable
from tandem.errors import DeadlineError, DeviceError, RequestError

SCHEMA = 1
CHAT = "/v1/chat/completions"
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father"
)
GREW = 2.0  # times the first ones' wait: the server does not keep up
FEWEST = 6  # answers: the waits of fewer may grow by chance
ENOUGH = 100  # requests, for a 99th of a hundred


class Percentiles(TypedDict):
    """Seconds."""

    p50: float
    p90: float
    p99: float
    most: float


class ServeRow(TypedDict):
    rate: float  # requests a second that were sent, on average
    requests: int
    answered: int
    errors: dict[str, int]  # what went wrong: how often
    seconds: float  # from the first request to the last token
    tokens_per_s: float  # of all answers, over those seconds
    requests_per_s: float  # that were answered
    prompt_tokens: int  # of all that were answered, by the server's count (0: it does not tell)
    tokens: int  # of all answers
    ttft: Percentiles | None  # None: nothing was answered
    between_tokens: Percentiles | None  # as a reader sees them
    whole: Percentiles | None  # from the request to its last token
    ttft_seconds: list[float]  # of each answer
    whole_seconds: list[float]
    late: float  # seconds at most that this client was behind its own plan
    warnings: list[str]


class ServeResult(TypedDict):
    schema: int
    date: str
    version: str  # of Tandem
    server: str
    model: str
    prompt_words: int
    generate: int
    rows: list[ServeRow]
    notes: list[str]


@dataclass(frozen=True)
class Load:
    rate: float
    requests: int
    prompt: int  # words on average: from half to one and a half times as many
    generate: int  # tokens on average, alike
    timeout: float
    seed: int = 0


class Server:
    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        self.client, self.url, self.model = Client(url, api_key), url, model or ""
        self.more: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        self.notes: list[str] = []

    async def meet(self, load: Load) -> None:
        """Which model it has, and whether it knows all that we ask; the first request also warms it up. That takes as
        long as any answer may, and no longer."""
        try:
            async with asyncio.timeout(load.timeout):
                await self._meet(load)
        except TimeoutError:
            raise DeadlineError(
                f"the server at {self.url} did not answer a first request in {load.timeout:g} s: "
                "see whether it works, or give it more with --timeout"
            ) from None
        except OSError as error:
            raise DeviceError(
                f"there is no server at {self.url} ({_reason(error)}): start one with `tandem serve`"
            ) from None

    async def _meet(self, load: Load) -> None:
        try:
            self.model = self.model or (await self.client.get("/v1/models"))["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise RequestError(f"the server at {self.url} lists no models: name one with --model") from None
        chance = random.Random(-1)
        try:
            await self.ask(words(chance, load.prompt), load.generate)
        except Refused as error:
            if error.status not in (400, 422):
                raise
            self.more = {}
            self.notes.append("the server does not know ignore_eos: answers may be shorter than asked for")
            await self.ask(words(chance, load.prompt), load.generate)

    async def ask(self, text: str, tokens: int, due: float | None = None) -> Answer:
        body = {
            "model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
            "temperature": 0, "stream": True, **self.more,
        }  # fmt: skip
        return await self.client.ask(CHAT, body, due)


def _few(requests: int) -> list[str]:
    few = f"of {requests} requests p99 is about the slowest: more of them (--requests 200) tell what is usual"
    return [few] if requests < ENOUGH else []


def _reason(error: OSError) -> str:
    """Without numbers and addresses."""
    if said := getattr(error, "reason", ""):  # of TLS, whose numbers are its own
        return str(said).replace("_", " ").lower()
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or "no connection"


def run(
    server: Server, loads: Sequence[Load], tell: Callable[[ServeRow], None] = lambda row: None
) -> ServeResult:
    async def all_of_them() -> list[ServeRow]:
        await server.meet(loads[0])
        rows = []
        for load in loads:
            rows.append(await poisson(server, load))
            tell(rows[-1])
        return rows

    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": version("tandem-llm"),
        "server": server.url,
        "rows": asyncio.run(all_of_them()),
        "model": server.model.rpartition("/")[2] if server.model.startswith("/") else server.model,
        "prompt_words": loads[0].prompt,
        "generate": loads[0].generate,
        "notes": [*server.notes, *_few(loads[0].requests)],
    }


async def poisson(server: Server, load: Load) -> ServeRow:
    chance = random.Random(load.seed)
    work = [
        (
            chance.expovariate(load.rate),
            words(chance, around(chance, load.prompt)),
            around(chance, load.generate),
        )
        for _ in range(load.requests)
    ]
    errors, late = Counter[str](), 0.0
    begun = due = time.perf_counter()

    async def one(text: str, tokens: int, due: float) -> Answer | None:
        nonlocal late
        await asyncio.sleep(due - time.perf_counter())
        late = max(late, time.perf_counter() - due)
        try:
            async with asyncio.timeout(load.timeout):
                answer = await server.ask(text, tokens, due)
        except TimeoutError:
            errors[f"no answer in {load.timeout:g} s"] += 1
        except Refused as error:
            errors[f"HTTP {error.status}" if error.status else "closed"] += 1
        except Unreadable:
            errors["not OpenAI's API"] += 1
        except OSError as error:
            errors[f"no connection: {error.strerror or error}"] += 1
        else:
            if answer.times and answer.ended:
                return answer
            errors["cut off" if answer.times else "an empty answer"] += 1
        return None

    tasks = []
    for gap, text, tokens in work:
        due += gap
        tasks.append(asyncio.create_task(one(text, tokens, due)))
    answers = [answer for answer in await asyncio.gather(*tasks) if answer]
    return summary(load, answers, dict(errors), begun, late)


def summary(load: Load, answers: list[Answer], errors: dict[str, int], begun: float, late: float) -> ServeRow:
    first = [answer.first for answer in answers]
    whole = [answer.times[-1] - answer.asked for answer in answers]
    events = sum(len(answer.times) for answer in answers)
    tokens = sum(answer.tokens or len(answer.times) for answer in answers)
    seconds = max((answer.times[-1] for answer in answers), default=begun) - begun
    return {
        "rate": load.rate,
        "requests": load.requests,
        "answered": len(answers),
        "errors": errors,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if answers else 0.0,
        "requests_per_s": len(answers) / seconds if answers else 0.0,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "tokens": tokens,
        "ttft": percentiles(first),
        "between_tokens": percentiles([b - a for answer in answers for a, b in pairwise(answer.times)]),
        "whole": percentiles(whole),
        "ttft_seconds": first,
        "whole_seconds": whole,
        "late": late,
        "warnings": _warnings(first, events, tokens, late),
    }


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    if not seconds:
        return None
    p50, p90, p99 = map(float, np.percentile(seconds, [50, 90, 99]))
    return {"p50": p50, "p90": p90, "p99": p99, "most": float(max(seconds))}


def words(chance: random.Random, count: int) -> str:
    """A text that no other begins like, of words that are about a token each."""
    return " ".join(chance.choices(WORDS.split(), k=count))


def around(chance: random.Random, average: int) -> int:
    return chance.randint(max(1, average // 2), max(1, average + average // 2))


def _warnings(first: list[float], events: int, tokens: int, late: float) -> list[str]:
    """`first`: waits, in the order in which requests came."""
    found, third = [], len(first) // 3
    if len(first) >= FEWEST and np.median(first[-third:]) > GREW * np.median(first[:third]) + 0.05:
        found.append("requests came faster than they were answered: with more of them, times would be longer")
    if events < 0.9 * tokens:
        found.append(
            f"{tokens} tokens came in {events} pieces: the time between tokens is that between pieces"
        )
    if late > 0.05:
        found.append(f"this client was up to {late:.2f} s behind its plan: the machine is too busy to tell")
    return found
