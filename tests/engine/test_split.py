"""A model's layers on several devices: the tokens are those of one, all devices are busy, and failures are told."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from tandem import LLM, cli
from tandem.cli import run
from tandem.devices.backends import open_device
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.split import balance
from tandem.devices.split.cut import cut, layer_starts
from tandem.devices.split.device import SplitDevice
from tandem.devices.split.stage import Stage, StepBuffers
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.engine.prompt_lookup import PromptLookup
from tandem.engine.sequence import Sequence
from tandem.errors import DeviceError, DeviceLostError, DoesNotFitError, RequestError
from tandem.kernels.abi import KV_BLOCK
from tandem.model.model import open_model
from tandem.program.validate import validate
from tests.cli.tiny_model import write_tiny_model
from tests.engine.simulation import SimulatedEngine, expected
from tests.engine.tiny_models import opened, write_model
from tests.engine.workloads import CONTEXT, Workload, random_workload, serve
from tests.models.test_reference import GOLDENS
from tests.program.programs import PASS_SETS, build, formats_of, golden, real_config

GOLDEN = GOLDENS / "gemma3-pattern3.gguf"  # four layers
STOPS = frozenset(range(0, 320, 20))


@contextmanager
def split_engine(path: Path, *split: int, **options: Any) -> Iterator[Engine]:
    model, device = open_model(path), SplitDevice([CPUDevice(1) for _ in split], split)
    try:
        yield Engine.load(model, device, **{"context": CONTEXT, "batch": 8, **options})
    finally:
        device.close()
        model.gguf.close()


def tokens_of(sequences: list[Sequence], workload: Workload) -> list[list[int]]:
    return [
        [sampled.id for sampled in sequence.generated]
        for sequence, arrival in zip(sequences, workload.arrivals, strict=True)
        if arrival.cancelled is None
    ]


# ---- cutting


@pytest.mark.fast
@pytest.mark.parametrize("passes", PASS_SETS.values(), ids=list(PASS_SETS))
@pytest.mark.parametrize("name", ["gemma3-pattern3", "llama", "qwen2", "cohere2", "gpt-oss"])
def test_parts_are_programs_of_their_own(name: str, passes: tuple[str, ...]) -> None:
    program = golden(name, passes)
    starts = layer_starts(program)
    parts = cut(program, starts, [1, *[1] * (len(starts) > 2), len(starts) - 1 - (len(starts) > 2)])
    assert [launch.name for part in parts for launch in part.program.launches] == [
        launch.name for launch in program.launches
    ]
    for part in parts:
        validate(part.program, part.entering)
        assert sum(tensor.arena == "kv" for tensor in part.tensor_map) == len(part.layers)
    assert sum(part.program.arena_bytes["kv"] for part in parts) == program.arena_bytes["kv"]
    assert not parts[0].entering and not parts[-1].leaving
    with pytest.raises(Exception, match="nothing has written it"):
        validate(parts[1].program)


@pytest.mark.fast
def test_little_crosses_and_nothing_is_there_twice() -> None:
    config = real_config("Gemma 3 27B")
    program = build(config, formats_of(config, mixed=True), tokens=1, rows=1)
    parts = cut(program, layer_starts(program), [20, 42])
    crossing = sum(tensor.nbytes for tensor in parts[0].leaving)
    assert crossing <= 5376 * 4 + 16 * 5376 * 1.5  # the residual of a token, and a tile of its norm
    head = next(tensor for tensor in parts[0].tensor_map if tensor.name == "token_embd.weight")
    tables = 2 * 2048 * 128 * 4
    both = sum(part.program.arena_bytes["weights"] for part in parts)
    assert program.arena_bytes["weights"] + head.nbytes <= both
    assert both <= program.arena_bytes["weights"] + head.nbytes + tables + 10000


@pytest.mark.fast
@pytest.mark.parametrize(
    ("rates", "free", "rows", "counts"),
    [
        ((1.0, 1.0), (1e12, 1e12), 2, (33, 29)),  # the head takes as long as some layers
        ((3.0, 1.0), (1e12, 1e12), 2, (49, 13)),
        ((3.0, 1.0), (5e9, 1e12), 2, (16, 46)),  # layers of 0.25 GB each, and the embedding
        ((3.0, 1.0), (5e9, 6e9), 2, (32, 30)),  # more than their own memory: some of the host's, too
        ((1.0, 1.0, 2.0), (1e12, 1e12, 1e12), 4, (16, 16, 30)),
        # One sequence has nothing from a device that others keep busy.
        ((3.0, 1.0), (1e12, 1e12), 1, (61, 1)),
        ((1.0, 2.0, 1.5), (1e12, 8e9, 1e12), 1, (1, 28, 33)),
    ],
)
def test_layers_go_where_they_are_computed_fastest(
    rates: tuple[float, ...],
    free: tuple[float, ...],
    rows: int,
    counts: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = real_config("Gemma 3 27B")
    program = build(config, formats_of(config, mixed=False), tokens=64, rows=rows)
    found = iter(rates)
    monkeypatch.setattr(balance, "_rate", lambda *args: next(found))
    devices = [Card(nbytes) for nbytes in free]
    chosen = balance.balance(program, layer_starts(program), devices)  # type: ignore[arg-type]
    assert tuple(chosen) == counts


class Card:
    """A GPU of which only the memory matters: its own, and some of the host's."""

    name, loaders, workers, shares_memory = "card", 1, 1, False

    def __init__(self, nbytes: float) -> None:
        self.nbytes = nbytes

    def free_memory(self) -> tuple[float, float]:
        return self.nbytes, self.nbytes + 4e9


