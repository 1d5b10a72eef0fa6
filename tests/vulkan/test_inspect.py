"""`tandem inspect --device`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tandem.cli import inspect_device, main
from tandem.cli.inspect_device import _details
from tandem.devices.vulkan.feature_report import feature_paths
from tandem.errors import DeviceError
from tests.vulkan.machines import GB, PHOENIX


@pytest.mark.fast
def test_lavapipe_on_one_screen(lavapipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--device", lavapipe]) == 0
    shown = capsys.readouterr().out
    for word in (
        "DEVICE",
        "vulkan:0",
        "selects vulkan:",
        "integer dot product",
        "matrix units",
        "HEAP",
        "limits: ",
    ):
        assert word in shown
    assert len(shown.splitlines()) <= 40 and max(map(len, shown.splitlines())) <= 160
    assert main(["inspect", "--device", lavapipe, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["used"].startswith("vulkan:") and 0 < data["heaps"][0]["free"] <= data["heaps"][0]["bytes"]


@pytest.mark.fast
def test_a_phoenix_and_what_it_would_be_without() -> None:
    paths = {name: (there, path) for name, there, path in feature_paths(PHOENIX)}
    matrices = "matmuls of more than 128 tokens, and prompts' attention, through shared memory"
    assert paths["matrix units"] == (True, matrices)
    # The fake machine's features.
    assert paths["integer dot product"] == (False, "models do not run without it")
    bare = {name: path for name, _, path in feature_paths(replace(PHOENIX, matrix_shapes=()))}
    assert "integer dot products" in bare["matrix units"]
    with_dots = replace(
        PHOENIX, features=PHOENIX.features | {"shaderIntegerDotProduct"}, register_coopmat=True
    )
    nvidia = {name: path for name, _, path in feature_paths(with_dots)}
    assert nvidia["matrix units"] == "matmuls of more than 2 tokens, and attention, all from registers"
    assert nvidia["integer dot product"] == "matmuls of up to 2 tokens"
    plain = {
        name: path
        for name, _, path in feature_paths(replace(with_dots, matrix_shapes=(), register_coopmat=False))
    }
    assert plain["integer dot product"] == "matmuls of any number of tokens"
    heaps = _details(PHOENIX, [5.0 * GB, 10.0 * GB])["heaps"]
    assert [(h["device_local"], h["mapped"], h["free"]) for h in heaps] == [
        (False, True, 5 * GB),
        (True, True, 10 * GB),
    ]


@pytest.mark.fast
@pytest.mark.parametrize(("asked", "code"), [(["--device"], 0), ([], 0), (["--device", "vulkan"], 1)])
def test_without_vulkan_it_says_what_to_install(
    asked: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> Any:
        raise DeviceError("no Vulkan driver: install one")

    monkeypatch.setattr(inspect_device, "devices", none)
    monkeypatch.setattr("tandem.devices.backends.GPU_NODES", ())
    assert main(["inspect", *asked]) == code
    shown = capsys.readouterr()
    assert "no Vulkan driver: install one" in (shown.err if code else shown.out)
    assert code or "auto selects the CPU" in shown.out


@pytest.mark.fast
def test_a_program_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--program"]) == 1
    assert "name one" in capsys.readouterr().err
