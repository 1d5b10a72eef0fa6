"""How requests feel when others are there: time to the first token, and between tokens, on this machine.

    python -m benchmarks.serving MODEL [--device cpu] [--threads 2]

- shared: the first token after a prompt of 1,000 tokens, new and when the same beginning was answered before;
- disturbed: the time between tokens of a stream, before and while a prompt of 2,000 tokens arrives;
- load: clients that ask one request after another (prompts of 20 to 200 tokens, answers of 16 to 64): tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

import numpy as np

from tandem import AsyncLLM

CONTEXT = 4096


def ids(llm: AsyncLLM, count: int, chance: random.Random) -> list[int]:
    return [chance.randrange(1000, 2000) for _ in range(count)]


async def first_token(llm: AsyncLLM, prompt: list[int]) -> float:
    return (await llm.generate(prompt, max_tokens=1)).usage.first_token_seconds


async def shared(llm: AsyncLLM, rounds: int = 5) -> tuple[float, float]:
    """Seconds to the first token: of a new prompt, and of one that begins like it."""
    cold, warm = [], []
    for i in range(rounds):
        chance = random.Random(i)
        prefix = ids(llm, 1000, chance)
        cold.append(await first_token(llm, prefix + ids(llm, 20, chance)))
        warm.append(await first_token(llm, prefix + ids(llm, 20, chance)))
    return float(np.median(cold)), float(np.median(warm))


async def disturbed(llm: AsyncLLM, streams: int, rounds: int = 3) -> tuple[Any, Any, float]:
    """Gaps between a stream's tokens: before a long prompt arrives, and until its first token; and how long that is."""
    before, during, first = [], [], []
    for i in range(rounds):
        chance, times, arrived = random.Random(i), list[list[float]](), list[float]()

        async def answer(chance: random.Random = chance, times: list[list[float]] = times) -> None:
            times.append([])
            mine = times[-1]
            async for _ in llm.stream(ids(llm, 20, chance), max_tokens=2000, ignore_eos=True):
                mine.append(time.perf_counter())

        answering = [asyncio.create_task(answer()) for _ in range(streams)]
        await asyncio.sleep(2.0)
        arrived.append(time.perf_counter())
        first.append(await first_token(llm, ids(llm, 2000, chance)))
        arrived.append(time.perf_counter())
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)
        for mine in times:
            gaps = np.diff(mine)
            at = np.array(mine[1:])
            before += gaps[(at < arrived[0]) & (at > arrived[0] - 1.5)].tolist()
            during += gaps[(at >= arrived[0]) & (at <= arrived[1])].tolist()
    return np.array(before), np.array(during), float(np.median(first))


async def load(llm: AsyncLLM, clients: int, seconds: float = 8.0) -> tuple[float, float]:
    """Tokens a second of all clients, and the 99th percentile of the time to the first token."""
    made, first, end = [], [], time.perf_counter() + seconds

    async def client(number: int) -> None:
        chance = random.Random(number)
        while time.perf_counter() < end:
            prompt = ids(llm, chance.randrange(20, 200), chance)
            result = await llm.generate(prompt, max_tokens=chance.randrange(16, 64), ignore_eos=True)
            made.append(len(result.token_ids))
            first.append(result.usage.first_token_seconds)

    begun = time.perf_counter()
    await asyncio.gather(*(client(i) for i in range(clients)))
    return sum(made) / (time.perf_counter() - begun), float(np.percentile(first, 99))


async def run(options: argparse.Namespace) -> None:
    threads = {"threads": options.threads} if options.threads else {}
    async with AsyncLLM(options.model, device=options.device, context=CONTEXT, **threads) as llm:
        print(f"{options.model} on {llm.llm.device.describe()}")
        await load(llm, 4, 1.0)
        cold, warm = await shared(llm)
        print(
            f"first token after 1,000 tokens: new {cold * 1e3:.0f} ms, shared {warm * 1e3:.0f} ms ({warm / cold:.1%})"
        )
        for streams in (1, 4):
            before, during, first = await disturbed(llm, streams)
            median, p99 = np.median(before), np.percentile(during, 99)
            print(
                f"{streams} streams: {median * 1e3:.1f} ms between tokens; while 2,000 tokens arrive median "
                f"{np.median(during) * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms ({p99 / median:.1f}x the quiet median), "
                f"first token of those after {first:.1f} s"
            )
        for clients in (1, 4, 16, 64):
            rate, first = await load(llm, clients)
            print(f"{clients:2} clients: {rate:.0f} tok/s, first token p99 {first * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
