"""Prefix-aware routing: prefer the replica whose prefix cache has a prompt's beginning, unless it is overloaded."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from tandem.server.http.bodies import MAX_VALUES, count_values

Replica = TypeVar("Replica", bound=Hashable)

CHUNK_CHARS = 256  # characters that a key adds to the key before it
MAX_CHUNKS = 256  # of a prompt
# Fields of any API's request.
PROMPT_FIELDS = "model", "system", "instructions", "tools", "messages", "prompt", "input"
MAX_KEYS = 200_000  # remembered
MAX_IMBALANCE = 4  # a preferred replica may have this many requests more than the least loaded one


def prefix_keys(body: bytes) -> list[bytes]:
    """A hash for each chunk of a prompt and all chunks before it, from the JSON body of any API. None for a body that a
    replica will refuse: this process does not parse it for nothing."""
    if count_values(body) > MAX_VALUES:
        return []
    try:
        given = json.loads(body)
        text = json.dumps([given[name] for name in PROMPT_FIELDS if name in given], ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        return []
    keys, digest = [], hashlib.blake2b(digest_size=16)
    for begin in range(0, min(len(text), CHUNK_CHARS * MAX_CHUNKS) - CHUNK_CHARS + 1, CHUNK_CHARS):
        digest.update(text[begin : begin + CHUNK_CHARS].encode("utf-8", "surrogatepass"))
        keys.append(digest.digest())
    return keys


class PrefixAffinity:
    """Remembers which replica last computed each prefix, and how many requests each replica has."""

    def __init__(self) -> None:
        self._holders: OrderedDict[bytes, Hashable] = OrderedDict()  # prefix key -> replica, in LRU order
        self._load: Counter[Hashable] = Counter()

    def ranked(self, replicas: Iterable[Replica], keys: Sequence[bytes]) -> list[Replica]:
        """The replicas, preferred first."""
        by_load = list(replicas)
        random.shuffle(by_load)  # requests that arrive together see the same load
        by_load.sort(key=lambda replica: self._load[replica])
        for key in reversed(keys):
            holder = self._holders.get(key)
            if holder in by_load:
                if self._load[holder] <= self._load[by_load[0]] + MAX_IMBALANCE:
                    by_load.sort(key=lambda replica: replica != holder)
                break
        return by_load

    def begin(self, replica: Hashable, keys: Iterable[bytes]) -> None:
        self._load[replica] += 1
        for key in keys:
            self._holders[key] = replica
            self._holders.move_to_end(key)
        while len(self._holders) > MAX_KEYS:
            self._holders.popitem(last=False)

    def end(self, replica: Hashable) -> None:
        self._load[replica] -= 1

    def forget(self, replica: Hashable) -> None:
        """Removes a replica that died."""
        del self._load[replica]
        self._holders = OrderedDict((key, other) for key, other in self._holders.items() if other != replica)
