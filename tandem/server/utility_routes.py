"""/tokenize, /detokenize, /tokenizer_info, /health and /metrics."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import Field
from typing_extensions import TypedDict

from tandem.engine.llm import LLM
from tandem.errors import RequestError
from tandem.server.core.prompt import GenerationRequest
from tandem.server.core.serving import get_server
from tandem.server.http.background import run_in_thread, run_inline_if_small
from tandem.server.http.bodies import JSONRoute, Natural, StrictModel
from tandem.server.openai.chat import MessageParam, message
from tandem.server.openai.error_body import ERRORS

router = APIRouter(route_class=JSONRoute, tags=["more"])
PART = 1 << 12  # ids of a response that are written at once


class TokenizeRequest(StrictModel):
    """A text as `prompt` (vLLM) or `content` (llama-server), or messages for the chat template."""

    neutral = (("return_token_strs", False),)
    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[MessageParam], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None  # each token as {"id": ..., "piece": ...}, as in llama-server


class TokenText(TypedDict):
    id: int
    piece: str | list[int]  # the text, or the bytes of a token that is no text by itself


class Tokens(TypedDict):
    tokens: list[int] | list[TokenText]
    count: int
    max_model_len: int


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: Annotated[list[Natural], Field(fail_fast=True)]


class Text(TypedDict):
    prompt: str
    content: str


class TokenizerInfo(TypedDict):
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class Health(TypedDict):
    status: Literal["ok", "loading", "failed"]
    message: str


@router.post("/tokenize", response_model=Tokens, responses=ERRORS)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """The token ids of a text or a conversation."""
    server = get_server(request)
    async with server.models.use(server.model_name(body.model)) as llm:
        if body.messages:
            ids = await server.prompt_ids(llm, await run_inline_if_small(_conversation, body.messages))
        else:
            ids = await run_in_thread(_ids, llm.llm, body)
        written = await run_in_thread(_tokenized, llm.llm, ids, with_pieces=bool(body.with_pieces))
        return Response(written, media_type="application/json")


@router.post("/detokenize", response_model=Text, responses=ERRORS)
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids, including control tokens."""
    server = get_server(request)
    async with server.models.use(server.model_name(body.model)) as llm:
        return Response(await run_in_thread(_detokenized, llm.llm, body), media_type="application/json")


@router.get("/tokenizer_info", responses=ERRORS)
async def tokenizer_info(request: Request, model: str | None = None) -> TokenizerInfo:
    """For lm-eval's `tokenizer_backend=remote`."""
    server = get_server(request)
    async with server.models.use(server.model_name(model)) as llm:
        tokenizer = llm.llm.tokenizer
        bos, eos = (
            None if id is None else tokenizer.piece(id) for id in (tokenizer.bos_id, tokenizer.eos_id)
        )
        return TokenizerInfo(bos_token=bos, eos_token=eos, chat_template=llm.llm.chat_template or None)


@router.get(
    "/health", responses={503: {"model": Health, "description": "The model is loading or has failed"}}
)
async def health(request: Request) -> Health:
    """200 if the first model is loaded, otherwise 503."""
    status, message = get_server(request).health()
    found = Health(status=status, message=message)
    return found if status == "ok" else JSONResponse(found, 503)  # type: ignore[return-value]


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus's text format."""
    return PlainTextResponse(get_server(request).metrics.text())


def _tokenized(llm: LLM, ids: list[int], *, with_pieces: bool) -> str:
    """The response as JSON. Its ids are written in parts, so that the GIL is not held for all of them."""
    shown = partial(_piece, llm) if with_pieces else str
    parts = (",".join(map(shown, ids[at : at + PART])) for at in range(0, len(ids), PART))
    return f'{{"tokens":[{",".join(parts)}],"count":{len(ids)},"max_model_len":{llm.context}}}'


def _piece(llm: LLM, id: int) -> str:
    data = llm.tokenizer.token_bytes(id)
    try:
        return json.dumps({"id": id, "piece": data.decode()}, ensure_ascii=False)
    except UnicodeDecodeError:
        return json.dumps({"id": id, "piece": list(data)})


def _detokenized(llm: LLM, body: DetokenizeRequest) -> str:
    text = json.dumps(llm.tokenizer.decode(body.tokens, special=True), ensure_ascii=False)
    return f'{{"prompt":{text},"content":{text}}}'


def _conversation(messages: list[MessageParam]) -> GenerationRequest:
    return GenerationRequest(None, messages=[message(one) for one in messages])


def _ids(llm: LLM, body: TokenizeRequest) -> list[int]:
    text = body.content if body.prompt is None else body.prompt
    if text is None:
        raise RequestError("the request has no text: give prompt, content or messages")
    bos = body.add_special_tokens if body.add_special is None else body.add_special
    options: dict[str, Any] = {"special": body.parse_special is not False}
    return llm.tokenizer.encode(text, **options, bos=None if bos is not False else False)