# ---- the same tokens


@pytest.mark.parametrize(
    ("architecture", "format", "split", "kv", "prompt_lookup"),
    [
        ("llama", "Q4_0", (1, 1), "f16", False),
        ("gemma3", "Q4_K", (1, 1, 1), "q8", False),
        ("gemma3", "F32", (2, 1), "f32", True),
    ],
)
def test_workloads_get_the_tokens_of_one_device(
    architecture: str, format: str, split: tuple[int, ...], kv: str, prompt_lookup: bool, tmp_path: Path
) -> None:
    """Requests come and go, share beginnings, wait for blocks, have biases and penalties, and draft tokens."""
    path = write_model(tmp_path / "tiny.gguf", format, architecture)
    rng = np.random.default_rng(7)
    workloads = [random_workload(rng, requests=8, prompt=90, answer=20) for _ in range(6)]
    proposer = PromptLookup() if prompt_lookup else None
    with (
        opened(path, context=CONTEXT, batch=8, kv=kv, prefix_caching=False) as one,
        split_engine(path, *split, kv=kv, proposer=proposer) as engine,
    ):
        for workload in workloads:
            alone = []
            for arrival in workload.arrivals:
                sequence = one.submit(list(arrival.prompt), arrival.params, STOPS)
                while sequence.finish_reason is None:
                    one.step()
                alone.append(sequence)
            assert tokens_of(serve(engine, workload, STOPS), workload) == tokens_of(alone, workload)
            assert engine.cache.free_blocks == engine.cache.blocks
        logits = [each.logits(list(range(50))) for each in (one, engine)]
        assert logits[0].tobytes() == logits[1].tobytes()


