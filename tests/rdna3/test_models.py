"""Whole golden models on the emulated Radeon 780M: as near to transformers as on any device."""

from __future__ import annotations

import numpy as np
import pytest

from tandem import LLM
from tandem.cli import main
from tandem.devices.backends import EMULATED, open_device
from tandem.devices.rdna3.device import EmulatedDevice
from tandem.errors import DeviceError
from tests.models.test_reference import GOLDENS, NAMES, golden_prompts
from tests.vulkan.mesa import FOLDER

MESA = "TANDEM_RADV"
# Families whose launches others have too.
NO_NEW_KERNEL = (
    "ernie4_5", "ernie4_5-moe", "exaone4", "exaone4-window", "falcon-h1", "falcon-h1-normed", "glm4", "granite",
    "granitehybrid", "granitehybrid-moe", "granitemoe", "hunyuan-dense", "hunyuan-moe", "lfm2", "lfm2moe", "mamba2",
    "nemotron_h", "nemotron_h_moe-latent", "olmo2", "olmo3", "phi3", "phi3-long", "qwen35moe", "qwen3next", "seed_oss",
    "smollm3", "stablelm",
)  # fmt: skip


@pytest.fixture(autouse=True)
def unpacked(mesa: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MESA, str(FOLDER))


def load(name: str, device: str = EMULATED, kv: str = "f32") -> LLM:
    return LLM(GOLDENS / f"{name}.gguf", device=device, context=128, kv=kv)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name in NO_NEW_KERNEL)) for name in NAMES],
)
def test_equals_transformers(name: str) -> None:
    with load(name) as llm:
        for ids, logits in golden_prompts(name):
            assert np.abs(llm.logits(ids) - logits).max() < 1e-4


@pytest.mark.parametrize("name", ["gemma3-pattern3", "qwen2"])
def test_generates_what_the_cpu_does(name: str) -> None:
    """Steps of prompts and of single tokens, of two sequences, with sampling by the device."""
    prompts = [[int(i) for i in ids[:12]] for ids, _ in golden_prompts(name)][:2]
    with load(name, "cpu") as cpu, load(name) as llm:
        expected, got = (each.generate(prompts, max_tokens=4, temperature=0) for each in (cpu, llm))
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]


def test_says_that_it_is_emulated_and_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = open_device(EMULATED)
    assert isinstance(device, EmulatedDevice) and "emulated" in device.describe()
    device.close()
    model = str(GOLDENS / "llama.gguf")
    for command in (["bench", model], ["tune", model], ["report"]):
        assert main([*command, "--device", EMULATED]) == 1
        assert "says nothing about speed" in capsys.readouterr().err
    with pytest.raises(DeviceError, match="says nothing about speed"):
        open_device(f"{EMULATED},cpu")
    monkeypatch.setenv(MESA, "/nowhere")
    with pytest.raises(DeviceError, match="set TANDEM_RADV to the folder"):
        open_device(EMULATED)
