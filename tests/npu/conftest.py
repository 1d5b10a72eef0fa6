"""A STAND-IN for pyxrt, as the module that the runtime imports."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

USERS = ("tandem.devices.npu.runtime", "tandem.devices.npu.accelerator", "tandem.devices.npu.trials")


@pytest.fixture
def xrt(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(Path(__file__).parent / "stand_in")
    for name in ("pyxrt", *USERS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("pyxrt")
    importlib.import_module(USERS[0]).TIMEOUT_SECONDS = 600.0  # type: ignore[attr-defined]  # the emulator takes its time
    yield module
    for name in ("pyxrt", *USERS):
        sys.modules.pop(name, None)
