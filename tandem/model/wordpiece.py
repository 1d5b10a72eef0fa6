"""WordPiece, BERT's tokenizer: words of letters, or of one punctuation mark, are spelled with the longest tokens first.

GGUF files write a token that begins a word with U+2581 before it, and one that goes on without a mark.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

MAX_WORD = 100  # characters; a longer word is unknown
MAX_WORDS = 1 << 16  # in the cache
CHINESE = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class _Characters(dict[int, str]):
    """What becomes of each character before text is split at spaces, found out when it is first seen."""

    def __init__(self, lowercase: bool) -> None:
        self.lowercase = lowercase

    def __missing__(self, code: int) -> str:
        self[code] = result = self._changed(chr(code), code)
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

    def words(self, text: str) -> list[str]:
        """The words of a text, as they are looked up: in lower case and without accents if the vocabulary is so."""
        if self.lowercase and not text.isascii():
            text = unicodedata.normalize("NFD", text)
        return text.translate(self._characters).split()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self.words(text):
            known = self._words.get(word)
            ids += self._spell(word) if known is None else known
        return ids

    def _spell(self, word: str) -> list[int]:
        ids, begin = list[int](), 0
        while begin < len(word) <= MAX_WORD:
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
