"""`tandem tune`: what is faster and right is found and kept, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.bench.sensors import Reading, Sensors
from tandem.cli import main
from tandem.devices.backends import open_device
from tandem.devices.cpu import tuned as cpu
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.tuned_choices import Choice, Choices, read_choices, shape_of, write_choices
from tandem.kernels.kernel import Array, Counts, Scalars
from tandem.kernels.q8_tiles import q8_pack
from tandem.model.synthetic import SyntheticModel
from tandem.plan.predict import Planned
from tandem.program.program import Program
from tandem.settings import read_settings
from tandem.tune import search as tuning
from tandem.tune import tasks as tuning_tasks
from tandem.tune.cases import shapes
from tandem.tune.search import TuningResult, choose, keep, tune, tuned_file
from tandem.tune.tasks import Task, difference, tasks
from tandem.tune.trials import KernelTrial, TrialMemory
from tests.engine.test_batch_invariance import requests
from tests.engine.tiny_models import opened, write_model
from tests.program.programs import golden

COUNTS = {"tokens": 1, "rows": 1, "work": 1}
FAST, WRONG, SAME = {"threads": 1}, {"threads": 2}, {"threads": 3}


class Pretended:
    """A kernel whose time and results are known; each call of `seconds` takes the next of its deviations."""

    def __init__(
        self, seconds: dict[int, float], wrong: set[int], deviations: tuple[float, ...] = (0.0,)
    ) -> None:
        self._seconds, self._wrong, self._deviations, self._calls = seconds, wrong, deviations, 0

    def results(self, counts: Counts, choice: Choice = {}) -> dict[str, Array]:  # noqa: B006
        return {"out": np.full(4, 1.5 if choice.get("threads") in self._wrong else 1.0, np.float32)}

    def seconds(self, counts: Counts, launches: int, choice: Choice = {}) -> float:  # noqa: B006
        self._calls += 1
        deviation = self._deviations[self._calls % len(self._deviations)]
        return self._seconds.get(choice.get("threads", 0), 1e-3) * (1 + deviation)

    def free(self) -> None:
        pass


def task(*trials: Pretended, check: Any = None, bound: float = 0.0) -> Task:
    timed = [(trial, COUNTS) for trial in trials]
    return Task("k", "s", "1 token", ["key"], 1, timed, [FAST, WRONG, SAME], check, bound)


@pytest.mark.fast
def test_a_wrong_candidate_is_never_chosen_however_fast() -> None:
    found = choose(task(Pretended({1: 0.9e-3, 2: 1e-6}, wrong={2})), 1e-3)
    assert found.choice == FAST and found.wrong == [WRONG] and found.gain == pytest.approx(1 / 0.9 - 1)

    def refuse(choice: Choice) -> None:
        raise AssertionError("not what NumPy gives")

    for checked in (
        task(Pretended({2: 1e-6}, {2}), check=refuse, bound=1.0),
        task(Pretended({2: 1e-6}, {2})),
    ):
        found = choose(checked, 1e-3)
        assert not found.choice and found.gain == 0 and found.wrong == [WRONG]
    tolerant = task(Pretended({2: 1e-6}, {2}), check=lambda _: None, bound=1.0)
    assert choose(tolerant, 1e-3).choice == WRONG, "within the error that the kernel may have"


@pytest.mark.fast
def test_what_is_not_surely_faster_is_not_chosen() -> None:
    nothing = task(Pretended({1: 0.98e-3}, set()))
    assert not choose(nothing, 1e-3).choice, "by less than the margin"
    noisy = task(Pretended({1: 0.9e-3}, set(), (0.0, 0.5, -0.3, 0.8, -0.1, 0.4, 0.1)))
    assert not choose(noisy, 1e-3).choice, "the rounds overlap"
    clear = task(Pretended({1: 0.9e-3}, set(), (0.0, 0.01, -0.01)))
    assert choose(clear, 1e-3).choice == FAST
    one_slower = task(Pretended({1: 0.5e-3}, set()), Pretended({1: 1.1e-3}, set()))
    assert not choose(one_slower, 1e-3).choice, "at the cost of another size"
    assert not choose(task(Pretended({1: 0.1e-3}, set())), 1e-3, until=0.0).tried, "out of time"


@pytest.mark.fast
def test_differences_are_of_the_results_size() -> None:
    want = np.array([[1, -1, 2, np.nan]], np.float32)
    got = want + np.float32(0.01)
    assert difference(want, want) == 0 and difference(got, want) == pytest.approx(
        0.01 / np.sqrt(6 / 4), rel=0.02
    )
    assert (
        difference(np.nan_to_num(want), want) == np.inf and difference(np.array([1]), np.array([2])) == np.inf
    )
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    close, far = x + np.float32(1e-4), x.copy()
    far[1, 7] += 1
    assert difference(q8_pack(close), q8_pack(x)) < 1e-3 < difference(q8_pack(far), q8_pack(x))


# ---- the file


@pytest.mark.fast
def test_choices_are_kept_whole_and_a_damaged_file_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "new" / "some.tuned"
    assert read_choices(file).by_shape == {}
    write_choices(file, Choices({"a": {"threads": 64}}), {"device": "one"})
    assert read_choices(file).by_shape == {"a": {"threads": 64}} and list(file.parent.iterdir()) == [file]
    text = file.read_text()
    for damaged in (text.replace("64", "65"), text[:40], "", "[]", "\udcff", '{"choices": {}}'):
        file.write_bytes(damaged.encode(errors="surrogateescape"))
        with pytest.warns(UserWarning, match="is damaged and not used") as told:
            assert read_choices(file).by_shape == {}
        assert len(told) == 1


@pytest.mark.fast
def test_latent_attention_has_no_choices() -> None:
    """It is no kernel `attention` with other scalars."""
    found = shapes(golden("deepseek-v3"), cpu.TUNED)
    assert {shape.kind for shape in found} == {"matmul", "norm"}
    assert any(shape.kind == "attention" for shape in shapes(golden("llama"), cpu.TUNED))


def test_a_shape_is_known_whatever_the_context() -> None:
    scalars = {"rows": 64, "columns": 32.0, "out_stride": 64, "blocks": 7, "scale": 0.5}
    longer = {**scalars, "blocks": 9, "out_stride": 128}
    assert shape_of("k", scalars, 5) == shape_of("k", longer, 8) == "k rows=64 columns=32 @8"
    assert shape_of("k", scalars, 9) != shape_of("k", scalars, 8) != shape_of("k", {**scalars, "rows": 65}, 8)
    choices = Choices({shape_of("k", scalars, 8): FAST})
    assert choices.of("k", scalars, 7) == FAST and not choices.of("k", scalars, 1)
    with choices.trying(SAME):
        assert choices.of("any", {}) == SAME
    assert choices.of("k", scalars, 7) == FAST


# ---- the CPU


@pytest.fixture
def device() -> Iterator[CPUDevice]:
    opened = CPUDevice(2)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def program() -> Program:
    return Planned(SyntheticModel("gemma-3-270m:q4_0", layers=1), 64).program


def with_one_matmul(program: Program) -> Program:
    """Keeps only the matmul that reads the fewest bytes."""
    matmuls = [launch for launch in program.launches if launch.kernel.name == "matmul_q4_0"]
    return replace(program, launches=[min(matmuls, key=lambda launch: launch.cost(COUNTS).bytes)])


def test_a_planted_wrong_kernel_is_not_chosen_on_the_cpu(
    device: CPUDevice, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves out most rows, and so would be by far the fastest. Results are the CPU's; times are told, for those of
    a busy machine say anything."""
    planted: list[Choice] = [{"rows": 16}, {"panels_per_item": 4}]

    def seconds(trial: KernelTrial, counts: Counts, launches: int, choice: Choice = {}) -> float:  # noqa: B006
        return 1e-6 if choice == planted[0] else 1e-3

    monkeypatch.setattr(cpu, "candidates", lambda scalars: planted)
    monkeypatch.setattr(KernelTrial, "seconds", seconds)
    (found,) = tune(device, with_one_matmul(program), context=64)
    assert found.wrong == [planted[0]] and not found.choice and found.tried == 2