class OnlyOneToken:
    """A constraint that allows one token at each position."""

    ended = False

    def __init__(self) -> None:
        self.at = 0

    def write_masks(self, rows: np.ndarray, draft: tuple[int, ...]) -> None:
        assert not draft
        rows[0] = 0
        rows[0, self.at // 32] = 1 << self.at % 32

    def accept(self, token: int) -> bool:
        assert token == self.at
        self.at += 9
        return True


def test_masks_reach_the_last_device(tmp_path: Path) -> None:
    with split_engine(write_model(tmp_path / "tiny.gguf", "Q4_0"), 1, 1) as engine:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        sequences = [
            engine.new_sequence([4, 5], params, constraint=constraint)
            for constraint in (None, OnlyOneToken())
        ]  # type: ignore[arg-type]
        for sequence in sequences:
            engine.enqueue(sequence)
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
        assert [sampled.id for sampled in sequences[1].generated] == [0, 9, 18, 27, 36]


def test_intermediates_embeddings_and_saved_conversations(tmp_path: Path) -> None:
    """Also from one device to several, and back."""
    prompt = [(7 * i) % 250 + 3 for i in range(75)]
    options: dict[str, Any] = {"threads": 1, "context": 128, "batch": 2}
    with (
        LLM(GOLDEN, device="cpu", **options) as one,
        LLM(GOLDEN, device="cpu,cpu", split=[3, 1], **options) as split,
    ):
        names = ["embedding", "blk.0.out", "blk.2.attn", "blk.3.ffn_out", "result_norm", "logits"]
        captured = [llm.capture(prompt[:20], names) for llm in (one, split)]
        for name in names:
            assert captured[0][name].tobytes() == captured[1][name].tobytes(), name
        assert (one.embed(prompt) == split.embed(prompt)).all()
        assert len(split.engine.step_slots[0].recording.replay_timed()) == len(split.engine.program.launches)
        assert one.save(prompt, tmp_path / "one") == split.save(prompt, tmp_path / "split") == 64
        assert (tmp_path / "one").read_bytes() == (tmp_path / "split").read_bytes()
    with LLM(GOLDEN, device="cpu,cpu", **options) as split:
        for stage in split.device.chain:  # type: ignore[attr-defined]
            arenas = set(stage.device._arenas)
            assert arenas == set(stage.part.program.arena_bytes), "nothing is left of what was measured"
        assert split.restore(tmp_path / "one") == prompt[:64]
        assert split.save([*prompt[:64], 1], tmp_path / "again") == 64
    assert (tmp_path / "again").read_bytes() == (tmp_path / "one").read_bytes()


def test_the_command_line_prints_the_layers_of_each_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, notes = str(write_tiny_model(tmp_path / "tiny.gguf", layers=5)), list[str]()
    monkeypatch.setattr(run, "note", notes.append)

    def answer(*options: str) -> str:
        assert cli.main(["run", path, "tell me a tale", "-n", "9", "--threads", "2", *options]) == 0
        return capsys.readouterr().out

    expected = answer("--device", "cpu")
    assert answer("--device", "cpu,cpu", "--split", "4,1", "--prompt-lookup") == expected
    assert any("layers 0 to 3 on the CPU" in note and "; layers 4 to 4 on" in note for note in notes)
    assert answer("--device", "cpu,cpu,cpu", "--split", "auto", "--draft", path) == expected
    assert cli.main(["run", path, "x", "--device", "cpu,cpu", "--split", "3,3"]) == 1
    assert "the model has 5 layers, not 6" in capsys.readouterr().err


# ---- several steps in flight


@pytest.mark.fast
@pytest.mark.parametrize("seed", range(20))
def test_each_step_has_its_part_of_the_sequences(seed: int) -> None:
    rng = random.Random(seed)
    stages, windows = rng.randint(2, 4), rng.choice([(0,), (0, 20), (16, 33)])
    blocks = tuple(128 // KV_BLOCK + rng.randint(0, 20) for _ in windows)
    engine = SimulatedEngine(
        windows=windows,
        blocks=blocks,
        context=128,
        batch=6,
        tokens=rng.choice([8, 40]),
        step_slots=stages,
        draft_tokens=rng.choice([0, 9]),
    )
    engine.scheduler.stages = stages
    sequences = []
    for step in range(80):
        if rng.random() < 0.3 and step < 60:
            prompt = [rng.choice([1, 4, 6, 5, 2]) for _ in range(rng.randint(1, 60))]
            params = SamplingParams(max_tokens=rng.randint(1, 40), priority=rng.randint(0, 1))
            sequences.append(engine.submit(prompt, params))
        elif sequences and rng.random() < 0.05:
            engine.cancel(rng.choice(sequences))
        engine.step()
        flying = [
            chunk.sequence
            for step_slot in engine._in_flight
            for chunk in step_slot.chunks
            if chunk.samples_next
        ]
        assert len(flying) == len(set(flying)), "a sequence is sampled by two steps in flight"
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    for sequence in sequences:
        ids = [sampled.id for sampled in sequence.generated]
        assert ids == expected(sequence.request.prompt, len(ids), windows, engine.repeats)
    while engine._in_flight:
        engine.step()
    engine.check_idle()


MEETINGS = range(12, 24)  # steps: those before have prompts, in those after some have ended


def let_meet(stages: list[Stage]) -> None:
    """Each stage begins a step when the one after it begins the step before: only if both are given steps at a time,
    however fast they are, does anything go on."""
    meetings = [{step: Barrier(2, timeout=60) for step in MEETINGS} for _ in stages[1:]]

    def enter(i: int, stage: Stage) -> Callable[[StepBuffers], None]:
        enter, steps = stage.copy_in, count()

        def meet(carrier: StepBuffers) -> None:
            step = next(steps)
            if i and step + 1 in MEETINGS:
                meetings[i - 1][step + 1].wait()
            if i < len(meetings) and step in MEETINGS:
                meetings[i][step].wait()
            enter(carrier)

        return meet

    for i, stage in enumerate(stages):
        stage.times.clear()
        stage.copy_in = enter(i, stage)  # type: ignore[method-assign, assignment]


def check_overlap(stages: list[Stage]) -> None:
    """That by their timestamps neighbours were at work at the same time, in all steps in which they met."""
    for one, after in pairwise(stages):
        for step in MEETINGS:
            (begun, ended), (begun_after, ended_after) = one.times[step], after.times[step - 1]
            assert max(begun, begun_after) < min(ended, ended_after)


def test_all_devices_are_busy(tmp_path: Path) -> None:
    with split_engine(write_model(tmp_path / "tiny.gguf", "Q4_0", "gemma3"), 1, 1, 1) as engine:
        chain = engine.device.chain  # type: ignore[attr-defined]
        let_meet(chain)
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        prompts = [[9], list(range(100, 230)), [3] * 20, [10, 4]]
        sequences = [engine.submit(prompt, params) for prompt in prompts]
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
        check_overlap(chain)
        begun = [[begin for begin, _ in stage.times] for stage in chain]
        assert all(one < other for one, other in zip(begun[0], begun[1], strict=True))


# ---- failures


def test_a_device_that_is_lost_fails_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set(threading.enumerate())
    llm = LLM(GOLDEN, device="cpu,cpu", threads=2, context=128, batch=4)
    recording = llm.device.chain[1].recording  # type: ignore[attr-defined]
    calls = iter(range(100))

    def lost() -> None:
        if next(calls) > 3:
            raise DeviceLostError("the GPU has not answered: load the model again")

    monkeypatch.setattr(recording, "start", lost)
    for _ in range(2):  # and so do those that come later
        with pytest.raises(DeviceLostError, match="has not answered"):
            llm.generate([[1, 2, 3], [4, 5]], max_tokens=20)
    llm.close()
    llm.close()
    assert set(threading.enumerate()) <= threads


def test_an_interrupt_while_a_step_is_handed_over_disturbs_nobody() -> None:
    with LLM(GOLDEN, device="cpu,cpu", threads=2, context=128, batch=4) as llm:
        alone = llm.generate([1, 2, 3], max_tokens=9).token_ids
        stage = llm.device.chain[0]  # type: ignore[attr-defined]
        stage.inbox = Interrupting(stage.inbox)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[7, 8], [9]], max_tokens=9)
        assert llm.generate([1, 2, 3], max_tokens=9).token_ids == alone


