"""The tokenizer of XLM-RoBERTa and its descendants (bge-m3, multilingual E5): SentencePiece's unigram model.

Of all ways to cut a text into tokens, it takes the likeliest one. A file has the character map that SentencePiece
compiled: a trie of UTF-8 bytes (a double array), and what becomes of each of its strings. The longest string that
matches is replaced; the result has one space between words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from tandem.kernels.kernel import Array
from tandem.threads import throttle

UNKNOWN_PENALTY = 10.0  # below the least likely token
MAX_WORDS = 1 << 16  # in the cache
MAX_CACHED = 64  # characters of a word in the cache
ASCII = re.compile(r"[\x00-\x7f]+(?![^\x00-\x7f])")  # without a character that one after it may change


class CharacterMap:
    def __init__(self, data: bytes) -> None:
        """`data`: the bytes of the trie (4 bytes), the trie, and texts that end with a NUL. Raises ValueError."""
        size = int.from_bytes(data[:4], "little")
        if size % 4 or size > max(0, len(data) - 4):
            raise ValueError
        self._units: list[int] = np.frombuffer(data[4 : 4 + size], "<u4").tolist()
        self._texts = data[4 + size :] + b"\0"
        self._ascii = {code: self._one(bytes([code]))[0] for code in range(128)} if self._units else {}
        self._is_simple = not any(self._has_pair(code) for code in range(128))

    def replaced(self, text: str) -> str:
        if not self._units:
            return text
        parts, at = list[str](), 0
        while at < len(text):
            if not len(parts) & 1023:
                throttle()
            if self._is_simple and (run := ASCII.match(text, at)):
                parts.append(run[0].translate(self._ascii))
                at = run.end()
                continue
            data = text[at : at + 64].encode(errors="replace")
            found, length = self._one(data)
            parts.append(found)
            # A damaged trie may have a part of a character: it stands for the whole one.
            at += max(1, len(data[:length].decode(errors="ignore")))
        return "".join(parts)

    def _one(self, data: bytes) -> tuple[str, int]:
        """(what becomes of the longest string at the start of `data`, or else of its first character, its bytes)."""
        found, length = -1, 0
        for count, value in self._matches(data):
            found, length = value, count
        if length:
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
            if unit >> 8 & 1 and node < len(units) and (value := units[node] & 0x7FFFFFFF) < len(self._texts):
                found.append((count, value))
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

    def encode(self, text: str, space: bool = True) -> list[int]:
        """`space`: the first word has a space before it, too."""
        words = [word for word in self._characters.replaced(text).replace("\u2581", " ").split(" ") if word]
        pieces = [f" {word}" if i or space else word for i, word in enumerate(words)]
        ids: list[int] = []
        for piece in pieces if self._by_word else ["".join(pieces)]:
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
        best = [0.0] + [-np.inf] * len(text)
        before: list[tuple[int, int]] = [(0, 0)] * (len(text) + 1)  # (where the last token begins, its id)
        for begin in range(len(text)):
            if not begin & 1023:
                throttle()
            score, is_known = best[begin], False
            for end in range(begin + 1, min(len(text), begin + longest) + 1):
                token = tokens.get(text[begin:end])
                if token is not None:
                    is_known |= end == begin + 1
                    if score + token[1] > best[end]:
                        best[end], before[end] = score + token[1], (begin, token[0])
            if not is_known and score + self._unknown_score > best[begin + 1]:
                best[begin + 1], before[begin + 1] = score + self._unknown_score, (begin, self._unknown)
        ids, end = list[int](), len(text)
        while end:
            end, id = before[end]
            if not (ids and id == ids[-1] == self._unknown):  # neighbours become one
                ids.append(id)
        return ids[::-1]
