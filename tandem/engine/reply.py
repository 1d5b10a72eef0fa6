"""What a request gets back: tokens as they come, and the whole when it is done."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.engine.sequence import Sampled, Sequence
from tandem.engine.text import TextStream
from tandem.errors import DeadlineError

if TYPE_CHECKING:
    from tandem.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    first_token_seconds: float  # from submission to the first token
    decode_seconds: float  # from the first token to the last
    cached_tokens: int = 0  # of the prompt: computed before, for another request

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class TokenLogprob:
    id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()  # the likeliest tokens: id, text, log-probability


@dataclass(frozen=True)
class Result:
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop": an end token or a stop string; "length": max_tokens or the context
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one a token; nothing is said of the first


@dataclass(frozen=True)
class Token:
    """One item of a stream: a token and the text it completes (which may be empty)."""

    id: int
    text: str
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None  # on the last one
    usage: Usage | None = field(default=None, repr=False)  # on the last one
    prompt_logprobs: list[TokenLogprob | None] | None = field(default=None, repr=False)  # on the first one


class Reply:
    """A request being served, and how much of it has been handed out."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self.sequence, self.text, self._tokenizer = (
            sequence,
            TextStream(tokenizer, sequence.params.stop),
            tokenizer,
        )
        self.pieces: list[str] = []  # one a token that was handed out

    @property
    def has_new_tokens(self) -> bool:
        return len(self.pieces) < len(self.sequence.generated)

    @property
    def done(self) -> bool:
        return self.sequence.finish_reason is not None and not self.has_new_tokens

    def next(self) -> Token:
        """The next token. With the end of a stop string the reply is done, and whoever serves it takes it back."""
        sequence, text = self.sequence, self.text
        sampled = sequence.generated[len(self.pieces)]
        self.pieces.append("" if sampled.id in sequence.stop_ids else text.push(sampled.id))
        if text.stopped:
            sequence.finish("stop")
            sequence.finish_reason = "stop"
            del sequence.generated[len(self.pieces) :]  # sampled before the stop string was seen
        logprob = self._logprob(sampled) if sampled.logprob is not None else None
        scores = self.prompt_logprobs() if len(self.pieces) == 1 else None
        if sequence.finish_reason is None or self.has_new_tokens:
            return Token(sampled.id, self.pieces[-1], logprob, prompt_logprobs=scores)
        self.pieces[-1] += text.flush()
        return Token(sampled.id, self.pieces[-1], logprob, sequence.finish_reason, self._usage(), scores)

    def check(self) -> None:
        """Raises what ended the request before its time."""
        if self.sequence.error:
            raise self.sequence.error
        if self.sequence.finish_reason == "timeout":
            raise DeadlineError(
                f"the request was not done in {self.sequence.params.timeout:g} s, {len(self.pieces)} tokens of its "
                "answer were: allow more time or ask for less"
            )

    def result(self) -> Result:
        self.check()
        sequence = self.sequence
        wanted = sequence.params.logprobs is not None
        logprobs = [self._logprob(sampled) for sampled in sequence.generated] if wanted else None
        ids = [sampled.id for sampled in sequence.generated]
        return Result(
            "".join(self.pieces), ids, sequence.finish_reason or "length", self._usage(), logprobs,
            self.prompt_logprobs(),
        )  # fmt: skip

    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Of the prompt's tokens, when the first of the answer is there, if they were asked for."""
        if self.sequence.params.prompt_logprobs is None:
            return None
        return [None, *map(self._logprob, self.sequence.prompt_scores)]

    def _usage(self) -> Usage:
        sequence = self.sequence
        first = sequence.first_token or time.perf_counter()
        return Usage(
            len(sequence.prompt), len(sequence.generated), first - sequence.submitted,
            max(0.0, (sequence.finished or first) - first), sequence.cached_prompt_tokens,
        )  # fmt: skip

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        piece = self._tokenizer.piece
        top = tuple((token, piece(token), logprob) for token, logprob in sampled.top)
        return TokenLogprob(sampled.id, piece(sampled.id), sampled.logprob or 0.0, top)
