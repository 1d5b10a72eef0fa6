"""The Python API: `from tandem import LLM`."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, overload

from tandem.devices.opening import open_device
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Sampled, Sequence
from tandem.engine.text import TextStream
from tandem.errors import RequestError
from tandem.kernels.kernel import Array
from tandem.model.chat_template import ChatTemplate
from tandem.model.model import open_model
from tandem.model.registry import resolve
from tandem.model.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    first_token_seconds: float  # from submission to the first token
    decode_seconds: float  # from the first token to the last

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


@dataclass(frozen=True)
class Token:
    """One item of a stream: a token and the text it completes (which may be empty)."""

    id: int
    text: str
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None  # on the last one
    usage: Usage | None = field(default=None, repr=False)  # on the last one


class LLM:
    """A model ready to answer. Close it, or use it in a `with` block, to give its memory and threads back."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        threads: int | None = None,
        context: int | None = None,
        kv: str = "f16",
        batch: int = 64,
        gpu_memory: float | None = None,
    ) -> None:
        """`model`: a GGUF file, or a name that `tandem pull` has fetched. `context`: tokens a request may have in
        all. `kv`: "f16" or "f32" keys and values. `batch`: sequences served at a time. `gpu_memory`: bytes of a GPU's
        own memory to use at most."""
        if kv not in ("f16", "f32"):
            raise RequestError(f"kv={kv!r}: use f16 or f32")
        if batch < 1 or (threads is not None and threads < 1) or (context is not None and context < 1):
            raise RequestError("threads, context and batch must be 1 or more")
        self._model = open_model(resolve(os.fspath(model)))
        config = self._model.config
        self.context = min(context or DEFAULT_CONTEXT, config.trained_context)
        if context and context > config.trained_context:
            raise RequestError(
                f"context={context}: this model was trained for {config.trained_context} at most"
            )
        self.tokenizer = Tokenizer.from_gguf(self._model.gguf)
        self._template: ChatTemplate | None = None
        self.device = open_device(device, threads=threads, gpu_memory=gpu_memory)
        try:
            self.engine = Engine(
                self._model, self.device, context=self.context, batch=batch, kv_f32=kv == "f32"
            )
        except BaseException:
            self.device.close()
            raise

    # ---- text

    def chat(self, messages: Iterable[Message], **params: Any) -> Result:
        """Answers a conversation: [{"role": "user", "content": "..."}]. Parameters as in SamplingParams."""
        return self._run([self._prepare(self.chat_ids(messages), params)])[0]

    @overload
    def generate(self, prompt: str, **params: Any) -> Result: ...
    @overload
    def generate(self, prompt: list[int], **params: Any) -> Result: ...
    @overload
    def generate(self, prompt: list[str] | list[list[int]], **params: Any) -> list[Result]: ...
    def generate(
        self, prompt: str | list[int] | list[str] | list[list[int]], **params: Any
    ) -> Result | list[Result]:
        """Continues a text or token ids, or each of a list of them in one batch. Parameters as in SamplingParams."""
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return self._run([self._prepare(self._ids(prompt), params)])[0]
        many = [self._ids(one) for one in prompt]
        return self._run([self._prepare(ids, params) for ids in many])

    def stream(self, prompt: str | list[int] | Iterable[Message], **params: Any) -> Iterator[Token]:
        """Like generate (text or ids) or chat (messages), one item a token. Closing the iterator stops the request."""
        items = prompt if isinstance(prompt, str) else list(prompt)
        is_chat = bool(items) and isinstance(items[0], Mapping)
        ids = self.chat_ids(items) if is_chat else self._ids(items)  # type: ignore[arg-type]
        return self._stream(self._prepare(ids, params))

    def chat_ids(self, messages: Iterable[Message], **template: Any) -> list[int]:
        """The token ids of a conversation, up to where the model's answer begins."""
        if self._template is None:
            self._template = ChatTemplate.from_gguf(self._model.gguf, self.tokenizer)
        text = self._template.render([dict(message) for message in messages], **template)
        return self.tokenizer.encode(text, special=True)

    # ---- tokens and numbers

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text, with the beginning-of-sequence token where the model wants one. Control tokens
        written out in the text are parsed only with `special`."""
        return self.tokenizer.encode(text, special=special)

    def detokenize(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def logits(self, ids: list[int]) -> Array:
        """float32 [len(ids), vocabulary]: the logits after each token."""
        return self.engine.logits(ids)

    def capture(self, ids: list[int], names: Iterable[str]) -> dict[str, Array]:
        """Named intermediates for each token: see `intermediates` for the names."""
        return self.engine.capture(ids, names)

    @property
    def intermediates(self) -> list[str]:
        return list(self.engine.program.values)

    # ---- what is inside

    def program_text(self, *, tokens: int = 1) -> str:
        """The launches of a step of `tokens` tokens, with what each moves and computes."""
        return self.engine.program.text({"tokens": tokens, "rows": 1, "work": max(1, tokens // 16)})

    @property
    def config(self) -> dict[str, Any]:
        return dataclasses.asdict(self._model.config)

    def close(self) -> None:
        self.device.close()
        self._model.gguf.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- a request's life

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
            if not prompt:
                raise RequestError("the prompt is empty: give at least one character")
            return ids
        return list(prompt)

    def _prepare(self, ids: list[int], params: dict[str, Any]) -> Sequence:
        known = {f.name for f in dataclasses.fields(SamplingParams)}
        unknown = params.keys() - known
        if unknown:
            raise RequestError(
                f"unknown parameter {sorted(unknown)[0]!r}; there is: {', '.join(sorted(known))}"
            )
        return self.engine.prepare(ids, SamplingParams(**params), self.tokenizer.stop_ids)

    def _stream(self, sequence: Sequence) -> Iterator[Token]:
        text = TextStream(self.tokenizer, sequence.params.stop)
        shown = 0
        self.engine.enqueue(sequence)  # here and not before: a stream nobody reads takes no place in the queue
        try:
            while sequence.finish_reason is None:
                self.engine.step()
                for sampled in sequence.generated[shown:]:
                    shown += 1
                    yield self._token(sequence, sampled, text)
        finally:
            if sequence.finish_reason is None:
                self.engine.cancel(sequence)

    def _token(self, sequence: Sequence, sampled: Sampled, text: TextStream) -> Token:
        piece = "" if sampled.id in sequence.stop_ids else text.push(sampled.id)
        if text.stopped:
            self.engine.cancel(sequence)
            sequence.finish_reason = "stop"
        last = sequence.finish_reason is not None
        if last:
            piece += text.flush()
        logprob = self._logprob(sampled) if sampled.logprob is not None else None
        return Token(sampled.id, piece, logprob, sequence.finish_reason, _usage(sequence) if last else None)

    def _run(self, sequences: list[Sequence]) -> list[Result]:
        texts = {sequence: TextStream(self.tokenizer, sequence.params.stop) for sequence in sequences}
        parts: dict[Sequence, list[str]] = {sequence: [] for sequence in sequences}
        try:
            for sequence in sequences:
                self.engine.enqueue(sequence)
            while any(sequence.finish_reason is None for sequence in sequences):
                for sequence in self.engine.step():
                    if sequence in texts:
                        parts[sequence].append(
                            self._token(sequence, sequence.generated[-1], texts[sequence]).text
                        )
        finally:
            for sequence in sequences:
                if sequence.finish_reason is None:
                    self.engine.cancel(sequence)
        return [self._result(sequence, "".join(parts[sequence])) for sequence in sequences]

    def _result(self, sequence: Sequence, text: str) -> Result:
        wanted = sequence.params.logprobs is not None
        logprobs = [self._logprob(sampled) for sampled in sequence.generated] if wanted else None
        ids = [sampled.id for sampled in sequence.generated]
        return Result(text, ids, sequence.finish_reason or "length", _usage(sequence), logprobs)

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        piece = self.tokenizer.piece
        top = tuple((token, piece(token), logprob) for token, logprob in sampled.top)
        return TokenLogprob(sampled.id, piece(sampled.id), sampled.logprob or 0.0, top)


def _usage(sequence: Sequence) -> Usage:
    first = sequence.first_token or time.perf_counter()
    return Usage(
        len(sequence.prompt), len(sequence.generated), first - sequence.submitted,
        max(0.0, (sequence.finished or first) - first),
    )  # fmt: skip
