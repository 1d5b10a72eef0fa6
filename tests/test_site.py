"""`make site`: it builds without a warning, its links lead somewhere, and its pages fetch nothing from other hosts."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import tandem

ROOT = Path(__file__).parent.parent
LOADED = {("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("source", "srcset")}


class Page(HTMLParser):
    """The addresses that a page loads or links to, and the names of its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.text = path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.anchors.add(value)
            elif (tag, name) in LOADED and value:
                self.loads.append(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "WARNING" not in run.stderr, run.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_of_the_docs_is_there(site: Path, pages: dict[Path, Page]) -> None:
    names = {str(path.relative_to(site)) for path in pages}
    docs = ROOT / "docs"
    assert {str(path.relative_to(docs).with_suffix(".html")) for path in docs.rglob("*.md")} <= names
    assert {"repository/CONTRIBUTING.html", "repository/examples/chat.py.html"} <= names


def test_links_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists() or (
                address.fragment
                and target in pages
                and unquote(address.fragment) not in pages[target].anchors
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_pages_load_nothing_from_other_hosts(site: Path, pages: dict[Path, Page]) -> None:
    assert not [load for page in pages.values() for load in page.loads if urlsplit(load).netloc]
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert styles and not [text for text in styles if "url(http" in text or "url(//" in text]


def test_the_api_reference_is_made_from_docstrings(pages: dict[Path, Page]) -> None:
    [page] = [page for path, page in pages.items() if path.name == "API.html"]
    assert {f"tandem.{name}" for name in tandem.__all__} <= page.anchors
    assert {"tandem.LLM.chat", "tandem.LLM.stream", "tandem.AsyncLLM.generate"} <= page.anchors
    assert "<li><code>prompt_lookup</code>: speculative decoding" in re.sub(r"\s+", " ", page.text)
    for method in (tandem.LLM.stream, tandem.AsyncLLM.chat, tandem.SamplingParams):
        first = re.split(r"[`.:]", inspect.getdoc(method) or "")[0].strip()
        assert first and first in re.sub(r"\s+", " ", page.text), first
    assert "tandem.LLM._stream" not in page.anchors
