"""What the tests of the page do in it."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page, expect

from tests.server.servers import Running


def settle(page: Page, server: Running, **settings: Any) -> None:
    page.goto(server.url)
    page.evaluate("s => localStorage.setItem('tandem.settings', s)", json.dumps(settings))
    page.reload()
    expect(page.locator("#model option")).to_have_count(2)


def send(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def answered(page: Page, count: int = 1) -> None:
    """Waits until there are `count` responses and the last is complete."""
    expect(page.locator("article.reply .stats")).to_have_count(count)
    expect(page.locator("#send")).to_be_visible()


def keep(page: Page, chat: dict[str, Any]) -> None:
    """Puts a conversation where older versions kept it. The page finds it when it is reloaded."""
    page.evaluate("c => localStorage.setItem('tandem.chat.' + c.id, JSON.stringify(c))", chat)


def kept(page: Page) -> list[dict[str, Any]]:
    """The conversations that the browser has, without their files."""
    read = "async () => { const all = []; await (await import('/page/store.js')).each(c => all.push(c)); return all }"
    found: list[dict[str, Any]] = page.evaluate(read)
    return found


def choose_in_menu(page: Page, action: str) -> None:
    page.click("#open-menu")
    page.get_by_role("button", name=action, exact=True).click()
