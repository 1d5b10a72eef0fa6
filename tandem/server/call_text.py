"""A call of a tool as its text comes: its name first, then its arguments, piece by piece."""

from __future__ import annotations

import json
import re

# As nearly all models write it, Qwen 2.5 with the double brace of its template. Other orders of its keys are read too,
# when the call is whole.
BEGIN = re.compile(
    r'\s*\[?\s*\{?\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def begun_call(text: str, at: int) -> tuple[str, int] | None:
    """The name of the call that begins there, and where its arguments do."""
    found = BEGIN.match(text, at)
    try:
        return (json.loads(found[1], strict=False), found.end()) if found else None
    except ValueError:
        return None


class ObjectText:
    """Finds the end of a JSON object, whose text comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: objects and lists that are open already."""
        self._depth, self._in_string, self._escaped = depth, False, False

    def take(self, text: str) -> tuple[str, str, bool]:
        """What belongs to the object, what comes after it, and whether it has ended. New lines in strings, which models
        write and JSON does not know, are escaped."""
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
