"""Tools of MCP servers on the page: each call is shown, and made when the user allows it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.packages import model_path
from tests.server.page.pages import answered, choose_in_menu, kept, send, settle
from tests.server.page.test_access import faults, tab_to
from tests.server.servers import Running, serving
from tests.server.tool_server import http_tool_server

ROOT = Path(__file__).parents[3]
RESULT = "The die shows 4 of 6."


def calling(name: str) -> Callable[[Route], None]:
    """Has the model call this tool in answer to a user; without it, a small model seldom does."""

    def route(route: Route) -> None:
        body = route.request.post_data_json
        if body.get("tools") and body["messages"][-1]["role"] == "user":
            body |= {
                "tool_choice": {"type": "function", "function": {"name": name}},
                "parallel_tool_calls": False,
            }
        route.continue_(post_data=json.dumps(body))

    return route


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with API keys whose settings name an MCP server."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("smollm2", "another"):
        (folder / f"{name}.gguf").symlink_to(model_path("smollm2"))
    (folder / "keys").write_text("secret-key\n")
    (folder / "keys").chmod(0o600)
    command = json.dumps(["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.server.tool_server"])
    files = (folder / "smollm2.gguf", folder / "another.gguf")
    with serving(
        folder, *files, presets=f"[mcp]\ndice = {command}\n", api_keys=str(folder / "keys"), shutdown=1
    ) as found:
        yield found


def add_server(page: Page, url: str, token: str = "") -> None:
    page.click("#open-settings")
    page.fill("#mcp-url", url)
    page.get_by_label("Token, if it needs one").fill(token)
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.locator(".tool-servers li small")).to_have_text("roll_dice, wait, exit")
    page.click("#settings-close")


def test_a_call_is_made_when_it_is_allowed(server: Running, browser: Browser) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    settle(page, server, temperature=0, max_tokens=30)
    page.route("**/v1/chat/completions", calling("roll_dice"))
    with http_tool_server(token="open sesame") as (url, received):
        add_server(page, url, "open sesame")
        assert not faults(page)
        send(page, "Roll a die.")
        call = page.get_by_label("Call of roll_dice")
        expect(call.locator("pre")).to_have_text('{\n  "sides": 6\n}')
        expect(call).to_contain_text(url.removeprefix("http://"))
        assert not [m for m in received if m.get("method") == "tools/call"], "nobody has allowed it"
        assert not faults(page)
        page.reload()  # it still waits for the user
        page.route("**/v1/chat/completions", calling("roll_dice"))
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Allow").click()
        answered(page, 2)
        asked, result = sent.value.post_data_json["messages"][-2:]
        assert result == {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": RESULT}
        assert [m["params"] for m in received if m.get("method") == "tools/call"] == [
            {"name": "roll_dice", "arguments": {"sides": 6}}
        ]
        assert {"jsonrpc": "2.0", "id": "p", "result": {}} in received, "a ping of the server is answered"
        call.get_by_text("Result").click()
        expect(call.locator("pre").last).to_have_text(RESULT)
        expect(page.get_by_role("button", name="Allow")).to_have_count(0)
        assert not faults(page)
        send(page, "Again.")
        answered(page, 3)
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Refuse").click()
        answered(page, 4)
        assert sent.value.post_data_json["messages"][-1]["content"] == "The user refused this call."
        expect(page.get_by_label("Call of roll_dice").last).to_contain_text("refused")
        assert len([m for m in received if m.get("method") == "tools/call"]) == 1
        [chat] = kept(page)
        assert [len(m.get("calls", [])) for m in chat["messages"]] == [0, 1, 0, 0, 1, 0]
        with page.expect_download() as export:
            choose_in_menu(page, "Export as JSON")
        path = export.value.path()
        assert RESULT in path.read_text()
        page.set_input_files(
            "#import", [{"name": "a.json", "mimeType": "application/json", "buffer": path.read_bytes()}]
        )
        expect(page.get_by_label("Call of roll_dice")).to_have_count(2)
    assert not problems
    context.close()


def test_a_call_can_be_stopped_and_fail(server: Running, browser: Browser) -> None:
    page = browser.new_page()
    settle(page, server, temperature=0, max_tokens=30)
    with http_tool_server() as (url, received):
        add_server(page, url)
        page.route("**/v1/chat/completions", calling("wait"))
        send(page, "Wait.")
        page.get_by_role("button", name="Allow").click()
        expect(page.get_by_label("Call of wait")).to_contain_text("running")
        page.click("#stop")
        expect(page.get_by_role("button", name="Allow")).to_be_enabled()
        while not any(m.get("method") == "notifications/cancelled" for m in received):
            page.wait_for_timeout(20)
        page.get_by_role("button", name="Allow").click()
        expect(page.get_by_label("Call of wait")).to_contain_text("running")
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Allow")).to_be_enabled()
    page.get_by_role("button", name="Allow").click()  # the server has gone
    answered(page, 2)
    call = page.get_by_label("Call of wait")
    expect(call).to_contain_text("failed")
    call.get_by_text("Result").click()
    expect(call).to_contain_text("It cannot be reached")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "Hello")
    assert "tools" not in sent.value.post_data_json
    expect(page.locator("#toast")).to_contain_text("It cannot be reached")
    page.close()


def test_tools_that_the_settings_name(own: Running, browser: Browser) -> None:
    """By keyboard."""
    page = browser.new_page()
    page.goto(own.url)
    page.evaluate("""localStorage.setItem('tandem.key', 'secret-key');
        localStorage.setItem('tandem.settings', JSON.stringify({temperature: 0, max_tokens: 30}))""")
    page.reload()
    expect(page.locator("#model option")).to_have_count(2)
    page.route("**/v1/chat/completions", calling("roll_dice"))
    page.click("#open-settings")
    switch = page.get_by_role("checkbox", name="dice")
    expect(switch).not_to_be_checked()  # until the user wants it
    switch.focus()
    page.keyboard.press("Space")
    expect(page.locator(".tool-servers li small")).to_have_text("roll_dice, wait, exit")
    page.keyboard.press("Escape")
    send(page, "Roll a die.")
    expect(page.get_by_label("Call of roll_dice").locator(".call-head span")).to_have_text("dice")
    page.focus("#input")
    tab_to(page, "Allow", "Shift+Tab")
    page.keyboard.press("Enter")
    answered(page, 2)
    page.get_by_label("Call of roll_dice").get_by_text("Result").click()
    expect(page.get_by_label("Call of roll_dice").locator("pre").last).to_have_text(RESULT)
    page.close()


def test_the_page_itself_reaches_no_other_host(server: Running) -> None:
    """Only the worker may, and it can show nothing."""
    policy: dict[str, Any] = {
        name: server.ask(path)[1]["content-security-policy"]
        for name, path in (("page", "/"), ("module", "/page/mcp.js"), ("worker", "/page/mcp-worker.js"))
    }
    assert "connect-src 'self';" in policy["page"] and "connect-src 'self';" in policy["module"]
    assert policy["worker"] == "default-src 'none'; connect-src http: https:"


def test_calls_of_an_import_are_made_of_known_servers_only(page: Page) -> None:
    made = {"id": "a", "name": "delete_all", "arguments": "{", "url": "no address", "tool": "delete_all"}
    disguised = {**made, "name": "roll_dice"}  # what is called is shown, not what an import says
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "calls": [made, {"id": 3}, "call", {**disguised, "result": 7, "failed": "x"}],
        },
    ]
    content = json.dumps({"chats": [{"id": "odd", "messages": messages}]}).encode()
    page.set_input_files("#import", [{"name": "a.json", "mimeType": "application/json", "buffer": content}])
    calls = page.get_by_label("Call of delete_all")
    expect(calls).to_have_count(2)
    expect(calls.first).to_contain_text("no address")
    calls.first.get_by_role("button", name="Allow").click()
    calls.first.get_by_text("Result").click()
    expect(calls.first).to_contain_text("There is no such tool any more.")
