"""What the bodies of requests have in common: types are exact, and no field is dropped in silence."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

IGNORED = "Accepted; changes nothing."


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)  # 3.0 is a whole number in JSON
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE]
Natural = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
Positive = Annotated[int, Field(ge=1, lt=2**31), WHOLE]


class Fields(BaseModel):
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
def _known(cls: type[Fields]) -> frozenset[str]:
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


def given(**values: Any) -> dict[str, Any]:
    """Without those that are None."""
    return {name: value for name, value in values.items() if value is not None}
