"""The Python API: `from tandem import LLM`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from tandem.devices.backends import open_device
from tandem.devices.device import Device
from tandem.engine import ranking
from tandem.engine.driver import Driver
from tandem.engine.engine import Engine, step_limits
from tandem.engine.input_processor import InputProcessor, Message, as_items
from tandem.engine.load_options import DRAFT_HEAD, NO_DRAFT, LoadOptions, disk_bytes
from tandem.engine.output import OutputReader, Result, Token, TokenLogprob, Usage
from tandem.engine.params import NO_RANKER, POOLINGS, TextTokens
from tandem.engine.speculation import Proposer
from tandem.errors import RequestError, TandemError, UnsupportedModelError
from tandem.interrupts import deferred
from tandem.kernels.kernel import Array
from tandem.model.locate import resolve
from tandem.model.model import Model, open_model
from tandem.model.model_files import find_mmproj
from tandem.program.program import Program
from tandem.settings import read_settings
from tandem.threads import BackgroundCall

if TYPE_CHECKING:
    from tandem.engine.disk_cache import DiskCache
    from tandem.engine.stats import EngineStats
    from tandem.gguf.file import GGUF
    from tandem.model.chat_template import ChatTemplate
    from tandem.model.tokenizer import Tokenizer
    from tandem.model.vision import VisionModel

DEFAULT_CONTEXT = 4096
NO_TEXTS = "a query and its documents are texts: give a str"
NO_MMPROJ = "none"  # as `mmproj`: without the encoder beside the model
__all__ = ["LLM", "Result", "Token", "TokenLogprob", "Usage"]


class LLM:
    """A loaded model. Close it, or use it in a `with` block, to free its memory and threads.

    Several streams may be open at a time, and several threads may use it: all requests share the steps of one engine.
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
        mmproj: str | os.PathLike[str] | None = None,
        disk_cache: str | float | None = None,
        chat_template: str | None = None,
        lookup: bool = False,
    ) -> None:
        """Loads a model.

        `model`: the path of a GGUF file, or the name of a model that `tandem pull` has fetched.
        `device`: cpu, vulkan, vulkan:<index or part of a name>, auto, or several of them, as in "vulkan:0,cpu".
        `threads`: CPU threads; None: one per core.
        `context`: maximum tokens of a request, prompt and output together.
        `kv`: the type of the KV cache: "f16", "q8" (int8, half the memory) or "f32".
        `batch`: maximum number of sequences that run at a time.
        `gpu_memory`: maximum bytes of a GPU's own memory.
        `kv_memory`: bytes of the KV cache, and a tenth of it for checkpoints of recurrent layers; None: a share of
        the free memory.
        `prompt_lookup`: speculative decoding with n-grams of the prompt and output; fast where output repeats input.
        `draft`: speculative decoding with this smaller model of the same family, or "mtp": with the model's own draft
        head. None: on a CPU with the draft head, if the file has one and `prompt_lookup` is off; "none": without.
        `split`: layers of each of several devices; None: in proportion to their measured speed.
        `placement`: what several devices divide: "layers", "columns" of matmuls,
        "columns-overlapped" (two steps in flight) or "npu-attention".
        `npu`: "auto" or "require" use the NPU of a Ryzen 7040 or 8040 (docs/NPU.md; not yet run on one).
        `mmproj`: the file of its vision encoder; None: the one beside the model, if there is one for it; "none".
        `disk_cache`: the maximum bytes of a prefix cache on disk, such as "20G"; None: in memory only.
        `chat_template`: a template in Jinja, or "chatml", "gemma", "llama2", "llama3" or "mistral"; None: the file's.
        `lookup`: the former name of `prompt_lookup`."""
        if not isinstance(lookup, bool):
            raise RequestError(f"lookup={lookup!r}: give True or False")
        options = LoadOptions(
            model=model,
            device=device,
            threads=threads,
            context=context,
            kv=kv,
            batch=batch,
            gpu_memory=gpu_memory,
            kv_memory=kv_memory,
            prompt_lookup=prompt_lookup or lookup,
            draft=draft,
            split=split,
            placement=placement,
            npu=npu,
            mmproj=mmproj,
            disk_cache=disk_cache,
            chat_template=chat_template,
        )
        if npu != "off":
            from tandem.devices.npu.attach import npu_missing

            npu_missing(npu)  # raises, if the NPU is required and missing, before a model is read
        with ExitStack() as opened:  # closes all of them if a later part fails
            path = resolve(os.fspath(model))
            self._model = opened.enter_context(open_model(path))
            self.context = _choose_context(context, self._model)
            self.device = _open_device(options, self._model)
            opened.callback(self.device.close)
            vision, no_vision = self._open_vision(Path(path), options)
            if vision:
                opened.enter_context(vision)
            self._draft: LLM | None = None
            if options.draft_model is not None:
                self._draft, kv_memory = self._open_draft(options.draft_model, options)
                opened.callback(self._draft.close)
            # Reads the vocabulary while weights are repacked.
            text = BackgroundCall(_open_text, self._model.gguf, chat_template)
            opened.callback(text.join)
            self.engine = Engine.load(
                self._model,
                self.device,
                context=self.context,
                batch=batch,
                kv=kv,
                kv_memory=kv_memory,
                proposer=self._proposer(options),
                draft_head=self._uses_draft_head(options),
                vision=vision,
            )
            if disk_cache is not None and not self._model.config.encodes:
                opened.callback(self._open_disk_cache(disk_cache, vision).close)
            self.tokenizer, template = text.result()
            self._chosen_template = chat_template
            self.driver = Driver(self.engine)
            self._inputs = InputProcessor(self.engine, self.tokenizer, template, no_vision)
            self._closing = opened.pop_all()

    def _open_vision(self, path: Path, options: LoadOptions) -> tuple[VisionModel | None, str]:
        """Opens the vision encoder that was named, or the first beside the model that is one for it; returns None and
        the reason if there is none."""
        if options.mmproj == NO_MMPROJ:
            return None, f"it was loaded with mmproj = {NO_MMPROJ}"
        if options.mmproj is not None:
            return self._open_encoder(resolve(os.fspath(options.mmproj)), options), ""
        problem = ""
        for found in find_mmproj(path):
            try:
                return self._open_encoder(found, options), ""
            except TandemError as error:  # the language model works without images
                problem = problem or str(error).replace(str(found), found.name)
        return None, problem

    def _open_encoder(self, path: str | Path, options: LoadOptions) -> VisionModel:
        from tandem.engine.image_encoder import check_fits
        from tandem.model.vision import VisionModel

        vision = VisionModel.open(path)
        try:
            limits = step_limits(self._model, self.device, self.context, options.batch, 0)
            check_fits(vision, self._model, self.device, limits)
        except BaseException:
            vision.close()
            raise
        return vision

    def _open_draft(self, draft: str | os.PathLike[str], options: LoadOptions) -> tuple[LLM, float | None]:
        """Opens the draft model; returns it and the bytes of KV cache that are left to the main model."""
        from tandem.engine.draft_model import split_kv_memory

        path = resolve(os.fspath(draft))
        with open_model(path) as small:
            context = min(self.context, small.config.trained_context)
            kv_memory, draft_kv_memory = split_kv_memory(
                self._model,
                small,
                options.kv,
                self.context,
                options.batch,
                self.device.free_memory(),
                options.kv_memory,
                self.device.weight_layout,
            )
        first = options.device.partition(",")[0]  # a draft model is small: one device is enough
        llm = LLM(
            path,
            device=first,
            threads=options.threads,
            context=context,
            kv=options.kv,
            batch=options.batch,
            kv_memory=draft_kv_memory,
            draft=NO_DRAFT,
        )
        return llm, kv_memory

    def _open_disk_cache(self, size: str | float, vision: VisionModel | None) -> DiskCache:
        from tandem.engine.disk_cache import DiskCache

        folder = read_settings().pipelines / "prefixes"
        return DiskCache.open(self.engine, folder, disk_bytes(size), vision)

    def _uses_draft_head(self, options: LoadOptions) -> bool:
        if options.prompt_lookup or options.draft not in (None, DRAFT_HEAD):
            return False
        runs = self.device.holds_several_programs
        if options.draft and not self._model.config.draft_layers:
            raise RequestError(
                f"draft={DRAFT_HEAD}: the file has no draft head (nextn tensors): use one that has it, or a draft model"
            )
        if options.draft and not runs:
            raise RequestError(
                f"draft={DRAFT_HEAD}: draft heads run on one device: name one, or use a draft model"
            )
        wanted = options.draft is not None or self.device.step_slots == 1
        return runs and wanted and self._model.config.draft_layers > 0

    def _proposer(self, options: LoadOptions) -> Proposer | None:
        if options.prompt_lookup:
            from tandem.engine.prompt_lookup import PromptLookup

            return PromptLookup()
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
        """Answers a conversation: [{"role": "user", "content": "..."}]. Parameters as in SamplingParams.

        `n`: the number of answers, returned in a list. Each is sampled independently; the prompt is computed once."""
        results = self.driver.run(self._inputs.process_copies(self.chat_ids(messages), params, n))
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

        Prompts with a common prefix compute it once. `n`: the number of completions of each prompt; those of one
        prompt follow each other in the list."""
        items = as_items(prompt)
        is_one = isinstance(items, str) or (items and isinstance(items[0], Integral))
        prompts = [self._inputs.token_ids(one) for one in ([items] if is_one else items)]
        outputs = [each for ids in prompts for each in self._inputs.process_copies(ids, params, n)]
        results = self.driver.run(outputs)
        return results[0] if is_one and n is None else results

    def stream(self, prompt: str | list[int] | Iterable[Message], **params: Any) -> Iterator[Token]:
        """Like generate (text or ids) or chat (messages), one item per token. Closing the iterator ends the request."""
        return self.driver.stream(self.prepare(prompt, **params))

    def prepare(self, prompt: str | list[int] | Iterable[Message], **params: Any) -> OutputReader:
        """Checks a request; `driver.submit` queues it."""
        return self._inputs.process(prompt, **params)

    def chat_ids(
        self, messages: Iterable[Message], limit: int | None = None, /, **template: Any
    ) -> list[int]:
        """Returns the token ids of a conversation, up to the beginning of the model's response. `limit`: stops
        encoding once there are more than `limit` tokens. `template`: variables of the chat template."""
        return self._inputs.chat_ids(messages, limit, **template)

    def vision(self, images: int) -> VisionModel:
        """The encoder of a prompt with `images` images; raises RequestError if there is none, or they are too many."""
        return self._inputs.vision(images)

    @property
    def chat_template(self) -> str:
        """The chat template; empty if the file has none, or one that is too long to be used."""
        from tandem.model.chat_formats import BY_NAME
        from tandem.model.template_sandbox import MAX_SOURCE

        if self._chosen_template is not None:
            return "" if self._chosen_template in BY_NAME else self._chosen_template
        source: str = self._model.gguf.get("tokenizer.chat_template", "")
        return source if len(source) <= MAX_SOURCE else ""

    # ---- tokens and numbers

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Returns the token ids of a text, with the BOS token if the model needs it. Control tokens in the text are
        parsed only with `special`."""
        if not isinstance(text, str):
            raise RequestError(f"a {type(text).__name__} is no text: give a str")
        return self.tokenizer.encode(text, special=special)

    def detokenize(self, ids: list[int]) -> str:
        return self.tokenizer.decode(self._inputs.token_ids(ids))

    def logits(self, ids: list[int]) -> Array:
        """Returns the logits after each token: float32 [len(ids), vocabulary]."""
        with self.driver.locked():
            return self.engine.logits(self._inputs.token_ids(ids))

    def capture(self, ids: list[int], names: Iterable[str]) -> dict[str, Array]:
        """Returns intermediate activations by name, for each token. `intermediates` lists the names."""
        try:
            wanted = None if isinstance(names, str) else list(names)
        except TypeError:
            wanted = None
        if wanted is None:
            raise RequestError(
                f"{names!r} are no intermediates: give a list of names from `LLM.intermediates`"
            )
        with self.driver.locked():
            return self.engine.capture(self._inputs.token_ids(ids), wanted)

    def embed(
        self,
        prompt: str | list[int] | list[str] | list[list[int]],
        *,
        pooling: str | None = None,
        truncate: bool = False,
    ) -> Array:
        """Returns a vector of length 1 for a text or token ids, float32 [width]; for a list of them, [texts, width].

        It is pooled from the final hidden states. `pooling`: "mean" of all tokens, the "last" token, or the first
        ("cls"); None: as the file says, else "mean". `truncate`: leaves out the end of a text that is longer than the
        context, which is an error otherwise."""
        return self._out_of_band(self.embedding(prompt, pooling, truncate=truncate))

    def embedding(
        self,
        prompt: str | list[int] | list[str] | list[list[int]],
        pooling: str | None = None,
        *,
        truncate: bool = False,
    ) -> Generator[Array | None]:
        """Runs `embed` in parts, for `driver.forward`: yields None after each part but the last, then the result. Steps
        may run between two parts."""
        if pooling is not None and (not isinstance(pooling, str) or pooling not in POOLINGS):
            raise RequestError(f"pooling={pooling!r}: use mean, last or cls")
        chosen = self._model.config.pooling if pooling is None else pooling
        chosen = chosen if chosen in POOLINGS else "mean"
        items = as_items(prompt)
        is_one = isinstance(items, str) or bool(items and isinstance(items[0], Integral))
        texts = [self.embedding_ids(one, truncate=truncate) for one in ([items] if is_one else items)]
        for ids in texts:
            self.engine.check_prompt(ids)
        if encoder := self.engine.text_encoder:
            parts = encoder.embed([TextTokens(ids) for ids in texts], chosen)
        else:
            parts = self._embedding(texts, chosen)
        return ((one[0] if is_one else one) if one is not None else None for one in self._finite(parts))

    def embedding_ids(self, text: str | list[int], *, truncate: bool = False) -> list[int]:
        """Returns the token ids of a text to embed, which fits into the context."""
        limit = self.context if isinstance(text, str) else None
        return self._inputs.short_ids(self._inputs.token_ids(text, limit), truncate)

    def _embedding(self, texts: Sequence[list[int]], pooling: str) -> Generator[Array | None]:
        vectors = []
        for ids in texts:
            for pooled in _pool(self.engine.captured(ids, ["result_norm"]), pooling):
                if pooled is not None:
                    vectors.append(pooled)
                if len(vectors) < len(texts):
                    yield None
        yield np.stack(vectors) if vectors else np.empty((0, self._model.config.dim), np.float32)

    def rerank(self, query: str, documents: Iterable[str], *, truncate: bool = False) -> Array:
        """Returns how relevant each document is to a query: float32 [documents], higher for more relevant ones.

        For models that rank. `truncate`: leaves out the end of a document that is too long for the context with the
        query, which is an error otherwise."""
        return self._out_of_band(
            self.ranking(list(self.pairs(query, as_items(documents), truncate=truncate)))
        )

    def pairs(self, query: str, documents: Iterable[str], *, truncate: bool = False) -> Iterator[TextTokens]:
        """Yields the token ids of a query and each document, as a model that ranks takes them."""
        if not self.ranks:
            raise RequestError(NO_RANKER)
        if not isinstance(query, str):
            raise RequestError(NO_TEXTS)
        if self._classifier is None:
            return self._inputs.pairs(query, _texts(documents), truncate)
        return self._inputs.prompted_pairs(query, _texts(documents), ranking.template(self._model), truncate)

    def ranking(self, pairs: Sequence[TextTokens]) -> Generator[Array | None]:
        """Runs `rerank` in parts, for `driver.forward`, as `embedding` does."""
        if encoder := self.engine.text_encoder:
            return self._finite(encoder.score(pairs))
        if self._classifier is None:
            raise RequestError(NO_RANKER)
        for pair in pairs:
            self.engine.check_prompt(pair.ids)
        return self._finite(ranking.score(self.engine, pairs, self._classifier))

    def _finite(self, parts: Generator[Array | None]) -> Generator[Array | None]:
        """The same parts. JSON has no infinity, and clients sort by these numbers."""
        with closing(parts):
            for part in parts:
                if part is not None and not np.isfinite(part).all():
                    raise UnsupportedModelError(
                        f"{self._model.gguf.path.name} gives numbers that are not finite: fetch the file again"
                    )
                yield part

    @property
    def ranks(self) -> bool:
        """Whether the model has a score for a query and a document."""
        encoder = self.engine.text_encoder
        return encoder.ranks if encoder else self._classifier is not None

    @cached_property
    def _classifier(self) -> Array | None:
        return ranking.classifier(self._model)

    @property
    def generates(self) -> bool:
        """Whether the model generates text: others embed and rank texts only."""
        return self.engine.text_encoder is None

    def _out_of_band(self, parts: Generator[Array | None]) -> Array:
        with self.driver.locked(), closing(parts):
            return next(result for result in parts if result is not None)

    @property
    def intermediates(self) -> list[str]:
        """Names of the activations that `capture` can return."""
        return list(self.program.values)

    # ---- conversations on disk

    def save(self, prompt: str | list[int] | Iterable[Message], path: str | os.PathLike[str]) -> int:
        """Saves the KV blocks of a prompt or conversation, and computes them first if need be; returns the number of
        tokens saved. After `restore`, requests with this prefix find it in the prefix cache."""
        from tandem.engine import kv_snapshot

        kv_snapshot.check_path(path)  # before the work
        tokens = self.prepare(prompt).sequence.request.prompt
        self.generate(tokens, max_tokens=1)
        with self.driver.locked(), deferred():
            state = kv_snapshot.save(self.engine, tokens)
        state.write(path)
        return len(state.tokens)

    def restore(self, path: str | os.PathLike[str]) -> list[int]:
        """Loads the KV blocks that `save` wrote with the same model; returns their tokens."""
        from tandem.engine import kv_snapshot

        kv_snapshot.check_path(path)
        state = kv_snapshot.read(path, self.engine)
        with self.driver.locked(), deferred():
            kv_snapshot.restore(self.engine, state, path)
        return state.tokens

    # ---- the loaded model

    def stats(self) -> EngineStats:
        """Counters of the engine: requests, steps, KV blocks, prefix cache, speculative decoding."""
        return self.engine.stats()

    @property
    def program(self) -> Program:
        """The kernel launches of a step."""
        return self.engine.program

    def program_text(self, *, tokens: int = 1) -> str:
        """Returns the kernel launches of a step of `tokens` tokens, with the bytes and operations of each."""
        counts = {"tokens": tokens, "rows": 1, "work": max(1, tokens // 16)}
        return self.device.step_program(self.program, counts, single=tokens == 1).text(counts)

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the device, including those of the draft model and of the vision encoder."""
        encoder = self.engine.encoder
        programs = [self.program, *([encoder.program] if encoder else [])]
        drafts = self._draft.nbytes if self._draft else 0
        return sum(sum(program.arena_bytes.values()) for program in programs) + drafts

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on the device."""
        return self._model.nbytes(self.device.weight_layout)

    @property
    def trained_context(self) -> int:
        """The context that the model was trained for, in tokens."""
        return self._model.config.trained_context

    @property
    def takes_images(self) -> bool:
        """Whether the model was loaded with its vision encoder."""
        return self.engine.encoder is not None

    @property
    def config(self) -> dict[str, Any]:
        return dataclasses.asdict(self._model.config)

    def close(self) -> None:
        if not self.driver.forked:
            self.driver.close(self._closing.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _choose_context(context: int | None, model: Model) -> int:
    trained = model.config.trained_context
    if context and context > trained:
        raise RequestError(f"context={context}: this model was trained for {trained} at most")
    return min(context or DEFAULT_CONTEXT, trained)


def _open_device(options: LoadOptions, model: Model) -> Device:
    """Opens the device, with the NPU as an accelerator if that is asked for."""
    device = open_device(
        options.device,
        threads=options.threads,
        gpu_memory=options.gpu_memory,
        split=options.split,
        placement=options.placement,
        alone=options.npu == "off",
    )
    if options.npu == "off":
        return device
    from tandem.devices.npu.attach import with_npu

    c = model.config
    return with_npu(device, options.npu, f"{c.architecture} {c.layers} x {c.dim} x {c.ffn_dim}")


def _open_text(gguf: GGUF, template: str | None) -> tuple[Tokenizer, ChatTemplate | None]:
    """Opens the tokenizer, and the chat template: the one that was chosen, or the file's if it has a valid one."""
    from tandem.model.chat_template import ChatTemplate
    from tandem.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(gguf)
    try:
        return tokenizer, ChatTemplate.from_gguf(gguf, tokenizer, template)
    except TandemError:
        if template is not None:
            raise
        return tokenizer, None  # chat_ids raises it


def _texts(items: Iterable[str]) -> Iterator[str]:
    for item in items:
        if not isinstance(item, str):
            raise RequestError(NO_TEXTS)
        yield item


def _pool(parts: Iterator[dict[str, Array]], pooling: str) -> Generator[Array | None]:
    """Pools hidden states float32 [tokens, width] that come in parts, and normalises the vector to length 1."""
    rows = next(parts)["result_norm"]
    first, total = rows[0], rows.sum(axis=0)
    for part in parts:
        yield None
        rows = part["result_norm"]
        total += rows.sum(axis=0)
    pooled = {"mean": total, "last": rows[-1], "cls": first}[pooling]
    yield pooled / max(float(np.linalg.norm(pooled)), 1e-12)
