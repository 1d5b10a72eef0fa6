"""A device that fails gives a typed error, gives everything back, and can be opened again."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM, cli
from tandem.devices.vulkan.binding import DEVICE_LOST, OUT_OF_DEVICE_MEMORY, TIMEOUT, result_error
from tandem.devices.vulkan.device import VulkanDevice
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.errors import DeviceError, DeviceLostError, DoesNotFitError
from tandem.model.model import open_model
from tests.cli.tiny_model import write_tiny_model
from tests.engine.tiny_models import write_model
from tests.models.test_reference import GOLDENS
from tests.vulkan.test_device import quantise_program, start

CREATED = {"AllocateMemory": "FreeMemory", "CreateBuffer": "DestroyBuffer", "CreateShaderModule": "DestroyShaderModule",
           "CreateSemaphore": "DestroySemaphore", "CreateCommandPool": "DestroyCommandPool",
           "CreatePipelineCache": "DestroyPipelineCache", "CreateDevice": "DestroyDevice",
           "CreateInstance": "DestroyInstance", "CreateQueryPool": "DestroyQueryPool",
           "CreatePipelineLayout": "DestroyPipelineLayout",
           "CreateComputePipelines": "DestroyPipeline"}  # fmt: skip
MODEL = GOLDENS / "gemma3-pattern3.gguf"
PROMPTS = [[5, 6, 7], [8, 9], list(range(10, 30))]


class Balance:
    """How many of each kind of handle are alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tandem.devices.vulkan.binding import Vulkan

        self.alive: Counter[str] = Counter()
        self.failing: dict[str, tuple[int, int]] = {}  # function -> (calls that succeed first, VkResult)
        original = Vulkan.__getattr__
        monkeypatch.setattr(
            Vulkan, "__getattr__", lambda vk, name: self.watched(vk, name, original(vk, name))
        )

    def watched(self, vk: Any, name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            if name in self.failing:
                left, code = self.failing[name]
                self.failing[name] = left - 1, code
                if left <= 0:
                    if name == "WaitSemaphores":
                        function(*args)  # lavapipe is not lost, and still works on it
                    if code >= 0:
                        return code
                    raise result_error(f"vk{name}", code)
            result = function(*args)
            self.alive[name] += name in CREATED
            for create, destroy in CREATED.items():
                self.alive[create] -= destroy == name
            return result

        setattr(vk, name, call)
        return call

    def nothing_is_alive(self) -> bool:
        return not any(self.alive.values())


@pytest.fixture
def balance(lavapipe: str, monkeypatch: pytest.MonkeyPatch) -> Balance:
    return Balance(monkeypatch)


def use(device: VulkanDevice) -> None:
    program = quantise_program()
    start(device, program)
    recorded = device.record(program)
    recorded.replay()
    recorded.replay_timed()


def test_a_good_run_gives_everything_back(lavapipe: str, balance: Balance) -> None:
    device = VulkanDevice(lavapipe)
    use(device)
    device.close()
    device.close()
    assert balance.alive["CreateDevice"] == 0 and balance.nothing_is_alive()


@pytest.mark.parametrize("function", ["QueueSubmit", "WaitSemaphores"])
@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_a_lost_device(lavapipe: str, balance: Balance, function: str, calls: int) -> None:
    device = VulkanDevice(lavapipe)
    balance.failing[function] = calls, DEVICE_LOST
    with pytest.raises(
        DeviceLostError, match=f"the GPU stopped .vk{function} .*VK_ERROR_DEVICE_LOST.*load the model"
    ):
        for _ in range(5):
            use(device)
    device.close()
    assert balance.nothing_is_alive()
    balance.failing.clear()
    again = VulkanDevice(lavapipe)
    use(again)
    again.close()


def test_a_device_that_does_not_answer(lavapipe: str, balance: Balance) -> None:
    device = VulkanDevice(lavapipe)
    use(device)
    balance.failing["WaitSemaphores"] = 0, TIMEOUT
    with pytest.raises(DeviceLostError, match=r"has not answered for \d+ s"):
        use(device)
    device.close()  # what it may still use stays with it
    balance.failing.clear()
    again = VulkanDevice(lavapipe)
    use(again)
    again.close()


@pytest.mark.parametrize("calls", range(0, 8))
def test_memory_that_runs_out(lavapipe: str, balance: Balance, calls: int) -> None:
    balance.failing["AllocateMemory"] = calls, OUT_OF_DEVICE_MEMORY
    device = None
    with pytest.raises(
        DoesNotFitError, match=r"out of device memory .*use a smaller model, context or batch"
    ):
        device = VulkanDevice(lavapipe)
        for _ in range(3):
            use(device)
    if device is not None:
        balance.failing.clear()
        use(device)
        device.close()
    assert balance.nothing_is_alive()


def test_a_refused_pipeline(lavapipe: str, balance: Balance) -> None:
    device = VulkanDevice(lavapipe)
    balance.failing["CreateComputePipelines"] = 0, -13
    with pytest.raises(DeviceError, match=r"refuses the shader quantise .*VK_ERROR_UNKNOWN"):
        use(device)
    device.close()
    assert balance.nothing_is_alive()


def test_a_failed_start(lavapipe: str, balance: Balance) -> None:
    for function in (
        "CreateDevice",
        "CreateCommandPool",
        "CreateSemaphore",
        "CreatePipelineCache",
        "MapMemory",
    ):
        balance.failing = {function: (0, -3)}
        with pytest.raises(DeviceError, match=f"vk{function} failed with VK_ERROR_INITIALIZATION_FAILED"):
            VulkanDevice(lavapipe)
        assert balance.nothing_is_alive(), function


def load(lavapipe: str) -> LLM:
    return LLM(MODEL, device=lavapipe, context=128, batch=4)


def answers(llm: LLM) -> list[list[int]]:
    return [result.token_ids for result in llm.generate(PROMPTS, max_tokens=12)]


@pytest.mark.parametrize(
    ("function", "code"),
    [("QueueSubmit", DEVICE_LOST), ("WaitSemaphores", DEVICE_LOST), ("WaitSemaphores", TIMEOUT)],
)
def test_a_device_lost_while_it_answers(lavapipe: str, balance: Balance, function: str, code: int) -> None:
    """Every request in flight ends with the error, at once; the model can be loaded again and answers as before."""
    llm = load(lavapipe)
    expected = answers(llm)
    streams = [llm.stream(prompt, max_tokens=100) for prompt in PROMPTS]
    for stream in streams:
        next(stream)
    balance.failing[function] = 5, code
    begun = time.perf_counter()
    with ThreadPoolExecutor(len(streams)) as pool:
        failures = [pool.submit(list, stream) for stream in streams]
        found = [failure.exception(timeout=20) for failure in failures]
    assert all(isinstance(error, DeviceLostError) and "load the model again" in str(error) for error in found)
    with pytest.raises(DeviceLostError):
        llm.generate(PROMPTS)  # one that comes too late
    assert time.perf_counter() - begun < 10
    balance.failing.clear()  # a GPU that seemed to hang has come to its end
    llm.close()
    assert balance.nothing_is_alive()
    with load(lavapipe) as again:
        assert answers(again) == expected
    assert balance.nothing_is_alive()


def test_a_device_lost_under_the_command_line(
    lavapipe: str, balance: Balance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf")
    balance.failing["QueueSubmit"] = 12, DEVICE_LOST
    assert cli.main(["run", str(model), "go on", "--device", lavapipe, "-n", "500"]) == 1
    shown = capsys.readouterr()
    assert 0 < len(shown.out.strip()) < 500
    assert shown.err.startswith("tandem: the GPU stopped (vkQueueSubmit failed with VK_ERROR_DEVICE_LOST)")
    assert balance.nothing_is_alive()


@pytest.mark.parametrize("calls", range(8))
def test_memory_that_runs_out_while_a_model_loads(lavapipe: str, balance: Balance, calls: int) -> None:
    balance.failing["AllocateMemory"] = calls, OUT_OF_DEVICE_MEMORY
    with pytest.raises(
        DoesNotFitError, match=r"out of device memory .*use a smaller model, context or batch"
    ):
        load(lavapipe)
    assert balance.nothing_is_alive()


def test_a_pipeline_refused_between_two_requests(lavapipe: str, balance: Balance) -> None:
    """The requests that need it fail; the model goes on when the driver takes it again."""
    with load(lavapipe) as llm:
        expected = llm.generate([1, 2, 3], max_tokens=4).token_ids
        balance.failing["CreateComputePipelines"] = 0, -13
        with pytest.raises(DeviceError, match="the driver refuses the shader"):
            llm.generate([list(range(40)), list(range(1, 41))], max_tokens=4)  # more tokens: other shaders
        assert llm.generate([1, 2, 3], max_tokens=4).token_ids == expected
        balance.failing.clear()
        assert len(llm.generate(list(range(40)), max_tokens=4).token_ids) == 4
    assert balance.nothing_is_alive()


def test_an_interrupt_while_a_step_is_handed_over_disturbs_nobody(lavapipe: str, tmp_path: Path) -> None:
    device = VulkanDevice(lavapipe)
    engine = Engine.load(
        open_model(write_model(tmp_path / "tiny.gguf", "Q4_0")),
        device,
        context=256,
        batch=4,
        prefix_caching=False,
    )

    def answer() -> list[int]:
        sequence = engine.submit([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
        while sequence.finish_reason is None:
            engine.step()
        return [sampled.id for sampled in sequence.generated]

    before, submit, calls = answer(), device.vk.QueueSubmit, iter(range(100))

    def interrupted(*args: object) -> object:
        result = submit(*args)
        if next(calls) == 9:
            raise KeyboardInterrupt
        return result

    device.vk.QueueSubmit = interrupted
    sequence = engine.submit([9, 9], SamplingParams(max_tokens=40, ignore_eos=True))
    with pytest.raises(KeyboardInterrupt):
        while sequence.finish_reason is None:
            engine.step()
    engine.cancel(sequence)
    assert [answer() for _ in range(3)] == [before] * 3
    device.close()