def test_an_interrupt_while_a_step_is_waited_for_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes to the main thread, which waits, while another one works with what the step has been given."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    with LLM(GOLDEN, device="cpu,cpu", threads=2, context=128, batch=4) as llm:
        expected = llm.logits([1, 2, 3])
        stage: Stage = llm.device.chain[1]  # type: ignore[attr-defined]
        enter, done = stage.copy_in, list[bool]()

        def interrupted(carrier: StepBuffers) -> None:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.05)  # for who would not wait to go wrong
            enter(carrier)
            done.append(True)

        for use in (lambda: llm.logits([5, 6]), lambda: llm.generate([8], max_tokens=1)):
            with monkeypatch.context() as patch:
                patch.setattr(stage, "copy_in", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    use()
                assert done.pop()
            assert llm.logits([1, 2, 3]).tobytes() == expected.tobytes()
            assert llm.engine.cache.free_blocks == llm.engine.cache.blocks
    signal.signal(signal.SIGINT, handler)


class Interrupting:
    """Ctrl-C right after a step was put into the queue, or right before."""

    def __init__(self, queue: Any) -> None:
        self.queue, self.calls = queue, iter(range(1000))

    def put(self, item: Any) -> None:
        call = next(self.calls)
        if call != 4:
            self.queue.put(item)
        if call in (2, 4):
            raise KeyboardInterrupt

    def get(self) -> Any:
        return self.queue.get()


@pytest.mark.fast
def test_what_cannot_be_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(kind: type[Exception], message: str, device: str, split: Any = None) -> None:
        threads = set(threading.enumerate())
        with pytest.raises(kind, match=message):
            LLM(GOLDEN, device=device, split=split, threads=2, context=64, batch=1)
        assert set(threading.enumerate()) <= threads

    refused(DeviceError, "no device 'gpu': use cpu", "cpu,gpu")
    refused(DeviceError, "auto chooses one device", "cpu,auto")
    refused(DeviceError, "4 layers, too few for 5 devices", "cpu,cpu,cpu,cpu,cpu")
    refused(DeviceError, "more than 8", ",".join(["cpu"] * 9))
    refused(DeviceError, "the model has 4 layers, not 5", "cpu,cpu", [4, 1])
    refused(DeviceError, "give 2 numbers", "cpu,cpu", [1, 1, 2])
    refused(DeviceError, "name several", "cpu", [4])
    refused(RequestError, "number of layers", "cpu,cpu", "2,2")
    refused(RequestError, "number of layers", "cpu,cpu", [4, 0])
    free = iter([(1e9, 1e9)] * 2 + [(1e3, 1e3)] * 20)
    monkeypatch.setattr(CPUDevice, "free_memory", lambda device: next(free))
    refused(DoesNotFitError, "layers 0 to 1 take 0.00 GB, and cpu has 0.00 GB free", "cpu,cpu", [2, 2])
    free = iter([(1e9, 1e9)] * 2 + [(1e3, 1e3)] * 20)
    refused(DoesNotFitError, "do not fit: cpu has 0.00 GB, cpu has 0.00 GB free", "cpu,cpu")


@pytest.mark.fast
def test_the_host_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUDevice, "free_memory", lambda device: (3e9, 5e9))
    with_host = SplitDevice([CPUDevice(1), CPUDevice(1)])
    try:
        assert with_host.free_memory() == (3e9, 5e9)
        assert SplitDevice([Card(8e9), Card(8e9)]).free_memory() == (16e9, 20e9)  # type: ignore[list-item]
        assert "the CPU" in with_host.describe() and open_device("cpu").stages == 1
    finally:
        with_host.close()


@pytest.mark.fast
def test_closed() -> None:
    llm = LLM(GOLDEN, device="cpu,cpu", threads=2, context=64, batch=2, split=[2, 2])
    llm.embed([1, 2])
    llm.close()
    for use in (lambda: llm.embed([1, 2]), lambda: llm.logits([1]), lambda: llm.generate([1], max_tokens=2)):
        with pytest.raises(DeviceError, match="closed: open the model again"):
            use()
