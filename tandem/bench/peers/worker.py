"""Worker processes that run one side of a comparison.

A worker reads a JSON object a line and answers each with one. The first line that it prints describes it. Commands:
  open {prompts}     start a sequence for each prompt (an empty list: only prepare for prefill)
  steps {count}      generate `count` tokens in each sequence -> {seconds}
  prefill {tokens}   compute a prompt up to its first sampled token -> {seconds}
  close {}           drop the sequences
Each answer has `cpu`, the processor seconds of the command, from which the time of other processes follows.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tandem.bench.machine import busy_seconds
from tandem.errors import DeviceError

SETTLE = 0.05  # seconds between measurements, for the threads of the last one to fall asleep
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class WorkerTiming:
    seconds: float
    others: float  # share of the machine's processor time that went to other processes
    inside: float  # seconds in the compiled core, if the worker reports them


class Worker:
    def __init__(self, python: str, script: Path, *arguments: object, cpu_time: bool = False) -> None:
        """`cpu_time`: seconds are those that the worker computed, for one thread where others use the machine."""
        self._cpu_time = cpu_time
        command = [python, str(script), *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.info = self._answer()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def measure(self, do: str, **request: Any) -> WorkerTiming:
        time.sleep(SETTLE)
        busy, started = busy_seconds(), time.perf_counter()
        answer = self.ask(do, **request)
        if self._cpu_time:
            return WorkerTiming(answer["cpu"], 0.0, answer.get("inside", 0.0))
        capacity = (time.perf_counter() - started) * (os.cpu_count() or 1)
        others = max(0.0, busy_seconds() - busy - answer["cpu"]) / capacity
        return WorkerTiming(answer["seconds"], others, answer.get("inside", 0.0))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise DeviceError(
                f"a worker process failed with status {self._process.wait()}: see its message above"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()  # closes its stdin, which ends the worker

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def alternating(i: int, ours: Callable[[int], A], peer: Callable[[int], B]) -> tuple[A, B]:
    """Round `i` of both sides; which is first alternates."""
    if i % 2:
        return ours(i), peer(i)
    theirs = peer(i)
    return ours(i), theirs
