"""Stored responses: broken, locked and forged files, long conversations, many clients of one conversation."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import RequestError, ResponseStoreError
from tandem.server.core import response_store
from tandem.server.core.response_store import MAX_ENTRY, MAX_ITEMS, ResponseStore, StoredItem
from tandem.server.openai import responses
from tests.hostile.attacks import ATTEMPTS, MAX_HEALTH, MiB, watched
from tests.server.servers import Running

ITEMS = [StoredItem(f"i{n}", f'{{"n": {n}}}') for n in range(20)]
FILES = 5_000  # damaged ones in a soak; `make test` makes a part


def using(path: Path | None, work: Callable[[ResponseStore], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        store = ResponseStore(path)
        try:
            await work(store)
        finally:
            store.close()

    asyncio.run(run())


# ---- the file


def foreign(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE entries (id, body)")
    database.commit()
    database.close()


@pytest.mark.fast
@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        os.mkfifo,
        foreign,
        lambda path: path.write_bytes(b"no database" * 1000),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/dev/full"),
        lambda path: path.symlink_to(path),
        lambda path: path.parent.rmdir(),
    ],
)
def test_a_file_that_holds_something_else_is_refused_at_the_start(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "responses"
    make(path)
    begin = time.monotonic()
    with pytest.raises(RequestError, match=r"cannot hold stored responses .* name another file"):
        ResponseStore(path)
    assert time.monotonic() - begin < 2
    if make is foreign:
        assert sqlite3.connect(path).execute("SELECT count(*) FROM sqlite_schema").fetchone() == (1,)


@pytest.mark.fast
def test_other_users_cannot_read_a_new_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        using(tmp_path / "r", lambda store: store.put("a", "{}", ITEMS))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o600


@pytest.mark.fast
def test_what_is_deleted_leaves_the_file(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await store.put("a", "{}", [StoredItem("i", "a secret of the client")])
        assert b"a secret" in (tmp_path / "r").read_bytes()
        await store.delete("a")

    using(tmp_path / "r", work)
    assert b"a secret" not in (tmp_path / "r").read_bytes()


def test_a_locked_file_delays_its_requests_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait together, not one after the other, and other requests do not wait at all."""
    monkeypatch.setattr(response_store, "PATIENCE", 0.5)

    async def work(store: ResponseStore) -> None:
        await store.put("a", "{}", ITEMS)
        other = sqlite3.connect(tmp_path / "r", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        begin = time.monotonic()
        tasks = [asyncio.create_task(store.append("a", ITEMS)) for _ in range(20)]
        await asyncio.to_thread(bool)
        assert time.monotonic() - begin < 0.3, "threads for other work are free"
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, ResponseStoreError) and "locked" in str(result)
        assert time.monotonic() - begin < 2
        other.execute("ROLLBACK")
        assert await store.items("a") == ITEMS and await store.append("a", ITEMS)

    using(tmp_path / "r", work)


