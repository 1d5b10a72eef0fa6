"""API keys: a file with one a line. Only their digests are kept, and none is ever written to a log."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from tandem.errors import RequestError


class Keys:
    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def accept(self, presented: str | None) -> bool:
        """Takes as long for a wrong key as for a right one, whichever it is."""
        digest, found = _digest(presented or ""), False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found and bool(presented)


def read_keys(path: Path) -> list[str]:
    """The keys of a file, without comments (#) and empty lines."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the file of API keys {path} cannot be read: {error}") from None
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise RequestError(f"{path} holds no API key: write one a line")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise RequestError(f"{path} holds a key that no header can carry: use printable ASCII without spaces")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
