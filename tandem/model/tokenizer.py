"""Encodes text to token ids and decodes it, with the vocabulary of the model file. The merging is in C (merge.c).

Four kinds: SentencePiece (`tokenizer.ggml.model` = llama: Gemma, Llama 2, Mistral), byte-level BPE (gpt2: Llama 3,
Qwen, SmolLM), WordPiece (bert, wordpiece.py) and SentencePiece's unigram model (t5, unigram.py). Files of Gemma 4
(gemma4) have merges in place of SentencePiece's scores. In text that is not valid UTF-8, U+FFFD replaces each invalid
byte.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np

from tandem.errors import RequestError, UnsupportedModelError
from tandem.gguf.file import GGUF, StringArray
from tandem.kernels.kernel import Array
from tandem.model.fill_in_middle import FillInMiddle, find_tokens
from tandem.model.harmony import ENDS, Markers, find_markers
from tandem.model.pretokenize import PreTokenizer, pre_tokenizer
from tandem.model.unigram import Unigram
from tandem.model.wordpiece import WordPiece
from tandem.native import ffi, load
from tandem.threads import share, throttle, throttled

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # `tokenizer.ggml.token_type`
HIDDEN = (UNKNOWN, CONTROL, UNUSED)  # not shown by decode unless `special`
MAX_TEXT = 64 << 20  # bytes; merging takes up to 52 times as much memory
MAX_CHARACTER = 4  # bytes in UTF-8
MAX_SPECIAL = 4 << 20  # bytes of all special tokens; Gemma, which has the most, has 0.1 MB
GEMMA4, WORDPIECE, UNIGRAM = "gemma4", "bert", "t5"  # `tokenizer.ggml.model`
NO_MERGE = -1e9  # score of a token that no merge makes
MAX_SHOWN = 8192  # tokens in the cache of decoded bytes

# Tokens that always end the output, even if the file does not mark them.
STOP_TOKENS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
    "<turn|>", "<|tool_response>",  # Gemma 4
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip
# Tokens around reasoning and tool calls: they are part of an output's text, although some files hide them.
MARKUP = (
    "<think>", "</think>", "<seed:think>", "</seed:think>", "[THINK]", "[/THINK]",
    "<|START_THINKING|>", "<|END_THINKING|>", "<|channel>", "<channel|>",
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<seed:tool_call>", "</seed:tool_call>", "<function_calls>", "</function_calls>", "<|python_tag|>",
    "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>",
    "<|START_ACTION|>", "<|END_ACTION|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """The vocabulary of a model. Any number of threads may use it at the same time."""

    def __init__(self, core: Any, memory: list[Array], pre: PreTokenizer | None) -> None:
        """Use `from_gguf`."""
        self._core, self._memory, self._pre = core, memory, pre
        self._word_piece: WordPiece | None = None
        self._unigram: Unigram | None = None
        self._bytes, self._starts, self._types = memory[:3]
        self._byte_tokens = {} if pre else {id: byte for byte, id in enumerate(core.byte_ids) if id >= 0}
        self.vocab_size = len(self._types)
        self.bos_id: int | None = None
        self.eos_id: int | None = None
        self.add_bos = self.add_eos = self.add_space_prefix = False
        self.eos_ids: frozenset[int] = frozenset()  # all tokens that end an output: eos_id, end of turn ...
        self.harmony: Markers | None = None  # of gpt-oss
        self.fill_in_middle: FillInMiddle | None = None  # of code models
        self._shown: dict[int, bytes] = {}  # cache: bytes of recently decoded tokens

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Self:
        kind = gguf.require("tokenizer.ggml.model", str)
        if kind not in ("llama", "gpt2", GEMMA4, WORDPIECE, UNIGRAM):
            raise UnsupportedModelError(
                f"{gguf.path}: the tokenizer is {kind!r}; this engine runs 'llama' (SentencePiece), 'gpt2' "
                "(byte-level BPE), 'bert' (WordPiece) and 't5' (unigram): choose another model"
            )
        pre = pre_tokenizer(gguf.get("tokenizer.ggml.pre", "default")) if kind == "gpt2" else None
        self = cls(*_load_vocabulary(gguf, kind, pre), pre)
        default = (1, 2) if kind == "llama" else (None, None)
        self.bos_id = _token_id(gguf, "bos", default[0], self.vocab_size)
        self.eos_id = _token_id(gguf, "eos", default[1], self.vocab_size)
        self.add_bos = gguf.get("tokenizer.ggml.add_bos_token", pre.add_bos if pre else True)
        self.add_eos = gguf.get("tokenizer.ggml.add_eos_token", False)
        if kind == WORDPIECE:
            self._set_word_piece(gguf)
        if kind == UNIGRAM:
            self._set_unigram(gguf)
        self.add_space_prefix = pre is None and gguf.get("tokenizer.ggml.add_space_prefix", True)
        known_eos_ids = [id for id in map(self.find, STOP_TOKENS) if id is not None]
        self._types[known_eos_ids] = CONTROL  # not all files mark them
        if (end := self.find("</s>")) is not None and self._types[end] == CONTROL:  # in Gemma's, it is HTML
            known_eos_ids.append(end)
        ends = [_token_id(gguf, name, None, self.vocab_size) for name in ("eot", "eom")]
        self._types[[id for id in map(self.find, MARKUP) if id is not None]] = USER_DEFINED
        self.harmony = find_markers(self)
        self.fill_in_middle = find_tokens(gguf, self)
        if self.harmony:
            known_eos_ids.remove(self.harmony.end)
            self._types[list(self.harmony)] = USER_DEFINED
            ends += [self.find(text) for text in ENDS]
        self.eos_ids = frozenset(known_eos_ids) | {id for id in (self.eos_id, *ends) if id is not None}
        if pre or kind == GEMMA4:
            _add_merges(gguf, self._core, self._memory)
        _add_specials(gguf, self._core, self._memory)
        return self

    def _set_word_piece(self, gguf: GGUF) -> None:
        """A text stands between the tokens [CLS] and [SEP]."""
        first = _token_id(gguf, "cls", self.find("[CLS]"), self.vocab_size)
        self.bos_id = _token_id(gguf, "bos", first, self.vocab_size)
        # The key is spelled so in files.
        last = _token_id(gguf, "seperator", self.find("[SEP]"), self.vocab_size)
        self.eos_id = _token_id(gguf, "eos", last, self.vocab_size)
        self.add_eos = gguf.get("tokenizer.ggml.add_eos_token", True)
        unknown = _token_id(gguf, "unknown", self.find("[UNK]"), self.vocab_size)

        self._word_piece = WordPiece(self._plain_tokens(), 0 if unknown is None else unknown)

    def _set_unigram(self, gguf: GGUF) -> None:
        unknown = _token_id(gguf, "unknown", self.find("<unk>"), self.vocab_size)
        scores = np.asarray(gguf.require("tokenizer.ggml.scores", np.ndarray), np.float32)
        characters = gguf.get("tokenizer.ggml.precompiled_charsmap", np.empty(0, np.uint8))
        if len(scores) != self.vocab_size or not np.isfinite(scores).all():
            gguf.fail("tokenizer.ggml.scores", "there is no number for each token: convert the model again")
        data = np.asarray(characters).astype(np.uint8).tobytes()
        try:
            self._unigram = Unigram(self._plain_tokens(), scores, 0 if unknown is None else unknown, data)
        except ValueError as error:
            gguf.fail("tokenizer.ggml.precompiled_charsmap", f"{error}: convert the model again")

    def _plain_tokens(self) -> dict[str, int]:
        """The tokens that plain text may become."""
        raw, starts = self._bytes.tobytes(), self._starts.tolist()
        return {
            raw[starts[id] : starts[id + 1]].decode(errors="replace"): id
            for id in np.flatnonzero(~np.isin(self._types, HIDDEN))[::-1].tolist()  # of equal ones, the first
        }

    @property
    def ends_twice(self) -> bool:
        """Whether two end tokens stand between the two texts of a pair, as in XLM-RoBERTa."""
        return self._unigram is not None

    def find(self, text: str) -> int | None:
        """Returns the token with this text in the file, special or not; None: there is none."""
        raw = self._spelled(text.encode())
        id = load().tandem_tokenizer_find(self._core, raw, len(raw))
        return id if id >= 0 else None

    def encode(
        self,
        text: str | bytes,
        *,
        special: bool = False,
        bos: bool | None = None,
        continues: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        """Returns the ids of `text`. With `special`, control tokens in the text are encoded as such; otherwise as text.

        `bos`: whether to add the BOS token; None does as the file says, but never twice.
        `continues`: the text follows another, so no space is added at its start.
        `limit`: stops encoding once there are more than `limit` tokens.
        """
        if limit is not None and len(text) > (end := (limit + 1) * max(self._core.longest, MAX_CHARACTER)):
            ids = self.encode(text[:end], special=special, bos=bos, continues=continues, limit=limit)
            if len(ids) > limit:
                return ids  # always, unless the vocabulary cannot spell the text
        data = self._spelled(_valid_utf8(text))
        if len(data) > MAX_TEXT:
            raise RequestError(f"the text has {len(data)} bytes: give {MAX_TEXT} at most")
        ids, most = list[int](), len(data) if limit is None else limit
        for start, end, token in self._special_spans(data, special):
            if token is not None:
                ids.append(token)
            elif start < end:
                space = self.add_space_prefix and not continues
                for part in throttled(self._plain_ids(data[start:end], space, most - len(ids))):
                    ids += part
            throttle()
            if len(ids) > most:
                break
        if bos is None:
            bos = self.add_bos and ids[:1] != [self.bos_id]
            if self.add_eos and self.eos_id is not None:
                ids.append(self.eos_id)
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def _spelled(self, data: bytes) -> bytes:
        """Text in the core's spelling: SentencePiece writes a space as U+2581."""
        return data if self._pre else data.replace("\u2581".encode(), b" ")

    def _special_spans(self, data: bytes, special: bool) -> Iterator[tuple[int, int, int | None]]:
        """Splits text into special tokens and plain text; yields start, end, and the token (None: plain text)."""
        next_special, span = load().tandem_tokenizer_next_special, ffi.new("int64_t[2]")
        at = 0
        while at < len(data):
            token = next_special(self._core, data, len(data), at, special, span)
            yield at, span[0], None
            if token >= 0:
                yield span[0], span[1], token
            at = span[1]

    def _plain_ids(self, data: bytes, space: bool, most: int) -> Iterator[list[int]]:
        """Yields the ids of plain text in parts, and no more parts once there are more than `most` ids."""
        if self._word_piece:
            for ids in self._word_piece.encode(data.decode()):
                yield ids
                if (most := most - len(ids)) < 0:
                    return
            return
        if self._unigram:
            yield self._unigram.encode(data.decode(), space, most)
            return
        if self._pre is None:
            yield self._merged(b" " + data if space else data, [], most)
            return
        for part, words in self._pre.parts(data):
            ids = self._merged(part, words, most)
            yield ids
            most -= len(ids)
            if most < 0:
                return

    def _merged(self, data: bytes, word_lengths: list[int] | Array, most: int) -> list[int]:
        words, ids = np.array(word_lengths, np.int32), np.empty(len(data), np.int32)
        memory = _pointer("int32_t *", words), len(words), _pointer("int32_t *", ids)
        count = load().tandem_tokenizer_encode(self._core, data, len(data), *memory, most, share())
        if count < 0:
            raise MemoryError
        tokens: list[int] = ids[:count].tolist()
        return tokens

    def decode(self, ids: Iterable[int], *, special: bool = False, continues: bool = False) -> str:
        """Returns the text of `ids`; invalid UTF-8 becomes U+FFFD. With `special`, control tokens are shown.

        `continues`: the ids follow others, so a space at their start is text, not the space that `encode` adds.
        """
        bytes_of = self.token_bytes if special else self.shown_bytes
        known: dict[int, bytes] = {}
        parts = []
        for id in ids:
            part = known.get(id)
            if part is None:
                part = known[id] = bytes_of(id)
            parts.append(part)
        data = b"".join(parts)
        if self.add_space_prefix and not continues:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """Returns the bytes of a token; not always whole characters."""
        if not 0 <= id < self.vocab_size:
            raise RequestError(f"token {id} is not in the vocabulary: it has 0 to {self.vocab_size - 1}")
        if id in self._byte_tokens:
            return bytes([self._byte_tokens[id]])
        return self._bytes[self._starts[id] : self._starts[id + 1]].tobytes()

    def shown_bytes(self, id: int) -> bytes:
        """Returns the bytes that `decode` shows: none for a control token."""
        data = self._shown.get(id)
        if data is None:
            if len(self._shown) >= MAX_SHOWN:
                self._shown = {}
            data = self._shown[id] = b"" if self.is_hidden(id) else self.token_bytes(id)
        return data

    def piece(self, id: int) -> str:
        """Returns the text of a token; invalid UTF-8 becomes U+FFFD."""
        return self.token_bytes(id).decode(errors="replace")

    def is_hidden(self, id: int) -> bool:
        """Whether `decode` leaves the token out, such as a control token."""
        return 0 <= id < self.vocab_size and int(self._types[id]) in HIDDEN


