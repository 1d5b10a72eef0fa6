"""Models that embed and rank texts agree with transformers on tiny models, whichever texts share a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tandem import LLM
from tandem.engine.ranking import CLASSIFIER
from tandem.engine.text_encoder import STEP_TEXTS
from tandem.errors import ContextError, ModelFileError, RequestError
from tandem.gguf.file import GGUF
from tandem.kernels.kernel import Array
from tandem.model.tokenizer import Tokenizer
from tandem.model.weights import vector
from tests.cli.tiny_model import DIM, write_tiny_model
from tests.gguf_files import Key, write
from tests.models.encoder_texts import BERT_RANK_KEYS, QUERY, TEXTS

GOLDENS = Path(__file__).parent / "goldens" / "encoders"
NAMES = ("bert", "nomic-bert", "modern-bert")

pytestmark = pytest.mark.fast


def load(name: str, kv: str = "f32", **options: object) -> LLM:
    return LLM(GOLDENS / f"{name}.gguf", device="cpu", threads=2, kv=kv, **options)


def golden(name: str) -> Iterator[tuple[list[int], Array]]:
    with np.load(GOLDENS / f"{name}.npz") as arrays:
        for i in range(len(TEXTS)):
            yield arrays[f"ids_{i}"].tolist(), arrays[f"result_{i}"]


def pooled(hidden: Array, pooling: str) -> Array:
    vector = {"mean": hidden.mean(axis=0), "cls": hidden[0], "last": hidden[-1]}[pooling]
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_equal_those_of_transformers(name: str) -> None:
    with load(name) as llm:
        assert [llm.tokenize(text) for text in TEXTS] == [ids for ids, _ in golden(name)]
        for pooling in ("mean", "cls", "last"):
            expected = np.array([pooled(hidden, pooling) for _, hidden in golden(name)])
            assert np.abs(llm.embed(TEXTS, pooling=pooling) - expected).max() < 1e-5
            assert np.abs(llm.embed(TEXTS[1], pooling=pooling) - expected[1]).max() < 1e-5
        assert np.array_equal(llm.embed(TEXTS), llm.embed(TEXTS, pooling="mean"))  # as the file says


def test_scores_equal_those_of_transformers() -> None:
    expected = [float(scores[0]) for _, scores in golden("bert-rank")]
    with load("bert-rank") as llm:
        assert [pair.ids for pair in llm.pairs(QUERY, TEXTS)] == [ids for ids, _ in golden("bert-rank")]
        assert np.abs(llm.rerank(QUERY, TEXTS) - expected).max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_vector_does_not_depend_on_the_texts_beside_it(name: str) -> None:
    rng = np.random.default_rng(0)
    texts = [[2, *rng.integers(4, 21, rng.integers(0, 126)).tolist(), 3] for _ in range(2 * STEP_TEXTS)]
    texts += [[2, 7, 3]] * (STEP_TEXTS + 1)
    with load(name, kv="f16") as llm:
        together = llm.embed(texts)
        for i in (0, 1, 17, 2 * STEP_TEXTS - 1, -1):
            assert np.array_equal(together[i], llm.embed(texts[i]))


def test_texts_that_are_empty_or_too_long() -> None:
    with load("bert", context=32) as llm:
        long = "the cat sat on the mat. " * 10
        assert llm.embed([]).shape == (0, 32)
        with pytest.raises(ContextError, match="the context holds 32: shorten it, truncate it"):
            llm.embed(["a", long])
        first = [*llm.tokenize(long)[:31], 3]
        assert np.array_equal(llm.embed(long, truncate=True), llm.embed(first))
        for prompt in ("", [""], [[]]):
            with pytest.raises(RequestError, match="the prompt is empty"):
                llm.embed(prompt)
        with pytest.raises(RequestError, match="a token id is outside 0 to 20"):
            llm.embed([[2, 99, 3]])
        with pytest.raises(RequestError, match="no scores of pairs"):
            llm.rerank("a", ["b"])


def test_a_pair_has_two_tokens_between_its_texts_in_xlm_roberta(tmp_path: Path) -> None:
    """As bge-reranker-v2-m3: the family's tokenizer with BERT's layers, and one type of token."""
    golden = GGUF.open(GOLDENS / "bert-rank.gguf")
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", "\u2581the", "\u2581cat", *"abcdefghijklmn"]
    keys: list[Key] = [
        *BERT_RANK_KEYS,
        ("tokenizer.ggml.token_type_count", "u32", 1),
        ("tokenizer.ggml.model", "str", "t5"),
        ("tokenizer.ggml.tokens", "[str]", tokens),
        ("tokenizer.ggml.scores", "[f32]", [0.0] * 4 + [-1.0 - i / 8 for i in range(17)]),
        ("tokenizer.ggml.token_type", "[i32]", [3, 3, 3, 2] + [1] * 17),
        *(
            (f"tokenizer.ggml.{name}_token_id", "u32", id)
            for name, id in (("bos", 0), ("eos", 2), ("unknown", 3))
        ),
        ("tokenizer.ggml.add_eos_token", "bool", True),
    ]
    tensors = [
        (name, "F32", vector(golden, name).reshape(tensor.shape)) for name, tensor in golden.tensors.items()
    ]
    tensors = [
        (name, kind, rows[:1] if name == "token_types.weight" else rows) for name, kind, rows in tensors
    ]
    write(tmp_path / "xlm-r.gguf", keys, tensors)
    with LLM(tmp_path / "xlm-r.gguf", device="cpu", threads=2, kv="f32") as llm:
        assert next(llm.pairs("the cat", ["cab"])).ids == [0, 5, 6, 2, 2, 4, 9, 7, 8, 2]
        assert llm.tokenize("the  catX") == [0, 5, 6, 3, 2]
        scores = llm.rerank("the cat", ["cab", "cab", "the"])
        assert scores[0] == scores[1] != scores[2]


def test_a_generating_model_ranks_by_its_yes(tmp_path: Path) -> None:
    """As Qwen3-Reranker: the probability of the first of two classes after a prompt that asks for a judgement."""
    rows = np.random.default_rng(3).standard_normal((2, DIM)).astype(np.float32)
    keys: list[Key] = [
        ("llama.pooling_type", "u32", 4),
        ("tokenizer.chat_template.rerank", "str", "<|im_start|>{query} in {document}<|im_end|>?"),
        *((f"tokenizer.ggml.add_{name}_token", "bool", True) for name in ("bos", "eos")),
        ("tokenizer.ggml.bos_token_id", "u32", 65),
    ]
    file = write_tiny_model(tmp_path / "tiny.gguf", more_keys=keys, more_tensors=[(CLASSIFIER, "F32", rows)])
    with LLM(file, device="cpu", threads=1, context=64, kv="f32") as llm:
        documents = ["dog", "a cat", "", "long " * 9]
        expected = []
        for document in documents:
            ids = llm.tokenize(f"<|im_start|>cat in {document}<|im_end|>?", special=True)[1:-1]
            assert next(llm.pairs("cat", [document])).ids == ids
            yes, no = rows @ llm.capture(ids, ["result_norm"])["result_norm"][-1]
            expected.append(1 / (1 + np.exp(no - yes)))
        assert np.abs(llm.rerank("cat", documents) - expected).max() < 1e-6
        assert len(llm.embed("cat")) == DIM and llm.generate("a", max_tokens=2).text
        cut = next(llm.pairs("cat", ["x" * 100], truncate=True)).ids
        assert len(cut) == 64 and cut[-2:] == llm.tokenize("<|im_end|>?", special=True)[1:-1]
        with pytest.raises(ContextError, match="shorten it, truncate it"):
            llm.rerank("cat", ["x" * 100])
        with pytest.raises(ContextError, match="the query has more tokens"):
            llm.rerank("x" * 100, ["a"])
        with pytest.raises(RequestError, match="are texts"):
            llm.rerank("cat", [3])  # type: ignore[list-item]


def test_a_classifier_of_another_width_is_refused(tmp_path: Path) -> None:
    rows = (CLASSIFIER, "F32", np.zeros((2, DIM - 1), np.float32))
    keys: list[Key] = [("llama.pooling_type", "u32", 4)]
    file = write_tiny_model(tmp_path / "tiny.gguf", more_keys=keys, more_tensors=[rows])
    with (
        LLM(file, device="cpu", threads=1, context=64) as llm,
        pytest.raises(ModelFileError, match="do not have the 64 numbers"),
    ):
        llm.rerank("cat", ["a"])


def test_a_generating_model_embeds_with_its_last_token(tmp_path: Path) -> None:
    """As Qwen3-Embedding: a token that ends each text, and the hidden state after it."""
    keys: list[Key] = [("llama.pooling_type", "u32", 3), ("tokenizer.ggml.add_eos_token", "bool", True)]
    with LLM(
        write_tiny_model(tmp_path / "tiny.gguf", more_keys=keys),
        device="cpu",
        threads=1,
        context=64,
        kv="f32",
    ) as llm:
        ids = [*llm.tokenize("cat", special=True)[:3], 257]
        last = llm.capture(ids, ["result_norm"])["result_norm"][-1]
        assert np.abs(llm.embed("cat") - last / np.linalg.norm(last)).max() < 1e-6
        assert llm.embedding_ids("x" * 100, truncate=True)[-1] == 257


def test_it_generates_nothing() -> None:
    with load("bert") as llm:
        for call in (
            lambda: llm.chat([{"role": "user", "content": "a"}]),
            lambda: llm.generate("a"),
            lambda: list(llm.stream("a")),
            lambda: llm.logits([2, 3]),
            lambda: llm.capture([2, 3], ["hidden"]),
        ):
            with pytest.raises(RequestError, match="embeds and ranks texts, and generates none"):
                call()
        assert llm.stats().running == 0


def test_word_pieces_are_those_of_tokenizers() -> None:
    """On texts of many scripts, with the vocabulary of the golden."""
    ours = Tokenizer.from_gguf(GGUF.open(GOLDENS / "bert.gguf"))
    vocabulary = {ours.piece(id): id for id in range(ours.vocab_size)}
    spelled = {
        text[1:] if text.startswith(" ") else text if text.startswith("[") else f"##{text}": id
        for text, id in vocabulary.items()
    }
    theirs = tokenizers.Tokenizer(tokenizers.models.WordPiece(spelled, unk_token="[UNK]"))
    theirs.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    rng = np.random.default_rng(1)
    alphabet = [
        *"abcBC ,.!\t\n[]#$^`é\u0301ŠİΣﬁ漢字한글\u200b\x00\ufffd\u00a0①“”…—😀",
        "the",
        "cat",
        "unbelievables",
    ]
    for _ in range(500):
        text = "".join(rng.choice(alphabet, rng.integers(1, 30)))
        assert ours.encode(text) == [2, *theirs.encode(text, add_special_tokens=False).ids, 3], text
    assert ours.encode("[SEP] a" + "b" * 200) == [*ours.encode("[ SEP ] " + "?" * 101)[:4], 1, 3]
