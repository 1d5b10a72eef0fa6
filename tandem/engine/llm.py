"""The Python API: `from tandem import LLM`."""

from __future__ import annotations

import dataclasses
import operator
import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from tandem.devices.npu.opening import npu_missing, with_npu
from tandem.devices.opening import open_device
from tandem.engine.engine import Engine
from tandem.engine.lookup import Lookup
from tandem.engine.params import SamplingParams
from tandem.engine.reply import Reply, Result, Token, TokenLogprob, Usage
from tandem.engine.speculation import Proposer
from tandem.errors import RequestError, TandemError
from tandem.interrupts import deferred
from tandem.kernels.kernel import Array
from tandem.kernels.layouts import KV_TYPES
from tandem.model.model import open_model
from tandem.model.registry import resolve
from tandem.threads import Beside

if TYPE_CHECKING:
    from tandem.engine.grammar import Grammar, Grammars
    from tandem.model.chat_template import ChatTemplate
    from tandem.model.gguf import GGUF
    from tandem.model.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096
MOST_OF_ANYTHING = 1 << 31  # threads, tokens or sequences
NOT_A_PROMPT = (
    "a prompt is a text or a list of token ids; a conversation, for chat and stream, is a list of messages"
)
Message = Mapping[str, Any]
__all__ = ["LLM", "Result", "Token", "TokenLogprob", "Usage"]


