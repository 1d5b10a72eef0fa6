"""OpenAI's /v1/models."""

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


@router.get("/v1/models", responses={401: ERRORS[401]})
async def list_models(request: Request) -> ModelList:
    """The models of this server. The first one is the default."""
    return ModelList(object="list", data=[_card(name) for name in get_server(request).models.names()])


@router.get("/v1/models/{model:path}", responses={401: ERRORS[401], 404: ERRORS[404], 400: ERRORS[400]})
async def show_model(request: Request, model: str) -> ModelCard:
    """One model of this server."""
    models = get_server(request).models
    model = models.known_name(model)
    if model not in models.names():
        raise ModelNotFoundError(f"there is no model {model}: see /v1/models")
    return _card(model)


def _card(name: str) -> ModelCard:
    return ModelCard(id=name, object="model", created=0, owned_by="tandem")
