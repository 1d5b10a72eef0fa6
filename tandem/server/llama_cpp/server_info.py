"""llama-server's /props, /slots and /apply-template."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from typing_extensions import TypedDict

from tandem import __version__
from tandem.model.tokenizer import Tokenizer
from tandem.server.core.prompt import GenerationRequest
from tandem.server.core.serving import get_server
from tandem.server.http.background import run_in_thread, run_inline_if_small
from tandem.server.http.bodies import AnyObject, JSONRoute, StrictModel
from tandem.server.llama_cpp.completion import CompletionRequest, settings_body
from tandem.server.llama_cpp.error_body import ERRORS
from tandem.server.openai.chat import MessageParam, message, tool
from tandem.server.openai.parts import ToolParam

router = APIRouter(route_class=JSONRoute, tags=["llama.cpp"])


class Props(TypedDict):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str


class Slot(TypedDict):
    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class ApplyTemplateRequest(StrictModel):
    model: str | None = None
    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1)]
    tools: list[ToolParam] | None = None
    chat_template_kwargs: AnyObject | None = None
    add_generation_prompt: bool | None = None


class RenderedPrompt(TypedDict):
    prompt: str


@router.get("/props", responses=ERRORS)
async def props(request: Request, model: str | None = None) -> Props:
    """What a client needs to know of the first model, or of the one it names. A slot is a place in the batch."""
    server = get_server(request)
    name = server.model_name(model)
    path = server.models.path(name)
    async with server.models.use(name) as llm:
        tokenizer = llm.llm.tokenizer
        bos, eos = ("" if id is None else tokenizer.piece(id) for id in (tokenizer.bos_id, tokenizer.eos_id))
        preset = server.presets.get(name)
        params = settings_body(CompletionRequest(prompt="")) | dict(preset.sampling if preset else {})
        params["n_predict"] = params["max_tokens"]
        return Props(
            default_generation_settings={"n_ctx": llm.llm.context, "params": params},
            total_slots=server.settings.batch,
            model_alias=name,
            model_path=path.name,
            chat_template=llm.llm.chat_template,
            bos_token=bos,
            eos_token=eos,
            modalities={"vision": llm.llm.takes_images, "audio": False},
            build_info=f"tandem-{__version__}",
        )


@router.get("/slots", responses=ERRORS)
async def slots(request: Request, model: str | None = None) -> list[Slot]:
    """The places in the batch of a model. Requests are not bound to a place: the first ones are shown as busy."""
    server = get_server(request)
    async with server.models.use(server.model_name(model)) as llm:
        busy, context = llm.llm.stats().running, llm.llm.context
        speculates = bool(server.settings.draft or server.settings.prompt_lookup)
        return [
            Slot(id=i, n_ctx=context, speculative=speculates, is_processing=i < busy)
            for i in range(server.settings.batch)
        ]


@router.post("/apply-template", response_model=RenderedPrompt, responses=ERRORS)
async def apply_template(request: Request, body: ApplyTemplateRequest) -> RenderedPrompt:
    """The prompt of a conversation as text, without the token that begins every prompt."""
    server = get_server(request)
    async with server.models.use(server.model_name(body.model)) as llm:
        generation = await run_inline_if_small(_generation_request, body)
        ids = await server.prompt_ids(llm, generation)
        return RenderedPrompt(prompt=await run_in_thread(_decoded, llm.llm.tokenizer, ids))


def _generation_request(body: ApplyTemplateRequest) -> GenerationRequest:
    variables = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    return GenerationRequest(
        body.model,
        messages=[message(one) for one in body.messages],
        tools=[tool(one.function) for one in body.tools or []],
        template_kwargs=variables,
        continue_final_message=True,
    )


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    first = tokenizer.add_bos and ids[:1] == [tokenizer.bos_id]
    return tokenizer.decode(ids[int(first) :], special=True)
