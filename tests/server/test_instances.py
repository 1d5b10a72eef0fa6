"""The registry of running servers: nobody else can put a process into it, and a full disk does not stop a server."""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import RequestError
from tandem.server import instances
from tests.cli.tiny_model import write_tiny_model
from tests.server.servers import PATIENCE

HOLD_LOCK = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
(fcntl.flock if sys.argv[2] == "flock" else fcntl.lockf)(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tandem" / "servers"


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        assert started.stdout
        started.stdout.close()


def write(file: Path, pid: int) -> Path:
    known = {"pid": pid, "url": "http://127.0.0.1:1", "models": ["tiny"], "started": 1.0, "api_keys": None}
    file.write_text(json.dumps(known))
    return file


@pytest.mark.fast
@pytest.mark.parametrize("lock", ["flock", "lockf"])
def test_a_forged_file_does_not_kill_a_process(folder: Path, lock: str) -> None:
    """A file names a victim, and another process holds its lock."""
    folder.mkdir(parents=True, mode=0o777)
    folder.chmod(0o777)
    with process("import time; print('here', flush=True); time.sleep(600)") as victim:
        file = write(folder / "1.json", victim.pid)
        with process(HOLD_LOCK, str(file), lock) as forger:
            assert forger.stdout and forger.stdout.readline() == "locked\n"
            assert instances.running() == []
            forged = instances.Instance(victim.pid, "http://127.0.0.1:1", ["tiny"], 1.0, None)
            assert instances.stop(forged, 1)
            time.sleep(0.2)
            assert victim.poll() is None


@pytest.mark.fast
def test_the_folder_is_closed_to_others(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    instances.running()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.fast
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_what_another_user_wrote_is_not_used(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    (file := folder / "1.json").touch()
    with process(HOLD_LOCK, str(file), "lockf") as forger:
        assert forger.stdout and forger.stdout.readline() == "locked\n"
        write(file, forger.pid)
        os.chown(file, 12345, 12345)
        assert instances.running() == []
        os.chown(file, os.geteuid(), 0)
        assert [instance.pid for instance in instances.running()] == [forger.pid]  # in its own name
    os.chown(folder, 12345, 12345)
    with pytest.raises(RequestError, match="not a folder of this user"):
        instances.running()


@pytest.mark.fast
def test_odd_files_are_passed_over(folder: Path) -> None:
    """A FIFO would be waited for, a link would be followed."""
    folder.mkdir(parents=True, mode=0o700)
    os.mkfifo(folder / "1.json")
    (folder / "2.json").symlink_to("/etc/passwd")
    (folder / "3.json").mkdir()
    (folder / "4.json").write_text("[" * 100_000)
    with (folder / "5.json").open("w") as file:
        file.write("[" * 100_000)
        file.flush()
        with process(HOLD_LOCK, str(folder / "5.json"), "lockf") as holder:
            assert holder.stdout and holder.stdout.readline() == "locked\n"
            assert instances.running() == []


@pytest.mark.fast
@pytest.mark.parametrize(
    "wrong",
    [{"url": 7}, {"models": "tiny"}, {"models": [7]}, {"started": "x"}, {"started": 1e300}, {"started": -1e300},
     {"started": float("nan")}, {"api_keys": 7}, {"pid": None}, {"more": 1}],
    ids=str,
)  # fmt: skip
def test_a_file_with_values_of_other_types_is_passed_over(folder: Path, wrong: dict[str, Any]) -> None:
    folder.mkdir(parents=True, mode=0o700)
    (file := folder / "1.json").touch()
    with process(HOLD_LOCK, str(file), "lockf") as holder:
        assert holder.stdout and holder.stdout.readline() == "locked\n"
        write(file, holder.pid)
        assert [instance.pid for instance in instances.running()] == [holder.pid]
        file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
        assert instances.running() == []


@pytest.mark.fast
def test_a_server_that_starts_stays_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tandem ps` at any moment of its registration removes nothing."""
    lockf, registered = fcntl.lockf, folder / f"{os.getpid()}.json"

    def look_first(*arguments: Any) -> None:
        assert instances.running() == []
        lockf(*arguments)

    monkeypatch.setattr(fcntl, "lockf", look_first)
    with instances.registered("http://127.0.0.1:1", ["tiny"], None):
        assert json.loads(registered.read_text())["models"] == ["tiny"]
    assert list(folder.iterdir()) == []


@pytest.mark.fast
def test_a_lock_names_its_process(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    file = folder / "x"
    file.touch()
    with process(HOLD_LOCK, str(file), "lockf") as holder, file.open() as opened:
        assert holder.stdout and holder.stdout.readline() == "locked\n"
        assert instances._lock_holder(opened.fileno()) == holder.pid


def test_a_full_disk_does_not_stop_the_server(tmp_path: Path) -> None:
    """No file can grow, as on a full disk; the server says which file, and works."""
    model = write_tiny_model(tmp_path / "tiny.gguf")
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-B", "-m", "tandem", "serve", str(model), "--port", "0"]

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    server = subprocess.Popen(command, stderr=subprocess.PIPE, env=env, text=True, preexec_fn=fill)
    assert server.stderr
    try:
        said = ""
        while "listening at" not in said:
            line = server.stderr.readline()
            assert line, f"it ended: {said}"
            said += line
        assert re.search(
            rf"will not show this server: {tmp_path}/cache/tandem/servers/{server.pid}.json: \w", said
        )
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.wait()
        server.stderr.close()
    assert not list((tmp_path / "cache" / "tandem" / "servers").iterdir())
