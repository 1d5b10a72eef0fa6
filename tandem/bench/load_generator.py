"""`tandem bench serve`: a load generator.

Open loop: requests arrive at Poisson times and do not wait for earlier responses. Latencies count from the time when a
request was due, so that a stalled server cannot hide its delay (no coordinated omission). Closed loop: each of some
clients sends its next request when it has the response to the last.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from typing import Any, TypedDict

import numpy as np

from tandem.bench.http_client import Client, Refused, StreamTimes, Unreadable
from tandem.errors import DeadlineError, DeviceError, RequestError

SCHEMA = 1
CHAT = "/v1/chat/completions"
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father"
)
GROWTH = 2.0  # ratio of the last to the first TTFTs, above which the server does not keep up
MIN_FOR_GROWTH = 6  # responses needed to judge that
MIN_FOR_P99 = 100  # requests


class Percentiles(TypedDict):
    """Seconds."""

    p50: float
    p90: float
    p99: float
    max: float


class ServeRow(TypedDict):
    rate: float  # average requests sent a second; 0: clients
    clients: int  # 0: requests arrive at a rate
    requests: int
    answered: int
    errors: dict[str, int]  # count of each kind of error
    seconds: float  # from the first request to the last token
    # Of all responses over those seconds; with clients: while each of them receives tokens of one.
    tokens_per_s: float
    requests_per_s: float  # responses over those seconds
    prompt_tokens: int  # of all answered requests, by the server's usage (0: not reported)
    tokens: int  # of all responses
    ttft: Percentiles | None  # time to first token; None: nothing was answered
    between_tokens: Percentiles | None  # inter-token latency
    whole: Percentiles | None  # end-to-end latency: from the request to its last token
    ttft_seconds: list[float]  # of each response
    whole_seconds: list[float]
    late: float  # maximum seconds that this client sent a request late
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
    prompt: int  # average words: uniform from half to one and a half times as many
    generate: int  # average tokens, likewise
    timeout: float
    seed: int = 0
    clients: int = 0  # if not 0: instead of the rate


class ServerTarget:
    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        self.client, self.url, self.model = Client(url, api_key), url, model or ""
        self.more: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        self.notes: list[str] = []

    async def probe(self, load: Load) -> None:
        """Finds the model and the supported parameters with a first request, which also warms up the server. Raises if
        that takes longer than `load.timeout`."""
        try:
            async with asyncio.timeout(load.timeout):
                await self._probe(load)
        except TimeoutError:
            raise DeadlineError(
                f"the server at {self.url} did not answer a first request in {load.timeout:g} s: "
                "check the server, or raise --timeout"
            ) from None
        except OSError as error:
            raise DeviceError(
                f"there is no server at {self.url} ({_reason(error)}): start one with `tandem serve`"
            ) from None

    async def _probe(self, load: Load) -> None:
        try:
            if not self.model:
                self.model = (await self.client.get("/v1/models"))["data"][0]["id"]
            if not isinstance(self.model, str):
                raise TypeError
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise RequestError(f"the server at {self.url} lists no models: name one with --model") from None
        rng = random.Random(-1)
        try:
            await self.stream(words(rng, load.prompt), load.generate)
        except Refused as error:
            if error.status not in (400, 422):
                raise
            self.more = {}
            self.notes.append("the server does not support ignore_eos: answers may be shorter than requested")
            await self.stream(words(rng, load.prompt), load.generate)

    async def stream(self, text: str, tokens: int, due: float | None = None) -> StreamTimes:
        body = {
            "model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
            "temperature": 0, "stream": True, **self.more,
        }  # fmt: skip
        return await self.client.stream(CHAT, body, due)


def _few(requests: int) -> list[str]:
    few = f"with {requests} requests p99 is about the slowest one: use more, such as --requests 200"
    return [few] if requests < MIN_FOR_P99 else []


def _reason(error: OSError) -> str:
    """The reason of an error without numbers and addresses."""
    if reason := getattr(error, "reason", ""):  # an error of TLS, which has its own numbers
        return str(reason).replace("_", " ").lower()
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or "no connection"


def run(
    server: ServerTarget, loads: Sequence[Load], tell: Callable[[ServeRow], None] = lambda row: None
) -> ServeResult:
    async def all_of_them() -> list[ServeRow]:
        await server.probe(loads[0])
        rows = []
        for load in loads:
            rows.append(await (closed_loop if load.clients else poisson)(server, load))
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


async def poisson(server: ServerTarget, load: Load) -> ServeRow:
    rng = random.Random(load.seed)
    errors, late = Counter[str](), 0.0
    begun = due = time.perf_counter()

    async def one(text: str, tokens: int, due: float) -> StreamTimes | None:
        nonlocal late
        await asyncio.sleep(due - time.perf_counter())
        late = max(late, time.perf_counter() - due)
        return await answered(server, load, text, tokens, due, errors)

    tasks = []
    for gap, text, tokens in [
        (rng.expovariate(load.rate), *request(rng, load)) for _ in range(load.requests)
    ]:
        due += gap
        tasks.append(asyncio.create_task(one(text, tokens, due)))
    answers = [answer for answer in await asyncio.gather(*tasks) if answer]
    return summary(load, answers, dict(errors), begun, late)


async def closed_loop(server: ServerTarget, load: Load) -> ServeRow:
    rng = random.Random(load.seed)
    waiting = deque(request(rng, load) for _ in range(load.requests))
    errors, begun = Counter[str](), time.perf_counter()

    async def client() -> list[StreamTimes]:
        answers = []
        while waiting:
            text, tokens = waiting.popleft()
            if answer := await answered(server, load, text, tokens, None, errors):
                answers.append(answer)
        return answers

    clients = await asyncio.gather(*(client() for _ in range(load.clients)))
    row = summary(load, [answer for answers in clients for answer in answers], dict(errors), begun, 0.0)
    if all(clients):
        first = max(answers[0].times[0] for answers in clients)
        last = min(answers[-1].times[-1] for answers in clients)
        tokens = sum(_tokens_between(answer, first, last) for answers in clients for answer in answers)
        if last > first:
            row["tokens_per_s"] = tokens / (last - first)
    return row


def _tokens_between(answer: StreamTimes, first: float, last: float) -> float:
    """An event may have several tokens: all events of an answer count for as many as they have on average."""
    events = sum(first < at <= last for at in answer.times)
    return events * (answer.tokens or len(answer.times)) / len(answer.times)


def request(rng: random.Random, load: Load) -> tuple[str, int]:
    """A prompt, and the number of tokens to answer."""
    return words(rng, around(rng, load.prompt)), around(rng, load.generate)


async def answered(
    server: ServerTarget, load: Load, text: str, tokens: int, due: float | None, errors: Counter[str]
) -> StreamTimes | None:
    """The times of a response, or None and one more of `errors`."""
    try:
        async with asyncio.timeout(load.timeout):
            answer = await server.stream(text, tokens, due)
    except TimeoutError:
        errors[f"no answer in {load.timeout:g} s"] += 1
    except Refused as error:
        errors[f"HTTP {error.status}" if error.status else "closed"] += 1
    except Unreadable:
        errors["not the OpenAI API"] += 1
    except OSError as error:
        errors[f"no connection: {error.strerror or error}"] += 1
    else:
        if answer.times and answer.ended:
            return answer
        errors["cut off" if answer.times else "an empty answer"] += 1
    return None


def summary(
    load: Load, answers: list[StreamTimes], errors: dict[str, int], begun: float, late: float
) -> ServeRow:
    first = [answer.ttft for answer in answers]
    whole = [answer.times[-1] - answer.asked for answer in answers]
    events = sum(len(answer.times) for answer in answers)
    tokens = sum(answer.tokens or len(answer.times) for answer in answers)
    seconds = max((answer.times[-1] for answer in answers), default=begun) - begun
    return {
        "rate": load.rate,
        "clients": load.clients,
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
        "warnings": _warnings([] if load.clients else first, events, tokens, late),
    }


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    if not seconds:
        return None
    p50, p90, p99 = map(float, np.percentile(seconds, [50, 90, 99]))
    return {"p50": p50, "p90": p90, "p99": p99, "max": float(max(seconds))}


def words(rng: random.Random, count: int) -> str:
    """Random words of about one token each. Random prompts share no prefix that a server could have cached."""
    return " ".join(rng.choices(WORDS.split(), k=count))


def around(rng: random.Random, average: int) -> int:
    """A random number from half to one and a half times `average`."""
    return rng.randint(max(1, average // 2), max(1, average + average // 2))


def _warnings(first: list[float], events: int, tokens: int, late: float) -> list[str]:
    """`first`: TTFTs in the order of the requests."""
    found, third = [], len(first) // 3
    if len(first) >= MIN_FOR_GROWTH and np.median(first[-third:]) > GROWTH * np.median(first[:third]) + 0.05:
        found.append(
            "requests arrived faster than they were answered: with more of them, latencies would grow"
        )
    if events < 0.9 * tokens:
        found.append(
            f"{tokens} tokens came in {events} events: the inter-token latency is that between events"
        )
    if late > 0.05:
        found.append(f"this client sent requests up to {late:.2f} s late: the machine is too busy to measure")
    return found
