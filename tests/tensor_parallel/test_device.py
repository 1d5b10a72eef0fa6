"""A step's matmuls on several devices: the tokens of one, fractions that follow what each can do, and failures told."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import LLM, cli
from tandem.cli import run
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.device import Bytes
from tandem.devices.tensor_parallel import balance
from tandem.devices.tensor_parallel.accelerator import DeviceAccelerator, Partition, PartitionResult
from tandem.devices.tensor_parallel.device import MEASURED, TensorParallelDevice
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.engine.prompt_lookup import PromptLookup
from tandem.errors import DeviceError, DeviceLostError
from tests.cli.tiny_model import write_tiny_model
from tests.engine.test_split import tokens_of
from tests.engine.tiny_models import opened, write_model
from tests.engine.workloads import CONTEXT, random_workload, serve
from tests.models.test_reference import GOLDENS
from tests.tensor_parallel.slow_devices import SlowCPU, SlowHelper, check_both_work, tensor_parallel_engine

GOLDEN = GOLDENS / "gemma3-pattern3.gguf"


def cpus(count: int) -> list[DeviceAccelerator]:
    return [DeviceAccelerator(CPUDevice(1)) for _ in range(count)]


@pytest.mark.parametrize(
    ("architecture", "format", "placement", "fractions", "options"),
    [
        ("llama", "Q4_0", "columns", (3, 1), {}),
        ("gemma3", "Q4_K", "columns", (1, 1, 1), {"kv": "q8"}),
        ("gemma3", "F32", "columns", None, {}),
        ("qwen2", "Q8_0", "columns", (0, 1), {}),
        ("gemma3", "Q4_0", "columns-overlapped", (1, 1), {}),
        ("llama", "Q6_K", "columns-overlapped", None, {"proposer": PromptLookup()}),
        ("gemma3", "Q4_0", "npu-attention", None, {"kv": "q8"}),
    ],
)
def test_workloads_get_the_bits_of_one_device(
    architecture: str, format: str, placement: str, fractions: tuple[int, ...] | None, options: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    path = write_model(tmp_path / "tiny.gguf", format, architecture)
    rng = np.random.default_rng(7)
    kv = options.get("kv", "f16")
    accelerators = cpus(len(fractions) - 1 if fractions else 1)
    with (
        opened(path, context=CONTEXT, batch=8, prefix_caching=False, kv=kv) as one,
        tensor_parallel_engine(
            path, CPUDevice(1), accelerators, placement, fractions=fractions, context=CONTEXT, **options
        ) as many,
    ):
        for _ in range(3):
            workload = random_workload(rng, requests=8, prompt=90, answer=20)
            found, expected = (tokens_of(serve(e, workload, frozenset()), workload) for e in (many, one))
            assert found == expected
        assert many.logits(list(range(50))).tobytes() == one.logits(list(range(50))).tobytes()
        assert many.cache.free_blocks == many.cache.blocks


def test_chunks_of_a_prompt_follow_each_other(tmp_path: Path) -> None:
    """Each looks back at those before it, and two are in flight, with matmuls of both on the accelerator."""
    path, prompt = write_model(tmp_path / "tiny.gguf", "Q4_0", "gemma3"), [(7 * i) % 300 for i in range(490)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    accelerator = SlowHelper(CPUDevice(1))
    accelerator.times_as_long = 0.1
    found = []
    with (
        opened(path, context=512, batch=8) as one,
        tensor_parallel_engine(
            path, CPUDevice(1), [accelerator], "columns-overlapped", fractions=(1, 1), context=512
        ) as many,
    ):
        for engine in (one, many):
            sequences = [engine.submit(prompt[i:], params) for i in range(3)]
            while any(sequence.finish_reason is None for sequence in sequences):
                engine.step()
            found.append([[sampled.id for sampled in sequence.generated] for sequence in sequences])
        device = many.device
        assert isinstance(device, TensorParallelDevice) and device.runner
        main, times = sorted(device.runner.times), sorted(accelerator.times)
        assert len(main) > 4 * 13  # steps of 13 segments each
        busy = [begin for begin, _ in main if any(b < begin < e for b, e in times)]
        assert busy  # segments of one step that began while the accelerator had its partition of the other
    assert found[0] == found[1]


def test_fractions_follow_the_speed_of_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two alike; then one is slowed down, until it does not pay; then it is fast again."""
    monkeypatch.setattr(balance, "REBALANCE_STEPS", 4)
    monkeypatch.setattr(balance, "RETRY", 12)
    monkeypatch.setattr(balance, "REFRESH", 1000)
    path, ids = write_model(tmp_path / "tiny.gguf", "Q4_0", "gemma3"), list(range(30))
    accelerator = SlowHelper(CPUDevice(1))
    with tensor_parallel_engine(path, SlowCPU(1), [accelerator], batch=32) as engine, opened(path) as one:
        device = engine.device
        assert isinstance(device, TensorParallelDevice)
        expected = one.logits(ids).tobytes()

        def fraction() -> float:
            """Of the accelerator in the larger matmuls, after another step."""
            assert engine.logits(ids).tobytes() == expected
            found = device.balances[32]
            cuts = [cut for (shape, _), cut in found.cuts.items() if shape[1] >= 512]
            return sum(cut[1] for cut in cuts) / sum(sum(cut) for cut in cuts) if found.on else 0.0

        def reached(low: float, high: float) -> bool:
            """A busy machine may take some more steps."""
            return any(low <= fraction() <= high for _ in range(60))

        # On a busy machine nothing may pay: that is below.
        monkeypatch.setattr(balance, "MIN_GAIN", -math.inf)
        assert reached(0.3, 0.6)
        accelerator.times_as_long = 4.0
        assert reached(0.05, 0.28)
        monkeypatch.setattr(balance, "MIN_GAIN", 0.05)
        accelerator.times_as_long = 40.0
        assert any(fraction() == 0.0 and not device.balances[32].on for _ in range(60))
        assert "it does not pay" in device.describe()
        accelerator.times.clear()
        fraction()
        assert not accelerator.times  # it is left alone
        accelerator.times_as_long = 0.1
        monkeypatch.setattr(balance, "MIN_GAIN", -math.inf)
        assert reached(0.5, 1.0)


