"""The measurements of a model: prefill, decode at batch sizes 1, 8 and 32, Python's share of a step, and TTFT."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.pairs import HERE, Pair, first_output
from benchmarks.result_table import Row, Work, seconds_row, share_row, speed_row
from tandem.bench.bandwidth import HostReads
from tandem.bench.machine import DISTURBED
from tandem.bench.peers.peer import SCRIPT
from tandem.bench.peers.worker import Worker, WorkerTiming, alternating
from tandem.bench.roofline import host_ops

TEXT = HERE.parent / "tests" / "models" / "text.txt"
PROMPT = "The sky is blue because"
PREFILL, OPENING = 512, 128  # tokens of the timed prompt, and of each prompt before timed decoding
# Sequences: steps a round; rounds are short, for the machine may change by the second.
STEPS = {1: 32, 8: 8, 32: 4}
MAX_TRIES = 3  # rounds for each that counts, while other processes disturb them
PYTHON_SHARE = 0.03  # of a decode step, at most

# model: ratios to reach in prefill and in decoding 1, 8 and 32 sequences
TARGETS = {
    "smollm2": (3.0, 1.4, 2.5, 4.0),
    "gemma-3-270m": (2.5, 1.2, 2.5, 2.5),
    "qwen2.5-coder-1.5b": (1.5, 0.97, 1.5, 1.5),
}

READ = 1e9  # bytes that a measurement of the memory reads, at least

Measure = Callable[[int], WorkerTiming]  # takes the number of the round


def alternate(
    ours: Measure, peer: Measure, rounds: int, read: Callable[[], float] = lambda: 0.0
) -> list[Pair]:
    """Alternating rounds of both sides, after one to warm up.

    A round in which other processes took part of the machine is followed by one more, within a limit; the least
    disturbed are kept, whatever they measured.
    """
    ours(0)
    peer(0)
    taken: list[Pair] = []
    while len(taken) < MAX_TRIES * rounds and sum(pair.others <= DISTURBED for pair in taken) < rounds:
        speed = read()
        taken.append(Pair(*alternating(len(taken) + 1, ours, peer), speed))
    kept = sorted(range(len(taken)), key=lambda i: taken[i].others)[:rounds]
    return [taken[i] for i in sorted(kept)]


class HostLimits:
    """Read bandwidth and int8 rate of all threads together.

    `nbytes` are read again and again, as a model's weights are: what stays in the caches between steps counts.
    """

    def __init__(self, threads: int, nbytes: float) -> None:
        self._threads, self._reads = threads, HostReads(threads, int(nbytes))

    def read_gb_per_s(self) -> float:
        return self._reads.rate(READ) / 1e9

    def int8_gop_per_s(self) -> float:
        """0: not known for this CPU."""
        return host_ops(self._threads) / 1e9


def measure_name(sequences: int) -> str:
    """Of decoding that number, or of prefill (0)."""
    return {0: f"prefill {PREFILL}", 1: "decode"}.get(sequences, f"decode, batch {sequences}")


class Comparison:
    """One model on both sides."""

    def __init__(
        self, name: str, path: Path, peer_python: str, threads: int, rounds: int, *, cpu_time: bool = False
    ) -> None:
        self.name, self.path, self.peer_python, self.threads, self.rounds, self.cpu_time = (
            name,
            path,
            peer_python,
            threads,
            rounds,
            cpu_time,
        )
        self.flash: dict[str, bool] = {}  # measure: whether llama.cpp was faster with flash attention

    def rows(self) -> Iterator[Row]:
        yield from self.speeds(dict(zip((0, *STEPS), TARGETS[self.name], strict=True)))
        yield from self.first_tokens()

    def speeds(self, targets: Mapping[int, float]) -> Iterator[Row]:
        """Prefill (0 sequences) and decoding, as far as there are targets."""
        with self.opened():
            for sequences, target in targets.items():
                yield from self._speed(sequences, target)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Both sides have loaded the model."""
        self.path.read_bytes()  # into the page cache
        # Tokens per sequence.
        room = -(-(OPENING + STEPS[1] * (MAX_TRIES * self.rounds + 1) + PREFILL) // 256) * 256
        with (
            Worker(
                sys.executable,
                HERE / "tandem_worker.py",
                self.path,
                self.threads,
                room,
                cpu_time=self.cpu_time,
            ) as self.ours,
            Worker(
                self.peer_python, SCRIPT, self.path, self.threads, room, cpu_time=self.cpu_time
            ) as self.peer,
        ):
            self.limits = HostLimits(self.threads, self.ours.info["bytes"])
            self.int8_gop_per_s = self.limits.int8_gop_per_s()
            self.ids: list[int] = self.peer.ask("tokenize", text=TEXT.read_text())["ids"]
            yield

    def first_tokens(self) -> Iterator[Row]:
        """Seconds from the start of a process to the first token it prints."""
        tandem = [
            str(Path(sys.executable).with_name("tandem")),
            "run",
            str(self.path),
            PROMPT,
            "--max-tokens",
            "1",
        ]
        tandem += ["--temperature", "0", "--device", "cpu", "--threads", str(self.threads)]
        worker = [sys.executable, str(HERE / "tandem_worker.py"), str(self.path), str(self.threads)]
        peer = [self.peer_python, str(SCRIPT), str(self.path), str(self.threads)]
        yield self._first_token("first token, CLI", tandem, [*peer, "--first-token-of-chat", PROMPT])
        yield self._first_token(
            "first token, Python", [*worker, "--first-token", PROMPT], [*peer, "--first-token", PROMPT]
        )

    def _speed(self, sequences: int, target: float) -> Iterator[Row]:
        """Prefill or decoding; with decoding, Python's share of our time."""
        measure, steps = measure_name(sequences), STEPS.get(sequences, 1)
        pairs = self.pairs(sequences)
        work = Work(steps, sequences, PREFILL, self.ours.info)
        yield speed_row(measure, work, pairs, target, self.int8_gop_per_s)
        if sequences and not self.cpu_time:  # the time in the core is of the clock
            shares = [1 - pair.ours.inside / pair.ours.seconds for pair in pairs]
            yield share_row(f"Python's share of {measure}", shares, pairs, PYTHON_SHARE)

    def pairs(self, sequences: int) -> list[Pair]:
        """Rounds of prefill (of no open sequences) or of decoding that number."""
        measure = measure_name(sequences)
        prompts = [self.ids[32 * i :][:OPENING] for i in range(sequences)]
        steps = STEPS.get(sequences, 1)

        def request(i: int) -> dict[str, Any]:
            if sequences:
                return {"do": "steps", "count": steps}
            return {"do": "prefill", "tokens": self.ids[48 * i % (len(self.ids) - PREFILL) :][:PREFILL]}

        self.flash[measure] = self._prefers_flash(prompts[:1], sequences, request)
        self.ours.ask("open", prompts=prompts)
        self.peer.ask("open", prompts=prompts, flash=self.flash[measure])
        pairs = alternate(
            lambda i: self.ours.measure(**request(i)),
            lambda i: self.peer.measure(**request(i)),
            self.rounds,
            self.limits.read_gb_per_s,
        )
        self.ours.ask("close")
        self.peer.ask("close")
        return pairs

    def _prefers_flash(
        self, prompt: list[list[int]], sequences: int, request: Callable[[int], dict[str, Any]]
    ) -> bool:
        """Which of its two ways to compute attention is faster for llama.cpp here (copies of one prompt will do)."""
        best = {}
        for flash in (False, True):
            self.peer.ask("open", prompts=prompt, sequences=sequences, flash=flash)
            best[flash] = min(self.peer.measure(**request(i)).seconds for i in range(2))
            self.peer.ask("close")
        return best[True] <= best[False]

    def _first_token(self, measure: str, ours: list[str], peer: list[str]) -> Row:
        pairs = alternate(lambda i: first_output(ours), lambda i: first_output(peer), self.rounds)
        return seconds_row(measure, pairs, target=1.0)
