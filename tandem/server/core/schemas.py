"""What a JSON schema says about the arguments of a tool: their names, their types, their texts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
# The only keys of a schema whose `properties` are complete, so that additional properties can be excluded.
SIMPLE_KEYS = frozenset({"type", "properties", "required", "title", "description", "$defs", "$schema"})
MAX_REFERENCES, MAX_REFERENCE = 32, 1000  # from one to the next; characters of one
ANY_TEXT = "/(?s:.*)/"  # a terminal of Lark


def resolved(part: Any, root: Schema) -> Schema:
    """A part of a schema, or what its `$ref` names; no schema at all allows anything."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(part, Mapping):
            return {}
        reference = part.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return part
        if len(reference) > MAX_REFERENCE:
            return {}
        part = root
        for name in reference[1:].split("/")[1:]:
            part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return {}


def properties_of(part: Any, root: Schema) -> tuple[dict[str, Any], set[str], bool]:
    """(the properties of an object, which of them are required, whether it may have others)."""
    part = resolved(part, root)
    properties, required = part.get("properties"), part.get("required")
    found = (
        {str(name): value for name, value in properties.items()} if isinstance(properties, Mapping) else {}
    )
    names = found.keys() & {str(name) for name in required} if isinstance(required, list) else set()
    return found, names, part.get("additionalProperties", "properties" not in part) is not False


def whole(value: Any) -> int | None:
    """A whole number that is not negative, as `minItems` has it; None for any other value."""
    return int(value) if isinstance(value, int | float) and 0 <= value < math.inf else None


def closed(schema: Schema) -> Schema:
    """The schema without undeclared properties, where only JSON Schema's default allows them."""
    is_simple = "properties" in schema and schema.keys() <= SIMPLE_KEYS
    return {"additionalProperties": False, **schema} if is_simple else schema


def choices(part: Schema) -> list[Any] | None:
    """The values that `enum` or `const` allow; None: there is neither."""
    if "const" in part:
        return [part["const"]]
    values = part.get("enum")
    return values if isinstance(values, list) and values else None


def alternatives(part: Any, root: Schema) -> list[Schema]:
    """The schemas of which a value must fit one: those of `anyOf` and `oneOf`, or the part itself."""
    parts, found, known = [part], list[Schema](), set[int]()
    while parts:
        part = resolved(parts.pop(), root)
        options = next((part[name] for name in ("anyOf", "oneOf") if isinstance(part.get(name), list)), None)
        if id(part) in known:
            continue
        known.add(id(part))
        if options and choices(part) is None:
            parts += reversed(options)
        else:
            found.append(part)
    return found


def types_of(part: Any, root: Schema) -> frozenset[str]:
    """The types that a value may have."""
    return frozenset().union(*(_own_types(option) for option in alternatives(part, root)))


def _own_types(part: Schema) -> frozenset[str]:
    if (values := choices(part)) is not None:
        return frozenset(map(type_name, values))
    kinds = part.get("type")
    if isinstance(kinds, str | list):
        return ALL_TYPES & frozenset([kinds] if isinstance(kinds, str) else map(str, kinds)) or ALL_TYPES
    return frozenset({"object"}) if "properties" in part else ALL_TYPES


def type_name(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def with_definitions(part: Schema, root: Schema) -> dict[str, Any]:
    """A part of a schema as a schema of its own, in which references to the definitions of the whole still hold."""
    return {**part, **{name: root[name] for name in ("$defs", "definitions") if name in root}}


def pattern_of(part: Schema) -> str:
    """A terminal of Lark for the texts that a schema allows."""
    parts = list[str]()
    least, most = (whole(part.get(name)) for name in ("minLength", "maxLength"))
    if least is not None or most is not None:
        parts.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if isinstance(pattern := part.get("pattern"), str):
        start = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^").removesuffix("$" if not end else "")
        escaped = inner.replace(r"\/", "/").replace("/", r"\/")
        parts.append(f"/{start}({escaped}){end}/")
    return " & ".join(parts) or ANY_TEXT


def quoted(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text)
