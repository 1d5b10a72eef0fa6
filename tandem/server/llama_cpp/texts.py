"""llama-server's /embedding and /rerank; the latter is also the API of Jina, Cohere and vLLM."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from tandem.errors import RequestError
from tandem.server.core.serving import get_server
from tandem.server.http.bodies import JSONRoute, Positive, StrictModel, cancel_on_disconnect, json_response
from tandem.server.llama_cpp.error_body import ERRORS
from tandem.server.openai.embeddings import EmbeddingPrompts, each_text
from tandem.server.openai.error_body import ERRORS as OPENAI_ERRORS

router = APIRouter(route_class=JSONRoute, tags=["llama.cpp"])
MAX_DOCUMENTS = 2048
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class EmbeddingRequest(StrictModel):
    neutral = (("embd_normalize", 2),)  # the Euclidean norm becomes 1
    model: str | None = None
    content: EmbeddingPrompts | None = None
    input: EmbeddingPrompts | None = None


class RerankRequest(StrictModel):
    ignored = frozenset({"user", "priority", "return_text"})
    model: str | None = None
    query: str
    documents: Texts | None = None
    texts: Texts | None = None  # the documents, in the API of text-embeddings-inference
    top_n: Positive | None = None
    return_documents: bool | None = None
    truncate: bool | None = None  # leaves out the end of documents that are too long


class TextEmbedding(TypedDict):
    index: int
    embedding: list[list[float]]


class RankedText(TypedDict):
    text: str


class RankedDocument(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class RerankUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Ranking(TypedDict):
    object: str
    model: str
    results: list[RankedDocument]
    usage: RerankUsage


@router.post("/embeddings", include_in_schema=False)
@router.post("/embedding", response_model=list[TextEmbedding], responses=ERRORS)
async def embedding(request: Request, body: EmbeddingRequest) -> Response:
    """A normalised vector for each text, pooled as the model's file says."""
    server, prompts = get_server(request), body.input if body.content is None else body.content
    if prompts is None:
        raise RequestError("content is missing: give a text, or a list of them")
    work = server.embed(server.model_name(body.model), each_text(prompts))
    vectors, _ = await cancel_on_disconnect(request, work)
    return await json_response(
        vectors.size,
        lambda: [TextEmbedding(index=i, embedding=[one.tolist()]) for i, one in enumerate(vectors)],
    )


@router.post("/rerank", include_in_schema=False)
@router.post("/reranking", include_in_schema=False)
@router.post("/v1/reranking", include_in_schema=False)
@router.post("/v1/rerank", response_model=Ranking, responses=OPENAI_ERRORS)
async def rerank(request: Request, body: RerankRequest) -> Response:
    """The documents in the order of their relevance to the query, by a model that ranks."""
    server = get_server(request)
    name, documents = server.model_name(body.model), body.documents or body.texts
    if not documents:
        raise RequestError("documents is missing: give a list of texts")
    work = server.rerank(name, body.query, documents, truncate=body.truncate is True)
    scores, tokens = await cancel_on_disconnect(request, work)
    order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()

    def answer() -> Any:
        if body.documents is None:
            return [{"index": i, "score": float(scores[i])} for i in order]
        results = [RankedDocument(index=i, relevance_score=float(scores[i])) for i in order]
        for result in results if body.return_documents else ():
            result["document"] = RankedText(text=documents[result["index"]])
        usage = RerankUsage(prompt_tokens=tokens, total_tokens=tokens)
        return Ranking(object="list", model=name, results=results, usage=usage)

    return await json_response(len(documents), answer)
