"""The two sides of a comparison as processes that take commands, and the rule for rounds that others disturbed.

A worker reads one JSON object a line and answers each with one; its first line tells what it is. Commands:
  open {prompts}     start a sequence a prompt (an empty list: only get ready for prefill)
  steps {count}      let each sequence grow by so many tokens -> {seconds}
  prefill {tokens}   compute a prompt up to its first sampled token -> {seconds}
  close {}           forget the sequences
Each answer has `cpu`, the seconds of processor time it took, so that the time of other processes can be told.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

HERE = Path(__file__).parent
STEAL = 8  # columns of /proc/stat: user nice system idle iowait irq softirq steal
SETTLE = 0.05  # seconds between measurements, for the threads of the last one to fall asleep
DISTURBED = 0.05  # share of the machine's time that others may take in a round


@dataclass(frozen=True)
class Measured:
    seconds: float
    others: float  # share of the machine's processor time that went to other processes
    inside: float  # seconds in the compiled core, where the worker tells


class Pair(NamedTuple):
    """A round: both sides, one right after the other, and what the memory gave just before."""

    ours: Measured
    peer: Measured
    read_gb_per_s: float = 0.0

    @property
    def others(self) -> float:
        return max(self.ours.others, self.peer.others)


class Worker:
    def __init__(self, python: str, script: str, *arguments: object) -> None:
        command = [python, str(HERE / script), *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.info = self._answer()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def measure(self, do: str, **request: Any) -> Measured:
        time.sleep(SETTLE)
        busy, started = busy_seconds(), time.perf_counter()
        answer = self.ask(do, **request)
        capacity = (time.perf_counter() - started) * (os.cpu_count() or 1)
        others = max(0.0, busy_seconds() - busy - answer["cpu"]) / capacity
        return Measured(answer["seconds"], others, answer.get("inside", 0.0))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}: its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # which closes its stdin: that ends it


def first_output(command: list[str]) -> Measured:
    """Seconds from the start of a process to the first byte it prints. Python may keep its compiled modules."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    busy, before, started = busy_seconds(), os.times(), time.perf_counter()
    out, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=out, stderr=nowhere, env=environment) as process:
        assert process.stdout
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}")
    after = os.times()
    own = after.children_user + after.children_system - before.children_user - before.children_system
    capacity = (time.perf_counter() - started) * (os.cpu_count() or 1)
    return Measured(seconds, max(0.0, busy_seconds() - busy - own) / capacity, 0.0)


def busy_seconds() -> float:
    """Processor time of everything on the machine, and what its host took away."""
    with open("/proc/stat") as lines:
        fields = [int(field) for field in lines.readline().split()[1 : 1 + STEAL]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / float(os.sysconf("SC_CLK_TCK"))
