"""An answer as a row of blocks (thoughts, text, calls), which some dialects announce, fill and close one by one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from tandem.server.generation import Answer, Piece, ToolCall


@dataclass
class Block:
    index: int
    kind: Literal["reasoning", "text", "call"]
    text: str = ""  # so far; of a call: its arguments
    call: ToolCall | None = None


@dataclass
class Change:
    what: Literal["begin", "more", "end", "finish"]  # of a block; the last: of the answer
    piece: Piece
    block: Block
    text: str = ""  # that is new


async def changes(pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Change, None]:
    """What happens to the blocks of an answer."""
    block: Block | None = None
    count = 0
    async with aclosing(pieces):
        async for piece in pieces:
            for kind, text, call in _parts(piece):
                if block is None or block.kind != kind or call:
                    if block:
                        yield Change("end", piece, block)
                    block = Block(count, kind, call=call)
                    count += 1
                    yield Change("begin", piece, block)
                block.text += text
                yield Change("more", piece, block, text)
            if piece.finish:
                if block:
                    yield Change("end", piece, block)
                yield Change("finish", piece, block or Block(0, "text"))


def blocks(answer: Answer) -> list[Block]:
    """Of a whole answer."""
    found = [Block(0, "reasoning", answer.reasoning)] if answer.reasoning else []
    found += [Block(0, "text", answer.text)] if answer.text or not (found or answer.calls) else []
    return found + [Block(0, "call", call.arguments, call) for call in answer.calls]


def _parts(piece: Piece) -> Iterator[tuple[Literal["reasoning", "text", "call"], str, ToolCall | None]]:
    if piece.arguments:
        yield "call", piece.arguments, None
    if piece.reasoning:
        yield "reasoning", piece.reasoning, None
    if piece.text:
        yield "text", piece.text, None
    for call in piece.calls:
        yield "call", call.arguments, call
