"""Which replica to prefer: the one that has computed the beginning of a prompt before, unless it has too much to do."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Replica = TypeVar("Replica", bound=Hashable)

PART = 256  # characters that a key adds to the one before it
MAX_PARTS = 256  # of a prompt
FIELDS = (
    "model",
    "system",
    "instructions",
    "tools",
    "messages",
    "prompt",
    "input",
)  # what a prompt is made of
REMEMBERED = 200_000  # keys
SLACK = 4  # requests more than the least busy one that a replica may have and still be preferred


def prefix_keys(body: bytes) -> list[bytes]:
    """A key for each part of a prompt, which stands for that part and all before it; of any dialect's JSON."""
    try:
        given = json.loads(body)
        text = json.dumps([given[name] for name in FIELDS if name in given], ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        return []
    keys, digest = [], hashlib.blake2b(digest_size=16)
    for begin in range(0, min(len(text), PART * MAX_PARTS) - PART + 1, PART):
        digest.update(text[begin : begin + PART].encode("utf-8", "surrogatepass"))
        keys.append(digest.digest())
    return keys


class PrefixAffinity:
    """Who has computed what, and who is busy with how many requests."""

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, Hashable] = OrderedDict()  # key -> replica; the latest last
        self._busy: Counter[Hashable] = Counter()

    def ranked(self, replicas: Iterable[Replica], keys: Sequence[bytes]) -> list[Replica]:
        """The replicas in the order in which to ask them."""
        by_load = list(replicas)
        random.shuffle(by_load)  # requests that come at once see the same load
        by_load.sort(key=lambda replica: self._busy[replica])
        for key in reversed(keys):
            holder = self._last.get(key)
            if holder in by_load:
                if self._busy[holder] <= self._busy[by_load[0]] + SLACK:
                    by_load.sort(key=lambda replica: replica != holder)
                break
        return by_load

    def begin(self, replica: Hashable, keys: Iterable[bytes]) -> None:
        self._busy[replica] += 1
        for key in keys:
            self._last[key] = replica
            self._last.move_to_end(key)
        while len(self._last) > REMEMBERED:
            self._last.popitem(last=False)

    def end(self, replica: Hashable) -> None:
        self._busy[replica] -= 1

    def forget(self, replica: Hashable) -> None:
        """It is gone, and what it had computed with it."""
        del self._busy[replica]
        self._last = OrderedDict((key, other) for key, other in self._last.items() if other != replica)
