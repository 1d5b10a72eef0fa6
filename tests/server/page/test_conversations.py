"""Conversations in the browser: branches, search, export and import, reloads, and a server that dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Route, expect

from tests.cli.tiny_model import write_tiny_model
from tests.server.browsers import wait_until
from tests.server.page.pages import answered, choose_in_menu, keep, kept, send, settle
from tests.server.servers import Running, serving

# What an export must escape, or keep as it is.
ODD = "<!-- tandem: user -->\n\\<!-- tandem: file x -->\n### You\n\n````\n```py\n1\n```\n````\n\n  end  é 🚲"


def bubbles(page: Page) -> list[str]:
    return page.locator("article.user .bubble").all_inner_texts()


def shown(page: Page) -> list[str]:
    return page.locator("article.reply .text").all_inner_texts()


def go_on(route: Route) -> None:
    """A response as long as it may be."""
    route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))


def test_edits_and_regenerated_responses_are_branches(page: Page, server: Running) -> None:
    settle(page, server, temperature=1.5, max_tokens=12)
    send(page, "Name a colour.")
    answered(page)
    [first] = shown(page)
    page.get_by_label("Regenerate").click()
    expect(page.locator(".branches")).to_have_text("2/2")
    answered(page)
    [second] = shown(page)
    send(page, "Another.")
    answered(page, 2)
    page.get_by_label("Previous version").click()
    assert shown(page) == [first] and bubbles(page) == ["Name a colour."]
    expect(page.locator(".branches")).to_have_text("1/2")
    page.get_by_label("Next version").click()  # back to the newest message below
    assert shown(page)[0] == second and bubbles(page) == ["Name a colour.", "Another."]
    page.get_by_label("Edit").first.click()
    page.get_by_label("Edit message").fill("Name a fruit.")
    page.keyboard.press("Enter")
    answered(page, 1)
    assert bubbles(page) == ["Name a fruit."]
    page.reload()
    expect(page.locator("article.user .branches")).to_have_text("2/2")
    assert bubbles(page) == ["Name a fruit."]
    page.locator("article.user").get_by_label("Previous version").click()
    assert bubbles(page) == ["Name a colour.", "Another."] and shown(page)[0] == second
    chat = kept(page)[0]
    assert [m["role"] for m in chat["messages"]].count("user") == 3 and len(chat["messages"]) == 7


def test_conversations_are_found_by_what_was_said(page: Page) -> None:
    for id, title, text in (
        ("a", "Bicycles", "How many gears has a tandem?"),
        ("b", "Recipes", "Bread needs flour\nand a pinch of SALT."),
        ("c", "Letters", "<b>Salt</b> &amp; pepper"),
    ):
        keep(page, {"id": id, "title": title, "updated": 1, "messages": [{"role": "user", "content": text}]})
    page.reload()
    titles = page.locator("#chats .title")
    expect(titles).to_have_count(3)
    page.fill("#search", "salt")
    expect(titles).to_have_count(2)
    expect(titles.filter(has_text="Recipes")).to_contain_text("and a pinch of SALT.")
    expect(titles.filter(has_text="Letters")).to_contain_text("<b>Salt</b> &amp; pepper")
    page.fill("#search", "tandem GEARS")
    expect(titles).to_have_text(["BicyclesHow many gears has a tandem?"])
    titles.click()
    expect(page.locator("article.user .bubble")).to_have_text("How many gears has a tandem?")
    page.fill("#search", "nowhere")
    expect(page.locator("#chats")).to_have_text("Nothing found.")
    page.fill("#search", "")
    expect(titles).to_have_count(3)


def export(page: Page, action: str) -> Path:
    with page.expect_download() as download:
        choose_in_menu(page, action)
    saved = Path(download.value.path()).with_name(download.value.suggested_filename)
    download.value.save_as(saved)
    return saved


def test_exports_can_be_imported(page: Page) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": ODD, "parent": None},
        {"role": "assistant", "content": ODD, "model": "a b/c-->d", "parent": 0, "reasoning": "Hm."},
        {"role": "assistant", "content": "Another branch.", "model": "m", "parent": 0},
        {"role": "user", "content": "Last", "parent": 1},
    ]
    settings = {"system": ODD, "temperature": 0.3}
    chat = {
        "id": "a",
        "title": "Bikes / <x>",
        "updated": 5,
        "messages": messages,
        "leaf": 3,
        "settings": settings,
    }
    keep(page, chat)
    page.reload()
    page.goto(page.url.partition("#")[0] + "#a")
    expect(page.locator("article.user")).to_have_count(2)
    files = {
        action: export(page, action)
        for action in ("Export as Markdown", "Export as JSON", "Export all conversations")
    }
    assert files["Export as JSON"].name == "Bikes x.json"
    for action, file in files.items():
        page.set_input_files("#import", file)
        expect(page.locator("#toast")).to_have_text("Conversations imported: 1")
        wait_until(page, "() => location.hash.length > 5 && document.querySelector('article.user')")
        wait_until(page, "n => document.querySelectorAll('#chats li').length === n", 2)
        [copy] = [each for each in kept(page) if each["id"] != "a"]
        if action == "Export as Markdown":
            path = [copy["messages"][i] for i in range(3)]
            wanted = [messages[0], messages[1], messages[3]]
            assert [(m["role"], m["content"], m.get("model")) for m in path] == [
                (m["role"], m["content"], m.get("model")) for m in wanted
            ]
            assert copy["title"] == chat["title"] and copy["settings"] == {"system": ODD}
        else:
            assert copy == {**chat, "id": copy["id"]}
        page.locator("#chats .current .bin").click()
        page.goto(page.url.partition("#")[0] + "#a")
        wait_until(page, "n => document.querySelectorAll('#chats li').length === n", 1)
    wrong = files["Export as JSON"].with_name("wrong.json")
    for text in (
        "{",
        "[]",
        '{"messages": [{"role": 7}]}',
        '{"chats": [{"messages": [{"role": "user", "content": "x", "parent": 3}], "leaf": 0}]}',
    ):
        wrong.write_text(text)
        page.set_input_files("#import", wrong)
        expect(page.locator("#toast")).to_contain_text("wrong.json has no conversations")
        page.evaluate("document.getElementById('toast').textContent = ''")
    assert len(kept(page)) == 1


def test_what_is_wrong_in_an_import_is_left_out(page: Page, server: Running, tmp_path: Path) -> None:
    """It would stop the page whenever the conversation is shown."""
    wrong: Any = {"x": [1]}
    files = [
        wrong,
        5,
        None,
        {"name": "a", "blob": {}},
        {"name": "b", "text": wrong},
        {"name": "c", "text": "fine"},
    ]
    parts = {
        "reasoning": 5,
        "error": wrong,
        "stats": {"tokens": "x"},
        "model": wrong,
        "partial": 1,
        "own": wrong,
    }
    messages = [
        {"role": "user", "content": "Hi", "parent": None, "files": files},
        {"role": "assistant", "content": "Hello", "parent": 0, **parts},
    ]
    settings = {"toString": 5, "system": 7, "temperature": wrong, "top_k": 5}
    file = tmp_path / "odd.json"
    file.write_text(
        json.dumps(
            {
                "id": "live",  # the address of the live view
                "messages": messages,
                "settings": settings,
                "title": {"toString": 5},
                "updated": wrong,
            }
        )
    )
    settle(page, server, max_tokens=8)
    page.set_input_files("#import", file)
    expect(page.locator("#toast")).to_have_text("Conversations imported: 1")
    expect(page.locator("article.reply")).to_contain_text("Hello")
    expect(page.locator("article.user .files")).to_contain_text("c")
    [chat] = kept(page)
    assert chat["messages"][0]["files"] == [{"name": "c", "text": "fine"}]
    assert chat["messages"][1] == {"role": "assistant", "content": "Hello", "parent": 0}
    assert chat["settings"] == {"top_k": 5} and chat["title"] == "Hi" and chat["id"] != "live"
    assert "Hello" in export(page, "Export as Markdown").read_text()
    send(page, "And now?")
    answered(page)


def test_a_conversation_is_renamed(page: Page) -> None:
    send(page, "Hi")
    answered(page)
    choose_in_menu(page, "Rename")
    page.get_by_label("Name of this conversation").fill("Greetings")
    page.keyboard.press("Enter")
    expect(page.locator("#chats .title")).to_have_text("Greetings")


def test_a_response_goes_on_while_another_conversation_is_shown(page: Page, server: Running) -> None:
    settle(page, server, temperature=0, max_tokens=300)
    page.route("**/v1/chat/completions", go_on)
    send(page, "Tell a long story.")
    expect(page.locator("article.writing")).to_be_visible()
    page.click("#new")
    expect(page.locator(".welcome")).to_be_visible()
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#chats .dot")).to_have_count(1)
    expect(page.locator("#chats .dot")).to_have_count(0)  # it is complete
    page.click("#chats .title")
    answered(page)
    expect(page.locator(".stats")).to_contain_text("300 tokens")


def test_a_reload_in_mid_response_keeps_its_text_and_it_can_be_continued(page: Page, server: Running) -> None:
    page.route("**/v1/chat/completions", go_on)
    settle(page, server, temperature=0, max_tokens=1500)
    send(page, "Tell a very long story about the sea.")
    wait_until(page, "() => document.querySelector('article.reply .text').innerText.length > 200")
    before = page.evaluate("document.querySelector('article.reply .text').innerText.slice(0, 150)")
    page.evaluate(
        "s => localStorage.setItem('tandem.settings', s)", json.dumps({"temperature": 0, "max_tokens": 20})
    )
    page.reload()
    server.wait_idle()
    expect(page.locator(".stats")).to_have_text("interrupted")
    [text] = shown(page)
    assert text.startswith(before)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_label("Continue").click()
    assert sent.value.post_data_json["messages"][-1]["content"].startswith(before[:50])
    answered(page)
    assert shown(page)[0].startswith(text[:-20]) and len(shown(page)[0]) > len(text)
    expect(page.locator(".stats")).to_contain_text("20 tokens")


def test_a_server_that_dies_in_mid_response(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path, write_tiny_model(tmp_path / "tiny.gguf"), context=8000, shutdown=1) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.evaluate("localStorage.setItem('tandem.settings', JSON.stringify({max_tokens: 7000}))")
        page.route("**/v1/chat/completions", go_on)
        page.reload()
        expect(page.locator("#model")).to_have_value("tiny")
        send(page, "Hi")
        wait_until(page, "() => document.querySelector('article.reply .text')?.innerText.length > 100")
        server.process.kill()
        expect(page.locator("article.reply .error")).to_have_text(
            "The server cannot be reached: check that it is running."
        )
        assert len(shown(page)[0]) > 100
        expect(page.get_by_label("Continue")).to_be_visible()
        send(page, "Are you there?")
        expect(page.locator("article.reply .error")).to_have_count(2)
        assert [m["role"] for m in kept(page)[0]["messages"]] == ["user", "assistant"] * 2
        page.close()
