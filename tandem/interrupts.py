"""Ctrl-C at a time that suits: what several requests share must not be left half done by one of them."""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from typing import Any


class deferred:
    """In such a `with` block Ctrl-C waits for its end, as it does for any call into C; it only ever comes to the main
    thread."""

    def __enter__(self) -> None:
        self._came = False
        self._before = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
        if self._before is not None:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: Any) -> None:
        self._came = True

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._came:
                signal.raise_signal(signal.SIGINT)
