"""Emulated Radeon 780Ms. Mesa is that of Debian's backports, as for tests/vulkan/test_amd.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from tandem.bench import kernel_checks
from tandem.devices.rdna3.compiler import FAMILIES
from tandem.devices.rdna3.device import EmulatedDevice
from tests.vulkan.mesa import FOLDER, newer_driver


@pytest.fixture(scope="session")
def mesa() -> None:
    if newer_driver() is None:
        message = "NO MACHINE CODE FOR AMD RUNS: let apt reach Debian 12's backports, which have Mesa 25.0"
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)


@pytest.fixture(scope="session", params=[64, 32], ids=["wave64", "wave32"])
def device(request: pytest.FixtureRequest, mesa: None) -> Iterator[EmulatedDevice]:
    yield from opened(request.param)


@pytest.fixture(scope="session")
def wave64(mesa: None) -> Iterator[EmulatedDevice]:
    yield from opened(64)


def opened(lanes: int, family: str = FAMILIES[0]) -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(FOLDER, lanes, family=family)
    kernel_checks.prepare(device)
    yield device
    device.close()