class LLM:
    """A model ready to answer. Close it, or use it in a `with` block, to give its memory and threads back.

    Several streams may be open at a time, and several threads may use it: they share the steps of one engine.
    """

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
        kv_memory: float | None = None,
        lookup: bool = False,
        draft: str | os.PathLike[str] | None = None,
        split: Sequence[int] | None = None,
        placement: str = "layers",
        npu: str = "off",
    ) -> None:
        """`model`: a GGUF file, or a name that `tandem pull` has fetched. `context`: tokens a request may have in
        all. `kv`: what keys and values are kept as: "f16", "q8" (int8, half the memory) or "f32". `batch`: sequences
        served at a time. `gpu_memory`: bytes of a GPU's own memory to use at most. `kv_memory`: bytes for the keys and
        values of all sequences. `lookup`: guess tokens that have followed before, which is faster where answers repeat
        their prompts. `draft`: a smaller model of the same family that guesses tokens. `split`: how many layers each
        device has where `device` names several, as in "vulkan:0,cpu"; None: as many as it is fast. `placement`: what
        several devices divide: "layers", "columns" of matmuls, as a "pipeline", or "npu-attention". `npu`: "auto" or
        "require" let the NPU of a Ryzen 7040 or 8040 help (docs/NPU.md; not yet run on one)."""
        if not isinstance(model, str | os.PathLike):
            raise RequestError(f"model={model!r}: give the path of a GGUF file or the name of a model")
        if not isinstance(device, str):
            raise RequestError(f"device={device!r}: give a name, such as cpu or auto")
        if kv not in KV_TYPES:
            raise RequestError(f"kv={kv!r}: use f16, q8 or f32")
        for name, value in (("threads", threads), ("context", context), ("batch", batch)):
            if value is not None and not (isinstance(value, int) and 1 <= value < MOST_OF_ANYTHING):
                raise RequestError(
                    f"{name}={value!r}: give a whole number, 1 or more, below {MOST_OF_ANYTHING}"
                )
        if lookup and draft is not None:
            raise RequestError("guess tokens by lookup or by a draft model: give one of the two")
        if draft is not None and not isinstance(draft, str | os.PathLike):
            raise RequestError(f"draft={draft!r}: give the path of a GGUF file or the name of a model")
        if split is not None and not (
            isinstance(split, Sequence) and all(isinstance(layers, int) and layers > 0 for layers in split)
        ):
            raise RequestError(f"split={split!r}: give the number of layers of each device, in a list")
        for name, nbytes in (("gpu_memory", gpu_memory), ("kv_memory", kv_memory)):
            if nbytes is not None and not (isinstance(nbytes, int | float) and nbytes > 0):
                raise RequestError(f"{name}={nbytes!r}: give a number of bytes")
        npu_missing(npu)  # an error, if it is required, comes before a model is read
        self._grammars: Grammars | None = None
        self.lock = threading.Lock()  # of the engine
        self._left: deque[Reply] = deque()  # nobody reads these any more
        self._draft: LLM | None = None
        with ExitStack() as closing:  # if something fails, what was there before it
            self._model = closing.enter_context(open_model(resolve(os.fspath(model))))
            trained = self._model.config.trained_context
            self.context = min(context or DEFAULT_CONTEXT, trained)
            if context and context > trained:
                raise RequestError(f"context={context}: this model was trained for {trained} at most")
            alone = open_device(
                device, threads=threads, gpu_memory=gpu_memory, split=split, placement=placement
            )
            c = self._model.config
            self.device = with_npu(alone, npu, f"{c.architecture} {c.layers} x {c.dim} x {c.ffn_dim}")
            closing.callback(self.device.close)
            if draft is not None:
                from tandem.engine.draft import kv_shares

                with open_model(resolve(os.fspath(draft))) as opened:
                    most = min(self.context, opened.config.trained_context)
                    free = self.device.free_memory()[0]
                    kv_memory, share = kv_shares(self._model, opened, kv, most, batch, free, kv_memory)
                first = device.partition(",")[0]  # of several; a draft model is small
                self._draft = closing.enter_context(
                    LLM(
                        draft,
                        device=first,
                        threads=threads,
                        context=most,
                        kv=kv,
                        batch=batch,
                        kv_memory=share,
                    )
                )
            text = Beside(_open_text, self._model.gguf)  # the vocabulary is read while weights are repacked
            closing.callback(text.join)
            self.engine = Engine(
                self._model, self.device, context=self.context, batch=batch, kv=kv,
                kv_memory=kv_memory, proposer=Lookup() if lookup else self._drafting(),
            )  # fmt: skip
            self.tokenizer, self._template = text.result()
            self._closing = closing.pop_all()

    def _drafting(self) -> Proposer | None:
        if self._draft is None:
            return None
        from tandem.engine.draft import DraftModel, check_vocabularies

        tokens = "tokenizer.ggml.tokens"
        check_vocabularies(self._model.gguf.get(tokens), self._draft._model.gguf.get(tokens))
        return DraftModel(self._draft.engine, self._model.config.vocab)

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
        """Continues a text or token ids, or each of a list of them in one batch. Parameters as in SamplingParams.
        Prompts that begin alike, or are the same, are computed once."""
        items = _items(prompt)
        if isinstance(items, str) or (items and isinstance(items[0], Integral)):
            return self._run([self._prepare(self._ids(items), params)])[0]
        return self._run([self._prepare(self._ids(one), params) for one in items])

    def stream(self, prompt: str | list[int] | Iterable[Message], **params: Any) -> Iterator[Token]:
        """Like generate (text or ids) or chat (messages), one item a token. Closing the iterator stops the request."""
        return self._stream(self.prepare(prompt, **params))

    def chat_ids(self, messages: Iterable[Message], **template: Any) -> list[int]:
        """The token ids of a conversation, up to where the model's answer begins."""
        from tandem.model.chat_template import ChatTemplate

        if self._template is None:
            self._template = ChatTemplate.from_gguf(self._model.gguf, self.tokenizer)
        messages = _items(messages)
        if not all(isinstance(message, Mapping) for message in messages):
            raise RequestError('a conversation is a list of messages: [{"role": "user", "content": "..."}]')
        text = self._template.render([dict(message) for message in messages], **template)
        return self.tokenizer.encode(text, special=True)

    @property
    def chat_template(self) -> str:
        """The text of the file's own; empty if it has none."""
        source: str = self._model.gguf.get("tokenizer.chat_template", "")
        return source

    # ---- tokens and numbers

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text, with the beginning-of-sequence token where the model wants one. Control tokens
        written out in the text are parsed only with `special`."""
        return self.tokenizer.encode(text, special=special)

    def detokenize(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def logits(self, ids: list[int]) -> Array:
        """float32 [len(ids), vocabulary]: the logits after each token."""
        with self.lock:
            return self.engine.logits(self._ids(ids))

    def capture(self, ids: list[int], names: Iterable[str]) -> dict[str, Array]:
        """Named intermediates for each token: see `intermediates` for the names."""
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise RequestError(
                f"{names!r} are no intermediates: give a list of names from `LLM.intermediates`"
            )
        with self.lock:
            return self.engine.capture(self._ids(ids), names)

    def embed(self, prompt: str | list[int], *, pooling: str = "mean") -> Array:
        """float32 [width], of length 1: what the model makes of a text, before the head. `pooling`: the "mean" of its
        tokens, the "last" or the first ("cls")."""
        with self.lock:
            return next(vector for vector in self.embedding(prompt, pooling) if vector is not None)

    def embedding(self, prompt: str | list[int], pooling: str) -> Generator[Array | None]:
        """`embed` a part at a time, the vector last; whoever takes the next has the lock, others may be served in
        between."""
        if pooling not in ("mean", "last", "cls"):
            raise RequestError(f"pooling={pooling!r}: use mean, last or cls")
        parts = self.engine.captured(self._ids(prompt), ["result_norm"])
        return _pooled(parts, pooling)

    @property
    def intermediates(self) -> list[str]:
        return list(self.engine.program.values)

    # ---- conversations on disk

    def save(self, prompt: str | list[int] | Iterable[Message], path: str | os.PathLike[str]) -> int:
        """Saves the keys and values of a prompt or conversation, which are computed if they are not there; returns of
        how many tokens. After `restore`, what begins like it starts from there."""
        from tandem.engine import kv_state

        kv_state.check_path(path)  # before the work
        tokens = self.prepare(prompt).sequence.prompt
        self.generate(tokens, max_tokens=1)
        with self.lock:
            return kv_state.save(self.engine, tokens, path)

    def restore(self, path: str | os.PathLike[str]) -> list[int]:
        """Brings back what `save` wrote with the same model; returns the tokens."""
        from tandem.engine import kv_state

        kv_state.check_path(path)
        with self.lock:
            return kv_state.restore(self.engine, path)

    # ---- what is inside

    def program_text(self, *, tokens: int = 1) -> str:
        """The launches of a step of `tokens` tokens, with what each moves and computes."""
        return self.engine.program.text({"tokens": tokens, "rows": 1, "work": max(1, tokens // 16)})

    @property
    def nbytes(self) -> int:
        """Of everything it has allocated on its device, its draft model's too."""
        return sum(self.engine.program.arena_bytes.values()) + (self._draft.nbytes if self._draft else 0)

    @property
    def config(self) -> dict[str, Any]:
        return dataclasses.asdict(self._model.config)

    def close(self) -> None:
        with self.lock:
            self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- a request's life

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty: give at least one character")
            return self.tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise RequestError(NOT_A_PROMPT) from None

    def prepare(self, prompt: str | list[int] | Iterable[Message], **params: Any) -> Reply:
        """A request that has been checked but is not queued yet."""
        items = _items(prompt)
        is_chat = bool(items) and isinstance(items[0], Mapping)
        return self._prepare(self.chat_ids(items) if is_chat else self._ids(items), params)

    def _prepare(self, ids: list[int], params: dict[str, Any]) -> Reply:
        known = {f.name for f in dataclasses.fields(SamplingParams)}
        unknown = params.keys() - known
        if unknown:
            raise RequestError(
                f"unknown parameter {sorted(unknown)[0]!r}; there is: {', '.join(sorted(known))}"
            )
        wanted = SamplingParams(**params)
        grammar = self._compile(wanted) if wanted.form else None
        sequence = self.engine.prepare(ids, wanted, self.tokenizer.stop_ids, grammar)
        return Reply(sequence, self.tokenizer)

    def _compile(self, params: SamplingParams) -> Grammar:
        from tandem.engine.grammar import Grammars

        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self._model.config.vocab)
        return self._grammars.compile(params)

    def _stream(self, reply: Reply) -> Iterator[Token]:
        try:
            self._enqueue([reply])  # here and not before: a stream nobody reads takes no place in the queue
            while not reply.done:
                yield from self._advance([reply])
            reply.check()
        finally:
            self._cancel([reply])

    def _run(self, replies: list[Reply]) -> list[Result]:
        try:
            self._enqueue(replies)
            while unfinished := [reply for reply in replies if not reply.done]:
                self._advance(unfinished)
        finally:
            self._cancel(replies)
        return [reply.result() for reply in replies]

    def _enqueue(self, replies: list[Reply]) -> None:
        with self.lock:
            for reply in replies:
                self.engine.enqueue(reply.sequence)

    def _cancel(self, replies: list[Reply]) -> None:
        """What was left before its end: now, or before the next step. A stream may be collected as garbage anywhere,
        also in a thread that has the lock, which must not wait for itself."""
        unfinished = [
            each for each in replies if each.sequence.finish_reason is None or each.sequence.slot >= 0
        ]
        self._left.extend(unfinished)  # also one that an interrupt kept from being put away
        if self.lock.acquire(blocking=False):
            try:
                with deferred():
                    self.cancel_left()
            finally:
                self.lock.release()

    def cancel_left(self) -> None:
        """Ends the requests that nobody reads any more; the caller has the lock."""
        while self._left:
            self.engine.cancel(self._left.popleft().sequence)

    def _advance(self, replies: list[Reply]) -> list[Token]:
        """What is new of these replies, after a step if nothing is.

        A step serves every request, so a reply that was not read meanwhile has several new tokens."""
        with self.lock, deferred():
            for reply in replies:
                if reply.news:
                    break
            else:
                self.cancel_left()
                self.engine.step()
            tokens: list[Token] = []
            for reply in replies:
                tokens += self.take(reply)
            return tokens

    def take(self, reply: Reply) -> list[Token]:
        """What is new of a reply; the caller has the lock."""
        tokens = []
        while reply.news:
            tokens.append(reply.next())
        if reply.text.stopped:
            self.engine.cancel(reply.sequence)
        return tokens


def _items(prompt: Any) -> Any:
    """A text as it is; anything else as a list."""
    if isinstance(prompt, str):
        return prompt
    try:
        return list(prompt)
    except TypeError:
        raise RequestError(NOT_A_PROMPT) from None


def _pooled(parts: Iterator[dict[str, Array]], pooling: str) -> Generator[Array | None]:
    rows = next(parts)["result_norm"]
    first, total = rows[0], rows.sum(axis=0)
    for part in parts:
        yield None
        rows = part["result_norm"]
        total += rows.sum(axis=0)
    found = {"mean": total, "last": rows[-1], "cls": first}[pooling]
    yield found / max(float(np.linalg.norm(found)), 1e-12)


def _open_text(gguf: GGUF) -> tuple[Tokenizer, ChatTemplate | None]:
    """The vocabulary, and the chat template if it is a good one; imports here what only text needs."""
    from tandem.model.chat_template import ChatTemplate
    from tandem.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(gguf)
    try:
        return tokenizer, ChatTemplate.from_gguf(gguf, tokenizer)
    except TandemError:  # chat_ids will say so to whoever wants to chat
        return tokenizer, None
