"""Defers Ctrl-C while state that several requests share is being changed."""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from typing import Any


class deferred:
    """A `with` block that delays Ctrl-C until its end. It does nothing outside the main thread, which
    alone receives signals."""

    def __enter__(self) -> None:
        self._pending = False
        self._handler = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: Any) -> None:
        self._pending = True

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._pending:
                signal.raise_signal(signal.SIGINT)