@pytest.mark.fast
def test_a_full_disk_loses_no_answer_and_nothing_stored(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await store.put("a", "{}", ITEMS)
        for work in (
            store.put("b", "x" * 1_000_000, []),
            store.append("a", [StoredItem("large", "x" * 1_000_000)]),
        ):
            await store.items("a")  # opens the file
            assert store._connection
            store._connection.execute("PRAGMA max_page_count = 1")  # as if there were no room
            with pytest.raises(ResponseStoreError, match=r"full.*try again, or send store = false"):
                await work
        assert await store.items("a") == ITEMS and await store.body("b") is None

    using(tmp_path / "r", work)


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    source = f"""
import asyncio
from pathlib import Path
from tandem.server.core.response_store import ResponseStore, StoredItem

async def fill():
    store = ResponseStore(Path({str(tmp_path / "r")!r}))
    for i in range(1_000_000):
        await store.put(f"e{{i}}", "x" * 5000, [StoredItem("i", "{{}}")] * 20)
        print(i, flush=True)

asyncio.run(fill())
"""
    for last in (3, 17, 60):
        with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
            assert process.stdout
            while int(process.stdout.readline()) < last:
                pass
            process.kill()
            acknowledged = max([last, *map(int, process.stdout.read().split(b"\n")[:-1])])

        async def check(store: ResponseStore, acknowledged: int = acknowledged) -> None:
            for i in range(acknowledged + 1):
                assert await store.body(f"e{i}") == "x" * 5000 and len(await store.items(f"e{i}") or []) == 20

        using(tmp_path / "r", check)


@pytest.mark.fast
def test_a_file_that_is_removed_or_replaced_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "r"

    async def work(store: ResponseStore) -> None:
        await store.put("a", "{}", ITEMS)
        path.unlink()
        assert [await responses._stores(store.put("b", "{}", [])) for _ in range(2)][1]
        assert await store.body("b") == "{}" and await store.body("a") is None
        path.write_bytes(b"something else" * 1000)
        for _ in range(2):
            with pytest.raises(ResponseStoreError):
                await store.put("c", "{}", [])
        path.unlink()
        await responses._stores(store.put("d", "{}", []))
        await store.put("e", "{}", [])

    using(path, work)


@pytest.mark.parametrize("count", [FILES // 100, pytest.param(FILES, marks=pytest.mark.soak)])
def test_damaged_files(count: int, tmp_path: Path) -> None:
    """Bytes of a file are changed, also while it is open: each request ends well or with an error in a sentence."""
    path = tmp_path / "r"

    async def fill(store: ResponseStore) -> None:
        for i in range(6):
            await store.put(f"e{i}", '{"a": 1}' * 900, ITEMS * (1 + i), outputs=2)

    using(path, fill)
    sound = path.read_bytes()

    async def use(store: ResponseStore, rng: random.Random) -> None:
        if rng.random() < 0.5:
            path.write_bytes(damaged(sound, rng))
        for work in (
            store.items("e1"),
            store.page("e2", 3, "i4", newest_first=rng.random() < 0.5),
            store.append("e3", ITEMS),
            store.put("new", "{}", ITEMS),
            store.body("e4"),
            store.delete("e5"),
        ):
            try:
                found: Any = await work
                if isinstance(found, list):
                    responses.prepared(responses.ResponsesRequest(input="a", store=False), found)
            except (ResponseStoreError, RequestError) as error:
                assert str(error) and "\n" not in str(error)

    for number in range(count):
        rng = random.Random(number)
        path.write_bytes(damaged(sound, rng) if rng.random() < 0.7 else sound)
        Path(f"{path}-journal").unlink(missing_ok=True)
        if rng.random() < 0.1:
            Path(f"{path}-journal").write_bytes(damaged(sound, rng))
        try:
            using(path, lambda store, rng=rng: use(store, rng))  # type: ignore[misc]
        except RequestError as error:
            assert "cannot hold stored responses" in str(error)


def damaged(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 50))):
        at = rng.randrange(100 if rng.random() < 0.2 else len(changed))
        changed[at : at + 4] = rng.randbytes(4)
    if rng.random() < 0.2:
        del changed[rng.randrange(len(changed)) :]
    return bytes(changed)


@pytest.mark.fast
def test_a_damaged_item_is_an_error() -> None:
    body = responses.ResponsesRequest(input="a")
    for text in (
        "{",
        "[]",
        '{"type": "x"}',
        "[" * 100_000,
        '{"type": "message", "role": "user", "content": 1}',
    ):
        with pytest.raises(ResponseStoreError, match="begin a new one"):
            responses.prepared(body, [StoredItem("i", text)])


# ---- conversations


@pytest.mark.fast
@pytest.mark.parametrize("newest_first", [True, False])
def test_a_list_of_large_items_has_pages(newest_first: bool) -> None:
    """A list of all would have 16 MB: many clients that read it slowly would fill the memory."""
    items = [
        StoredItem(f"i{n}", f'"{"x" * size}"')
        for n, size in enumerate((400_000, 700_000, 3_000_000, 5, 5, 5))
    ]

    async def check(store: ResponseStore) -> None:
        await store.put("a", "{}", items)
        pages, after = list[list[str]](), None
        while True:
            page = await store.page("a", 2, after, newest_first=newest_first)
            assert page
            pages.append([item.id for item in page.items])
            if not page.has_more:
                break
            after = page.items[-1].id
        first = [["i0"], ["i1"], ["i2"], ["i3", "i4"], ["i5"]]
        assert pages == ([["i5", "i4"], ["i3"], ["i2"], ["i1"], ["i0"]] if newest_first else first)

    using(None, check)


def test_clients_of_one_conversation_lose_nothing(server: Running) -> None:
    id = server.ask("/v1/conversations", {})[2]["id"]

    def add(i: int) -> int:
        items = [{"role": "user", "content": f"{i} {n}"} for n in range(1 + i % 3)]
        return server.ask(f"/v1/conversations/{id}/items", {"items": items})[0]

    with ThreadPoolExecutor(16) as threads:
        assert set(threads.map(add, range(48))) == {200}
    items = server.ask(f"/v1/conversations/{id}/items?limit=100&order=asc")[2]["data"]
    texts = [item["content"] for item in items]
    assert sorted(texts) == sorted(f"{i} {n}" for i in range(48) for n in range(1 + i % 3))
    assert all(texts.index(f"{i} 1") == 1 + texts.index(f"{i} 0") for i in range(48) if i % 3)


def test_a_long_chain_of_responses(server: Running) -> None:
    previous: str | None = None
    for _ in range(40):
        body = {"input": "a", "max_output_tokens": 1, "previous_response_id": previous}
        status, _, response = server.ask("/v1/responses", body)
        assert status == 200, response
        previous = response["id"]
    listed = server.ask(f"/v1/responses/{previous}/input_items?limit=100")[2]
    assert len(listed["data"]) == 79 and not listed["has_more"]


@pytest.mark.parametrize(
    "id", ["resp_%", "resp_' OR 1=1 --", "resp_\0", "", "conv_1", "resp_" + "x" * 100_000, "resp__", "RESP_1"]
)
def test_forged_ids_find_nothing(server: Running, id: str) -> None:
    stored = server.ask("/v1/responses", {"input": "a", "max_output_tokens": 1})[2]["id"]
    for body in ({"previous_response_id": id or "resp_"}, {"conversation": id or "conv_"}):
        status, _, answer = server.ask("/v1/responses", {"input": "a", "max_output_tokens": 1, **body})
        assert status == 404 and len(answer["error"]["message"]) < 300
    for wrong in (f"/v1/conversations/{stored}", f"/v1/conversations/{stored.replace('resp_', 'conv_')}"):
        assert server.ask(wrong)[0] == 404
    assert server.ask(f"/v1/responses/{stored}/input_items?after=%27%20OR%201%3D1")[0] == 200


def test_a_stored_conversation_stalls_nobody(server: Running) -> None:
    """A request of 100 bytes goes on from 9,000 items, or reads one of them: others do not wait for it."""
    items = [{"role": "user", "content": f"{i} {'x' * 300}"} for i in range(9000)]
    body = {"input": items, "max_output_tokens": 1, "truncation": "auto"}
    status, _, response = server.ask("/v1/responses", body)
    assert status == 200, response
    more = {
        "input": "a",
        "max_output_tokens": 1,
        "truncation": "auto",
        "previous_response_id": response["id"],
    }
    for _ in range(ATTEMPTS):
        with watched(server) as harm, ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(server.ask, "/v1/responses", more) for _ in range(2)]
            path = f"/v1/responses/{response['id']}/input_items?limit=1"
            asked += [threads.submit(server.ask, path) for _ in range(20)]
            assert {one.result()[0] for one in asked} == {200}
        print(harm)
        assert harm.memory < 200 * MiB
        if harm.health < MAX_HEALTH:
            return
    raise AssertionError(harm)


