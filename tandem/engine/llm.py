"""The Python API: `from tandem import LLM`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from tandem.devices.npu.opening import npu_missing, with_npu
from tandem.devices.opening import open_device
from tandem.engine.embedding import pooled
from tandem.engine.engine import Engine
from tandem.engine.prompt_lookup import PromptLookup
from tandem.engine.reply import Result, Token, TokenLogprob, Usage
from tandem.engine.requests import Message, Requests, as_items
from tandem.engine.speculation import Proposer
from tandem.errors import RequestError, TandemError
from tandem.interrupts import deferred
from tandem.kernels.abi import KV_TYPES
from tandem.kernels.kernel import Array
from tandem.model.model import open_model
from tandem.model.registry import resolve
from tandem.threads import Beside

if TYPE_CHECKING:
    from tandem.gguf.file import GGUF
    from tandem.model.chat_template import ChatTemplate
    from tandem.model.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096
MAX_COUNT = 1 << 31  # threads, tokens or sequences
__all__ = ["LLM", "Result", "Token", "TokenLogprob", "Usage"]


class LLM(Requests):
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
        prompt_lookup: bool = False,
        draft: str | os.PathLike[str] | None = None,
        split: Sequence[int] | None = None,
        placement: str = "layers",
        npu: str = "off",
        lookup: bool = False,
    ) -> None:
        """`model`: a GGUF file, or a name that `tandem pull` has fetched. `context`: tokens a request may have in
        all. `kv`: what keys and values are kept as: "f16", "q8" (int8, half the memory) or "f32". `batch`: sequences
        served at a time. `gpu_memory`: bytes of a GPU's own memory to use at most. `kv_memory`: bytes for the keys and
        values of all sequences. `prompt_lookup`: draft tokens that followed before, faster where answers repeat
        their prompts. `draft`: a smaller model of the same family that drafts tokens. `split`: how many layers each
        device has where `device` names several, as in "vulkan:0,cpu"; None: as many as it is fast. `placement`: what
        several devices divide: "layers", "columns" of matmuls, as a "pipeline", or "npu-attention". `npu`: "auto" or
        "require" let the NPU of a Ryzen 7040 or 8040 help (docs/NPU.md; not yet run on one).
        `lookup`: the former name of `prompt_lookup`."""
        if not isinstance(model, str | os.PathLike):
            raise RequestError(f"model={model!r}: give the path of a GGUF file or the name of a model")
        for name, given, hint in (
            ("device", device, "give a name, such as cpu or auto"),
            ("kv", kv, "use f16, q8 or f32"),
            ("placement", placement, "use layers, columns, pipeline or npu-attention"),
            ("npu", npu, "use off, auto or require"),
        ):
            if not isinstance(given, str) or (name == "kv" and given not in KV_TYPES):
                raise RequestError(f"{name}={given!r}: {hint}")
        for name, flag in (("prompt_lookup", prompt_lookup), ("lookup", lookup)):
            if not isinstance(flag, bool):
                raise RequestError(f"{name}={flag!r}: give True or False")
        prompt_lookup = prompt_lookup or lookup
        for name, value in (("threads", threads), ("context", context), ("batch", batch)):
            auto = value is None and name != "batch"
            if not auto and not (isinstance(value, int) and 1 <= value < MAX_COUNT):
                raise RequestError(f"{name}={value!r}: give a whole number, 1 or more, below {MAX_COUNT}")
        if prompt_lookup and draft is not None:
            raise RequestError("prompt_lookup and draft exclude each other: give one of the two")
        if draft is not None and not isinstance(draft, str | os.PathLike):
            raise RequestError(f"draft={draft!r}: give the path of a GGUF file or the name of a model")
        if split is not None and not (
            isinstance(split, Sequence) and all(isinstance(layers, int) and layers > 0 for layers in split)
        ):
            raise RequestError(f"split={split!r}: give the number of layers of each device, in a list")
        for name, nbytes in (("gpu_memory", gpu_memory), ("kv_memory", kv_memory)):
            if nbytes is not None and not (isinstance(nbytes, int | float) and 0 < nbytes < 1 << 63):
                raise RequestError(f"{name}={nbytes!r}: give a number of bytes")
        npu_missing(npu)  # an error, if it is required, comes before a model is read
        super().__init__()
        self._draft: LLM | None = None
        with ExitStack() as opened:  # if something fails, what was there before it
            self._model = opened.enter_context(open_model(resolve(os.fspath(model))))
            trained = self._model.config.trained_context
            self.context = min(context or DEFAULT_CONTEXT, trained)
            if context and context > trained:
                raise RequestError(f"context={context}: this model was trained for {trained} at most")
            alone = open_device(
                device, threads=threads, gpu_memory=gpu_memory, split=split, placement=placement,
                alone=npu == "off",
            )  # fmt: skip
            c = self._model.config
            self.device = with_npu(alone, npu, f"{c.architecture} {c.layers} x {c.dim} x {c.ffn_dim}")
            opened.callback(self.device.close)
            if draft is not None:
                from tandem.engine.draft_model import kv_shares

                with open_model(resolve(os.fspath(draft))) as small:
                    most = min(self.context, small.config.trained_context)
                    free = self.device.free_memory()
                    kv_memory, share = kv_shares(self._model, small, kv, self.context, batch, free, kv_memory)
                first = device.partition(",")[0]  # of several; a draft model is small
                options = {"threads": threads, "context": most, "kv": kv, "batch": batch, "kv_memory": share}
                self._draft = opened.enter_context(LLM(draft, device=first, **options))  # type: ignore[arg-type]
            text = Beside(_open_text, self._model.gguf)  # the vocabulary is read while weights are repacked
            opened.callback(text.join)
            self.engine = Engine(
                self._model, self.device, context=self.context, batch=batch, kv=kv,
                kv_memory=kv_memory, proposer=PromptLookup() if prompt_lookup else self._drafting(),
            )  # fmt: skip
            self.tokenizer, self._template = text.result()
            self._closing = opened.pop_all()

    def _drafting(self) -> Proposer | None:
        if self._draft is None:
            return None
        from tandem.engine.draft_model import DraftModel, check_vocabularies

        tokens = "tokenizer.ggml.tokens"
        check_vocabularies(self._model.gguf.get(tokens), self._draft._model.gguf.get(tokens))
        return DraftModel(self._draft.engine, self._model.config.vocab)

    # ---- text

    @overload
    def chat(self, messages: Iterable[Message], *, n: None = None, **params: Any) -> Result: ...
    @overload
    def chat(self, messages: Iterable[Message], *, n: int, **params: Any) -> list[Result]: ...
    def chat(
        self, messages: Iterable[Message], *, n: int | None = None, **params: Any
    ) -> Result | list[Result]:
        """Answers a conversation: [{"role": "user", "content": "..."}]. Parameters as in SamplingParams. `n`: so many
        answers, in a list; each is drawn on its own, and what is asked is computed once."""
        results = self._run(self._copies(self.chat_ids(messages), params, n))
        return results[0] if n is None else results

    @overload
    def generate(self, prompt: str | list[int], *, n: None = None, **params: Any) -> Result: ...
    @overload
    def generate(self, prompt: str | list[int], *, n: int, **params: Any) -> list[Result]: ...
    @overload
    def generate(
        self, prompt: list[str] | list[list[int]], *, n: int | None = None, **params: Any
    ) -> list[Result]: ...
    def generate(
        self, prompt: str | list[int] | list[str] | list[list[int]], *, n: int | None = None, **params: Any
    ) -> Result | list[Result]:
        """Continues a text or token ids, or each of a list of them in one batch. Parameters as in SamplingParams.
        Prompts that begin alike, or are the same, are computed once. `n`: so many answers to each, one after the
        other in the list."""
        items = as_items(prompt)
        is_one = isinstance(items, str) or (items and isinstance(items[0], Integral))
        prompts = [self._ids(one) for one in ([items] if is_one else items)]
        results = self._run([each for ids in prompts for each in self._copies(ids, params, n)])
        return results[0] if is_one and n is None else results

    def stream(self, prompt: str | list[int] | Iterable[Message], **params: Any) -> Iterator[Token]:
        """Like generate (text or ids) or chat (messages), one item a token. Closing the iterator stops the request."""
        return self._stream(self.prepare(prompt, **params))

    @property
    def chat_template(self) -> str:
        """The text of the file's own; empty if it has none."""
        source: str = self._model.gguf.get("tokenizer.chat_template", "")
        return source

    # ---- tokens and numbers

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text, with the beginning-of-sequence token where the model wants one. Control tokens
        written out in the text are parsed only with `special`."""
        if not isinstance(text, str):
            raise RequestError(f"a {type(text).__name__} is no text: give a str")
        return self.tokenizer.encode(text, special=special)

    def detokenize(self, ids: list[int]) -> str:
        return self.tokenizer.decode(self._ids(ids))

    def logits(self, ids: list[int]) -> Array:
        """float32 [len(ids), vocabulary]: the logits after each token."""
        with self.lock:
            return self.engine.logits(self._ids(ids))

    def capture(self, ids: list[int], names: Iterable[str]) -> dict[str, Array]:
        """Named intermediates for each token: see `intermediates` for the names."""
        try:
            wanted = None if isinstance(names, str) else list(names)
        except TypeError:
            wanted = None
        if wanted is None:
            raise RequestError(
                f"{names!r} are no intermediates: give a list of names from `LLM.intermediates`"
            )
        with self.lock:
            return self.engine.capture(self._ids(ids), wanted)

    def embed(self, prompt: str | list[int], *, pooling: str = "mean") -> Array:
        """float32 [width], of length 1: what the model makes of a text, before the head. `pooling`: the "mean" of its
        tokens, the "last" or the first ("cls")."""
        with self.lock, closing(self.embedding(prompt, pooling)) as vectors:
            return next(vector for vector in vectors if vector is not None)

    def embedding(self, prompt: str | list[int], pooling: str) -> Generator[Array | None]:
        """`embed` a part at a time, the vector last; whoever takes the next has the lock, others may be served in
        between."""
        if not isinstance(pooling, str) or pooling not in ("mean", "last", "cls"):
            raise RequestError(f"pooling={pooling!r}: use mean, last or cls")
        parts = self.engine.captured(self._ids(prompt), ["result_norm"])
        return pooled(parts, pooling)

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
        with self.lock, deferred():
            return kv_state.save(self.engine, tokens, path)

    def restore(self, path: str | os.PathLike[str]) -> list[int]:
        """Brings back what `save` wrote with the same model; returns the tokens."""
        from tandem.engine import kv_state

        kv_state.check_path(path)
        with self.lock, deferred():
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


def _open_text(gguf: GGUF) -> tuple[Tokenizer, ChatTemplate | None]:
    """The vocabulary, and the chat template if it is a good one; imports here what only text needs."""
    from tandem.model.chat_template import ChatTemplate
    from tandem.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(gguf)
    try:
        return tokenizer, ChatTemplate.from_gguf(gguf, tokenizer)
    except TandemError:  # chat_ids will say so to whoever wants to chat
        return tokenizer, None
