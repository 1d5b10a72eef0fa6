"""A browser with the page, on a real server with a real model, shared by all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.packages import model_path
from tests.server.browsers import browser
from tests.server.page.pages import settle
from tests.server.servers import Running, serving

__all__ = ["browser"]
expect.set_options(timeout=60_000)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "smollm2.gguf").symlink_to(model_path("smollm2"))
    (folder / "another.gguf").symlink_to(model_path("smollm2"))
    with serving(
        folder, folder / "smollm2.gguf", folder / "another.gguf", batch=8, context=2048, shutdown=2
    ) as found:
        yield found


@pytest.fixture
def problems() -> list[str]:
    """Errors in the browser."""
    return []


@pytest.fixture
def page(server: Running, browser: Browser, problems: list[str]) -> Iterator[Page]:
    """The page, with short responses. The test fails on browser errors and on requests to other hosts."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    opened = context.new_page()
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    own = (server.url, f"blob:{server.url}")
    opened.on("request", lambda r: problems.append(r.url) if not r.url.startswith(own) else None)
    settle(opened, server, temperature=0, max_tokens=24)
    yield opened
    assert not problems
    context.close()
