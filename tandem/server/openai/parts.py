"""The parts of a chat request: texts and images of messages, tools, and formats of the response."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.errors import RequestError
from tandem.server.core.images import Content, content_of, from_url
from tandem.server.http.bodies import AnyObject, StrictModel


class ImageURL(StrictModel):
    ignored = frozenset({"detail"})
    url: str


class Part(StrictModel):
    ignored = frozenset({"cache_control", "prompt_cache_breakpoint"})
    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageURL | None = None


class ToolCallFunctionParam(StrictModel):
    name: str
    arguments: str


class ToolCallParam(StrictModel):
    ignored = frozenset({"index"})
    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolCallFunctionParam


class FunctionParam(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None


class ToolParam(StrictModel):
    ignored = frozenset({"cache_control"})
    type: Literal["function"]
    function: FunctionParam


class NamedFunction(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedToolList(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=1000)]


class AllowedTools(StrictModel):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


class JSONSchemaParam(StrictModel):
    name: str | None = None
    description: str | None = None
    schema_: AnyObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaParam | None = None
    schema_: AnyObject | None = Field(None, alias="schema")  # llama.cpp's, with json_object


class StructuredOutputs(StrictModel):
    """vLLM's structured output."""

    json_: AnyObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=1000)] | None = None
    grammar: str | None = None


def content_of_parts(parts: list[Part]) -> Content:
    return content_of([_part(part) for part in parts])


def _part(part: Part) -> dict[str, Any]:
    if part.type == "text" and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type == "image_url" and part.image_url:
        return from_url(part.image_url.url)
    raise RequestError(f"a part of type {part.type!r} has no {part.type!r}: give it")
