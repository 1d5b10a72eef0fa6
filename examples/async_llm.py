"""AsyncLLM: many requests in one process under asyncio, without a server. One of them is cancelled.

python examples/async_llm.py [MODEL]
"""

import asyncio
import sys

from tandem import AsyncLLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"


async def main() -> None:
    async with AsyncLLM(MODEL) as llm:
        endless = asyncio.create_task(llm.generate("One, two,", max_tokens=3000, ignore_eos=True))
        prompts = ["The capital of France is", "The opposite of hot is", "Two plus two is"]
        results = await asyncio.gather(*(llm.generate(prompt, max_tokens=4) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            print(prompt + result.text)
        endless.cancel()  # gives its memory back; the others never waited for it
        await asyncio.wait([endless])
        print(f"the endless request was cancelled: {endless.cancelled()}")


asyncio.run(main())
