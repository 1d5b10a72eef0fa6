"""Stored responses and conversations of OpenAI's Responses API, in SQLite.

An entry is a response or a conversation: its body, and the items of the conversation so far. Bodies and items are JSON
texts that are seldom parsed: most requests send them as they are. The oldest entries are forgotten when there are too
many.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tandem.errors import RequestError, ResponseStoreError

T = TypeVar("T")
Item = dict[str, Any]  # of a conversation: a message, a call, its output, reasoning
MAX_ENTRIES = 10_000  # stored responses and conversations
MAX_BYTES = 256 << 20  # of all of them
MAX_ENTRY = 16 << 20  # bytes of one of them
MAX_ITEMS = 10_000  # of one of them
MAX_PAGE = 1 << 20  # characters of a list of items, unless it has one item; clients ask for more
PATIENCE = 5.0  # s for a file that another program has locked
KIND = 0x54414E44  # SQLite's application_id of our files
DAMAGED = (sqlite3.Error, ValueError)  # what a damaged file raises: texts may be no UTF-8, and numbers texts
SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entries (
    id TEXT PRIMARY KEY, changed REAL NOT NULL, size INTEGER NOT NULL, outputs INTEGER NOT NULL, body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS items (
    entry TEXT NOT NULL REFERENCES entries (id) ON DELETE CASCADE, place INTEGER NOT NULL, id TEXT NOT NULL,
    body TEXT NOT NULL, UNIQUE (entry, place)
);
CREATE INDEX IF NOT EXISTS by_age ON entries (changed DESC, id, size);
PRAGMA application_id = {KIND};
PRAGMA user_version = 1;
COMMIT;
"""
# Of the entries from the newest on, those past a limit.
FORGET = """
DELETE FROM entries WHERE id IN (
    SELECT id FROM (
        SELECT id, row_number() OVER newest AS place, sum(size) OVER newest AS total
        FROM entries WINDOW newest AS (ORDER BY changed DESC, id)
    ) WHERE place > ? OR total > ?
)
"""


class StoredItem(NamedTuple):
    id: str
    text: str  # JSON


class Page(NamedTuple):
    """Some of an entry's items."""

    items: list[StoredItem]
    has_more: bool


class ResponseStore:
    """Entries by id. A thread of its own works on the file: one that is locked or slow holds up no other requests."""

    def __init__(self, path: Path | None) -> None:
        """`path`: the file, which is made if need be; None: in memory, until the server ends. Raises RequestError if it
        cannot be used."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, "tandem-responses")
        self._connection: sqlite3.Connection | None = None
        try:
            if path:
                _check_file(path)
            self._connection = _connect(path)
        except (*DAMAGED, OSError) as error:
            raise RequestError(
                f"{path} cannot hold stored responses ({_reason(error)}): name another file with --responses"
            ) from None

    async def body(self, id: str) -> str | None:
        """The body of an entry; None if there is none."""
        return await self._run(lambda database: _one(database, "SELECT body FROM entries WHERE id = ?", id))

    async def items(self, id: str) -> list[StoredItem] | None:
        """The items of an entry; None if there is none."""
        return await self._run(lambda database: _items(database, id))

    async def page(self, id: str, limit: int, after: str | None = None, *, newest_first: bool) -> Page | None:
        """Some items of a conversation, or those before a response: the first ones, or those after an item."""
        return await self._run(lambda database: _page(database, id, limit, after, newest_first))

    async def put(self, id: str, body: str, items: Iterable[StoredItem], outputs: int = 0) -> None:
        """Adds an entry. `outputs`: how many items, the last ones, are a response's own."""
        await self._run(lambda database: _put(database, id, body, list(items), outputs))

    async def append(self, id: str, items: Iterable[StoredItem]) -> bool:
        """Adds items to an entry; nothing that others add meanwhile is lost. Whether there was such an entry."""
        return await self._run(lambda database: _append(database, id, list(items)))

    async def delete(self, id: str) -> bool:
        """Whether there was such an entry."""
        return await self._run(
            lambda database: database.execute("DELETE FROM entries WHERE id = ?", (id,)).rowcount > 0
        )

    def close(self) -> None:
        self._thread.shutdown()
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection:
            with suppress(sqlite3.Error):
                connection.close()

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        until = time.monotonic() + PATIENCE
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work, until)

    def _transaction(self, work: Callable[[sqlite3.Connection], T], until: float) -> T:
        """`until`: when the request has waited long enough, for those before it too."""
        try:
            patience = max(0.0, until - time.monotonic())
            if self._connection is None:
                self._connection = _connect(self._path, patience)
            self._connection.execute(f"PRAGMA busy_timeout = {int(1000 * patience)}")
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # commits or rolls back
                return work(self._connection)
        except DAMAGED as error:
            if self._path:  # it may have been replaced
                self._disconnect()
            raise ResponseStoreError(
                f"the stored responses cannot be used ({_reason(error)}): try again, or send store = false"
            ) from None


