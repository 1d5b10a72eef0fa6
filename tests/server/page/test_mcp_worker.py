"""The page's worker for MCP servers, without a page: what servers send that they should not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from playwright._impl._driver import compute_driver_executable

WORKER = Path(__file__).parents[3] / "tandem" / "server" / "page" / "assets" / "mcp-worker.js"
# Runs the worker with a `fetch` whose answers to `tools/list` and `tools/call` are `answer`; prints what it posts.
HARNESS = """
let listen;
globalThis.addEventListener = (_, listener) => { listen = listener; };
globalThis.postMessage = (message) => { console.log(JSON.stringify(message)); process.exit(); };
const text = (type, body) => new Response(body, { headers: { "content-type": type } });
const endless = (part) => new ReadableStream({ pull(stream) { stream.enqueue(new TextEncoder().encode(part)); } });
globalThis.fetch = async (url, { body }) => {
  const { id, method } = JSON.parse(body);
  if (method === "initialize") return Response.json({ id, result: { protocolVersion: "1" } });
  if (method === "notifications/initialized") return new Response(null, { status: 202 });
  return ANSWER;
};
require("vm").runInThisContext(require("fs").readFileSync(process.argv[1], "utf8"));
listen({ data: { id: 1, action: ACTION, server: { url: "http://h", headers: {} }, name: "a", values: {} } });
"""


def posted(action: str, answer: str) -> dict[str, Any]:
    node = compute_driver_executable()[0]
    script = HARNESS.replace("ANSWER", answer).replace("ACTION", json.dumps(action))
    done = subprocess.run(
        [node, "-e", script, WORKER], capture_output=True, text=True, timeout=60, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_an_answer_without_end_is_given_up(kind: str) -> None:
    found = posted("call", f'text("{kind}", endless("x".repeat(1 << 20)))')
    assert found["error"]["message"] == "the answer has more than 16777216 characters"


def test_an_answer_is_found_among_events() -> None:
    ping = 'data: {"id":"p","method":"ping"}\\r\\n\\r\\n'
    for end in ("\\n\\n", ""):
        events = f"`{ping}data: ${{JSON.stringify({{ id, result: 7 }})}}{end}`"
        assert posted("call", f'text("text/event-stream", {events})')["result"] == 7
    found = posted("call", f'text("text/event-stream", `{ping}`)')
    assert found["error"]["message"] == "the stream ended without an answer"


def test_an_error_is_short() -> None:
    found = posted("call", 'Response.json({ id, error: { message: "x".repeat(1 << 20) } })')
    assert found["error"]["message"] == "x" * 500


def test_what_is_no_tool_is_left_out() -> None:
    """Its name made each response of a model an error."""
    tools = "[null, 3, { name: 7 }, {}, { name: 'a' }]"
    assert posted("tools", f"Response.json({{ id, result: {{ tools: {tools} }} }})")["result"] == [
        {"name": "a"}
    ]


def test_a_call_that_may_have_been_made_is_not_made_again() -> None:
    counted = (
        "((globalThis.count = (globalThis.count ?? 0) + 1), new Response(`try ${count}`, { status: STATUS }))"
    )
    for action, status, tries in (("call", 502, 1), ("call", 404, 2), ("tools", 502, 2)):
        found = posted(action, counted.replace("STATUS", str(status)))
        assert found["error"] == {
            "aborted": False,
            "unreachable": False,
            "status": status,
            "message": f"try {tries}",
        }
