"""WordPiece, BERT's tokenizer: words of letters, or of one punctuation mark, are spelled with the longest tokens first.

GGUF files write a token that begins a word with U+2581 before it, and one that goes on without a mark.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping

PIECE = 1 << 13  # characters of a text that are changed at once: other threads wait meanwhile
MAX_WORD = 100  # characters; a longer word is unknown
MAX_WORDS = MAX_CHARACTERS = 1 << 16  # in the caches
CHINESE = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class _Characters(dict[int, str]):
    """What becomes of each character before text is split at spaces, found out when it is first seen."""

    def __init__(self, lowercase: bool) -> None:
        self.lowercase = lowercase

    def __missing__(self, code: int) -> str:
        # Of each character alone: putting many marks in order takes the square of their number, and they are left out.
        parts = unicodedata.normalize("NFD", chr(code)) if self.lowercase else chr(code)
        if len(self) >= MAX_CHARACTERS:
            self.clear()
        self[code] = result = "".join(self._changed(part, ord(part)) for part in parts)
        return result

    def _changed(self, character: str, code: int) -> str:
        kind = unicodedata.category(character)
        if character in "\t\n\r" or kind == "Zs":
            return " "
        if code == 0xFFFD or kind in ("Cc", "Cf", "Co", "Cs") or (self.lowercase and kind == "Mn"):
            return ""
        is_symbol = kind[0] == "P" or (33 <= code <= 126 and not character.isalnum())
        if is_symbol or any(first <= code <= last for first, last in CHINESE):
            return f" {character} "
        return character.lower() if self.lowercase else character


class WordPiece:
    def __init__(self, tokens: Mapping[str, int], unknown: int) -> None:
        """`tokens`: those that plain text may become; a space stands for the mark."""
        self._tokens, self._unknown, self._longest = tokens, unknown, max(map(len, tokens), default=0)
        # Vocabularies for text in lower case have no tokens with capital letters.
        self.lowercase = any(f" {letter}" not in tokens for letter in "ABEST")
        self._characters = _Characters(self.lowercase)
        self._words: dict[str, list[int]] = {}

    def words(self, text: str) -> Iterator[list[str]]:
        """The words of a text piece by piece, as they are looked up: in lower case and without accents if the
        vocabulary is so. A word that is too long may be shortened; it stays too long."""
        left = ""  # the beginning of a word that may go on
        for begin in range(0, len(text), PIECE):
            changed = left + text[begin : begin + PIECE].translate(self._characters)
            words = changed.split()
            left = words.pop()[: MAX_WORD + 1] if words and not changed[-1].isspace() else ""
            yield words
        yield [left] * bool(left)

    def encode(self, text: str) -> Iterator[list[int]]:
        """The ids of a text piece by piece."""
        for words in self.words(text):
            ids: list[int] = []
            for word in words:
                known = self._words.get(word)
                ids += self._spell(word) if known is None else known
            yield ids

    def _spell(self, word: str) -> list[int]:
        if len(word) > MAX_WORD:
            return [self._unknown]
        ids, begin = list[int](), 0
        while begin < len(word):
            mark = "" if begin else " "
            for end in range(min(len(word), begin + self._longest), begin, -1):
                if (id := self._tokens.get(mark + word[begin:end])) is not None:
                    ids.append(id)
                    begin = end
                    break
            else:
                break
        if begin < len(word):
            ids = [self._unknown]
        if len(self._words) >= MAX_WORDS:
            self._words = {}
        self._words[word] = ids
        return ids
