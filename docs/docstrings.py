"""Prepares docstrings for the API reference, which reads them as Markdown. mkdocs.yml names this module.

Lines that each describe a parameter become a list. The comment behind a field of a dataclass, or on
the line above, becomes its description.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.is_attribute and not obj.docstring and (comment := _comment(obj)):
            obj.docstring = griffe.Docstring(comment, parent=obj)
        if obj.docstring:
            text = re.sub(r"^(`\w+`: )", r"- \1", obj.docstring.value, flags=re.MULTILINE)
            parts = text.split("`")  # a < outside of code would begin an HTML tag
            parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
            obj.docstring.value = "`".join(parts)


def _comment(field: griffe.Object) -> str:
    lines, line = field.lines_collection[field.filepath], field.lineno or 1
    _, _, comment = lines[line - 1].partition("  # ")
    above = lines[line - 2].strip()
    if not comment and above.startswith("# ") and not above.startswith("# ----"):
        comment = above.removeprefix("# ")
    return "" if comment.startswith(("fmt:", "noqa", "type:")) else comment
