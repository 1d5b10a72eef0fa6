"""Runs `tandem` as a process: plainly, until something shows, and on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

COMMAND = [sys.executable, "-m", "tandem"]
PATIENCE = 120.0  # seconds for anything to happen on a busy machine


def environment(home: Path, **changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**kept, "HF_HOME": str(home), "NO_PROXY": "*", "TERM": "xterm", **changes}


def tandem(
    *arguments: str | Path, env: dict[str, str] | None = None, stdin: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; both outputs as text."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], input=stdin, capture_output=True, env=env, timeout=PATIENCE
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def wait_for(pipe: int, pattern: bytes, seen: bytes = b"") -> bytes:
    """Reads until what was read has the pattern in it; everything read."""
    end = time.monotonic() + PATIENCE
    while not re.search(pattern, seen):
        ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{pattern!r} did not come within {PATIENCE:.0f} s, only {seen[-500:]!r}"
        try:
            more = os.read(pipe, 65536)
        except OSError:  # how a terminal says that its other end is closed
            more = b""
        assert more, f"the process ended before {pattern!r} came, with {seen[-500:]!r}"
        seen += more
    return seen


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid, self.fd, self.seen = pid, fd, b""

    def send(self, keys: bytes) -> None:
        self.seen = b""
        os.write(self.fd, keys)

    def expect(self, pattern: str) -> str:
        """Waits for a pattern in what came since the last `send`; all of that."""
        self.seen = wait_for(self.fd, pattern.encode(), self.seen)
        return self.seen.decode(errors="replace")

    def wait_for_rest(self) -> None:
        """Until it sleeps and has been sleeping for a while: it waits for the next key."""
        end, quiet, before = time.monotonic() + PATIENCE, 0, ""
        while quiet < 5 and time.monotonic() < end:
            time.sleep(0.02)
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            state, used = fields[0], " ".join(fields[11:13])  # S: sleeps; seconds of a processor
            quiet, before = quiet + 1 if state == "S" and used == before else 0, used

    def exit_code(self) -> int:
        """Reads to the end, as a terminal does, and waits."""
        while True:
            try:
                more = os.read(self.fd, 65536)
            except OSError:
                break
            if not more:
                break
            self.seen += more
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def on_terminal(*arguments: str | Path, env: dict[str, str]) -> Iterator[Terminal]:
    pid, fd = pty.fork()
    if pid == 0:
        os.execvpe(COMMAND[0], [*COMMAND, *map(str, arguments)], env)
    try:
        yield Terminal(pid, fd)
    finally:
        os.close(fd)  # hangs up: whatever still runs ends
        with suppress(ChildProcessError):  # waited for already
            os.waitpid(pid, 0)
