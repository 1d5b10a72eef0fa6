"""The output of a request: decodes sampled tokens to text one by one, and makes the Result at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.engine.sampling import Sampled
from tandem.engine.sequence import Sequence
from tandem.errors import DeadlineError

if TYPE_CHECKING:
    from tandem.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    first_token_seconds: float  # from submission to the first token
    decode_seconds: float  # from the first token to the last
    cached_tokens: int = 0  # prompt tokens whose KV blocks came from the prefix cache

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class TokenLogprob:
    id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()  # most likely tokens: id, text, log-probability


@dataclass(frozen=True)
class Result:
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop": a stop token or stop string; "length": max_tokens or the context
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one per prompt token; None for the first


@dataclass(frozen=True)
class Token:
    """One item of a stream: a token and the text it completes (which may be empty)."""

    id: int
    text: str
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None  # on the last one
    usage: Usage | None = field(default=None, repr=False)  # on the last one
    prompt_logprobs: list[TokenLogprob | None] | None = field(default=None, repr=False)  # on the first one
    cached_tokens: int = field(default=0, repr=False)  # on the first one: prompt tokens from the prefix cache


class Detokenizer:
    """Decodes token by token into whole characters; holds back text that may begin a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], prompt: list[int]) -> None:
        # Imported late, to keep start-up short.
        from tandem.model.harmony import HarmonyDecoder
        from tandem.model.tokenizer import StreamDecoder

        self._decoder: StreamDecoder | HarmonyDecoder = StreamDecoder(tokenizer, continues=True)
        if tokenizer.harmony:
            self._decoder = HarmonyDecoder(tokenizer, tokenizer.harmony, prompt)
        self._stops = [StopSearch(text) for text in stop]
        self._held = ""
        self.stopped = False  # a stop string was found

    def push(self, token: int) -> str:
        """Returns the text that this token completes."""
        text = self._decoder.push(token)
        return self._release(text) if self._stops else text

    def flush(self) -> str:
        """Returns the text held back, at the end of the output."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.flush())
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        held, found = self._held, [place for stop in self._stops if (place := stop.find(text)) is not None]
        text = held + text
        if found:
            self.stopped, self._held = True, ""
            return text[: len(held) + min(found)]
        keep = max((stop.matched for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class StopSearch:
    """Searches a text that arrives in parts for a stop string (Knuth, Morris and Pratt): a character takes constant
    time, whatever the stop string and the text held back."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        # For each length of a prefix, as far as it was needed: the longest shorter prefix that it ends with.
        self._shorter = [0, 0]
        self.matched = 0  # characters at the end of the text that begin the stop string

    def find(self, text: str) -> int | None:
        """Where the first stop string begins, counted from the beginning of this part; None if none ends in it."""
        stop, matched, at = self._stop, self.matched, 0
        while at < len(text):
            if not matched:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            matched, at = self._follow(matched, text[at]), at + 1
            if matched == len(stop):
                return at - matched
        self.matched = matched
        return None

    def _follow(self, matched: int, letter: str) -> int:
        """The length of the prefix at the end of the text, after one more letter."""
        while matched and self._stop[matched] != letter:
            matched = self._shorter_of(matched)
        return matched + (self._stop[matched] == letter)

    def _shorter_of(self, length: int) -> int:
        while len(self._shorter) <= length:
            self._shorter.append(self._follow(self._shorter[-1], self._stop[len(self._shorter) - 1]))
        return self._shorter[length]


class OutputReader:
    """Reads the output of one request: counts the tokens that the caller has received, and decodes them."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self.sequence, self._tokenizer = sequence, tokenizer
        self.detokenizer = Detokenizer(tokenizer, sequence.request.params.stop, sequence.request.prompt)
        self.texts: list[str] = []  # text of each token that was read
        self.is_streamed = False  # nobody asks for `result`: log-probabilities that were read are not kept
        self._prompt_scores: list[Sampled] = []

    @property
    def has_new_tokens(self) -> bool:
        return len(self.texts) < len(self.sequence.generated)

    @property
    def done(self) -> bool:
        """The request has finished and all of its tokens were read."""
        return self.sequence.finish_reason is not None and not self.has_new_tokens

    def next(self) -> Token:
        """Reads the next token. At a stop string the output is done, and the caller must cancel the sequence.

        It leaves out `prompt_logprobs`, which the caller of a stream adds to the first token: converting 40,000 of
        them takes as long as several steps."""
        sequence, detokenizer = self.sequence, self.detokenizer
        sampled = sequence.generated[len(self.texts)]
        if self.is_streamed and sampled.top:  # 2 KB of each token
            sequence.generated[len(self.texts)] = sampled._replace(top=())
        self.texts.append("" if sampled.id in sequence.request.eos_ids else detokenizer.push(sampled.id))
        if detokenizer.stopped:
            sequence.stop_after(len(self.texts))
        logprob = self._logprob(sampled) if sampled.logprob is not None else None
        cached = 0
        if len(self.texts) == 1:
            cached = sequence.state.cached_prompt_tokens
            self._prompt_scores = list(sequence.prompt_scores)  # a preempted sequence computes them again
            if self.is_streamed:  # their number is still needed
                sequence.prompt_scores[:] = [Sampled(0)] * len(sequence.prompt_scores)
        if sequence.finish_reason is None or self.has_new_tokens:
            return Token(sampled.id, self.texts[-1], logprob, cached_tokens=cached)
        self.texts[-1] += detokenizer.flush()
        end = sequence.finish_reason, self._usage()
        return Token(sampled.id, self.texts[-1], logprob, *end, cached_tokens=cached)

    def check(self) -> None:
        """Raises the error that ended the request, if one did."""
        if self.sequence.error:
            raise self.sequence.error
        if self.sequence.finish_reason == "timeout":
            raise DeadlineError(
                f"the request timed out after {self.sequence.request.params.timeout:g} s, with {len(self.texts)} "
                "tokens generated: allow more time, or ask for fewer tokens"
            )

    def result(self) -> Result:
        self.check()
        sequence = self.sequence
        wanted = sequence.request.params.logprobs is not None
        return Result(
            text="".join(self.texts),
            token_ids=[sampled.id for sampled in sequence.generated],
            finish_reason=sequence.finish_reason or "length",
            usage=self._usage(),
            logprobs=[self._logprob(sampled) for sampled in sequence.generated] if wanted else None,
            prompt_logprobs=self.prompt_logprobs(),
        )

    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Returns the log-probabilities of the prompt tokens, if they were requested. They are complete once a token
        was read. For a stream, only the first call returns them."""
        scores = self._prompt_scores
        if self.is_streamed:
            self._prompt_scores = []
        return [None, *map(self._logprob, scores)] if self.scores_prompt else None

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt tokens were asked for."""
        return self.sequence.request.params.prompt_logprobs is not None

    def _usage(self) -> Usage:
        sequence = self.sequence
        first = sequence.first_token or time.perf_counter()
        return Usage(
            prompt_tokens=len(sequence.request.prompt),
            completion_tokens=len(sequence.generated),
            first_token_seconds=first - sequence.request.submitted,
            decode_seconds=max(0.0, (sequence.finished or first) - first),
            cached_tokens=sequence.state.cached_prompt_tokens,
        )

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        piece = self._tokenizer.piece
        top = tuple((token, piece(token), logprob) for token, logprob in sampled.top)
        return TokenLogprob(sampled.id, piece(sampled.id), sampled.logprob or 0.0, top)
