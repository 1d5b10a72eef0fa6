"""The web page in a real browser, on a real server with a real model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Route, expect

from tests.cli.tiny_model import write_tiny_model
from tests.server.browsers import wait_until
from tests.server.page.pages import answered, send, settle
from tests.server.servers import Running, serving


def test_a_response_streams_and_can_be_stopped(page: Page, server: Running) -> None:
    def go_on(route: Route) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    page.route("**/v1/chat/completions", go_on)
    settle(page, server, temperature=0, max_tokens=2000)  # 6 seconds: long enough to stop it
    send(page, "Tell a very long story about the sea.")
    text = page.locator("article.reply .text")
    expect(page.locator("#rate.active #rate-text")).to_contain_text("tok/s")
    seen = text.inner_text()
    wait_until(
        page, "n => document.querySelector('article.reply .text').innerText.length > n + 20", len(seen)
    )
    page.click("#stop")
    assert text.inner_text().startswith(seen[:10])
    expect(page.locator(".stats")).to_contain_text("stopped")
    server.wait_idle()


def test_messages_are_edited_and_regenerated(page: Page) -> None:
    send(page, "Count to ten.")
    answered(page)
    first = page.locator("article.reply .text").inner_text()
    send(page, "Go on.")
    answered(page, 2)
    page.locator("article.user").first.hover()
    page.locator("article.user").first.get_by_label("Edit").click()
    page.get_by_label("Edit message").fill("Name three animals.")
    page.get_by_role("button", name="Send", exact=True).first.click()
    answered(page, 1)
    expect(page.locator("article.user .bubble")).to_have_text(["Name three animals."])
    edited = page.locator("article.reply .text").inner_text()
    assert edited != first
    page.evaluate("document.querySelector('article.reply .text').dataset.old = 1")
    page.get_by_label("Regenerate").click()
    expect(page.locator("article.reply .text[data-old]")).to_have_count(0)
    answered(page, 1)
    assert page.locator("article.reply .text").inner_text() == edited  # at temperature 0


def test_conversations_outlive_a_reload(page: Page) -> None:
    send(page, "Say one word.")
    answered(page)
    said = page.locator("article.reply .text").inner_text()
    page.reload()
    expect(page.locator("article.user")).to_have_text(["Say one word."])
    assert page.locator("article.reply .text").inner_text() == said
    page.click("#new")
    expect(page.locator(".welcome")).to_be_visible()
    send(page, "Another one.")
    answered(page)
    expect(page.locator("#chats li")).to_have_count(2)
    page.get_by_role("button", name="Say one word.", exact=True).click()
    expect(page.locator("article.user")).to_have_text(["Say one word."])
    page.get_by_role("button", name="Delete Another one.").click()
    expect(page.locator("#chats li")).to_have_count(1)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#chats li")).to_have_count(2)


def test_model_and_settings_reach_the_server(page: Page) -> None:
    page.select_option("#model", "another")
    page.click("#open-settings")
    page.fill("#system", "Answer in capital letters.")
    page.fill("#max_tokens", "5")
    page.locator("#temperature").fill("0.5")
    page.click("#settings-close")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "Hello")
    body = sent.value.post_data_json
    assert body["model"] == "another" and body["max_tokens"] == 5 and body["temperature"] == 0.5
    assert body["messages"][0] == {"role": "system", "content": "Answer in capital letters."}
    answered(page)
    expect(page.locator(".stats")).to_contain_text("tokens")
    page.reload()
    expect(page.locator("#model")).to_have_value("another")


def test_the_live_numbers_move(page: Page, server: Running) -> None:
    page.click("#open-live")
    expect(page.locator("#live-rate")).to_be_visible()
    server.ask("/v1/chat/completions", server.chat(max_tokens=1, model="smollm2"))
    expect(page.locator("#live-title")).to_have_text("smollm2")
    expect(page.locator("#live-roof .part")).to_have_count(5)  # measured, because the engine is idle
    before = int(page.locator("#live-totals dd").nth(1).inner_text().replace(",", ""))
    body = server.chat("Tell a story.", max_tokens=150, model="smollm2", stream=True)
    page.evaluate(
        "b => fetch('/v1/chat/completions', {method: 'POST', body: b, "
        "headers: {'content-type': 'application/json'}}).then(r => r.text())",
        json.dumps(body),
    )
    counted = "n => +document.querySelectorAll('#live-totals dd')[1].innerText.replaceAll(',', '') >= n"
    wait_until(page, counted, before + 150)
    # Of completed seconds: the next poll has them.
    for number in "rate", "first", "batch", "step", "traffic":
        expect(page.locator(f"#live-{number}")).to_have_text(re.compile(r"\d"))
    inked = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
    charts = page.locator(".chart canvas").filter(visible=True)
    expect(charts).to_have_count(4)  # without draft tokens
    for chart in charts.all():
        assert chart.evaluate(inked)
    history = server.ask("/live")[2]["models"]["smollm2"]["history"]
    assert max(history["kv_used"]) > 0 and sum(history["admitted"]) >= sum(history["cached"]) > 0
    assert sum(history["drafted"]) == sum(history["accepted"]) == 0


def test_the_page_asks_for_a_key(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-secret-1\n")
    with serving(tmp_path, write_tiny_model(tmp_path / "tiny.gguf"), api_keys="keys", shutdown=1) as server:
        page = browser.new_page()
        page.goto(server.url)
        for key in ("wrong", "sk-secret-1"):
            expect(page.locator("#key-dialog")).to_be_visible()
            page.fill("#key", key)
            page.click("#key-dialog .primary")
        expect(page.locator("#model")).to_have_value("tiny")
        page.evaluate("localStorage.setItem('tandem.settings', JSON.stringify({max_tokens: 4}))")
        page.reload()
        expect(page.locator("#model")).to_have_value("tiny")
        send(page, "Hi")
        answered(page)
        assert not page.locator("article.reply .error").count()
        page.close()


def test_settings_belong_to_a_conversation_and_presets_are_kept(page: Page) -> None:
    def body(text: str) -> Any:
        with page.expect_request("**/v1/chat/completions") as sent:
            send(page, text)
        expect(page.locator("#send")).to_be_visible()
        return sent.value.post_data_json

    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    page.fill("#max_tokens", "3")
    page.fill("#top_k", "7")
    page.fill("#min_p", "0.05")
    page.select_option("#reasoning_effort", "none")
    page.get_by_role("button", name="Save as").click()
    page.get_by_label("Name of the preset").fill("Short")
    page.keyboard.press("Enter")
    expect(page.locator("#preset")).to_have_value("Short")
    sent = body("Hello")
    wanted = {"max_tokens": 3, "top_k": 7, "min_p": 0.05, "reasoning_effort": "none"}
    assert sent | wanted == sent and sent["messages"][0]["content"] == "Be brief."
    page.click("#new")
    expect(page.locator("#system")).to_have_value("")
    sent = body("Another")
    assert sent["max_tokens"] == 24 and [m["role"] for m in sent["messages"]] == ["user"]
    assert not sent.keys() & {"top_k", "min_p", "reasoning_effort", "seed"}
    page.select_option("#preset", "Short")
    assert (more := body("More")) | wanted == more
    page.get_by_role("button", name="Hello", exact=True).click()
    page.reload()
    page.click("#open-settings")
    expect(page.locator("#system")).to_have_value("Be brief.")
    expect(page.locator("#preset")).to_have_value("Short")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("#preset option")).to_have_text(["Standard"])
    expect(page.locator("#system")).to_have_value("Be brief.")  # the conversation keeps its own
