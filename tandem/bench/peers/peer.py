"""llama.cpp as a peer of `tandem bench`: the same workloads in alternating rounds."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tandem.bench.peers.worker import SETTLE, Worker
from tandem.bench.result import Peer
from tandem.bench.rounds import Workload
from tandem.errors import DeviceError

SCRIPT = Path(__file__).with_name("llama_cpp_worker.py")
FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('llama_cpp') is None)"
ALL_LAYERS = 999
BLOCK = 256  # tokens: llama.cpp rounds contexts up to multiples of this


def check_peer(python: str) -> None:
    """Raises if that Python has no llama_cpp. Called before a model is loaded."""
    try:
        there = subprocess.run([python, "-c", FIND], check=False).returncode == 0
    except OSError as error:
        raise DeviceError(
            f"{python} cannot be run: give --peer a Python that has llama_cpp ({error})"
        ) from None
    if not there:
        raise DeviceError(
            "llama_cpp is not installed: pip install llama-cpp-python, or name a Python that has it with --peer"
        )


class LlamaCpp:
    """A model in a process of the peer's own Python, which sleeps during our rounds."""

    def __init__(self, python: str, model: Path, threads: int, gpu: bool, kv: str, vocab: int) -> None:
        check_peer(python)
        self._worker = Worker(python, SCRIPT, model, threads, 0, ALL_LAYERS if gpu else 0)
        self._kv, self._vocab, self._random = kv, vocab, np.random.default_rng(0)
        self._workload: Workload | None = None
        self.about: Peer = {
            "name": "llama.cpp",
            "version": self._worker.info["version"],
            "build": self._worker.info["system"],
        }

    def prepare(self, workload: Workload) -> bool:
        """Fills the KV cache to the workload's depth, with flash attention if that is faster there. Returns which."""
        best = {}
        for flash in (False, True) if self._kv == "f16" else (True,):
            self._open(workload, flash)
            self.round()  # to warm up
            best[flash] = self.round()
        flash = min(best, key=lambda which: best[which])
        self._open(workload, flash)
        return flash

    def round(self) -> float:
        """Seconds of a round."""
        assert self._workload
        self._worker.ask("rewind")
        time.sleep(SETTLE)
        if self._workload.kind == "decode":
            return float(self._worker.ask("steps", count=self._workload.tokens)["seconds"])
        return float(self._worker.ask("prefill", tokens=self._ids(self._workload.tokens))["seconds"])

    def _open(self, workload: Workload, flash: bool) -> None:
        if self._workload:
            self._worker.ask("close")
        prompts = [self._ids(workload.depth)] if workload.depth else []
        room = -(-workload.end // BLOCK) * BLOCK
        self._worker.ask(
            "open", prompts=prompts, sequences=workload.batch, flash=flash, room=room, kv=self._kv
        )
        self._workload = workload

    def _ids(self, count: int) -> Sequence[int]:
        found: list[int] = self._random.integers(0, self._vocab, count).tolist()
        return found

    def close(self) -> None:
        self._worker.close()
