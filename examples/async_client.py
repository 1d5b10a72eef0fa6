"""An asynchronous client: eight chats at once over HTTP, which the server answers as one batch.

    python examples/async_client.py [MODEL]

It uses the `openai` package where that is installed, else threads and urllib.
"""

import asyncio
import json
import sys
import time
import urllib.request

from local_server import local_server, post

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
COUNTRIES = ["France", "Italy", "Spain", "Japan", "Egypt", "Germany", "Norway", "Greece"]

try:
    from openai import AsyncOpenAI
except ImportError:
    AsyncOpenAI = None


async def main(url: str) -> None:
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        name = json.load(response)["data"][0]["id"]
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none") if AsyncOpenAI else None

    async def ask(country: str) -> str:
        messages = [{"role": "user", "content": f"What is the capital of {country}? One word."}]
        options = {"model": name, "messages": messages, "max_tokens": 12, "temperature": 0}
        if client:
            return (await client.chat.completions.create(**options)).choices[0].message.content
        reply = await asyncio.to_thread(post, f"{url}/v1/chat/completions", options)
        return reply["choices"][0]["message"]["content"]

    start = time.perf_counter()
    answers = await asyncio.gather(*map(ask, COUNTRIES))
    for country, answer in zip(COUNTRIES, answers, strict=True):
        print(f"{country}: {answer}")
    print(f"{len(answers)} answers in {time.perf_counter() - start:.2f} s")


with local_server(MODEL) as url:
    asyncio.run(main(url))
