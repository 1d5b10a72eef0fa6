"""Programs of MCP servers, and clients, that do what they should not: no server here, only their sessions."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from tandem.errors import QueueFullError
from tandem.server.http.bodies import compact
from tandem.server.mcp import tool_programs
from tandem.server.mcp.tool_programs import MAX_SESSIONS, MAX_UNREAD, ToolPrograms, ToolSession

ASK = '{"jsonrpc":"2.0","id":1,"method":"tools/list"}'


def is_gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True


def run(script: str, use: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs `use` with the programs, of which `test` is a shell's script; ends them."""
    monkeypatch.setattr(tool_programs, "GRACE", 0.3)

    async def go() -> None:
        programs = ToolPrograms({"test": ("sh", "-c", script)})
        try:
            await use(programs)  # type: ignore[operator]
        finally:
            await programs.close()

    asyncio.run(go())


def process_of(programs: ToolPrograms, id: str) -> asyncio.subprocess.Process:
    return programs.session("test", id)._process


def test_sessions_that_begin_at_once_are_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    begin = ToolSession.__init__

    def counted(self: ToolSession, name: str, process: asyncio.subprocess.Process) -> None:
        started.append(process)
        assert sum(not is_gone(one.pid) for one in started) <= MAX_SESSIONS
        begin(self, name, process)

    monkeypatch.setattr(ToolSession, "__init__", counted)

    async def use(programs: ToolPrograms) -> None:
        await asyncio.gather(*(programs.start("test") for _ in range(MAX_SESSIONS + 4)))

    run("exec cat >/dev/null", use, monkeypatch)
    assert len(started) == MAX_SESSIONS + 4


def test_a_program_that_does_not_read_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(programs: ToolPrograms) -> None:
        session = programs.session("test", await programs.start("test"))
        async with asyncio.timeout(2):  # a notification waits for nobody
            with pytest.raises(QueueFullError, match="has not read"):
                for _ in range(8):
                    session.tell(" " * (MAX_UNREAD // 2))

    run("exec sleep 60", use, monkeypatch)


def test_a_number_that_has_become_anothers_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(programs: ToolPrograms) -> None:
        id = await programs.start("test")
        ended = process_of(programs, id)
        await ended.wait()
        await asyncio.sleep(0.05)
        sent: list[int] = []
        monkeypatch.setattr(os, "killpg", lambda pid, number: sent.append(pid))
        await programs.start("test")  # ends the session whose process has ended
        await asyncio.gather(*programs._closing)
        assert ended.pid not in sent

    run("exit", use, monkeypatch)


def test_what_a_program_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(programs: ToolPrograms) -> None:
        session = programs.session("test", await programs.start("test"))
        answer = await session.ask(1, ASK, 2)
        left = int(answer.partition(b'"pid":')[2].rstrip(b"}\n"))
        for _ in range(100):
            await asyncio.sleep(0.02)
            if is_gone(left):
                return
        os.kill(left, signal.SIGKILL)
        raise AssertionError("it runs on")

    run('read line; sleep 60 >/dev/null & printf \'{"id":1,"pid":%d}\\n\' $!', use, monkeypatch)


def test_a_program_that_asks_with_an_odd_id_is_answered_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(programs: ToolPrograms) -> None:
        session = programs.session("test", await programs.start("test"))
        assert b"result" in await session.ask(1, ASK, 2)

    deep = "[" * 900 + "]" * 900
    run(
        f'read line; echo \'{{"id":{deep},"method":"ping"}}\'; echo \'{{"id":1,"result":{{}}}}\'; cat',
        use,
        monkeypatch,
    )


def test_a_program_that_writes_much_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bytes] = []
    monkeypatch.setattr(ToolSession, "_take", lambda self, line: taken.append(line))

    async def use(programs: ToolPrograms) -> None:
        session, seen = programs.session("test", await programs.start("test")), 0
        while not session.has_ended:
            assert len(taken) <= seen + 2  # others have their turn after each line
            seen = len(taken)
            await asyncio.sleep(0)
        assert seen == 5000

    run("yes '{}' | head -n 5000", use, monkeypatch)


def test_a_text_with_ends_of_lines_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some programs (with Node's readline, or Python's splitlines) end a line at these, too."""
    text = 'a\u2028{"method":"b"}\u2029c\x85d\n'
    message = compact({"id": 1, "method": "a", "params": {"text": text}})

    async def use(programs: ToolPrograms) -> None:
        session = programs.session("test", await programs.start("test"))
        answer = json.loads(await session.ask(1, message, 2))
        read = bytes.fromhex(answer["result"]).decode()
        assert len(read.splitlines()) == 1 and json.loads(read)["params"]["text"] == text

    run(
        'read -r line; printf \'{"id":1,"result":"%s"}\\n\' '
        '"$(printf %s "$line" | od -An -v -tx1 | tr -d " \\n")"; cat',
        use,
        monkeypatch,
    )


def test_programs_do_not_get_the_hubs_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OTHER", "kept")

    async def use(programs: ToolPrograms) -> None:
        session = programs.session("test", await programs.start("test"))
        answer = await session.ask(1, ASK, 2)
        assert b"kept" in answer and b"secret" not in answer

    run('read line; printf \'{"id":1,"result":"%s %s"}\\n\' "$HF_TOKEN" "$OTHER"; cat', use, monkeypatch)