def stored_items(items: Iterable[Item]) -> list[StoredItem]:
    return [StoredItem(item["id"], json.dumps(item)) for item in items]


def parsed(items: Iterable[StoredItem]) -> list[Item]:
    """Raises ValueError if what is stored is damaged."""
    return [json.loads(item.text) for item in items]


def check_size(items: list[StoredItem], *, size: int = 0, count: int = 0) -> int:
    """Refuses what is too large for an entry; returns its bytes. `size`, `count`: bytes and items beside these."""
    size += sum(len(item.text) + len(item.id) for item in items)
    count += len(items)
    if size > MAX_ENTRY or count > MAX_ITEMS:
        raise RequestError(
            f"the conversation has {size} bytes and {count} items, and {MAX_ENTRY} and {MAX_ITEMS} can be stored: "
            "begin a new one, or send store = false without a conversation"
        )
    return size


# ---- the file


def _check_file(path: Path) -> None:
    """Makes the file if it is not there: for this user alone, since it has prompts."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(None, "this is no regular file")


def _connect(path: Path | None, patience: float = PATIENCE) -> sqlite3.Connection:
    connection = sqlite3.connect(path or ":memory:", patience, isolation_level=None, check_same_thread=False)
    try:
        kind, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        is_empty = not connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if (kind, version) != (KIND, 1) and not is_empty:
            raise sqlite3.DatabaseError("it is a database of another program or version")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # what is forgotten does not stay in the file
        if is_empty:
            connection.executescript(SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split())[:200]


# ---- in a transaction


def _one(database: sqlite3.Connection, query: str, *values: Any) -> Any:
    """The first column of the first row, or None."""
    row = database.execute(query, values).fetchone()
    return None if row is None else row[0]


def _exists(database: sqlite3.Connection, id: str) -> bool:
    return _one(database, "SELECT 1 FROM entries WHERE id = ?", id) is not None


def _items(database: sqlite3.Connection, id: str) -> list[StoredItem] | None:
    if not _exists(database, id):
        return None
    rows = database.execute("SELECT id, body FROM items WHERE entry = ? ORDER BY place", (id,))
    return [StoredItem(*map(str, row)) for row in rows]


def _page(
    database: sqlite3.Connection, id: str, limit: int, after: str | None, newest_first: bool
) -> Page | None:
    outputs = _one(database, "SELECT outputs FROM entries WHERE id = ?", id)
    if outputs is None:
        return None
    end = _one(database, "SELECT count(*) FROM items WHERE entry = ?", id) - int(outputs)
    place = _one(database, "SELECT place FROM items WHERE entry = ? AND id = ?", id, after)
    if newest_first:
        begin, end, order = 0, end if place is None else min(int(place), end), "DESC"
    else:
        begin, order = 0 if place is None else int(place) + 1, "ASC"
    rows = database.execute(
        f"SELECT id, body FROM items WHERE entry = ? AND place >= ? AND place < ? ORDER BY place {order} LIMIT ?",
        (id, begin, end, limit + 1),
    )
    found, size = list[StoredItem](), 0
    for row in rows:
        size += len(str(row[1]))
        if len(found) == limit or (found and size > MAX_PAGE):
            return Page(found, has_more=True)
        found.append(StoredItem(*map(str, row)))
    return Page(found, has_more=False)


def _put(database: sqlite3.Connection, id: str, body: str, items: list[StoredItem], outputs: int) -> None:
    size = check_size(items, size=len(body.encode()))
    database.execute("DELETE FROM entries WHERE id = ?", (id,))
    database.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", (id, time.time(), size, outputs, body))
    _insert(database, id, 0, items)


def _append(database: sqlite3.Connection, id: str, items: list[StoredItem]) -> bool:
    row = database.execute(
        "SELECT size, (SELECT count(*) FROM items WHERE entry = entries.id) FROM entries WHERE id = ?", (id,)
    ).fetchone()
    if row is None:
        return False
    size, count = map(int, row)
    size = check_size(items, size=size, count=count)
    database.execute("UPDATE entries SET size = ?, changed = ? WHERE id = ?", (size, time.time(), id))
    _insert(database, id, count, items)
    return True


def _insert(database: sqlite3.Connection, id: str, first: int, items: list[StoredItem]) -> None:
    rows = ((id, first + i, *item) for i, item in enumerate(items))
    database.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", rows)
    database.execute(FORGET, (MAX_ENTRIES, MAX_BYTES))
