"""The command line. Exit codes: 0, 1 for an error (one sentence on stderr), 2 for usage, 130 for Ctrl-C.

Start-up is fast because only the module of the requested command is imported. The handler of Ctrl-C is installed before
almost anything else, since until then Python answers Ctrl-C with a traceback.
"""

from __future__ import annotations

import io
import os
import signal
import sys

TYPE_CHECKING = False  # as in tandem/__init__.py
if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. `arguments`: those of the process if None."""
    if arguments is None:
        signal.signal(signal.SIGINT, _exit_on_interrupt)
        if sys.stderr is not None:
            sys.stderr = _remarks()
        _open_closed()
        import warnings

        warnings.formatwarning = lambda message, *_, **__: f"tandem: {message}\n"  # no lines of our source
    from importlib import import_module

    from tandem.cli.commands import parse
    from tandem.cli.options import UsageError
    from tandem.cli.terminal import printable
    from tandem.errors import TandemError

    options = parse(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # characters that the terminal cannot encode become "?"
    try:
        code = import_module(f"tandem.cli.{options.module}").main(options)
        sys.stdout.flush()
        return int(code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TandemError, OSError, MemoryError) as error:
        print(f"tandem: {printable(_sentence(error))}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _open_closed() -> None:
    """Replaces streams that the parent process closed, which are None in Python, by /dev/null."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


class _Unfailing(io.FileIO):
    """Drops what cannot be written: a full disk under a log must not end a server, nor change an exit code."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data) or len(data)  # type: ignore[arg-type]
        except OSError:
            return len(data)  # type: ignore[arg-type]


def _remarks() -> io.TextIOWrapper:
    """stderr, whose errors are ignored."""
    raw = _Unfailing(sys.stderr.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), sys.stderr.encoding, sys.stderr.errors, line_buffering=True
    )


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:  # str(error) would begin with the error number
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or "out of memory"


def _exit_on_interrupt(*_: object) -> None:
    """Exits at once on Ctrl-C during start-up and loading, when there is nothing to clean up."""
    if sys.stderr.isatty():
        os.write(2, b"\n")
    os._exit(130)


class interruptible:
    """A `with` block in which Ctrl-C raises KeyboardInterrupt, for work that has something to clean up."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
