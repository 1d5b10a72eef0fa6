"""Stored responses and conversations of OpenAI's Responses API, in SQLite.

The oldest are forgotten when there are too many.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tandem.errors import RequestError

T = TypeVar("T")
Item = dict[str, Any]  # of a conversation: a message, a call, its output, reasoning
MAX_ENTRIES = 10_000  # stored responses and conversations
MAX_BYTES = 256 << 20  # of all of them
MAX_ENTRY = 16 << 20  # bytes of one of them
SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    id TEXT PRIMARY KEY, changed REAL NOT NULL, size INTEGER NOT NULL, body TEXT NOT NULL, items TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_age ON entries (changed);
"""


class ResponseStore:
    """Entries by id: the body of a response or conversation, and the items of the conversation so far."""

    def __init__(self, path: Path | None) -> None:
        """`path`: the file, which is made if need be; None: in memory, until the server ends."""
        self._path, self._lock = path, threading.Lock()
        self._connection: sqlite3.Connection | None = None

    async def get(self, id: str) -> tuple[dict[str, Any], list[Item]] | None:
        """(body, items) of an entry, or None."""
        return await self._run(lambda database: _read(database, id))

    async def put(self, id: str, body: dict[str, Any], items: list[Item]) -> None:
        """Adds or replaces an entry."""
        await self._run(lambda database: _write(database, id, body, items))

    async def append(self, id: str, items: list[Item]) -> bool:
        """Adds items to an entry; nothing that others add meanwhile is lost. Whether there was such an entry."""
        return await self._run(lambda database: _append(database, id, items))

    async def check(self, items: list[Item]) -> None:
        """Refuses items that are too large for an entry."""
        await asyncio.to_thread(lambda: _check_size(len(json.dumps(items))))

    async def delete(self, id: str) -> bool:
        """Whether there was such an entry."""
        return await self._run(
            lambda database: database.execute("DELETE FROM entries WHERE id = ?", (id,)).rowcount > 0
        )

    def close(self) -> None:
        with self._lock:
            if self._connection:
                self._connection.close()
                self._connection = None

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.to_thread(self._locked, work)

    def _locked(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = sqlite3.connect(self._path or ":memory:", check_same_thread=False)
                    self._connection.executescript(SCHEMA)
                with self._connection:  # a transaction
                    return work(self._connection)
            except sqlite3.Error as error:
                raise RequestError(
                    f"the stored responses cannot be used ({error}): send the request with store = false"
                ) from None


def _read(database: sqlite3.Connection, id: str) -> tuple[dict[str, Any], list[Item]] | None:
    row = database.execute("SELECT body, items FROM entries WHERE id = ?", (id,)).fetchone()
    return None if row is None else (json.loads(row[0]), json.loads(row[1]))


def _write(database: sqlite3.Connection, id: str, body: dict[str, Any], items: list[Item]) -> None:
    texts = json.dumps(body), json.dumps(items)
    size = sum(map(len, texts))
    _check_size(size)
    entry = (id, time.time(), size, *texts)
    database.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", entry)
    # Of the entries from the newest on, those past a limit are forgotten.
    database.execute(
        "DELETE FROM entries WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER newest AS place, "
        "sum(size) OVER newest AS total FROM entries WINDOW newest AS (ORDER BY changed DESC, id)) "
        "WHERE place > ? OR total > ?)",
        (MAX_ENTRIES, MAX_BYTES),
    )


def _append(database: sqlite3.Connection, id: str, items: list[Item]) -> bool:
    database.execute("BEGIN IMMEDIATE")  # another server may have the same file
    found = _read(database, id)
    if found is not None:
        _write(database, id, found[0], [*found[1], *items])
    return found is not None


def _check_size(size: int) -> None:
    if size > MAX_ENTRY:
        raise RequestError(
            f"the conversation has {size} bytes, and {MAX_ENTRY} can be stored: begin a new one, or send store = false "
            "without a conversation"
        )
