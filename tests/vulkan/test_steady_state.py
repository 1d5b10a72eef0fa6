"""Step after step: nothing is made, nothing grows, and the host's part is small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.bench.host_overhead import measure_host_overhead
from tandem.devices.vulkan.binding import Vulkan
from tandem.devices.vulkan.device import VulkanDevice
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.model.model import open_model
from tests.engine.test_memory import memory
from tests.models.test_reference import GOLDENS

MAKES = ("Create", "Allocate", "Map", "Begin", "Destroy", "Free")


@pytest.fixture
def engine(lavapipe: str) -> Iterator[Engine]:
    model, device = open_model(GOLDENS / "gemma3-pattern3.gguf"), VulkanDevice(lavapipe)
    yield Engine.load(model, device, context=128, batch=4)
    device.close()
    model.gguf.close()


class Calls:
    """The Vulkan functions that make or destroy something, as they are called."""

    def __init__(self, vk: Vulkan, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        for name in [name for name in dir(vk._library) if name[2:].startswith(MAKES)]:
            monkeypatch.setattr(vk, name[2:], self._noted(name, getattr(vk, name[2:])), raising=False)

    def _noted(self, name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.made.append(name)
            return function(*arguments)

        return call


def serve(engine: Engine, steps: int) -> int:
    """Requests that come and go, the same each time, until that many steps were made."""
    made = 0
    while made < steps:
        requests = [
            engine.submit([5 + i] * (3 + 20 * i), SamplingParams(max_tokens=12 + 4 * i, temperature=float(i)))
            for i in range(2)
        ]
        while any(request.finish_reason is None for request in requests):
            engine.step()
            made += 1
    return made


@pytest.mark.parametrize("steps", [60, pytest.param(10_000, marks=pytest.mark.soak)])
def test_nothing_grows(engine: Engine, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    serve(engine, 60)  # also those that begin with what others have computed
    device: Any = engine.device
    calls, resident = Calls(device.vk, monkeypatch), memory("VmRSS")
    files = len(list(Path("/proc/self/fd").iterdir()))
    assert serve(engine, steps) >= steps
    grown = memory("VmRSS") - resident
    print(f"{steps} steps: {grown / 1e6:.2f} MB more resident")
    assert not calls.made
    assert grown < 3e6
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    assert engine.cache.free_blocks == engine.cache.blocks


def test_host_time_of_a_step(engine: Engine) -> None:
    """The best of some tries: lavapipe, and whatever else runs here, take the host's core and caches. What the engine
    needs of them is in tests/engine/test_steady_state.py."""
    tries = [measure_host_overhead(engine, steps=20) for _ in range(4)]
    host, idle = min(one.host_us for one in tries), min(one.idle or 0.0 for one in tries)
    print(f"host {host:.0f} us of a step of {tries[0].step_us:.0f} us; device idle {idle:.1%}")
    assert all(one.idle is not None and one.idle >= 0 for one in tries) and idle < 0.5
    assert host < 500
