"""Terminal input and output that commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tandem.errors import RequestError
from tandem.model.catalogue import Progress

# Line separators, marks that change the direction of text, and the byte order mark.
INVISIBLE = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
# Removed from output: files and models must not send escape codes, or show a text in another order than it has.
CONTROLS = {code: None for code in (*range(32), *range(127, 160), *INVISIBLE) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    return text.translate(CONTROLS)


def dim(text: str) -> str:
    return f"\033[2m{text}\033[0m"


def note(text: str) -> None:
    """Prints a remark to stderr if that is a terminal."""
    if sys.stderr.isatty():
        print(dim(printable(text)), file=sys.stderr, flush=True)


# JSON escapes other control characters itself.
ESCAPED = {code: f"\\u{code:04x}" for code in (*range(127, 160), *INVISIBLE)}


def print_json(data: Any) -> None:
    """Prints JSON. Infinities and NaN become null."""
    import json

    finite = json.loads(json.dumps(data, default=str), parse_constant=lambda _: None)
    print(json.dumps(finite, ensure_ascii=False, indent=2).translate(ESCAPED))


def human_size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table. Columns whose header ends in a colon are right-aligned."""
    right = [title.endswith(":") for title in header]
    cells = [[title.rstrip(":") for title in header], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        line = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        print("  ".join(line).rstrip())


def read_text(source: Path | None) -> str:
    """Reads UTF-8 text from a file, or from stdin for None."""
    try:
        data = sys.stdin.buffer.read() if source is None else source.read_bytes()
    except FileNotFoundError:
        raise RequestError(f"there is no file {source}: check the path") from None
    except IsADirectoryError:
        raise RequestError(f"{source} is a directory: name a file in it") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        name = "stdin" if source is None else str(source)
        raise RequestError(
            f"{name} is not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}): convert it with iconv"
        ) from None


def check_writable(file: Path | None) -> None:
    """Raises before minutes of work if `file` cannot be written. It opens the file, for access rights alone do not tell
    (root, /proc)."""
    if file is None:
        return
    try:
        is_new = not file.exists()
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError:
        raise RequestError(f"{file} cannot be written: name a file in a writable folder") from None


def without_folder(argument: str) -> str:
    """The argument without the folders of a path, also in --option=FILE, so that published data does not show them."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    is_path = value.startswith(("/", ".", "~")) or Path(value).exists()
    return f"{option}{equals}{Path(value).name if is_path else value}"


@contextmanager
def progress_bar(doing: str = "fetching") -> Iterator[Progress]:
    """Shows downloads and the like: a progress bar for each file on a terminal, else a line for each file."""
    tasks: dict[str, Any] = {}
    with ExitStack() as at_end:
        bars: Any = None

        def advance(name: str, done: int, total: int) -> None:
            nonlocal bars
            if not sys.stderr.isatty():
                if name not in tasks:
                    tasks[name] = print(
                        f"{doing} {printable(name)} ({human_size(total)})", file=sys.stderr, flush=True
                    )
                return
            bars = bars or at_end.enter_context(_bars())
            if name not in tasks:
                tasks[name] = bars.add_task(printable(name), total=total, completed=done)
            bars.update(tasks[name], completed=done)

        yield advance


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    return Progress(*columns, TimeRemainingColumn(compact=True), console=Console(stderr=True))
