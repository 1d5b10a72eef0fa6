"""Debian's Chromium, driven by Playwright. Installed if possible; otherwise the tests are skipped with a warning."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.server.servers import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")


def _find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not _find() and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "chromium"]):
            subprocess.run(["apt-get", *command], capture_output=True, timeout=300)
    path = _find()
    if not path:
        message = "NO TEST OF THE PAGE RUNS: install Chromium (Debian: apt install chromium)"
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield opened
        opened.close()


def wait_until(page: Page, true: str, argument: object = None) -> None:
    """Polls the page until `true` holds. `Page.wait_for_function` would need eval, which the page's policy forbids."""
    end = time.monotonic() + PATIENCE
    while not page.evaluate(true, argument):
        assert time.monotonic() < end, f"not true after {PATIENCE:g} seconds: {true}"
        page.wait_for_timeout(20)