def test_a_conversation_has_a_size(server: Running) -> None:
    text = "x" * 190_000
    id = server.ask("/v1/conversations", {})[2]["id"]
    items = {"items": [{"role": "user", "content": text}] * 20}
    statuses = [server.ask(f"/v1/conversations/{id}/items", items)[0] for _ in range(6)]
    assert statuses == [200] * (MAX_ENTRY // (20 * 190_000)) + [400] * (6 - MAX_ENTRY // (20 * 190_000))
    half = {"input": [{"role": "user", "content": ""}] * (MAX_ITEMS // 2 + 1), "truncation": "auto"}
    status, _, first = server.ask("/v1/responses", {**half, "max_output_tokens": 1})
    assert status == 200
    status, _, answer = server.ask("/v1/responses", {**half, "previous_response_id": first["id"]})
    assert status == 400 and f"{MAX_ITEMS} can be stored" in answer["error"]["message"]


@pytest.mark.parametrize("items", [[], [{"type": "reasoning", "summary": []}] * 3])
def test_a_conversation_without_messages_is_not_compacted(server: Running, items: list[Any]) -> None:
    status, _, answer = server.ask("/v1/responses/compact", {"input": items} if items else {})
    assert status == 400 and "no messages" in answer["error"]["message"]


@pytest.mark.fast
def test_many_summaries_are_joined_once() -> None:
    """Each copied the system message: 4 MB of a request took seconds, and a stored conversation more."""
    item = {"type": "compaction", "encrypted_content": responses.encoded_summary("x" * 200)}
    user = {"role": "user", "content": "hi"}
    given = {"model": "m", "input": [item, user, *[item] * 4000], "instructions": "y" * 1_000_000}
    body = responses.ResponsesRequest.model_validate(given)
    assert isinstance(body.input, list)
    begun = time.thread_time()
    messages = responses._messages(body, body.input)
    assert time.thread_time() - begun < 0.5
    summary = "Summary of the conversation so far:\n" + "x" * 200
    assert messages == [
        {"role": "system", "content": "\n\n".join(["y" * 1_000_000, *[summary] * 4001])},
        user,
    ]
    alone = responses.ResponsesRequest.model_validate({"model": "m", "input": [user, item]})
    assert responses._messages(alone, alone.input) == [{"role": "system", "content": summary}, user]  # type: ignore[arg-type]
