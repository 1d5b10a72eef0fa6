"""/mcp: the MCP servers that the settings name, as MCP's streamable HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request, Response
from typing_extensions import TypedDict

from tandem.errors import RequestError
from tandem.server.core.serving import get_server
from tandem.server.http.bodies import (
    AnyObject,
    JSONRoute,
    StrictModel,
    cancel_on_disconnect,
    drop_none,
    written,
)
from tandem.server.openai.error_body import ERRORS, ErrorBody

router = APIRouter(route_class=JSONRoute, tags=["MCP"])
FAILED: dict[int | str, dict[str, Any]] = {
    502: {"model": ErrorBody, "description": "The program has ended, or cannot be started"}
}
ACCEPTED: dict[int | str, dict[str, Any]] = {202: {"description": "A notification was passed on"}}
SessionId = Annotated[str | None, Header(alias="mcp-session-id")]


class RpcMessage(StrictModel):
    """A message of JSON-RPC: a request, a notification or an answer."""

    jsonrpc: Literal["2.0"]
    id: int | str | None = None
    method: str | None = None
    params: AnyObject | None = None
    result: AnyObject | None = None
    error: AnyObject | None = None


class RpcAnswer(TypedDict, total=False):
    jsonrpc: str
    id: int | str
    result: dict[str, Any]
    error: dict[str, Any]


class ToolServers(TypedDict):
    servers: list[str]


@router.get("/mcp", responses=ERRORS)
async def tool_servers(request: Request) -> ToolServers:
    """The names of the MCP servers that the settings name."""
    return ToolServers(servers=list(get_server(request).tools.commands))


@router.post("/mcp/{name}", response_model=RpcAnswer, responses=ACCEPTED | FAILED | ERRORS)
async def message(request: Request, name: str, body: RpcMessage, session_id: SessionId = None) -> Response:
    """Passes a message on to an MCP server. `initialize` starts its program, a process for each session."""
    server, begins = get_server(request), body.method == "initialize"
    if body.method is None and body.id is None:
        raise RequestError("the message has neither a method nor an id: send one of JSON-RPC")
    if begins and body.id is None:
        raise RequestError("initialize has no id: send a request")
    if not begins and session_id is None:
        server.tools.command(name)
        raise RequestError("the header mcp-session-id is missing: initialize a session first")
    given = await written(drop_none(**vars(body)))
    id = await server.tools.start(name) if begins else session_id or ""
    session = server.tools.session(name, id)
    headers = {"mcp-session-id": id}
    if body.method is None or body.id is None:
        session.tell(given)
        return Response(status_code=202, headers=headers)
    answer = await cancel_on_disconnect(request, session.ask(body.id, given, server.settings.timeout))
    return Response(answer, media_type="application/json", headers=headers)


@router.delete("/mcp/{name}", status_code=204, responses=ERRORS)
async def end(request: Request, name: str, session_id: SessionId = None) -> None:
    """Ends a session, and its process."""
    get_server(request).tools.end(name, session_id or "")
