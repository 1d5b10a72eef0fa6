"""What the bodies of requests have in common: types are exact, and no field is dropped in silence."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class Fields(BaseModel):
    """A JSON object of a request.

    A field that is not declared and could change the answer is refused by name. Those that could not are `ignored`;
    `neutral` ones may have the values that ask for nothing. Null is as good as absent.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[tuple[tuple[str, Any], ...]] = ()

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            harmless = value is None or name in self.ignored or (name, value) in self.neutral
            if not harmless:
                raise PydanticCustomError("unsupported", "`{field}` is not supported", {"field": name[:80]})
        return self


def given(**values: Any) -> dict[str, Any]:
    """Without those that are None."""
    return {name: value for name, value in values.items() if value is not None}
