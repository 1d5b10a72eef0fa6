"""OpenAI's /v1/conversations: stored conversations, to which responses are added."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from typing_extensions import TypedDict

from tandem.server.core.serving import get_server
from tandem.server.http.bodies import AnyObject, JSONRoute, StrictModel
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


@router.post("/v1/conversations", responses=ERRORS)
async def create(request: Request, body: ConversationRequest) -> Conversation:
    """Begins a conversation."""
    created = Conversation(
        id=new_id("conv_"), object="conversation", created_at=now(), metadata=body.metadata or {}
    )
    await get_server(request).responses.put(created["id"], dict(created), new_items(body.items or []))
    return created


@router.get("/v1/conversations/{conversation_id}", response_model=Conversation, responses=ERRORS)
async def retrieve_conversation(request: Request, conversation_id: str) -> Any:
    """A conversation, without its items."""
    return (await stored(get_server(request), conversation_id, "conv_"))[0]


@router.delete("/v1/conversations/{conversation_id}", responses=ERRORS)
async def delete_conversation(request: Request, conversation_id: str) -> Deleted:
    """Forgets a conversation. Its responses stay."""
    server = get_server(request)
    await stored(server, conversation_id, "conv_")
    await server.responses.delete(conversation_id)
    return Deleted(id=conversation_id, object="conversation.deleted", deleted=True)


@router.get("/v1/conversations/{conversation_id}/items", responses=ERRORS)
async def list_items(
    request: Request, conversation_id: str, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> ItemList:
    """The items of a conversation."""
    _, items = await stored(get_server(request), conversation_id, "conv_")
    return item_list(items, limit, order, after)


@router.post("/v1/conversations/{conversation_id}/items", responses=ERRORS)
async def add_items(request: Request, conversation_id: str, body: ItemsRequest) -> ItemList:
    """Adds items to a conversation."""
    server, added = get_server(request), new_items(body.items)
    await stored(server, conversation_id, "conv_")
    if not await server.responses.append(conversation_id, added):
        await stored(server, conversation_id, "conv_")  # it was deleted meanwhile
    return item_list(added, len(added), "asc", None)
