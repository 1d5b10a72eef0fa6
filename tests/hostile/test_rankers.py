"""Models that rank: damaged heads and prompts are an error, and a short request has no gigabytes of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import LLM
from tandem.engine.ranking import CLASSIFIER, MAX_QUERIES, MAX_TEMPLATE, TEMPLATE_KEY
from tandem.errors import ContextError, ModelFileError, RequestError
from tandem.gguf.file import GGUF
from tandem.model.tokenizer import Tokenizer
from tandem.model.weights import vector
from tandem.server.core import serving
from tests.cli.tiny_model import DIM, write_tiny_model
from tests.gguf_files import Key, write
from tests.models.encoder_texts import BERT_RANK_KEYS
from tests.models.test_encoders import GOLDENS

pytestmark = pytest.mark.fast
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "kv": "f32"}


def ranker(path: Path, shape: tuple[int, ...] = (2, DIM), *more: Key) -> Path:
    rows = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    keys: list[Key] = [("llama.pooling_type", "u32", 4), *more]
    return write_tiny_model(path, more_keys=keys, more_tensors=[(CLASSIFIER, "F32", rows)])


@pytest.mark.parametrize("shape", [(2, DIM + 1), (DIM - 1,), (3, 5)])
def test_a_head_of_another_width_is_an_error(shape: tuple[int, ...], tmp_path: Path) -> None:
    with LLM(ranker(tmp_path / "m.gguf", shape), context=256, **OPTIONS) as llm:
        with pytest.raises(ModelFileError, match=r"cls\.output\.weight"):
            llm.rerank("a", ["b"])
        assert llm.generate("a", max_tokens=2).text


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("cls.weight", (5, 32)),
        ("cls.weight", (32, 33)),
        ("cls.output.weight", (33,)),
        ("cls.bias", (7,)),
        ("cls.output.bias", (2,)),
    ],
)
def test_layers_that_do_not_fit_together_are_an_error(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    golden = GGUF.open(GOLDENS / "bert-rank.gguf")
    arrays = {one: vector(golden, one).reshape(tensor.shape) for one, tensor in golden.tensors.items()}
    arrays[name] = np.ones(shape, np.float32)
    keys: list[Key] = [
        *BERT_RANK_KEYS,
        ("tokenizer.ggml.token_type_count", "u32", 2),
        ("tokenizer.ggml.model", "str", "bert"),
        ("tokenizer.ggml.tokens", "[str]", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(chr, range(97, 114))]),
    ]
    file = write(tmp_path / "m.gguf", keys, [(one, "F32", rows) for one, rows in arrays.items()])
    with pytest.raises(ModelFileError, match=r"cls\."):
        LLM(file, **OPTIONS)


@pytest.mark.parametrize("template", ["{query}" * (MAX_QUERIES + 1), "x" * (MAX_TEMPLATE + 1)])
def test_a_prompt_that_repeats_the_query_is_an_error(template: str, tmp_path: Path) -> None:
    """A query may have megabytes."""
    file = ranker(tmp_path / "m.gguf", (2, DIM), (TEMPLATE_KEY, "str", template))
    with LLM(file, context=64, **OPTIONS) as llm, pytest.raises(ModelFileError, match="no prompt"):
        llm.rerank("a", ["b"])


def test_a_context_without_room_for_the_prompt_is_an_error(tmp_path: Path) -> None:
    """It was a RecursionError."""
    with (
        LLM(ranker(tmp_path / "m.gguf"), context=8, **OPTIONS) as llm,
        pytest.raises(ContextError, match="more tokens than the context"),
    ):
        llm.rerank("a", ["b"])


def test_a_query_counts_with_each_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 40 KB took gigabytes of token ids, and of time."""
    monkeypatch.setattr(serving, "MAX_TOKENS", 4000)
    template: Key = (TEMPLATE_KEY, "str", "{query}{document}")
    with LLM(ranker(tmp_path / "m.gguf", (2, DIM), template), context=1024, **OPTIONS) as llm:
        assert len(serving._pairs(llm, "x" * 900, ["a"] * 4, False)) == 4
        with pytest.raises(RequestError, match="more than 4000 tokens together"):
            serving._pairs(llm, "x" * 900, ["a"] * 2048, False)
        with pytest.raises(RequestError, match="more than 4000 tokens together"):
            serving._embedding_ids(llm, ["x" * 2000] * 9, True)
        assert len(serving._embedding_ids(llm, ["x" * 900, [1, "a"]], False)) == 2


@pytest.mark.parametrize("kind", ["encoder", "classifier"])
def test_a_query_is_tokenized_once_however_many_documents_there_are(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MB of spaces are no token, and took a second for each of 2,048 documents."""
    template: Key = (TEMPLATE_KEY, "str", "{document}{query}")
    file = GOLDENS / "bert-rank.gguf" if kind == "encoder" else ranker(tmp_path / "m", (2, DIM), template)
    with LLM(file, **OPTIONS) as llm:
        encode, read = Tokenizer.encode, list[Any]()

        def counted(self: Tokenizer, text: str | bytes, **options: Any) -> list[int]:
            read.append(text)
            return encode(self, text, **options)

        monkeypatch.setattr(Tokenizer, "encode", counted)
        assert len(serving._pairs(llm, "aaa", ["b"] * 9, False)) == 9
    assert read.count("aaa") == 1 and read.count("b") == 9
