"""Scanners make JSON of the arguments of a tool call while they arrive.

What they write depends on the text only, not on how it is cut. A text that is no well-formed arguments gives some
text, never an error.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterable
from typing import Any, Protocol

import regex

from tandem.server.core.schemas import ALL_TYPES, Schema, properties_of, type_name, types_of

MAX_LITERAL = 64 << 10  # characters that are parsed as Python: its parser takes a second for a few million
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class Scanner(Protocol):
    """Makes JSON of the arguments of one call, which arrive in parts."""

    def take(self, text: str, last: bool = False) -> tuple[str, str, bool]:
        """(JSON of what was read, text that was not read, whether the arguments have ended). While they have not
        ended, text that was not read is given again, with more after it. With `last` there is no more."""
        ...


class JSONScanner:
    """Finds the end of a JSON object that arrives in parts."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: objects and lists that are open already."""
        self._depth, self._in_string, self._escaped = depth, False, False

    def take(self, text: str, last: bool = False) -> tuple[str, str, bool]:
        """Control characters in strings, which models write and JSON forbids, are escaped."""
        taken = []
        for place, letter in enumerate(text):
            taken.append(json.dumps(letter)[1:-1] if self._in_string and letter < " " else letter)
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = letter == "\\", letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return "".join(taken), text[place + 1 :], True
        return "".join(taken), "", False


class TaggedScanner:
    """Reads arguments between tags. A text is written while it arrives, another value when it is complete."""

    def __init__(self, begin: str, end: str, schema: Schema) -> None:
        """`begin` and `end`: as in TaggedArguments."""
        self._begin, self._end = loosely(begin.rstrip(), key=r"([^<>\n\"]{1,256}?)"), end.strip()
        self._new_lines = "\n" * begin.endswith("\n"), "\n" * end.startswith("\n")  # around a value
        self._properties, self._schema = properties_of(schema, schema)[0], schema
        self._json = "{"  # before the next name
        self._kinds: frozenset[str] | None = None  # types of the current value; None: there is none
        self._at_start = False  # nothing of the current text was read

    def take(self, text: str, last: bool = False) -> tuple[str, str, bool]:
        written = list[str]()
        while True:
            if self._kinds is not None:
                part, text, done = self._value(text, last, self._kinds)
                written.append(part)
                if not done:
                    return "".join(written), text, False
                continue
            text = text.lstrip()
            found = self._begin.match(text, partial=True)
            if found and not found.partial:
                name, text = found[1].strip(), text[found.end() :]
                written.append(f"{self._json}{json.dumps(name, ensure_ascii=False)}: ")
                self._json, self._at_start = ", ", True
                self._kinds = types_of(self._properties.get(name, True), self._schema)
            elif found:
                return "".join(written), "" if last else text, False
            else:
                written.append("{}" if self._json == "{" else "}")
                return "".join(written), text, True

    def _value(self, text: str, last: bool, kinds: frozenset[str]) -> tuple[str, str, bool]:
        value, end, rest = text.partition(self._end)
        if kinds != {"string"}:
            if not end:
                return "", "" if last else text, False
            self._kinds = None
            return json.dumps(_value_of(value.strip(), kinds), ensure_ascii=False), rest, True
        before, after = self._new_lines
        if end:
            value = value.removesuffix(after)
        elif not last:
            held = overlap(value, after + self._end) or overlap(value, self._end)
            value, rest = value[: len(value) - held], value[len(value) - held :]
        written = ""
        if self._at_start and (value or end):
            self._at_start, value, written = False, value.removeprefix(before), '"'
        written += escaped(value)
        if end:
            self._kinds, written = None, written + '"'
        return written, rest, bool(end)


