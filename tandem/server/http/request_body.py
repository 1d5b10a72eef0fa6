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

IGNORED = "Accepted; block_events nothing."


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)  # 3.0 is a whole number in JSON
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE]
Natural = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
Positive = Annotated[int, Field(ge=1, lt=2**31), WHOLE]


class StrictModel(BaseModel):
    """A JSON object of a request.

    A field that is not declared and could change the answer is refused by name. Those that could not are `ignored`;
    `neutral` ones may have the values that ask for nothing. Null is as good as absent.
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
    """Says in the OpenAPI document which fields there are besides those that count."""
    described = schema.setdefault("properties", {})
    for name in sorted(cls.ignored):
        described[name] = {"description": IGNORED}
    for name in dict.fromkeys(name for name, _ in cls.neutral):
        values = [value for known, value in cls.neutral if known == name]
        described[name] = {"enum": [*values, None], "description": "Other values are not supported."}
    schema["additionalProperties"] = False


def drop_none(**values: Any) -> dict[str, Any]:
    """Without those that are None."""
    return {name: value for name, value in values.items() if value is not None}


class JSONRequest(Request):
    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except (ValueError, RecursionError, MemoryError) as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from None


class JSONRoute(APIRoute):
    """Reads JSON whatever the request calls it, for `curl -d` calls it a form. But not if a web page sends it: from
    other sites, browsers let pass without asking what does not say that it is JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            scope = request.scope
            if "origin" not in request.headers:
                others = [header for header in scope["headers"] if header[0].lower() != b"content-type"]
                scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
            return await handle(JSONRequest(scope, request.receive))

        return handler
