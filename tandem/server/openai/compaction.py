"""OpenAI's /v1/responses/compact: a conversation becomes its system messages and a summary, which the model writes."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from tandem.errors import RequestError
from tandem.server.core.images import joined, text_of
from tandem.server.core.prompt import GenerationRequest
from tandem.server.core.serving import get_server
from tandem.server.http.background import run_inline_if_small
from tandem.server.http.bodies import JSONRoute, cancel_on_disconnect
from tandem.server.openai.chat import new_id, now
from tandem.server.openai.error_body import ERRORS
from tandem.server.openai.responses import (
    InputItems,
    ResponsesRequest,
    encoded_summary,
    prepared,
    stored_history,
    usage_body,
)

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])
ASK = (
    "Summarise this conversation for an assistant who will continue it and will see nothing of it but your summary. "
    "Keep names, numbers, facts, decisions, results of tools, what the user wants and what is still to be done. "
    "Write only the summary."
)
MAX_SUMMARY = 1024  # tokens, and a quarter of the context at most


class CompactRequest(ResponsesRequest):
    """As a request for a response; what it says about the response's form is ignored."""

    input: str | InputItems | None = None  # type: ignore[assignment]  # None: only what is stored


class Compaction(TypedDict):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]
    dropped_messages: int  # of a conversation that is longer than the context; not of OpenAI


@router.post("/v1/responses/compact", response_model=Compaction, responses=ERRORS)
async def compact(request: Request, body: CompactRequest) -> Response:
    """Replaces a conversation by a summary, which is the input of the next request."""
    server = get_server(request)
    history = await stored_history(server, body)
    body.input, body.store = body.input or [], False
    generation, _ = await run_inline_if_small(prepared, body, history)
    if not generation.messages:
        raise RequestError(
            "input is missing, or has no messages: give the conversation, or previous_response_id"
        )
    name = generation.model = server.model_name(generation.model)
    kept = [one for one in generation.messages if one["role"] == "system"]
    async with server.models.use(name) as llm:
        _ask_for_summary(generation, min(MAX_SUMMARY, llm.llm.context // 4))
    [result] = await cancel_on_disconnect(request, server.generate(generation))
    messages = [_message(text_of(one["content"], "a system message")) for one in kept]
    item = {
        "id": new_id("cmp_"),
        "type": "compaction",
        "encrypted_content": encoded_summary(result.text.strip()),
    }
    return JSONResponse(
        Compaction(
            id=new_id("resp_"),
            object="response.compaction",
            created_at=now(),
            model=name,
            output=[*messages, item],
            usage=usage_body(result.usage),
            dropped_messages=generation.dropped_messages,
        )
    )


def _message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "system",
        "status": "completed",
        "content": content,
    }


def _ask_for_summary(generation: GenerationRequest, max_tokens: int) -> None:
    """Changes a request for a response into one for a summary."""
    messages = generation.messages
    if messages[-1]["role"] == "user":  # templates want users and assistants to alternate
        messages[-1] = {**messages[-1], "content": joined(messages[-1]["content"], f"\n\n{ASK}")}
    else:
        messages.append({"role": "user", "content": ASK})
    generation.tools, generation.tool_choice = (), "auto"
    generation.params = {"max_tokens": max_tokens, "temperature": 0.0}
    generation.given = frozenset({*generation.params, "stop"})
    generation.template_kwargs = {"enable_thinking": False}
    generation.truncate = True
