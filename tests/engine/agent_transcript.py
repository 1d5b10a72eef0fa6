"""Transcripts as agents make them: each request has all that was said before, a tool's result, and is answered briefly.

Now and then the agent asks something beside it (a title, a summary) whose prompt begins otherwise, or leaves the
reasoning of its last answer out of later prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import NamedTuple

SIDE_EVERY, REASONING_EVERY = 5, 4  # requests
OPENING = 0.15  # of all tokens: instructions, tools, and the task


class AgentRequest(NamedTuple):
    said: list[int]  # by the user or a tool, after the answer before
    answer: int  # tokens of the answer
    reasoning: int  # of them, the first ones, which later prompts leave out
    side: list[int]  # the prompt of a request beside, just before; empty: none


def transcript(count: int, tokens: int, vocab: int, seed: int = 0) -> list[AgentRequest]:
    """With `count` requests, the last of which has about `tokens` tokens."""
    random, found = Random(seed), list[AgentRequest]()
    answers = [random.randrange(30, 120) * tokens // 30000 + 8 for _ in range(count)]
    rest = tokens - int(OPENING * tokens) - sum(answers)
    cuts = sorted(random.random() for _ in range(count - 2))
    sizes = [int(OPENING * tokens)] + [max(4, int(rest * (b - a))) for a, b in pairwise([0.0, *cuts, 1.0])]
    for number, (size, answer) in enumerate(zip(sizes, answers, strict=True), 1):
        side = random.randrange(100, 1000) * tokens // 30000 + 4 if number % SIDE_EVERY == 0 else 0
        reasoning = answer // 2 if number % REASONING_EVERY == 0 else 0
        said, beside = ([random.randrange(vocab) for _ in range(n)] for n in (size, side))
        found.append(AgentRequest(said, answer, reasoning, beside))
    return found


class Read(NamedTuple):
    """What a request computed of its prompt."""

    prompt: int  # tokens
    computed: int
    known: int  # tokens that an earlier request computed at the same place, after the same tokens

    @property
    def again(self) -> float:
        """The share of the prompt that was computed although it was known."""
        return max(0, self.computed - (self.prompt - self.known)) / self.prompt


Answer = Callable[
    [list[int], int], tuple[list[int], int]
]  # (prompt, tokens) -> (answer, computed prompt tokens)


def replay(requests: list[AgentRequest], answer: Answer) -> Iterator[Read]:
    """Runs the requests of a transcript; yields what each computed."""
    prompt, known = list[int](), 0
    for request in requests:
        if request.side:
            answer(request.side, 8)
        prompt = prompt + request.said
        generated, computed = answer(prompt, request.answer)
        yield Read(len(prompt), computed, known)
        # The state and the keys and values of the last token are not computed.
        known = len(prompt) if request.reasoning else len(prompt) + len(generated) - 1
        prompt = prompt + generated[request.reasoning :]
