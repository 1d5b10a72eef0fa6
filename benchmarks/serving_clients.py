"""The clients of the comparison of servers: their requests to /v1/completions, and their latencies.

Requests are token ids, greedy, and run to their full length, so that every server has the same work.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from tandem.bench.http_client import Client, StreamTimes

PROMPTS, ANSWERS = (20, 150), (16, 80)  # tokens of requests under load, from and to
ARRIVAL, PAUSE = 0.03, 0.05  # seconds on average until the next client comes, and from answer to next request
STREAMS, LONG = 4, 2000  # those that are disturbed, and the tokens of the prompt that does
QUIET = 2.0  # seconds before it
PREFIX, TAIL, PREFIXES = 1000, 20, 2  # tokens that prompts share, tokens after them, and how many such pairs
MAX_STREAM = 3600  # tokens of a stream, which is stopped earlier


class Texts:
    """Prompts out of one long text, so that each begins elsewhere."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self._at = list(ids), 0

    def take(self, count: int) -> list[int]:
        self._at = (self._at + 97) % len(self._ids)
        return (self._ids * (2 + count // len(self._ids)))[self._at : self._at + count]


def request(prompt: list[int], count: int) -> tuple[str, dict[str, Any]]:
    wanted = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}
    return "/v1/completions", wanted


def to(port: int) -> Client:
    return Client(f"http://127.0.0.1:{port}")


async def load(port: int, texts: Texts, clients: int, requests: int, seed: int) -> dict[str, float]:
    """Closed-loop clients that arrive at random times, and pause after each response."""
    rng = random.Random(seed)
    work = [(texts.take(rng.randint(*PROMPTS)), rng.randint(*ANSWERS)) for _ in range(requests)]
    made, answers = sum(count for _, count in work), list[StreamTimes]()

    async def client(arrives: float, rng: random.Random) -> None:
        await asyncio.sleep(arrives)
        while work:
            answers.append(await to(port).stream(*request(*work.pop())))
            await asyncio.sleep(rng.expovariate(1 / PAUSE))

    begun = time.perf_counter()
    arrivals = np.cumsum([rng.expovariate(1 / ARRIVAL) for _ in range(clients)])
    await asyncio.gather(*(client(at, random.Random(seed + i)) for i, at in enumerate(arrivals)))
    gaps = np.concatenate([np.diff(answer.times) for answer in answers])
    first = [answer.ttft for answer in answers]
    return {
        "tokens_per_s": made / (max(answer.times[-1] for answer in answers) - begun),
        "first_token_s": float(np.median(first)),
        "first_token_p99_s": float(np.percentile(first, 99)),
        "between_tokens_s": float(np.median(gaps)),
        "between_tokens_p99_s": float(np.percentile(gaps, 99)),
    }


async def disturbed(port: int, texts: Texts) -> dict[str, float]:
    """Inter-token latency of streams, before and while a long prompt arrives."""
    streams = [StreamTimes(time.perf_counter()) for _ in range(STREAMS)]

    async def read(answer: StreamTimes) -> None:
        async with aclosing(to(port).tokens(*request(texts.take(TAIL), MAX_STREAM))) as stream:  # type: ignore[type-var]
            async for at in stream:
                answer.times.append(at)

    reading = [asyncio.create_task(read(answer)) for answer in streams]
    await asyncio.sleep(QUIET)
    long = await to(port).stream(*request(texts.take(LONG), 1))
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    quiet, during = [], []
    for answer in streams:
        for before, at in zip(answer.times, answer.times[1:], strict=False):
            if long.asked - 0.75 * QUIET < before and at < long.asked:
                quiet.append(at - before)
            elif at > long.asked and before < long.times[0]:
                during.append(at - before)
    return {
        "quiet_s": float(np.median(quiet)),
        "during_s": float(np.median(during)),
        "during_p99_s": float(np.percentile(during, 99)),
        "p99_of_during": float(np.percentile(during, 99) / np.median(during)),
        "p99_of_quiet": float(np.percentile(during, 99) / np.median(quiet)),
        "first_token_s": long.ttft,
    }


async def shared(port: int, texts: Texts) -> dict[str, float]:
    """TTFT of new prompts, and of prompts that share a prefix with an earlier one."""
    cold, warm = [], []
    for _ in range(PREFIXES):
        prefix = texts.take(PREFIX)
        cold.append((await to(port).stream(*request(prefix + texts.take(TAIL), 1))).ttft)
        warm.append((await to(port).stream(*request(prefix + texts.take(TAIL), 1))).ttft)
    found = {"cold_s": float(np.median(cold)), "warm_s": float(np.median(warm))}
    return found | {"warm_of_cold": found["warm_s"] / found["cold_s"]}
