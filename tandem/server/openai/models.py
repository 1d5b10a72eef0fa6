"""OpenAI's /v1/models; Anthropic's, for a request with its header `anthropic-version`."""

from __future__ import annotations

from typing import Literal, NotRequired

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from tandem.errors import ModelNotFoundError
from tandem.server.core.serving import Server, get_server
from tandem.server.http.bodies import JSONRoute
from tandem.server.openai.error_body import ERRORS

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    aliases: NotRequired[list[str]]


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


@router.get("/models", include_in_schema=False)
@router.get("/v1/models", responses={401: ERRORS[401]})
async def list_models(request: Request) -> ModelList | AnthropicModelList:
    """The models of this server. The first one is the default."""
    server = get_server(request)
    names = server.models.names()
    if _is_anthropic(request):
        ends = (names[0], names[-1]) if names else (None, None)
        models = [_anthropic_model(name) for name in names]
        return AnthropicModelList(data=models, has_more=False, first_id=ends[0], last_id=ends[1])
    return ModelList(object="list", data=[_card(server, name) for name in names])


@router.get("/v1/models/{model:path}", responses={401: ERRORS[401], 404: ERRORS[404], 400: ERRORS[400]})
async def show_model(request: Request, model: str) -> ModelCard | AnthropicModel:
    """One model of this server."""
    server = get_server(request)
    model = server.known_name(model)
    if model not in server.models.names():
        raise ModelNotFoundError(f"there is no model {model}: see /v1/models")
    return _anthropic_model(model) if _is_anthropic(request) else _card(server, model)


def _is_anthropic(request: Request) -> bool:
    """Anthropic's API requires this header, and has another list at the same path."""
    return "anthropic-version" in request.headers


def _card(server: Server, name: str) -> ModelCard:
    card = ModelCard(id=name, object="model", created=0, owned_by="tandem")
    if server.settings.aliases and name == server.models.names()[0]:
        card["aliases"] = [name, *(alias for alias in server.settings.aliases if alias != "*")]
    return card


def _anthropic_model(name: str) -> AnthropicModel:
    return AnthropicModel(type="model", id=name, display_name=name, created_at="1970-01-01T00:00:00Z")
