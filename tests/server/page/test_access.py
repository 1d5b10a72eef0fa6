"""The page for everyone: axe-core finds no serious fault, the keyboard suffices, and it opens without the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tandem.server.page.static import FOLDER
from tests.cli.tiny_model import write_tiny_model
from tests.packages import axe_source
from tests.server.browsers import wait_until
from tests.server.page.pages import answered, keep, send
from tests.server.page.test_markdown import TYPESET
from tests.server.servers import Running, serving


def faults(page: Page) -> list[tuple[str, str, str]]:
    """(impact, rule, place) of each serious fault that axe-core finds."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(axe_source())
    # Colours are those after transitions.
    page.evaluate("Promise.allSettled(document.getAnimations().filter(a => a.playState === 'running' "
                  "&& a.effect.getTiming().iterations === 1).map(a => a.finished))")  # fmt: skip
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then(r => r.violations)")
    return [
        (
            each["impact"],
            each["id"],
            each["nodes"][0]["html"][:200] + each["nodes"][0].get("failureSummary", ""),
        )
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["desktop", "phone"])
def test_axe_finds_no_serious_fault(server: Running, browser: Browser, kind: str, scheme: Any) -> None:
    phone = kind == "phone"
    size = {"width": 390, "height": 844} if phone else {"width": 1280, "height": 800}
    context = browser.new_context(viewport=size, color_scheme=scheme, is_mobile=phone, has_touch=phone)
    page = context.new_page()
    page.goto(server.url)
    expect(page.locator("#model option")).to_have_count(2)
    assert not faults(page)  # a new conversation
    messages = [
        {"role": "user", "content": "Show me.", "files": [{"name": "notes.txt", "text": "x"}]},
        {"role": "assistant", "content": TYPESET + "\n\n> quote\n\n|a|b|\n|-|-|\n|1|2|\n\n- [ ] open\n\n[x](https://a.b)",
         "reasoning": "Hm.", "stats": {"tokens": 5, "rate": 20, "first": 100}},
        {"role": "user", "content": "Again?"},
        {"role": "assistant", "content": "No", "error": "It failed."},
    ]  # fmt: skip
    keep(page, {"id": "a", "title": "A chat", "updated": 1, "messages": messages})
    page.reload()
    page.goto(f"{server.url}/#a")
    expect(page.locator(".katex").first).to_be_visible()
    expect(page.locator(".hljs-keyword").first).to_be_visible()
    assert not faults(page)
    page.set_input_files("#pick", [{"name": "b.txt", "mimeType": "text/plain", "buffer": b"x"}])
    page.get_by_label("Edit").first.click()
    if phone:
        page.click("#side-open")
        page.fill("#search", "show")
        assert not faults(page)
        page.click("#side-close")
    page.click("#open-settings")
    assert not faults(page)
    page.click("#settings-close")
    page.click("#open-menu")
    assert not faults(page)
    page.keyboard.press("Escape")
    page.get_by_label("Show b.txt").click()
    assert not faults(page)
    page.keyboard.press("Escape")
    page.goto(f"{server.url}/#live")
    expect(page.locator("#live-title")).to_have_text("smollm2")
    assert not faults(page)
    context.close()


def focused(page: Page) -> str:
    return str(page.evaluate("""() => { const e = document.activeElement;
        return e.id || e.getAttribute('aria-label') || e.textContent.trim() }"""))  # fmt: skip


def tab_to(page: Page, wanted: str, key: str = "Tab") -> None:
    """Presses Tab until the element with this id or label has the focus, and is seen to have it."""
    for _ in range(60):
        if focused(page) == wanted:
            ring = """() => { let e = document.activeElement, found = false;
                for (let i = 0; i < 3 && e; i++, e = e.parentElement) {
                    const s = getComputedStyle(e);
                    found ||= s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0 || e.classList.contains('box')
                        || e.classList.contains('editor') || e.tagName === 'DIALOG';
                }
                return found }"""
            assert page.evaluate(ring), f"nothing shows that {wanted} has the focus"
            return
        page.keyboard.press(key)
    raise AssertionError(f"Tab does not reach {wanted}")


def test_the_keyboard_alone_is_enough(page: Page) -> None:
    assert focused(page) == "input"
    page.keyboard.type("Count to three.")
    page.keyboard.press("Enter")
    answered(page)
    tab_to(page, "Regenerate", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".branches")).to_have_text("2/2")
    answered(page)
    tab_to(page, "Previous version")
    page.keyboard.press("Enter")
    expect(page.locator(".branches")).to_have_text("1/2")
    assert focused(page) == "Previous version", "the focus stays"
    tab_to(page, "Edit", "Shift+Tab")
    page.keyboard.press("Enter")
    page.keyboard.type(" And to four.")
    page.keyboard.press("Enter")
    expect(page.locator("article.user .bubble")).to_have_text("Count to three. And to four.")
    answered(page)
    tab_to(page, "open-menu")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert focused(page) == "Rename"
    page.keyboard.press("Enter")
    page.keyboard.type("Counting")
    page.keyboard.press("Enter")
    expect(page.locator("#chats .title")).to_have_text("Counting")
    tab_to(page, "open-settings")
    page.keyboard.press("Enter")
    tab_to(page, "temperature")
    page.keyboard.press("ArrowRight")
    expect(page.locator("output").first).to_have_text("0.05")
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    tab_to(page, "open-live")
    page.keyboard.press("Enter")
    expect(page.locator("#live-view")).to_be_visible()
    tab_to(page, "Delete Counting")
    page.keyboard.press("Enter")
    expect(page.locator("#chats li")).to_have_count(0)
    assert focused(page) == "new"


def test_the_page_can_be_installed_and_opens_without_the_server(browser: Browser, tmp_path: Path) -> None:
    shell = {
        path.name
        for path in FOLDER.glob("*.*")
        if path.suffix in (".js", ".css", ".svg", ".png", ".webmanifest")
    }
    worker = (FOLDER / "service-worker.js").read_text()
    assert not [name for name in shell - {"service-worker.js"} if f'"{name}"' not in worker], (
        "the offline shell"
    )
    manifest = json.loads((FOLDER / "app.webmanifest").read_text())
    with serving(tmp_path, write_tiny_model(tmp_path / "tiny.gguf"), shutdown=1) as server:
        for icon in manifest["icons"]:
            assert server.ask(icon["src"])[1]["content-type"].startswith(icon["type"])
        page = browser.new_page(locale="fr")
        page.goto(server.url)
        page.evaluate("localStorage.setItem('tandem.settings', JSON.stringify({max_tokens: 5}))")
        wait_until(page, "() => navigator.serviceWorker.controller !== null")
        page.reload()
        expect(page.locator("#model")).to_have_value("tiny")
        send(page, "Hi")
        answered(page)
        found = page.context.new_cdp_session(page).send("Page.getInstallabilityErrors")[
            "installabilityErrors"
        ]
        assert [error["errorId"] for error in found] == ["in-incognito"]  # nothing that the page lacks
        server.process.kill()
        server.process.wait()
        page.reload()
        expect(page.locator("article.user .bubble")).to_have_text("Hi")
        expect(page.locator("#fine")).to_contain_text("injoignable")
        page.close()
