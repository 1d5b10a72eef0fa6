"""An answer as a row of blocks (thoughts, text, calls), which some dialects announce, fill and close one by one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from tandem.server.core.generation import Delta, GenerationResult, ToolCall


@dataclass
class ContentBlock:
    index: int
    kind: Literal["reasoning", "text", "call"]
    text: str = ""  # so far; of a call: its arguments
    call: ToolCall | None = None


@dataclass
class BlockEvent:
    what: Literal["begin", "more", "end", "finish"]  # of a block; the last: of the answer
    delta: Delta
    block: ContentBlock
    text: str = ""  # that is new


async def block_events(deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[BlockEvent, None]:
    """What happens to the blocks of an answer."""
    block: ContentBlock | None = None
    count = 0
    async with aclosing(deltas):
        async for delta in deltas:
            for kind, text, call in _parts(delta):
                if block is None or block.kind != kind or call:
                    if block:
                        yield BlockEvent("end", delta, block)
                    block = ContentBlock(count, kind, call=call)
                    count += 1
                    yield BlockEvent("begin", delta, block)
                block.text += text
                yield BlockEvent("more", delta, block, text)
            if delta.finish:
                if block:
                    yield BlockEvent("end", delta, block)
                yield BlockEvent("finish", delta, block or ContentBlock(0, "text"))


def content_blocks(answer: GenerationResult) -> list[ContentBlock]:
    """Of a whole answer."""
    found = [ContentBlock(0, "reasoning", answer.reasoning)] if answer.reasoning else []
    found += [ContentBlock(0, "text", answer.text)] if answer.text or not (found or answer.calls) else []
    return found + [ContentBlock(0, "call", call.arguments, call) for call in answer.calls]


def _parts(delta: Delta) -> Iterator[tuple[Literal["reasoning", "text", "call"], str, ToolCall | None]]:
    if delta.arguments:
        yield "call", delta.arguments, None
    if delta.reasoning:
        yield "reasoning", delta.reasoning, None
    if delta.text:
        yield "text", delta.text, None
    for call in delta.calls:
        yield "call", call.arguments, call
