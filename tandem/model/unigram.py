"""The tokenizer of XLM-RoBERTa and its descendants (bge-m3, multilingual E5): SentencePiece's unigram model.

Of all ways to cut a text into tokens, it takes the likeliest one. A file has the character map that SentencePiece
compiled: a trie of UTF-8 bytes (a double array), and what becomes of each of its strings. The longest string that
matches is replaced; the result has one space between words.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from io import StringIO

import numpy as np

from tandem.errors import RequestError
from tandem.kernels.kernel import Array
from tandem.threads import throttle

UNKNOWN_PENALTY = 10.0  # below the least likely token
MAX_WORDS = 1 << 16  # in the cache
MAX_CACHED = 64  # characters of a word in the cache
MAX_REPLACEMENT = 64  # bytes that a string may become; of XLM-RoBERTa's map, 33 at most
MAX_REPLACED = 64 << 20  # characters of a text
STEPS = 256  # characters between two looks at the time
WORDS = re.compile("[^ ]+")
ASCII = re.compile(r"[\x00-\x7f]+(?![^\x00-\x7f])")  # without a character that one after it may change


class CharacterMap:
    def __init__(self, data: bytes) -> None:
        """Raises a ValueError if `data` is no character map."""
        size = int.from_bytes(data[:4], "little")
        if size % 4 or size > max(0, len(data) - 4):
            raise ValueError("its trie is cut short")
        self._units: list[int] = np.frombuffer(data[4 : 4 + size], "<u4").tolist()
        self._texts = data[4 + size :] + b"\0"
        if max(map(len, self._texts.split(b"\0"))) > MAX_REPLACEMENT:
            raise ValueError(f"a character becomes more than {MAX_REPLACEMENT} bytes")
        self._ascii = {code: self._one(bytes([code]))[0] for code in range(128)} if self._units else {}
        self._is_simple = not any(self._has_pair(code) for code in range(128))

    def replaced(self, text: str) -> str:
        if not self._units:
            return text
        written, at, steps = StringIO(), 0, 0
        while at < len(text):
            if self._is_simple and (run := ASCII.match(text, at)):
                written.write(run[0].translate(self._ascii))
                at = run.end()
                continue
            data = text[at : at + 64].encode(errors="replace")
            found, length = self._one(data)
            written.write(found)
            at += max(1, len(data[:length].decode(errors="ignore")))  # a damaged map may cut a character
            steps += 1
            if not steps % STEPS:
                throttle()
                if written.tell() > MAX_REPLACED:
                    raise RequestError(f"the text has more than {MAX_REPLACED} characters: shorten it")
        return written.getvalue()

    def _one(self, data: bytes) -> tuple[str, int]:
        """(what becomes of the longest string at the start of `data`, or else of its first character, its bytes)."""
        found, length = -1, 0
        for count, value in self._matches(data):
            found, length = value, count
        if length and found < len(self._texts):
            return self._texts[found : self._texts.index(b"\0", found)].decode(errors="replace"), length
        first = data[0]
        length = 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
        return data[:length].decode(errors="replace"), length

    def _matches(self, data: bytes) -> list[tuple[int, int]]:
        """(bytes, value) of all strings of the trie that `data` begins with."""
        units, found = self._units, []
        node = _offset(units[0])
        for count, byte in enumerate(data, 1):
            node ^= byte
            if node >= len(units) or (unit := units[node]) & 0x800000FF != byte:
                break
            node ^= _offset(unit)
            if unit >> 8 & 1 and node < len(units):
                found.append((count, units[node] & 0x7FFFFFFF))
        return found

    def _has_pair(self, first: int) -> bool:
        """Whether a string of the trie begins with this and another ASCII character."""
        units = self._units
        node = _offset(units[0]) ^ first if units else 0
        if not units or node >= len(units) or units[node] & 0x800000FF != first:
            return False
        node ^= _offset(units[node])
        return any(
            (at := node ^ second) < len(units) and units[at] & 0x800000FF == second
            for second in range(1, 128)
        )


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 0x200) >> 6)


class Unigram:
    def __init__(self, tokens: Mapping[str, int], scores: Array, unknown: int, characters: bytes) -> None:
        """`tokens`: those that plain text may become; a space stands for U+2581. `scores`: log-probabilities by id."""
        self._tokens = {text: (id, float(scores[id])) for text, id in tokens.items()}
        self._unknown, self._longest = unknown, max(map(len, tokens), default=1)
        self._unknown_score = (
            min((score for _, score in self._tokens.values()), default=0.0) - UNKNOWN_PENALTY
        )
        self._characters = CharacterMap(characters)
        # A token goes over the end of a word in few vocabularies.
        self._by_word = not any(" " in text[1:] for text in tokens)
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str, space: bool = True, most: int | None = None) -> list[int]:
        """`space`: the first word has a space before it, too. `most`: it stops once there are more ids."""
        words = WORDS.finditer(self._characters.replaced(text).replace("\u2581", " "))
        pieces = (f" {word[0]}" if i or space else word[0] for i, word in enumerate(words))
        ids: list[int] = []
        for piece in pieces if self._by_word else ["".join(pieces)]:
            if most is not None and len(ids) > most:
                break
            known = self._words.get(piece)
            if known is None:
                throttle()
                known = self._spell(piece)
                if len(piece) <= MAX_CACHED:
                    if len(self._words) >= MAX_WORDS:
                        self._words = {}
                    self._words[piece] = known
            unknown = known[:1] == ids[-1:] == [self._unknown]  # neighbours become one
            ids += known[1:] if unknown else known
        return ids

    def _spell(self, text: str) -> list[int]:
        """The tokens of the likeliest way to write a text."""
        tokens, longest = self._tokens, self._longest
        best = array("d", [0.0]) + array("d", [-np.inf]) * len(text)
        starts, last = (
            array("i", [0]) * (len(text) + 1),
            array("i", [0]) * (len(text) + 1),
        )  # of the last token, its id
        for begin in range(len(text)):
            if not begin & 1023:
                throttle()
            score, is_known = best[begin], False
            for end in range(begin + 1, min(len(text), begin + longest) + 1):
                token = tokens.get(text[begin:end])
                if token is not None:
                    is_known |= end == begin + 1
                    if score + token[1] > best[end]:
                        best[end], starts[end], last[end] = score + token[1], begin, token[0]
            if not is_known and score + self._unknown_score > best[begin + 1]:
                best[begin + 1], starts[begin + 1] = score + self._unknown_score, begin
                last[begin + 1] = self._unknown
        ids, end = list[int](), len(text)
        while end:
            end, id = starts[end], last[end]
            if not (ids and id == ids[-1] == self._unknown):  # neighbours become one
                ids.append(id)
        return ids[::-1]
