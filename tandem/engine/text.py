"""From sampled tokens to text as it may be shown: whole characters, and nothing of a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.model.tokenizer import Tokenizer


class TextStream:
    """Decodes token by token; holds back what may be the beginning of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        from tandem.model.tokenizer import StreamDecoder  # late: a start does not wait for it

        self._decoder = StreamDecoder(tokenizer, continues=True)
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token completes; `stopped` turns true at a stop string."""
        if not self._stop:
            return self._decoder.push(token)
        return self._release(self._held + self._decoder.push(token))

    def flush(self) -> str:
        """What was held back and turned out to be harmless."""
        if self.stopped:
            return ""
        text, self._held = self._held + self._decoder.flush(), ""
        found = self._find(text)
        return text if found < 0 else text[:found]

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        found = self._find(text)
        if found >= 0:
            self.stopped, self._held = True, ""
            return text[:found]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _find(self, text: str) -> int:
        places = [text.find(stop) for stop in self._stop]
        return min((place for place in places if place >= 0), default=-1)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