def _value_of(text: str, kinds: frozenset[str]) -> Any:
    """The value that a text stands for, if its type is among `kinds`; else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _python_value(text)
    if not _is_json(value) or ("string" in kinds and type_name(value) not in kinds | {"integer"}):
        return text
    return text if type_name(value) == "integer" and not kinds & {"integer", "number"} else value


def _python_value(text: str) -> Any:
    if text in WORDS:
        return WORDS[text]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the text's escapes, which would go to the log
            return ast.literal_eval(text) if len(text) <= MAX_LITERAL else text
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return text


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return True


class LiteralScanner:
    """Reads `name=value` or `name:value`, with values of Python, of Gemma 4 or of JSON."""

    def __init__(self, close: str, quotes: tuple[str, ...], names: Iterable[str] = ()) -> None:
        """`close`: after the last argument; `quotes`: around strings, the longest first; `names`: of arguments that are
        written without one, in order."""
        self._close, self._quotes, self._names = close, quotes, iter(names)
        self._ends = ["}"]  # of the objects and lists that are open, in JSON
        self._quote = ""  # of the string that is open
        self._before = "{"  # JSON before the next value
        self._is_named = False  # the current argument has a name

    def take(self, text: str, last: bool = False) -> tuple[str, str, bool]:
        written, at = list[str](), 0
        while at < len(text) and self._ends:
            part, end = self._string(text, at, last) if self._quote else self._token(text, at, last)
            if end == at:  # it may go on
                break
            written.append(part)
            at = end
        return "".join(written), "" if last and self._ends else text[at:], not self._ends

    def _token(self, text: str, at: int, last: bool) -> tuple[str, int]:
        """(JSON, end) of the token at a place."""
        letter, is_top = text[at], len(self._ends) == 1
        if letter in "([{":
            before, end = self._begin_value(), "}" if letter == "{" else "]"
            self._ends.append(end)
            return before + ("{" if letter == "{" else "["), at + 1
        if letter in ")]}":
            return self._end(letter), at + 1
        if letter == ",":
            self._before = self._before or ", "
            self._is_named = self._is_named and not is_top
            return "", at + 1
        if letter in ":=":
            self._is_named = self._is_named or is_top
            return ": ", at + 1
        for quote in self._quotes:
            if text.startswith(quote, at):
                self._quote = quote
                return self._begin_value() + '"', at + len(quote)
            if quote.startswith(text[at : at + len(quote)]) and not last:
                return "", at
        found = WORD.match(text, at)
        if not found:
            return "", at + 1
        after = text[found.end() :].lstrip()
        if not after and not last:  # it may go on, or be a name
            return "", at
        if after[:1] in (":", "="):
            before, self._before = self._before, ""
            return before + json.dumps(found[0], ensure_ascii=False), found.end()
        return self._begin_value() + json.dumps(
            _value_of(found[0], ALL_TYPES), ensure_ascii=False
        ), found.end()

    def _begin_value(self) -> str:
        before, self._before = self._before, ""
        if len(self._ends) == 1 and not self._is_named and (name := next(self._names, None)) is not None:
            return f"{before}{json.dumps(name, ensure_ascii=False)}: "
        return before

    def _end(self, letter: str) -> str:
        if len(self._ends) == 1 and letter != self._close:
            return ""
        before, self._before = self._before if self._before == "{" else "", ""
        return before + self._ends.pop()

    def _string(self, text: str, at: int, last: bool) -> tuple[str, int]:
        """(JSON, end) of the next part of the open string."""
        quote, escapes = self._quote, self._quote[0] in "'\""
        if text.startswith(quote, at):
            self._quote = ""
            return '"', at + len(quote)
        if escapes and text[at] == "\\":
            found = ESCAPE.match(text, at, partial=True)
            if found and found.partial and not last:
                return "", at
            return _unescaped(
                found[0]
            ) if found and not found.partial else "", found.end() if found else at + 1
        places = (text.find(end, at) for end in (quote, "\\" if escapes else quote))
        end = min((place for place in places if place >= 0), default=-1)
        if end < 0:
            end = len(text) if last else len(text) - overlap(text[at:], quote)
        return escaped(text[at:end]), end


WORD = regex.compile(r"""[^\s\[\](){},:='"<]++(?:\s++[^\s\[\](){},:='"<]++)*+""")
ESCAPE = regex.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", regex.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
ESCAPED |= {letter: letter for letter in "\"'\\/"}


def _unescaped(text: str) -> str:
    """JSON of an escape in a string of Python."""
    letter = text[1]
    if letter == "u":  # as in JSON; two of them may be one character
        return text
    if letter in "xU":
        return escaped(chr(min(int(text[2:], 16), 0x10FFFF)))
    return escaped(ESCAPED.get(letter, text))


def escaped(text: str) -> str:
    """A part of a text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def overlap(text: str, tag: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)


def loosely(text: str, **parts: str) -> Any:
    """The expression of a text whose whitespace may be longer or missing. `parts`: expressions of what %name stands
    for. It knows no repetition that could be tried at many lengths."""
    expression = regex.sub(r"(?:\\?\s)+", lambda _: r"\s*+", regex.escape(text))
    for name, part in parts.items():
        expression = expression.replace(f"%{name}", part)
    return regex.compile(expression)
