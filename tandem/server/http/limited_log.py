"""The server's log. Clients write to it with what they send, so the lines of a kind are limited."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter

MAX_LINES = 30  # of a kind in a minute
MAX_LENGTH = 1000  # characters of a message
MAX_KINDS = 100  # a library may log without a format
MINUTE = 60.0  # s


class LineFormatter(logging.Formatter):
    """A message is one line of limited length, whatever a client has put into it. A traceback follows it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        shown = text[:MAX_LENGTH] + "..." * (len(text) > MAX_LENGTH)
        return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", "?", shown.rstrip())


class LimitedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes at most MAX_LINES of a kind in a minute to stderr, and afterwards how many it left out.

    A record's kind is its attribute `kind`, or else its format. Records of kind None are not limited.
    """

    def __init__(self) -> None:
        super().__init__()
        self._end = 0.0
        self._counts: Counter[str] = Counter()
        self.setFormatter(LineFormatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        kind: str | None = getattr(record, "kind", str(record.msg))
        if time.monotonic() > self._end:
            self._start_minute()
        if kind is not None:
            kind = kind if kind in self._counts or len(self._counts) < MAX_KINDS else "other"
            self._counts[kind] += 1
            if self._counts[kind] > MAX_LINES:
                return
        super().emit(record)

    def _start_minute(self) -> None:
        left_out = {kind: count - MAX_LINES for kind, count in self._counts.items() if count > MAX_LINES}
        self._counts.clear()
        self._end = time.monotonic() + MINUTE
        for kind, count in left_out.items():
            message, arguments = "left out %d more lines of this kind: %s", (count, kind)
            super().emit(logging.LogRecord("tandem", logging.WARNING, "", 0, message, arguments, None))


def log_to_stderr() -> None:
    """Writes the log of the server and of its libraries to stderr."""
    handler = LimitedHandler()
    for name, level in (("tandem", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
