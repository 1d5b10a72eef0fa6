"""HTTP request bodies: JSON parsing, and pydantic models with strict types that reject unknown fields by name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import cache
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError, from_json
from starlette.exceptions import HTTPException

IGNORED = "Accepted and ignored."  # description of ignored fields in the OpenAPI document


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)  # accepts 3.0, which is an integer in JSON
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE]
Natural = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
Positive = Annotated[int, Field(ge=1, lt=2**31), WHOLE]


class StrictModel(BaseModel):
    """A JSON object in a request body, with exact types.

    An unknown field is rejected by name. `ignored` fields are accepted because they cannot change the response;
    `neutral` fields are accepted only with these values, which turn them off. Null is the same as absent.
    """

    model_config = ConfigDict(
        strict=True, allow_inf_nan=False, json_schema_extra=lambda schema, cls: _describe(schema, cls)
    )
    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[tuple[tuple[str, Any], ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        known = _known(cls)
        for name, value in given.items() if isinstance(given, dict) else ():
            if name not in known and value is not None and (name, value) not in cls.neutral:
                raise PydanticCustomError("unsupported", "`{field}` is not supported", {"field": name[:80]})
        return given


@cache
def _known(cls: type[StrictModel]) -> frozenset[str]:
    return cls.ignored | {field.alias or name for name, field in cls.model_fields.items()}


def _describe(schema: dict[str, Any], cls: type[Any]) -> None:
    """Adds the ignored and neutral fields to the OpenAPI document."""
    described = schema.setdefault("properties", {})
    for name in sorted(cls.ignored):
        described[name] = {"description": IGNORED}
    for name in dict.fromkeys(name for name, _ in cls.neutral):
        values = [value for known, value in cls.neutral if known == name]
        described[name] = {"enum": [*values, None], "description": "Other values are not supported."}
    schema["additionalProperties"] = False


def drop_none(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


class JSONRequest(Request):
    """A request whose JSON is parsed by pydantic, which limits the depth of nesting."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except (ValueError, RecursionError, MemoryError) as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from None


class JSONRoute(APIRoute):
    """A route that parses JSON whatever the content type, because `curl -d` sends a form's. Requests with an Origin
    header must declare JSON: browsers send other content types across origins without a preflight."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            scope = request.scope
            if "origin" not in request.headers:
                others = [header for header in scope["headers"] if header[0].lower() != b"content-type"]
                scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
            return await handle(JSONRequest(scope, request.receive))

        return handler
