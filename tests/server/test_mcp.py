"""The MCP servers that the settings name: programs, reached by MCP's streamable HTTP at /mcp/NAME."""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import RequestError
from tandem.server.mcp.tool_programs import MAX_SESSIONS
from tandem.server.settings import read_settings_file
from tests.cli.processes import tandem
from tests.cli.tiny_model import write_tiny_model
from tests.server.servers import Running, serving, wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("mcp")
    command = json.dumps(["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.server.tool_server"])
    tables = f'[mcp]\ntest = {command}\nmissing = ["/no/such/program"]\n'
    with serving(
        folder, write_tiny_model(folder / "tiny.gguf"), presets=tables, shutdown=1, timeout=2
    ) as found:
        yield found


def rpc(method: str, id: int | None = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "params": params, **({"id": id} if id is not None else {})}


def begin(server: Running, name: str = "test") -> str:
    status, headers, body = server.ask(f"/mcp/{name}", rpc("initialize", protocolVersion="2025-06-18"))
    assert status == 200 and body["result"]["serverInfo"]["name"] == "test", body
    id: str = headers["mcp-session-id"]
    assert server.ask(f"/mcp/{name}", rpc("notifications/initialized", None), mcp_session_id=id)[0] == 202
    return id


def programs(server: Running) -> list[int]:
    """The processes of the tool servers that this server has started."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])

    def is_program(id: int) -> bool:
        try:
            return b"tests.server.tool_server" in Path(f"/proc/{id}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return False

    return [id for id, parent in parents.items() if parent == server.process.pid and is_program(id)]


def test_a_session_is_a_process_and_ends(server: Running) -> None:
    assert server.ask("/mcp")[2] == {"servers": ["test", "missing"]}
    session = begin(server)
    assert len(programs(server)) == 1
    tools = server.ask("/mcp/test", rpc("tools/list"), mcp_session_id=session)[2]["result"]
    assert tools["tools"][0]["name"] == "roll_dice" and tools["nextCursor"] == "1"
    called = rpc("tools/call", 7, name="roll_dice", arguments={"sides": 6})
    status, headers, body = server.ask("/mcp/test", called, mcp_session_id=session)
    assert status == 200 and headers["content-type"] == "application/json" and body["id"] == 7
    assert body["result"]["content"] == [{"type": "text", "text": "The die shows 4 of 6."}]
    assert server.ask("/mcp/test", rpc("nothing"), mcp_session_id=session)[2]["error"]["code"] == -32601
    gone = urllib.request.Request(
        f"{server.url}/mcp/test", headers={"mcp-session-id": session}, method="DELETE"
    )
    with urllib.request.urlopen(gone) as response:
        assert response.status == 204
    wait_until(lambda: not programs(server))
    assert server.ask("/mcp/test", rpc("tools/list"), mcp_session_id=session)[0] == 404


def test_sessions_are_bounded(server: Running) -> None:
    first = begin(server)
    others = [begin(server) for _ in range(MAX_SESSIONS)]
    assert server.ask("/mcp/test", rpc("tools/list"), mcp_session_id=first)[0] == 404, "the oldest has ended"
    assert server.ask("/mcp/test", rpc("tools/list"), mcp_session_id=others[0])[0] == 200
    wait_until(lambda: len(programs(server)) == MAX_SESSIONS)


def test_what_is_refused(server: Running) -> None:
    assert server.ask("/mcp/other", rpc("initialize"))[0] == 404
    status, _, body = server.ask("/mcp/missing", rpc("initialize"))
    assert (
        status == 502 and body["error"]["message"] == "missing cannot be started: No such file or directory"
    )
    assert server.ask("/mcp/test", rpc("tools/list"))[0] == 400
    assert server.ask("/mcp/test", rpc("initialize", None))[0] == 400
    session = begin(server)
    assert server.ask("/mcp/test", {"jsonrpc": "2.0"}, mcp_session_id=session)[0] == 400
    assert server.ask("/mcp/missing", rpc("tools/list"), mcp_session_id=session)[0] == 404, (
        "of another program"
    )
    assert server.ask("/mcp/test", rpc("tools/list"), origin="http://evil.example")[0] == 403


@pytest.mark.parametrize("way", ["exit", "long"])
def test_a_program_that_ends_is_an_error_and_can_be_started_again(server: Running, way: str) -> None:
    session = begin(server)
    message = rpc("long") if way == "long" else rpc("tools/call", name="exit", arguments={})
    for body in (message, rpc("tools/list")):
        status, _, found = server.ask("/mcp/test", body, mcp_session_id=session)
        assert status == 502 and "the program of test has ended" in found["error"]["message"]
    assert server.ask("/mcp/test", rpc("tools/list"), mcp_session_id=begin(server))[0] == 200


def test_a_call_has_the_time_of_a_response(server: Running) -> None:
    session = begin(server)
    status, _, body = server.ask(
        "/mcp/test", rpc("tools/call", name="wait", arguments={}), mcp_session_id=session
    )
    assert status == 408 and "test did not answer within 2 s" in body["error"]["message"]


def test_programs_end_with_the_server(tmp_path: Path) -> None:
    command = json.dumps(["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.server.tool_server"])
    with serving(
        tmp_path, write_tiny_model(tmp_path / "tiny.gguf"), presets=f"[mcp]\ntest = {command}\n"
    ) as server:
        begin(server)
        [program] = programs(server)
    with pytest.raises(ProcessLookupError):
        os.kill(program, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        'mcp = ["a"]',
        '[mcp]\na = "program"',
        "[mcp]\na = []",
        '[mcp]\n"a b" = ["c"]',
        "[mcp]\na = [1]",
        '[mcp]\na = ["b\\u0000"]',
    ],
)
def test_a_wrong_command_is_named(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "tandem.toml").write_text(wrong)
    with pytest.raises(RequestError, match="mcp has a wrong entry"):
        read_settings_file(tmp_path / "tandem.toml")


def test_the_settings_file_shows_a_command(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "tandem.toml").read_text()
    [shown] = re.findall(r"^# \[mcp\]\n((?:#   .*\n)+)", text, re.MULTILINE)
    (tmp_path / "tandem.toml").write_text("[mcp]\n" + re.sub(r"(?m)^#", "", shown))
    assert read_settings_file(tmp_path / "tandem.toml").mcp["files"][0] == "npx"


def test_replicas_share_no_sessions(tmp_path: Path) -> None:
    (tmp_path / "tandem.toml").write_text('[mcp]\na = ["b"]\n')
    done = tandem("serve", "smollm2", "--ray", "2", "--settings", tmp_path / "tandem.toml")
    assert done.returncode and "--ray serves no MCP servers: leave mcp out of the settings" in done.stderr
