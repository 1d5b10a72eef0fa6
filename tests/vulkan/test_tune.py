"""Tuning on Vulkan: candidates are right, a wrong one is not taken, what is kept is taken at the next start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cli import loading
from tandem.devices.tuned_choices import Choice, shape_of
from tandem.devices.vulkan import tuned
from tandem.devices.vulkan.capabilities import Capabilities
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.shader_modules import SPIRV, shader_modules
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.dispatch_table import DISPATCH_RULES, dispatch
from tandem.kernels.kernel import Counts, Scalars
from tandem.kernels.matmul_dispatch import COOPMAT_REG_SUMS
from tandem.model.synthetic import SyntheticModel
from tandem.plan.predict import Planned
from tandem.program.program import Program
from tandem.tune import search as tuning
from tandem.tune import tasks as tuning_tasks
from tandem.tune import trials
from tandem.tune.search import TuningResult, choose, keep
from tandem.tune.tasks import tasks
from tandem.tune.trials import KernelTrial, TrialMemory
from tests.engine.tiny_models import write_model
from tests.vulkan.machines import ALL_MAPPED
from tests.vulkan.test_dispatch import MATRICES

ONE = {"tokens": 1, "rows": 1, "work": 1}


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MAX_BYTES", 256 << 20)
    monkeypatch.setattr(trials, "COLD_BYTES", 4 << 20)


@pytest.fixture(scope="module")
def program() -> Program:
    return Planned(SyntheticModel("gemma-3-27b:q4_0", layers=1), 64).program


@pytest.fixture(scope="module")
def small() -> Program:
    """Attention, a norm, a matmul and a GLU matmul of a small model."""
    launches = Planned(SyntheticModel("smollm2-135m:q4_0", layers=1), 512).program.launches
    attention, norm = (
        next(launch for launch in launches if launch.kernel.name.startswith(k)) for k in ("attention", "norm")
    )
    matmuls = [launch for launch in launches if launch.kernel.name == "matmul_q4_0"]
    glu = next(launch for launch in matmuls if launch.scalars["epilogue"])
    smallest = min(matmuls, key=lambda launch: launch.cost(ONE).bytes)
    return Program([attention, norm, smallest, glu], {"tokens": 512, "rows": 1, "work": 64}, {})


@pytest.mark.fast
@pytest.mark.parametrize("register_coopmat", [False, True])
def test_candidates_fit_gpus_with_matrix_units(program: Program, register_coopmat: bool) -> None:
    device, shaders = (
        replace(MATRICES, register_coopmat=register_coopmat),
        set(shader_modules(SPIRV)),
    )
    found = 0
    for launch in program.launches:
        if launch.kernel.name.partition("_")[0] not in tuned.TUNED:
            continue
        for size in (1, 2, 4, 8, 16, 64, 512):
            counts = {"tokens": size, "rows": min(size, 64), "work": size if size < 64 else size // 16}
            rule = dispatch(launch.kernel.name, launch.scalars, counts, device)
            for choice in tuned.candidates(launch.kernel.name, launch.scalars, counts, device):
                with device.choices.trying(choice):
                    tried = dispatch(launch.kernel.name, launch.scalars, counts, device)
                assert tried != rule and (tried.shader or launch.kernel.name) in shaders
                assert all(n > 0 for n in (tried.x, tried.y, tried.z))
                fits(tried, device)
                found += 1
    assert found > 200 if register_coopmat else found > 60


def fits(dispatch: Dispatch, device: Capabilities) -> None:
    name, constants = dispatch.shader, dispatch.constants
    assert all(n >= 0 for n in constants)
    if name.startswith("matmul") and name[-4] == "u" and name[-2] == "n":
        units = constants[0] // 32 // constants[1]
        each = 64 * int(name[-3]) * int(name[-1])
        assert units > 0 and constants[1] // 2 * units * each <= COOPMAT_REG_SUMS and constants[0] <= 1024
    elif "_t" in name and name.startswith("matmul"):
        assert 32 <= constants[0] <= 1024 and 4 * constants[2] < device.shared_memory
    elif name.startswith(("attention_coopmat", "attention_multi_subgroup")):
        assert constants[3] > 0 and ("multi_subgroup" not in name or constants[3] % 4 == 0), (
            "a loop that does not advance"
        )
        assert constants[4] <= 1024 and 4 * constants[3] * constants[0] * constants[1] < device.shared_memory
    elif name.startswith("norm"):
        assert 32 <= constants[0] <= 1024


@pytest.mark.fast
def test_gpus_with_two_sizes_of_subgroups_try_both(program: Program) -> None:
    """AMD's RDNA: the driver's own choice is one of them."""
    device = replace(
        ALL_MAPPED, subgroup_min=32, subgroup_max=64, features=ALL_MAPPED.features | {"subgroupSizeControl"}
    )
    launch = next(launch for launch in program.launches if launch.kernel.name == "matmul_q4_0")
    choices = tuned.candidates(launch.kernel.name, launch.scalars, ONE, device)
    assert {choice.get("subgroup", 0) for choice in choices} == {0, 32, 64}
    assert all(choice["threads"] >= 64 for choice in choices), "a subgroup of 64 does not lie in two panels"


@pytest.mark.fast
def test_a_file_is_of_a_device_a_driver_and_the_shaders() -> None:
    folder = Path("folder")
    files = {
        tuned.tuned_file(folder, replace(ALL_MAPPED, **change))
        for change in ({}, {"name": "other"}, {"driver_version": 2}, {"cache_key": "1"})
    }
    assert len(files) == 4 and all(file.name.startswith("vulkan-") for file in files)


def test_all_candidates_are_right(
    device: VulkanDevice, small: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_tasks, "SIZES", ((1,), (2,), (5,)))
    monkeypatch.setattr(tuning_tasks, "SEQUENCES", ((1,),))
    monkeypatch.setattr(tuning_tasks, "PROMPT", 20)
    looked_at = 0
    for task in tasks(TrialMemory(device), small, 512, quick=False):
        for choice in task.candidates:
            assert task.is_correct(choice), f"{task.kernel} {task.shape}, {task.size}: {choice}"
            looked_at += 1
    assert looked_at > 20


def test_a_planted_wrong_kernel_is_not_chosen(
    device: VulkanDevice, small: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves out rows, and so would be by far the fastest. Results are the device's; times are told, for those of a
    busy machine say anything."""
    planted = {"rows": 1}
    own = DISPATCH_RULES["matmul_q4_0"]

    def seconds(trial: KernelTrial, counts: Counts, launches: int, choice: Choice = {}) -> float:  # noqa: B006
        return 1e-6 if choice == planted else 1e-3

    def rule(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch | None:
        found, choice = own(scalars, counts, gpu), gpu.choices.of("matmul", scalars, 1)
        return replace(found, x=choice["rows"]) if found and "rows" in choice else found

    def candidates(*_: object) -> list[Choice]:
        return [planted]

    monkeypatch.setitem(DISPATCH_RULES, "matmul_q4_0", rule)
    monkeypatch.setattr(tuned, "candidates", candidates)
    monkeypatch.setattr(KernelTrial, "seconds", seconds)
    monkeypatch.setattr(tuning_tasks, "SIZES", ((1,),))
    (task,) = tasks(TrialMemory(device), replace(small, launches=small.launches[2:3]), 512, quick=False)
    found = choose(task, 1e-3)
    assert found.wrong == [planted] and not found.choice


def test_what_is_kept_is_taken_at_the_next_start(
    lavapipe: str, small: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = small.launches[2]
    key = shape_of("matmul", launch.scalars, 1)
    first = VulkanDevice(lavapipe, cache=tmp_path)
    rule = dispatch(launch.kernel.name, launch.scalars, ONE, first.capabilities)
    keep(first, [TuningResult("", "", "", [key], 1, 2.0, 1.0, {"threads": 128}, 1, [])], tmp_path)
    first.close()
    for tune, taken in (("1", True), ("0", False)):
        monkeypatch.setenv("TANDEM_TUNE", tune)
        device = VulkanDevice(lavapipe, cache=tmp_path)
        found = dispatch(launch.kernel.name, launch.scalars, ONE, device.capabilities)
        assert (found != rule and found.constants[0] == 128) == taken
        device.close()


def test_the_first_use_of_a_gpu_is_announced_and_comes_once(
    lavapipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never of software, unless it says to be a GPU, as here."""
    model = write_model(tmp_path / "tiny.gguf", "Q8_0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "QUICK_LIMIT", 0.1)
    kept = tmp_path / "tandem"

    def use(no_tune: bool = False) -> str:
        loading.tune_at_first_use(lavapipe, model, no_tune)
        return capsys.readouterr().err

    assert not use() and not list(kept.glob("*.tuned")), "tests do not tune"
    monkeypatch.setenv("TANDEM_TUNE", "1")
    assert not use() and not list(kept.glob("*.tuned")), "it is software"
    start = VulkanDevice._start

    def pretend(self: VulkanDevice, *options: object) -> None:
        start(self, *options)  # type: ignore[arg-type]
        self.capabilities = replace(self.capabilities, kind="integrated")

    monkeypatch.setattr(VulkanDevice, "_start", pretend)
    assert not use(no_tune=True) and not list(kept.glob("*.tuned"))
    announced = use()
    assert announced.startswith("first use of") and announced.count("\n") == 1 and "--no-tune" in announced
    assert len(list(kept.glob("vulkan-*.tuned"))) == 1
    assert not use(), "once"
