"""Adds files of the repository to the site, so that links from the docs to them lead somewhere.

A file outside `docs/` that a page links to becomes a page under `repository/`: Markdown as it is, source as a block of
code, a folder as a list of its files. `mkdocs.yml` names this module. A link to a file that does not exist stays as it
is, and `mkdocs build --strict` refuses it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")  # in the navigation
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".slang": "hlsl", ".toml": "toml", ".md": "markdown"}


def on_files(files: Files, config: Any) -> Files:
    waiting = [ROOT / name for name in PAGES]
    waiting += [target for page in sorted(DOCS.rglob("*.md")) for target in _outside(page)]
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in done:
            done.add(path)
            files.append(File.generated(config, _uri(path), content=_content(path)))
            if path.suffix == ".md":
                waiting += _outside(path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    folder = (ROOT / uri.removeprefix("repository/") if uri.startswith("repository/") else DOCS / uri).parent

    def link(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return found[0]
        return (
            found[1]
            + os.path.relpath(_uri(target), os.path.dirname(uri) or ".")
            + (found[3] or "")
            + found[4]
        )

    return LINK.sub(link, markdown)


def _outside(page: Path) -> Iterator[Path]:
    """The files and folders of the repository, outside docs/, that a page links to."""
    for _, name, _, _ in LINK.findall(page.read_text()):
        target = (page.parent / name).resolve()
        if target.exists() and target.is_relative_to(ROOT) and not target.is_relative_to(DOCS):
            yield target


def _uri(path: Path) -> str:
    """Where a file of the repository is in the site's sources."""
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS))
    return f"repository/{path.relative_to(ROOT)}" + ("" if path.suffix == ".md" else ".md")


def _content(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text()
    title = f"# `{path.relative_to(ROOT)}`\n\n"
    if path.is_dir():
        return title + "\n".join(
            f"- `{each.name}`" for each in sorted(path.iterdir()) if each.name[0] not in "._"
        )
    return f"{title}~~~~~~{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n~~~~~~\n"
