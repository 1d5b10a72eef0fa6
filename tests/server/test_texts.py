"""A server of models that embed and rank texts: vectors and scores in every API, and no text from them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from tandem import LLM
from tests.models.encoder_texts import QUERY, TEXTS
from tests.models.test_encoders import GOLDENS
from tests.server.servers import Running, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("texts")
    models = (GOLDENS / "bert.gguf", GOLDENS / "bert-rank.gguf", "--device", "cpu", "--threads", "1")
    with serving(folder, *models, context=100, shutdown=2) as running:
        yield running


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    with LLM(GOLDENS / "bert.gguf", device="cpu", threads=1) as llm:
        return llm.embed(TEXTS)


def client_data(body: Any) -> list[Any]:
    """The vectors of an answer of OpenAI's or llama-server's API."""
    return [one["embedding"] for one in (body if isinstance(body, list) else body["data"])]


def test_vectors_in_every_api(server: Running, vectors: np.ndarray) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.embeddings.create(model="bert", input=TEXTS)
    assert np.allclose([one.embedding for one in found.data], vectors, atol=1e-6)
    assert found.usage.prompt_tokens == sum(len(ids) for ids in server_ids(server))
    [short] = client.embeddings.create(model="bert", input=TEXTS[0], dimensions=8).data
    assert np.allclose(short.embedding, vectors[0, :8] / np.linalg.norm(vectors[0, :8]), atol=1e-6)
    body = {"model": "bert", "input": TEXTS[1], "encoding_format": "base64"}
    data = server.ask("/v1/embeddings", body)[2]["data"][0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(data), "<f4"), vectors[1], atol=1e-6)
    ollama = server.ask("/api/embed", {"model": "bert", "input": TEXTS})[2]
    assert np.allclose(ollama["embeddings"], vectors, atol=1e-6)
    llama_cpp = server.ask("/embedding", {"model": "bert", "content": TEXTS})[2]
    assert np.allclose([one["embedding"][0] for one in llama_cpp], vectors, atol=1e-6)
    assert server.ask("/api/show", {"model": "bert"})[2]["capabilities"] == ["embedding"]
    for path in (
        "/embeddings",
        "/v1/embeddings",
    ):  # token ids and texts in one prompt, and such prompts in a list
        [mixed] = client_data(server.ask(path, {"model": "bert", "input": [7, "cat", 9]})[2])
        both = client_data(server.ask(path, {"model": "bert", "input": ["cat", [7, "cat", 9]]})[2])
        assert both[1] == mixed != both[0]


def server_ids(server: Running) -> list[list[int]]:
    return [
        server.ask("/tokenize", {"model": "bert", "content": text, "add_special": True})[2]["tokens"]
        for text in TEXTS
    ]


def test_ranking(server: Running) -> None:
    with LLM(GOLDENS / "bert-rank.gguf", device="cpu", threads=1) as llm:
        scores = llm.rerank(QUERY, TEXTS)
    body = {"model": "bert-rank", "query": QUERY, "documents": TEXTS, "top_n": 3, "return_documents": True}
    for path in ("/rerank", "/v1/rerank", "/v1/reranking"):
        status, _, answer = server.ask(path, body)
        assert (
            status == 200 and [one["index"] for one in answer["results"]] == np.argsort(-scores)[:3].tolist()
        )
        for one in answer["results"]:
            assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-5)
            assert one["document"]["text"] == TEXTS[one["index"]]
        assert answer["usage"]["total_tokens"] > 0
    other = server.ask("/rerank", {"model": "bert-rank", "query": QUERY, "texts": TEXTS})[2]
    assert [one["index"] for one in other] == np.argsort(-scores).tolist() and "score" in other[0]


def test_what_is_refused(server: Running) -> None:
    long = "the cat sat on the mat. " * 40
    for path, body, said in (
        ("/v1/chat/completions", server.chat(model="bert"), "generates none"),
        ("/v1/completions", {"model": "bert", "prompt": "a"}, "generates none"),
        ("/api/chat", {"model": "bert", "messages": server.chat()["messages"]}, "generates none"),
        ("/v1/embeddings", {"model": "bert", "input": ""}, "the prompt is empty"),
        ("/v1/embeddings", {"model": "bert", "input": []}, "input"),
        ("/v1/embeddings", {"model": "bert", "input": ["a", long]}, "the context holds 100"),
        ("/api/embed", {"model": "bert", "input": long, "truncate": False}, "the context holds 100"),
        ("/v1/rerank", {"model": "bert", "query": "a", "documents": ["b"]}, "use a reranker"),
        ("/v1/rerank", {"model": "bert-rank", "query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"model": "bert-rank", "query": long, "documents": ["a"]}, "shorten it"),
        (
            "/v1/rerank",
            {"model": "bert-rank", "query": "a", "documents": ["b", long]},
            "the context holds 100",
        ),
    ):
        status, _, answer = server.ask(path, body)
        assert status == 400 and said in str(answer), (path, status, answer)
    assert server.ask("/api/embed", {"model": "bert", "input": long})[0] == 200
    cut = {"model": "bert-rank", "query": "a", "documents": ["b", long], "truncate": True}
    assert server.ask("/v1/rerank", cut)[0] == 200