class StreamDecoder:
    """Decodes token by token. The texts from `push` and `flush`, joined, are equal to the text from `decode`. An
    incomplete character is held back until it is complete or known to be invalid."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False, continues: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._strip_space = tokenizer.add_space_prefix and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False  # a part of a character is held back

    def push(self, id: int) -> str:
        data = self._tokenizer.token_bytes(id) if self._special else self._tokenizer.shown_bytes(id)
        if self._strip_space and data:
            data, self._strip_space = data.removeprefix(b" "), False
        if not self._holds:
            try:
                return data.decode()  # whole characters, as in most tokens: several times as fast
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Returns the text that is still held back, at the end of the text."""
        return self._decoder.decode(b"", True)


def _pointer(kind: str, array: Array) -> Any:
    return ffi.cast(kind, array.ctypes.data)


def _valid_utf8(text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        try:
            text.decode()
            return text
        except UnicodeDecodeError:
            text = text.decode(errors="surrogateescape")  # one surrogate for each bad byte
    try:
        return text.encode()
    except UnicodeEncodeError:
        return LONE_SURROGATE.sub("\ufffd", text).encode()


def _token_id(gguf: GGUF, name: str, default: int | None, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in gguf.metadata:
        return default if default is not None and default < vocab_size else None
    id = gguf.require(key, int)
    if not 0 <= id < vocab_size:
        gguf.fail(key, f"token {id} is not in the vocabulary of {vocab_size}: convert the model again")
    return id


def _per_token(gguf: GGUF, key: str, count: int, default: int, dtype: str) -> Array:
    values = gguf.require(key, np.ndarray) if key in gguf.metadata else np.full(count, default)
    numbers = values.dtype.kind in ("f" if dtype == "float32" else "iu") and np.isfinite(values).all()
    if len(values) != count or (key in gguf.metadata and not numbers):
        gguf.fail(key, f"this must be {count} numbers, one for each token: convert the model again")
    return np.array(values, dtype)


def _slots(count: int, width: int) -> Array:
    """Returns an empty hash table (ids are -1) for `count` entries: a power of two, at most two thirds full."""
    return np.full((1 << (count * 3 // 2).bit_length(), width), -1, np.int32)


def _load_vocabulary(gguf: GGUF, kind: str, pre: PreTokenizer | None) -> tuple[Any, list[Array]]:
    """Returns the core's structure with all tokens, and the memory that it points to."""
    tokens = gguf.require("tokenizer.ggml.tokens", StringArray)
    count = len(tokens)
    types = _per_token(gguf, "tokenizer.ggml.token_type", count, NORMAL, "uint8")
    data, starts = np.empty(int(tokens.lengths.sum()) + 1, np.uint8), np.zeros(count + 1, np.int64)
    if kind == "llama":
        scores = _per_token(gguf, "tokenizer.ggml.scores", count, 0, "float32")
    else:  # of Gemma 4's tokens: below that of any merge until one is found
        scores = np.full(0 if pre else count, NO_MERGE, np.float32)
    slots = _slots(count, 2)
    core = ffi.new("tokenizer *")
    core.byte_level, core.whole_words = pre is not None, pre is not None and pre.whole_words
    unknown = _token_id(gguf, "unknown", 0, count)
    core.unknown = -1 if pre or unknown is None else unknown
    core.bytes, core.starts = _pointer("uint8_t *", data), _pointer("int64_t *", starts)
    core.types, core.scores = _pointer("uint8_t *", types), _pointer("float *", scores)
    core.slots, core.slot_mask = _pointer("void *", slots), len(slots) - 1
    load().tandem_tokenizer_add_tokens(core, *_strings(tokens))
    return core, [data, starts, types, scores, slots]


def _add_merges(gguf: GGUF, core: Any, memory: list[Array]) -> None:
    merges = gguf.require("tokenizer.ggml.merges", StringArray)
    slots = _slots(len(merges), 4)
    scratch = np.empty(int(merges.lengths.max(initial=0)) + 1, np.uint8)
    core.merges, core.merge_mask = _pointer("void *", slots), len(slots) - 1
    load().tandem_tokenizer_add_merges(core, *_strings(merges), _pointer("uint8_t *", scratch))
    memory.append(slots)


def _add_specials(gguf: GGUF, core: Any, memory: list[Array]) -> None:
    data, starts, types = memory[:3]
    ids = np.flatnonzero(np.isin(types, (CONTROL, USER_DEFINED, UNKNOWN)))
    size = int((starts[ids + 1] - starts[ids]).sum())
    if size > MAX_SPECIAL:
        gguf.fail("tokenizer.ggml.token_type", f"special tokens take {size} bytes: convert the model again")
    nodes = np.zeros((256 + size, 4), np.int32)
    nodes[:, 2] = -1
    core.trie = _pointer("void *", nodes)
    memory.append(nodes)
    room, raw = 256, data.tobytes()
    for id, start, end in zip(ids.tolist(), starts[ids].tolist(), starts[ids + 1].tolist(), strict=True):
        try:
            raw[start:end].decode()
        except UnicodeDecodeError:
            continue  # would cut a character in two
        room = load().tandem_tokenizer_add_special(core, id, room)


def _strings(strings: StringArray) -> tuple[Any, ...]:
    pointers = _pointer("int64_t *", strings.offsets), _pointer("int64_t *", strings.lengths)
    return _pointer("uint8_t *", strings.blob), *pointers, len(strings)
