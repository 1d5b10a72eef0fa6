"""OpenAI's /v1/models; Anthropic's, for a request with its header `anthropic-version`."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from tandem.errors import ModelNotFoundError
from tandem.server.core.serving import get_server
from tandem.server.http.bodies import JSONRoute
from tandem.server.openai.error_body import ERRORS

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class AnthropicModel(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModelList(TypedDict):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


@router.get("/v1/models", responses={401: ERRORS[401]})
async def list_models(request: Request) -> ModelList | AnthropicModelList:
    """The models of this server. The first one is the default."""
    names = get_server(request).models.names()
    if _is_anthropic(request):
        ends = (names[0], names[-1]) if names else (None, None)
        models = [_anthropic_model(name) for name in names]
        return AnthropicModelList(data=models, has_more=False, first_id=ends[0], last_id=ends[1])
    return ModelList(object="list", data=[_card(name) for name in names])


@router.get("/v1/models/{model:path}", responses={401: ERRORS[401], 404: ERRORS[404], 400: ERRORS[400]})
async def show_model(request: Request, model: str) -> ModelCard | AnthropicModel:
    """One model of this server."""
    models = get_server(request).models
    model = models.known_name(model)
    if model not in models.names():
        raise ModelNotFoundError(f"there is no model {model}: see /v1/models")
    return _anthropic_model(model) if _is_anthropic(request) else _card(model)


def _is_anthropic(request: Request) -> bool:
    """Anthropic's API requires this header, and has another list at the same path."""
    return "anthropic-version" in request.headers


def _card(name: str) -> ModelCard:
    return ModelCard(id=name, object="model", created=0, owned_by="tandem")


def _anthropic_model(name: str) -> AnthropicModel:
    return AnthropicModel(type="model", id=name, display_name=name, created_at="1970-01-01T00:00:00Z")
