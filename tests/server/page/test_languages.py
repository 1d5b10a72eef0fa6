"""The page's five languages: every text has a translation, and the page shows it."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Browser, expect

from tandem.server.page.static import FOLDER
from tests.server.page.pages import answered, send
from tests.server.servers import Running

LANGUAGES = ("de", "es", "fr", "zh")


def dictionary(language: str) -> dict[str, str]:
    text = (FOLDER / "lang" / f"{language}.js").read_text()
    pairs = re.findall(r'^  ("(?:[^"\\]|\\.)*"): ("(?:[^"\\]|\\.)*"),$', text, re.MULTILINE)
    return {json.loads(english): json.loads(other) for english, other in pairs}


def texts() -> set[str]:
    """What the page may show: the texts in its code, and those of its HTML."""
    found = {
        json.loads(f'"{text}"')
        for path in FOLDER.glob("*.js")
        for text in re.findall(r'\bt\("((?:[^"\\]|\\.)*)"', path.read_text())
    }
    body = re.sub(
        r"<svg.*?</svg>", "", (FOLDER / "index.html").read_text().partition("<body>")[2], flags=re.S
    )
    found |= set(re.findall(r'(?:aria-label|placeholder|title)="([^"]+)"', body))
    return found | {text.strip() for text in re.findall(r">([^<>]+)<", body) if text.strip()}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_translated(language: str) -> None:
    words = dictionary(language)
    assert {*words} == texts()
    values = re.compile(r"\{\w+\}")
    for english, other in words.items():
        assert other.strip() and sorted(values.findall(english)) == sorted(values.findall(other)), english


def test_the_page_speaks_the_browsers_language_or_the_chosen_one(server: Running, browser: Browser) -> None:
    context = browser.new_context(locale="de-CH")
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(server.url)
    german = dictionary("de")
    assert page.locator("html").get_attribute("lang") == "de"
    expect(page.locator(".welcome h1")).to_have_text(german["How can I help?"])
    expect(page.locator("#input")).to_have_attribute("placeholder", german["Message"])
    send(page, "Hallo")
    answered(page)
    expect(page.locator("article.reply .stats")).to_contain_text("Tokens/s")
    page.click("#open-settings")
    expect(page.locator("#fields")).to_contain_text(german["System prompt"])
    for language in ("fr", "zh", "es", "en"):
        page.select_option("#language", language)
        expect(page.locator("html")).to_have_attribute("lang", language)
        wanted = dictionary(language)["Live"] if language != "en" else "Live"
        expect(page.locator("#open-live span").first).to_have_text(wanted)
        expect(page.locator("#chats li")).to_have_count(1)  # the page listens
        page.click("#open-settings")
        expect(page.locator("#language")).to_have_value(language)
    assert not problems
    context.close()
