"""The second start compiles nothing, and answers soon."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tests.cli.processes import COMMAND
from tests.packages import model_path

PROMPT = "The sky is blue because"
SOON = 3.0  # seconds


def first_byte(command: list[str], environment: dict[str, str]) -> float:
    """Seconds from the start of a process to the first byte it prints; or, where others take part of the machine, the
    processor time of all its threads, if that is less."""
    before, begun = os.times(), time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.read(1)
        seconds = time.perf_counter() - begun
        process.stdout.read()
    assert process.returncode == 0
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return min(seconds, used)


def sizes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_smollm2_answers_soon_and_compiles_nothing(lavapipe: str, tmp_path: Path) -> None:
    """Mesa keeps what it compiles beside our own cache: neither grows at the second start."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MESA_")}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    command = [*COMMAND, "run", str(model_path("smollm2")), "--raw", PROMPT, "-n", "1", "--device", lavapipe]
    cold = first_byte(command, environment)
    kept = sizes(tmp_path)
    assert any(path.suffix == ".pipelines" for path in kept) and len(kept) > 1
    warm = min(first_byte(command, environment) for _ in range(2))
    assert sizes(tmp_path) == kept
    print(f"first token after {cold:.2f} s, then {warm:.2f} s")
    assert warm < SOON
