"""How model families write the arguments of a tool call: as JSON, between tags, or as literals.

`write` makes text of arguments, `grammar` allows only text whose arguments fit a JSON schema, and `scan` makes JSON of
text while it arrives (argument_scanners.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.errors import RequestError
from tandem.server.core.argument_scanners import JSONScanner, LiteralScanner, Scanner, TaggedScanner
from tandem.server.core.schemas import (
    ANY_TEXT,
    Schema,
    alternatives,
    choices,
    closed,
    pattern_of,
    properties_of,
    quoted,
    resolved,
    types_of,
    whole,
    with_definitions,
)
from tandem.threads import throttle

# llguidance options for JSON with one space after "," and ":", as models learned to write it. With free whitespace a
# weak model would fill its response with spaces.
COMPACT_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
GEMMA_QUOTE = '<|"|>'
EMPTY = '""'
# Characters of a grammar's rules, also of those that are equal: a schema may name a part often.
MAX_WRITTEN = 2 << 20
TAG_NAME = r"/[^\s<>=\"]+/"  # of an argument that the schema does not declare
NAME = r"/[A-Za-z_]\w*/"
SINGLE_QUOTED = r"/'([^'\\\n]|\\['\"\\nrt])*'/"


class Rules:
    """The rules of a Lark grammar that is being written. Equal rules are one."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # key of a rule -> its name
        self._lines: list[str] = []
        self._written = 0  # characters

    def add(self, body: str, options: str = "", *, terminal: bool = False) -> str:
        """The name of a rule."""
        return self.recursive(options + body, lambda: body, options, terminal=terminal)

    def recursive(
        self, key: str, body: Callable[[], str], options: str = "", *, terminal: bool = False
    ) -> str:
        """The name of a rule whose body may name the rule of this key again."""
        self._count(key)
        if key not in self._names:
            name = self._names[key] = f"{'T' if terminal else 'r'}{len(self._names)}"
            self._lines.append(f"{name}{options}: {body()}\n")
            self._count(self._lines[-1])
        return self._names[key]

    def _count(self, text: str) -> None:
        throttle()
        self._written += len(text)
        if self._written > MAX_WRITTEN:
            raise RequestError(
                "the parameters of the tools are too large for a grammar: simplify them, or send strict = false"
            )

    def until(self, end: str, text: str = ANY_TEXT) -> str:
        """The text of a terminal, up to the first `end`, and `end`."""
        body = self.add(text, terminal=True) if text[0] == "/" and text != ANY_TEXT else text
        return self.add(body, f"[suffix={quoted(end)}]")

    def json(self, schema: Any) -> str:
        return self.add(f"%json {json.dumps({'x-guidance': COMPACT_JSON, **schema})}")

    def __str__(self) -> str:
        return "".join(self._lines)


class ArgumentSyntax(Protocol):
    def write(self, arguments: Mapping[str, Any]) -> str: ...

    def grammar(self, rules: Rules, schema: Schema) -> str:
        """An expression of Lark."""
        ...

    def scan(self, schema: Schema) -> Scanner: ...


class JSONArguments:
    """A JSON object."""

    def write(self, arguments: Mapping[str, Any]) -> str:
        return _text(arguments)

    def grammar(self, rules: Rules, schema: Schema) -> str:
        return rules.json(closed(schema or {"type": "object"}))

    def scan(self, schema: Schema) -> Scanner:
        return JSONScanner()


@dataclass(frozen=True)
class TaggedArguments:
    """Each argument between tags: texts as they are, all else as JSON."""

    begin: str  # before a value; %key stands for its name
    end: str  # after a value

    def write(self, arguments: Mapping[str, Any]) -> str:
        return "".join(self._begin(name) + _text(value) + self.end for name, value in arguments.items())

    def _begin(self, name: str) -> str:
        return self.begin.replace("%key", name)

    def grammar(self, rules: Rules, schema: Schema) -> str:
        properties, required, is_open = properties_of(schema, schema)
        parts = []
        for name, part in properties.items():
            rule = rules.add(f"{quoted(self._begin(name))} {self._value(rules, part, schema)}")
            parts.append(rule if name in required else f"{rule}?")
        if is_open:
            before, _, after = self.begin.partition("%key")
            parts.append(f"({quoted(before)} {rules.until(after, TAG_NAME)} {rules.until(self.end)})*")
        return " ".join(parts) or EMPTY

    def _value(self, rules: Rules, part: Any, root: Schema) -> str:
        options = list[str]()
        for one in alternatives(part, root):
            kinds = types_of(one, root)
            if (values := choices(one)) is not None:
                options += [quoted(_text(value) + self.end) for value in values]
            elif "string" in kinds:
                options.append(rules.until(self.end, pattern_of(one)))
            else:
                values = [rules.json(with_definitions(one, root)), *_python_words(kinds)]
                options.append(f"({' | '.join(values)}) {quoted(self.end)}")
        return f"({' | '.join(options)})"

    def scan(self, schema: Schema) -> Scanner:
        return TaggedScanner(self.begin, self.end, schema)