def test_both_are_at_work(tmp_path: Path) -> None:
    """Neither can finish its partition unless the other has started its own."""
    check_both_work(write_model(tmp_path / "tiny.gguf", "Q4_0", "gemma3"), CPUDevice(1))


def test_what_is_made_once_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that measures, or for which fractions are recorded, takes longer than those after it."""
    path, seen = write_model(tmp_path / "tiny.gguf", "Q4_0", "gemma3"), list[str]()
    monkeypatch.setattr(balance, "MIN_GAIN", -math.inf)
    monkeypatch.setattr(balance.Balance, "observe_step", lambda *_: seen.append("step"))
    monkeypatch.setattr(balance.Balance, "observe", lambda *_: seen.append("partition"))
    monkeypatch.setattr(balance.Balance, "next", lambda self: "together" if self.on else "measure")
    monkeypatch.setattr(balance.Balance, "alone", 1.0)
    accelerator, given = DeviceAccelerator(CPUDevice(1)), list[bool]()
    submit = accelerator.submit

    def noted(partition: Partition) -> Future[PartitionResult]:
        given.append(bool(partition.inputs[0].any()))
        return submit(partition)

    accelerator.submit = noted  # type: ignore[method-assign]
    with tensor_parallel_engine(path, CPUDevice(1), [accelerator]) as engine:
        engine.logits(list(range(8)))
        device = engine.device
        assert isinstance(device, TensorParallelDevice) and device.balances[8].on and not seen
        # With zeros: activations are anything before a step.
        timed = 2 * MEASURED * len(device.balances[8].cuts)
        assert len(given) >= timed and not any(given[:timed]) and all(given[timed:])
        engine.logits(list(range(8)))
        assert seen.count("step") == 1 and seen.count("partition") >= len(device.works)


def test_intermediates_and_saved_conversations(tmp_path: Path) -> None:
    prompt = [(7 * i) % 250 + 3 for i in range(75)]
    options: dict[str, Any] = {"threads": 1, "context": 128, "batch": 2}
    names = ["embedding", "blk.0.out", "blk.2.attn", "result_norm", "logits"]
    with LLM(GOLDEN, device="cpu", **options) as one:
        expected = one.capture(prompt[:20], names)
        one.save(prompt, tmp_path / "one")
        embedded = one.embed(prompt)
        for placement in ("columns", "columns-overlapped"):
            with LLM(GOLDEN, device="cpu,cpu", placement=placement, split=[1, 1], **options) as many:
                found = many.capture(prompt[:20], names)
                assert all(found[name].tobytes() == expected[name].tobytes() for name in names)
                assert (many.embed(prompt) == embedded).all()
                assert len(many.engine.step_slots[0].recording.replay_timed()) == len(
                    many.engine.program.launches
                )
    with LLM(GOLDEN, device="cpu,cpu", placement="npu-attention", **options) as offloaded:
        assert offloaded.save(prompt, tmp_path / "offloaded") == 64
        assert (tmp_path / "one").read_bytes() == (tmp_path / "offloaded").read_bytes()
        assert offloaded.restore(tmp_path / "one") == prompt[:64]
        with pytest.raises(DeviceError, match="cannot capture intermediates"):
            offloaded.capture(prompt[:20], ["blk.0.out"])
        assert "attention took" in offloaded.device.describe()


def test_latent_attention_on_the_second_device() -> None:
    """Its cache is there, so the launches that store and read latents are, too."""
    texts = []
    for options in ({"device": "cpu"}, {"device": "cpu,cpu", "placement": "npu-attention"}):
        with LLM(GOLDENS / "deepseek-v3.gguf", threads=1, context=128, batch=1, **options) as llm:
            texts.append(llm.generate(list(range(3, 90)), max_tokens=9, temperature=0.0).token_ids)
    assert texts[0] == texts[1]


def test_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, notes = str(write_tiny_model(tmp_path / "tiny.gguf", layers=3)), list[str]()
    monkeypatch.setattr(run, "note", notes.append)

    def answer(*options: str) -> str:
        assert cli.main(["run", path, "tell me a tale", "-n", "9", "--threads", "2", *options]) == 0
        return capsys.readouterr().out

    expected = answer("--device", "cpu")
    for placement in ("columns", "columns-overlapped", "npu-attention"):
        assert answer("--device", "cpu,cpu", "--placement", placement) == expected
    assert answer("--device", "cpu,cpu", "--placement", "columns", "--split", "60,40") == expected
    assert any("columns of matmuls on the CPU" in note for note in notes)


class Failing(DeviceAccelerator):
    after = 20

    def run(self, partition: Partition) -> Sequence[Bytes]:
        self.after -= 1
        if self.after < 0:
            raise DeviceLostError("the NPU has not answered: load the model again")
        return super().run(partition)


@pytest.mark.parametrize("placement", ["columns", "columns-overlapped", "npu-attention"])
def test_an_accelerator_that_fails_fails_the_requests(placement: str, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    path, accelerator = write_model(tmp_path / "tiny.gguf", "Q4_0"), Failing(CPUDevice(1))
    fractions = None if placement == "npu-attention" else (1, 1)
    with tensor_parallel_engine(path, CPUDevice(1), [accelerator], placement, fractions=fractions) as engine:
        for _ in range(2):  # and so do those that come later
            sequence = engine.submit([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
            with pytest.raises(DeviceLostError, match="has not answered"):
                while sequence.finish_reason is None:
                    engine.step()
            engine.cancel(sequence)
    assert not set(threading.enumerate()) - threads


def test_an_interrupt_while_a_step_is_handed_over_disturbs_nobody(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "Q4_0")
    with tensor_parallel_engine(
        path, CPUDevice(1), cpus(1), "columns-overlapped", fractions=(1, 1)
    ) as engine:
        alone = answer(engine, [1, 2, 3])
        device = engine.device
        assert isinstance(device, TensorParallelDevice) and device.runner
        runner, add, calls = device.runner, device.runner.add, iter(range(100))

        def interrupted(step: Any) -> None:
            call = next(calls)
            if call == 8:
                runner._steps.append(step)  # and nobody is told
            elif call != 5:
                add(step)
            if call in (2, 5, 8):
                raise KeyboardInterrupt

        device.runner.add = interrupted  # type: ignore[method-assign]
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                answer(engine, [7, 8])
        assert answer(engine, [1, 2, 3]) == alone


@pytest.mark.parametrize("placement", ["columns", "columns-overlapped", "npu-attention"])
def test_an_interrupt_while_a_step_is_waited_for_waits_for_it(placement: str) -> None:
    """Ctrl-C comes to the main thread, which waits, while a accelerator works with what the step has been given."""
    options: dict[str, Any] = {"split": None if placement == "npu-attention" else [1, 1], "threads": 2}
    interrupts, done = [0], list[bool]()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with LLM(GOLDEN, device="cpu,cpu", placement=placement, context=128, batch=4, **options) as llm:
            assert isinstance(llm.device, TensorParallelDevice)
            accelerator = llm.device.accelerators[0]
            assert isinstance(accelerator, DeviceAccelerator)
            run = accelerator.run

            def interrupted(partition: Partition) -> Sequence[Bytes]:
                if interrupts.pop():
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    time.sleep(0.05)  # for who would not wait to go wrong
                    done.append(True)
                interrupts.append(0)
                return run(partition)

            accelerator.run = interrupted  # type: ignore[method-assign]
            expected, alone = llm.logits([1, 2, 3]), llm.generate([4, 5], max_tokens=5).token_ids
            for use in (lambda: llm.logits([5, 6]), lambda: llm.generate([7, 8], max_tokens=5)):
                interrupts[:] = [1]
                with pytest.raises(KeyboardInterrupt):
                    use()
                assert done.pop()
                assert llm.logits([1, 2, 3]).tobytes() == expected.tobytes()
                assert llm.generate([4, 5], max_tokens=5).token_ids == alone
    finally:
        signal.signal(signal.SIGINT, before)


def answer(engine: Engine, prompt: list[int]) -> list[int]:
    sequence = engine.submit(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    try:
        while sequence.finish_reason is None:
            engine.step()
    except BaseException:
        engine.cancel(sequence)
        raise
    return [sampled.id for sampled in sequence.generated]


@pytest.mark.fast
def test_what_cannot_be_divided_is_refused() -> None:
    def refused(message: str, device: str, placement: str, split: Any = None) -> None:
        threads = set(threading.enumerate())
        with pytest.raises(DeviceError, match=message):
            LLM(GOLDEN, device=device, placement=placement, split=split, threads=2, context=64, batch=1)
        assert not set(threading.enumerate()) - threads

    refused("name several", "cpu", "columns")
    refused("no placement 'rows'", "cpu,cpu", "rows")
    refused("give 2 numbers", "cpu,cpu", "columns", [1, 1, 1])
    refused("name two devices, and no split", "cpu,cpu,cpu", "npu-attention")
