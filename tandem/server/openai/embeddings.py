"""OpenAI's /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from tandem.kernels.kernel import Array
from tandem.server.core.serving import get_server
from tandem.server.http.bodies import (
    JSONRoute,
    Natural,
    Positive,
    StrictModel,
    cancel_on_disconnect,
    json_response,
)
from tandem.server.openai.chat import IGNORED
from tandem.server.openai.completions import MAX_PROMPTS, Prompts
from tandem.server.openai.error_body import ERRORS

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])


# Token ids and texts of one prompt, and lists of such prompts, as llama-server takes them.
Mixed = Annotated[list[Natural | str], Field(fail_fast=True, min_length=1)]
EmbeddingPrompts = (
    Prompts
    | Mixed
    | Annotated[list[str | Mixed], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
)


def each_text(prompts: Any) -> list[Any]:
    """A list of prompts, from one prompt or several. A list with a token id is one prompt."""
    if isinstance(prompts, str) or any(isinstance(part, int) for part in prompts):
        return [prompts]
    return list(prompts)


class EmbeddingRequest(StrictModel):
    ignored = IGNORED
    model: str | None = None
    input: EmbeddingPrompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


@router.post("/v1/embeddings", response_model=EmbeddingList, responses=ERRORS)
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """A normalised vector for each text, pooled as the model's file says."""
    server = get_server(request)
    name = server.model_name(body.model)
    work = server.embed(name, each_text(body.input), dimensions=body.dimensions)
    vectors, tokens = await cancel_on_disconnect(request, work)
    encode = _base64 if body.encoding_format == "base64" else _floats
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return await json_response(
        vectors.size,
        lambda: EmbeddingList(object="list", model=name, data=_data(vectors, encode), usage=usage),
    )


def _data(vectors: Array, encode: Callable[[Array], list[float] | str]) -> list[Embedding]:
    return [
        Embedding(object="embedding", index=i, embedding=encode(vector)) for i, vector in enumerate(vectors)
    ]


def _floats(vector: Array) -> list[float] | str:
    floats: list[float] = vector.tolist()
    return floats


def _base64(vector: Array) -> list[float] | str:
    return base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode()