def _python_words(kinds: Set[str]) -> list[str]:
    """Python's words for values of these types: templates write them, so models do, too."""
    return ['"True"', '"False"'] * ("boolean" in kinds) + ['"None"'] * ("null" in kinds)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class PythonArguments:
    """Keyword arguments of a call in Python, whose nested values are JSON."""

    def write(self, arguments: Mapping[str, Any]) -> str:
        return ", ".join(f"{name}={self._written(value)}" for name, value in arguments.items())

    def _written(self, value: Any) -> str:
        is_word = value is None or isinstance(value, bool)
        return repr(value) if is_word else json.dumps(value, ensure_ascii=False)

    def grammar(self, rules: Rules, schema: Schema) -> str:
        return items(rules, schema, schema, self.value, ", ", "=")

    def value(self, rules: Rules, part: Any, root: Schema) -> str:
        options = list[str]()
        for one in alternatives(part, root):
            kinds = types_of(one, root)
            if (values := choices(one)) is not None:
                options += [quoted(self._written(value)) for value in values]
                continue
            options += [rules.json(with_definitions(one, root)), *_python_words(kinds)]
            if "string" in kinds and pattern_of(one) == ANY_TEXT and "format" not in one:
                options.append(rules.add(SINGLE_QUOTED, terminal=True))
        return " | ".join(options)

    def scan(self, schema: Schema) -> Scanner:
        return LiteralScanner(")", ('"""', "'''", '"', "'"), properties_of(schema, schema)[0])


class GemmaArguments:
    """Gemma 4's literals: names without quotes, texts between `<|"|>`, arguments sorted by name."""

    def write(self, arguments: Mapping[str, Any]) -> str:
        return ",".join(f"{name}:{self._written(arguments[name])}" for name in self._sorted(arguments))

    def _sorted(self, names: Mapping[str, Any]) -> list[str]:
        return sorted(names, key=str.lower)

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
        if isinstance(value, Mapping):
            return f"{{{self.write(value)}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        return json.dumps(value)

    def grammar(self, rules: Rules, schema: Schema) -> str:
        return self._object(rules, schema, schema)

    def _object(self, rules: Rules, part: Any, root: Schema) -> str:
        return items(rules, part, root, self.value, ",", ":", self._sorted)

    def value(self, rules: Rules, part: Any, root: Schema) -> str:
        part = resolved(part, root)
        return rules.recursive(f"{id(part) if part else ''}", lambda: self._options(rules, part, root))

    def _options(self, rules: Rules, part: Schema, root: Schema) -> str:
        options = list[str]()
        for one in alternatives(part, root):
            if (values := choices(one)) is not None:
                options += [quoted(self._written(value)) for value in values]
            else:
                options += [self._of_type(rules, kind, one, root) for kind in sorted(types_of(one, root))]
        return " | ".join(options)

    def _of_type(self, rules: Rules, kind: str, part: Schema, root: Schema) -> str:
        if kind == "string":
            return f"{quoted(GEMMA_QUOTE)} {rules.until(GEMMA_QUOTE, pattern_of(part))}"
        if kind == "object":
            return f'"{{" {self._object(rules, part, root)} "}}"'
        if kind != "array":
            return " | ".join([rules.json({**part, "type": kind}), *_python_words({kind})])
        item = self.value(rules, part.get("items", {}), root)
        least, most = whole(part.get("minItems")) or 0, whole(part.get("maxItems"))
        if most == 0:
            return '"[]"'
        more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' + ("" if least else ' | "[]"')

    def scan(self, schema: Schema) -> Scanner:
        return LiteralScanner("}", (GEMMA_QUOTE,))


def items(
    rules: Rules,
    part: Any,
    root: Schema,
    value: Callable[[Rules, Any, Schema], str],
    comma: str,
    after_name: str,
    order: Callable[[Mapping[str, Any]], list[str]] = list,
) -> str:
    """The items of an object with commas between them, as an expression of Lark."""
    properties, required, is_open = properties_of(part, root)
    first, more = EMPTY, EMPTY  # what may follow if nothing comes before, and if something does
    if is_open:
        item = rules.add(f"{rules.until(after_name, NAME)} {rules.add(value(rules, {}, root))}")
        more = rules.add(f"({quoted(comma)} {item})*")
        first = rules.add(f"({item} {more})?")
    for name in reversed(order(properties)):
        item = f"{quoted(name + after_name)} {rules.add(value(rules, properties[name], root))}"
        is_optional = name not in required
        first = rules.add(f"{item} {more}" + f" | {first}" * is_optional)
        more = rules.add(f"{quoted(comma)} {item} {more}" + f" | {more}" * is_optional)
    return first


JSON, PYTHON, GEMMA_4_LITERALS = JSONArguments(), PythonArguments(), GemmaArguments()
