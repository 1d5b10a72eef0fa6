"""The command line on a Vulkan device: spilling, what does not fit, and devices that are not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tandem import cli
from tandem.bench import bandwidth, rounds
from tandem.devices.vulkan.device import VulkanDevice
from tandem.model import locate
from tests.cli.processes import tandem
from tests.cli.tiny_model import write_tiny_model

PROMPT = "tell me a tale"
HIDDEN = {"VK_ICD_FILENAMES": os.devnull, "VK_DRIVER_FILES": os.devnull}  # of old loaders, of new ones


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=10_000_000)


def answer(capsys: pytest.CaptureFixture[str], model: Path, *options: str) -> list[int]:
    """The token ids that `tandem run` gives."""
    assert cli.main(["run", str(model), PROMPT, "-n", "24", "--json", *options]) == 0
    ids: list[int] = json.loads(capsys.readouterr().out)["token_ids"]
    return ids


def test_a_small_gpu_memory_spills_and_changes_no_token(
    lavapipe: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled: list[int] = []
    original = VulkanDevice.allocate

    def watched(device: VulkanDevice, program: Any) -> None:
        original(device, program)
        spilled.append(sum(placed.part.nbytes for placed in device.placed if placed.spilled))

    monkeypatch.setattr(VulkanDevice, "allocate", watched)
    expected = answer(capsys, tiny, "--device", "cpu")
    assert len(expected) == 24
    for limit in ("1", "0.0001", "0.000001"):  # GB
        assert answer(capsys, tiny, "--device", lavapipe, "--gpu-memory", limit) == expected
    all_in, some, more = spilled
    assert all_in == 0 < some < more


def test_a_context_too_large_is_refused_with_the_one_that_fits(
    lavapipe: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        VulkanDevice, "heaps_free", lambda device: [0.3e9, *[0.0] * (len(device.capabilities.heaps) - 1)]
    )

    def refusal(context: int) -> str:
        assert cli.main(["run", str(tiny), PROMPT, "--device", lavapipe, "-c", str(context)]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        return shown.err

    message = refusal(10_000_000)
    assert "does not fit in the 0.3 GB" in message, message
    largest = int(message.rsplit("use a context of at most ", 1)[1].split(",")[0])
    assert f"use a context of at most {largest}, or kv q8" in refusal(largest + 16)


def without_loader(folder: Path) -> dict[str, str]:
    """An environment in which libvulkan.so.1 cannot be loaded."""
    (folder / "libvulkan.so.1").write_text("not a library")
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.mark.parametrize("how", ["no driver", "no loader"])
@pytest.mark.parametrize("device", ["vulkan", "vulkan:0"])
def test_with_every_device_hidden_it_stops(tiny: Path, tmp_path: Path, how: str, device: str) -> None:
    """An error that says what to install, and no other device in its place."""
    environment = {**os.environ, **(HIDDEN if how == "no driver" else without_loader(tmp_path))}
    done = tandem("run", tiny, PROMPT, "-n", "4", "--device", device, env=environment)
    assert done.returncode == 1 and done.stdout == "", "the CPU must not answer"
    [line] = done.stderr.splitlines()
    assert line.startswith("tandem: ") and "install" in line and "Vulkan" in line


def test_with_every_device_hidden_auto_takes_the_cpu(tiny: Path) -> None:
    done = tandem("run", tiny, PROMPT, "-n", "4", env={**os.environ, **HIDDEN})
    assert done.returncode == 0 and len(done.stdout.strip()) == 4, done.stderr


@pytest.mark.parametrize(
    ("shape", "free", "advice"),
    [
        (
            "gemma-3-27b:q8_0",
            20e9,
            "use it in Q5_0 (18.6 GB) or smaller, or another model, a file of at most 19.8 GB",
        ),
        ("gemma-3-27b:q4_0", 2e9, "use a smaller model, a file of at most 1.8 GB"),
    ],
)
def test_a_model_too_large_is_refused_with_what_would_fit(
    lavapipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shape: str, free: float,
    advice: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(VulkanDevice, "free_memory", lambda device: (free, free))
    monkeypatch.setattr(bandwidth, "MIN_SECONDS", 0.01)
    assert cli.main(["bench", "--synthetic", shape, "--device", lavapipe]) == 1
    message = capsys.readouterr().err
    size = "28.7" if "q8_0" in shape else "15.6"
    assert f"the model ({size} GB) with a context of " in message, message
    assert f"in the {free / 1e9:.1f} GB that are free: {advice}" in message, message


def test_bench(
    lavapipe: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "WARM_UP", 0.0)
    monkeypatch.setattr(bandwidth, "MIN_SECONDS", 0.01)
    options = ["-p", "20", "-n", "2", "-b", "1,9", "-d", "20", "-r", "2", "--profile", "--json"]
    assert cli.main(["bench", str(tiny), "--device", lavapipe, *options]) == 0
    data = json.loads(capsys.readouterr().out)
    labels = [row["label"] for row in data["rows"]]
    assert labels == ["prefill 20 at 20", "decode 2, batch 1 at 20", "decode 2, batch 9 at 20"]
    for row in data["rows"]:
        assert len(row["seconds"]) == 2 and row["interval"][0] <= row["median"] <= row["interval"][1]
        assert sum(group["seconds"] for group in data["profiles"][row["label"]]) > 0


def test_the_bandwidth_of_a_gpu_is_that_of_reads(lavapipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = VulkanDevice(lavapipe)
    monkeypatch.setattr(bandwidth, "MIN_SECONDS", 0.01)
    for size in (16 << 20, 1 << 20):
        assert 1e8 < bandwidth.device_reads(device, size) < 1e14
    assert not device.arenas
    device.close()


@pytest.mark.parametrize("command", ["run", "serve", "bench", "tune", "perplexity"])
def test_a_device_that_is_not_there_is_told_before_a_model_is_fetched(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text(PROMPT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(locate, "resolve", lambda *_, **__: pytest.fail("the model was asked for first"))
    more = [str(tmp_path / "text")] if command == "perplexity" else [PROMPT] if command == "run" else []
    assert cli.main([command, "smollm2", *more, "--device", "vulkan:99"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and "vulkan" in shown.err.lower()