def test_times_are_those_of_launches(device: CPUDevice, program: Program) -> None:
    (task,) = tasks(TrialMemory(device), with_one_matmul(program), 64, quick=False)
    [(trial, counts), *_] = task.timed
    found = [trial.seconds(counts, launches) for launches in (*[1] * 300, 4)]
    assert all(1e-6 < each < 10 for each in found), "no thread begins before the clock"


def test_any_choice_of_the_cpu_gives_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    path, wanted = write_model(tmp_path / "tiny.gguf", "Q4_K", "gemma3"), requests(8)
    with opened(path) as engine:
        expected = engine.run(*wanted)
        program = engine.program
    kinds = {launch.kernel.name.partition("_")[0]: launch.scalars for launch in program.launches}
    for text in {json.dumps(choice) for s in kinds.values() for choice in cpu.candidates(s)}:
        choice = json.loads(text)

        def of(_: Choices, kind: str, scalars: Scalars, choice: Choice = choice) -> Choice:
            return choice if choice in cpu.candidates(scalars) else {}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Choices, "of", of)
            with opened(path) as engine:
                assert engine.run(*wanted) == expected and engine.run(wanted[3]) == [expected[3]], text


def test_what_is_found_is_kept_and_taken_by_the_next_device(
    device: CPUDevice, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, launch = read_settings().pipelines, with_one_matmul(program).launches[0]
    key = shape_of("matmul", launch.scalars)
    found = TuningResult("matmul_q4_0", "", "all", [key], 1, 2.0, 1.0, {"panels_per_item": 8}, 1, [])
    fewer = TuningResult("threads", "", "all", [cpu.DEVICE], 1, 2.0, 1.0, {"threads": 1}, 1, [])
    assert keep(device, [found, fewer], folder) == tuned_file(device, folder)
    monkeypatch.setenv("TANDEM_TUNE", "1")
    again: Any = open_device("cpu", threads=2)
    assert again.choices.by_shape == {key: {"panels_per_item": 8}, cpu.DEVICE: {"threads": 1}}
    again.close()
    keep(device, [replace(found, choice={})], folder)
    assert read_choices(tuned_file(device, folder)).by_shape == {cpu.DEVICE: {"threads": 1}}
    monkeypatch.setenv("TANDEM_TUNE", "0")
    assert not cpu.tuned_choices(read_settings(), 2).by_shape
    assert tuned_file(device, folder) != cpu.tuned_file(folder, 3)


def test_the_number_of_threads_is_the_users_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("XDG_CACHE_HOME", str(tmp_path)), ("TANDEM_TUNE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TANDEM_THREADS", raising=False)
    settings = read_settings()
    assert cpu.tuned_threads(settings) == settings.threads
    file = cpu.tuned_file(settings.pipelines, settings.threads)
    write_choices(file, Choices({cpu.DEVICE: {"threads": 5}}), {})
    assert cpu.tuned_threads(settings) == 5
    file.write_text("{}")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        open_device("cpu").close()
    assert len(told) == 1 and "run `tandem tune` again" in str(told[0].message), "said once"
    monkeypatch.setenv("TANDEM_THREADS", str(settings.threads))
    assert cpu.tuned_threads(read_settings()) == settings.threads
    assert cpu.candidate_threads(16) == [{"threads": 12}, {"threads": 8}] and not cpu.candidate_threads(1)


@pytest.mark.fast
def test_what_was_found_before_ctrl_c_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found_one(*_: Any, **__: Any) -> Iterator[TuningResult]:
        yield TuningResult("matmul", "", "all", ["key"], 1, 2.0, 1.0, FAST, 1, [])
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "tune", found_one)
    before = signal.signal(signal.SIGINT, lambda *_: pytest.fail("it would have gone at once"))
    try:
        assert main(["tune", "--synthetic", "smollm2-135m:q4_0", "--device", "cpu", "--threads", "1"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    [file] = (tmp_path / "tandem").glob("cpu-*.tuned")
    assert read_choices(file).by_shape == {"key": FAST}


@pytest.mark.fast
@pytest.mark.parametrize(("others", "kept"), [(0.0, FAST), (0.5, {})])
def test_fewer_threads_are_not_chosen_while_others_have_part_of_the_machine(
    others: float, kept: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def during(sensors: Sensors, run: Callable[[], TuningResult]) -> tuple[TuningResult, Reading]:
        return run(), Reading(1.0, None, [], 0, others)

    monkeypatch.setattr(Sensors, "during", during)
    finding = tuning._undisturbed(task(Pretended({1: 5e-4}, set())), 1e-3, np.inf)
    assert finding.choice == kept and (finding.gain > 0.5) == bool(kept)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "QUICK_LIMIT", 0.3)
    monkeypatch.setattr(tuning_tasks, "QUICK_SHAPES", 1)
    monkeypatch.setattr("os.getloadavg", lambda: (9.0, 9.0, 9.0))
    command = ["tune", "--synthetic", "smollm2-135m:q4_0", "--device", "cpu", "--threads", "1", "--quick"]
    output = tmp_path / "out.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*command, "--json", "--output", str(output)]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert json.loads(output.read_text()) == printed and "the CPU" in printed["device"]
        first, page = printed["findings"][0], (Path(__file__).parents[2] / "docs/TUNING.md").read_text()
        assert printed["schema"] == 1 and all(f"`{name}`" in page for name in (*printed, *first))
        assert (
            first["kernel"] == "matmul_q8_0"  # the head: no other shape reads as many bytes
            and first["before_us"] >= first["after_us"] > 0
            and not first["wrong"]
        )
        assert main(command) == 0
    text = capsys.readouterr().out
    assert "Warning: other processes kept this machine busy" in text
    assert "KERNEL" in text and "49152 x 576" in text and str(tmp_path) in text
    assert len(list((tmp_path / "tandem").glob("cpu-*.tuned"))) == 1
    assert main([*command, "--output", str(tmp_path)]) == 1 and "cannot be written" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", str(output))
    assert main(command) == 1 and "set XDG_CACHE_HOME" in capsys.readouterr().err
