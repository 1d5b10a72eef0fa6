"""The command line. Exit codes: 0, 1 for an error (one sentence on stderr), 2 for usage, 130 for Ctrl-C.

Nothing heavy is imported here: each command's module is, when it is asked for. And next to nothing is before Ctrl-C
is handled: until then, Python answers it with a traceback.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # as in tandem/__init__.py
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; `arguments` are those of the process if None."""
    if arguments is None:
        signal.signal(signal.SIGINT, _leave)
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
            stream.reconfigure(errors="replace")  # a character the terminal cannot show is no error
    try:
        code = import_module(f"tandem.cli.{options.module}").main(options)
        sys.stdout.flush()
        return int(code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TandemError, OSError, MemoryError) as error:
        print(f"tandem: {printable(_sentence(error))}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _open_closed() -> None:
    """Python has None for streams that whoever started us has closed: they read and write nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:  # as Python prints it, there would be a number before
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or "out of memory"


def _leave(*_: object) -> None:
    """Ctrl-C while the program starts or loads: nothing is half done, so go at once and quietly."""
    if sys.stderr.isatty():
        os.write(2, b"\n")
    os._exit(130)


class interruptible:
    """In such a `with` block, Ctrl-C raises KeyboardInterrupt, for work that has something to tidy up."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
