"""A response as content blocks (reasoning, text, tool call), which Anthropic's and OpenAI's Responses APIs send."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from tandem.server.core.output_parser import Delta, GenerationResult
from tandem.server.core.tool_calls import ToolCall

Kind = Literal["reasoning", "text", "call"]


@dataclass
class ContentBlock:
    index: int
    kind: Kind
    text: str = ""  # received so far; the arguments of a call
    call: ToolCall | None = None


@dataclass
class BlockEvent:
    type: Literal["start", "delta", "stop", "finish"]  # of a block; "finish": of the response
    delta: Delta
    block: ContentBlock
    text: str = ""  # new in this event


async def block_events(deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[BlockEvent, None]:
    """Turns the deltas of one response into events of its content blocks."""
    block: ContentBlock | None = None
    count = 0
    async with aclosing(deltas):
        async for delta in deltas:
            for kind, text, call in _parts(delta):
                if block is None or block.kind != kind or call:
                    if block:
                        yield BlockEvent("stop", delta, block)
                    block = ContentBlock(count, kind, call=call)
                    count += 1
                    yield BlockEvent("start", delta, block)
                block.text += text
                yield BlockEvent("delta", delta, block, text)
            if delta.finish_reason:
                if block:
                    yield BlockEvent("stop", delta, block)
                yield BlockEvent("finish", delta, block or ContentBlock(0, "text"))


def content_blocks(result: GenerationResult) -> list[ContentBlock]:
    """The content blocks of a complete response; an empty text block if there is nothing else."""
    blocks = [ContentBlock(0, "reasoning", result.reasoning)] if result.reasoning else []
    if result.text or not (blocks or result.tool_calls):
        blocks.append(ContentBlock(0, "text", result.text))
    return blocks + [ContentBlock(0, "call", call.arguments, call) for call in result.tool_calls]


def _parts(delta: Delta) -> Iterator[tuple[Kind, str, ToolCall | None]]:
    """(kind, text, the call that starts here), in the order in which they are sent."""
    if delta.arguments:
        yield "call", delta.arguments, None
    if delta.reasoning:
        yield "reasoning", delta.reasoning, None
    if delta.text:
        yield "text", delta.text, None
    for call in delta.tool_calls:
        yield "call", call.arguments, call
