"""HTTP request bodies: JSON parsing, and pydantic models with strict types that reject unknown fields by name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import cache
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json
from starlette.exceptions import HTTPException

from tandem.errors import RequestError
from tandem.native import load
from tandem.server.http.background import SMALL, set_size, translate
from tandem.server.http.streaming import cancel_on_disconnect
from tandem.threads import breathe

IGNORED = "Accepted and ignored."  # description of ignored fields in the OpenAPI document
# Values in a body, of which a name counts as eight: parsing them must not hold the GIL for long.
MAX_VALUES = 1 << 18
MAX_ERRORS = 100  # of which the first is named


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
        breathe()
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
    """A request whose JSON has been parsed and validated."""

    content: BaseModel

    async def json(self) -> Any:
        return self.content


async def _whole_body(request: Request) -> bytes:
    """As `request.body`, without one more copy: the middleware has put the parts together."""
    message = await request.receive()
    request._body = message.get("body", b"")
    while message.get("more_body"):
        message = await request.receive()
        request._body += message.get("body", b"")
    return request._body


class JSONRoute(APIRoute):
    """A route that parses JSON whatever the content type, because `curl -d` sends a form's. Requests with an Origin
    header must declare JSON: browsers send other content types across origins without a preflight."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model: Any = self.body_field and self.body_field.field_info.annotation

        async def handler(request: Request) -> Response:
            scope, is_json = request.scope, True
            if "origin" in request.headers:
                declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                is_json = declared == "application/json" or declared.endswith("+json")
            else:
                others = [header for header in scope["headers"] if header[0].lower() != b"content-type"]
                scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
            parsed = JSONRequest(scope, request.receive)
            body = await _whole_body(parsed) if model and is_json else b""
            if not body:
                return await handle(parsed)
            set_size(len(body))
            response = respond(parsed, body)
            return await (response if len(body) <= SMALL else cancel_on_disconnect(request, response))

        async def respond(request: JSONRequest, body: bytes) -> Response:
            request.content = await translate(_validated, body, model)
            return await handle(request)

        return handler


def _validated(body: bytes, model: type[BaseModel]) -> BaseModel:
    """The body as an instance of the model. pydantic's parser limits the depth of nesting."""
    if (count := load().tandem_json_count(body, len(body))) > MAX_VALUES:
        raise RequestError(
            f"the body has {count} values, a name counted as 8: give {MAX_VALUES} at most, in several requests"
        )
    try:
        return model.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        if error.error_count() > MAX_ERRORS:
            raise RequestError(
                f"the body has {error.error_count()} errors: see /docs for its format"
            ) from None
        found = error.errors(include_url=False, include_input=False)
    except (ValueError, RecursionError, MemoryError) as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from None
    raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found])
