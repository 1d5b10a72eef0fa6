"""OpenAI's /v1/conversations: stored conversations, to which responses are added."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from tandem.server.core.response_store import Page, StoredItem, stored_items
from tandem.server.core.serving import get_server
from tandem.server.http.background import run_inline_if_small
from tandem.server.http.bodies import AnyObject, JSONRoute, StrictModel, written
from tandem.server.openai.chat import new_id, now
from tandem.server.openai.error_body import ERRORS
from tandem.server.openai.responses import (
    Deleted,
    InputItem,
    ItemList,
    Limit,
    Order,
    item_list,
    new_items,
    raw_json,
    stored,
)

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])
NewItems = Annotated[list[InputItem], Field(max_length=20)]  # as many as OpenAI takes


class ConversationRequest(StrictModel):
    items: NewItems | None = None
    metadata: AnyObject | None = None


class ItemsRequest(StrictModel):
    items: Annotated[NewItems, Field(min_length=1)]


class Conversation(TypedDict):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, Any]


@router.post("/v1/conversations", response_model=Conversation, responses=ERRORS)
async def create(request: Request, body: ConversationRequest) -> Response:
    """Begins a conversation."""
    created = Conversation(
        id=new_id("conv_"), object="conversation", created_at=now(), metadata=body.metadata or {}
    )
    text, items = await written(created), await run_inline_if_small(_items, body.items or [])
    await get_server(request).responses.put(created["id"], text, items)
    return await raw_json(text)


@router.get("/v1/conversations/{conversation_id}", response_model=Conversation, responses=ERRORS)
async def retrieve_conversation(request: Request, conversation_id: str) -> Response:
    """A conversation, without its items."""
    return await raw_json(await stored("conv_", conversation_id, get_server(request).responses.body))


@router.delete("/v1/conversations/{conversation_id}", responses=ERRORS)
async def delete_conversation(request: Request, conversation_id: str) -> Deleted:
    """Forgets a conversation. Its responses stay."""
    await stored("conv_", conversation_id, get_server(request).responses.delete)
    return Deleted(id=conversation_id, object="conversation.deleted", deleted=True)


@router.get("/v1/conversations/{conversation_id}/items", response_model=ItemList, responses=ERRORS)
async def list_items(
    request: Request, conversation_id: str, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> Response:
    """The items of a conversation."""
    pages = partial(
        get_server(request).responses.page, limit=limit, after=after, newest_first=order == "desc"
    )
    return await item_list(await stored("conv_", conversation_id, pages))


@router.post("/v1/conversations/{conversation_id}/items", response_model=ItemList, responses=ERRORS)
async def add_items(request: Request, conversation_id: str, body: ItemsRequest) -> Response:
    """Adds items to a conversation."""
    items = await run_inline_if_small(_items, body.items)
    await stored("conv_", conversation_id, partial(get_server(request).responses.append, items=items))
    return await item_list(Page(items, has_more=False))


def _items(given: list[InputItem]) -> list[StoredItem]:
    return stored_items(new_items(given))
