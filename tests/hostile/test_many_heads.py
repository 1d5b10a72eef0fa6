"""Latent attention has matrices of its own for each head: a file with thousands took minutes to load, and never ran."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tandem import LLM
from tandem.devices.cpu import device
from tandem.errors import DeviceError, ModelFileError
from tandem.gguf.file import GGUF
from tandem.model.architectures.deepseek2 import MAX_HEADS, MAX_HEADS_OF_LAYERS
from tests.models.test_reference import GOLDENS

pytestmark = pytest.mark.fast


def changed(path: Path, **values: int) -> Path:
    """The golden model with other numbers in its metadata."""
    golden = GOLDENS / "deepseek-v3.gguf"
    data, known = bytearray(golden.read_bytes()), GGUF.open(golden)
    for name, value in values.items():
        key = f"deepseek2.{name}".encode()
        at = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4  # its type has 4 bytes
        assert struct.unpack_from("<I", data, at)[0] == known.get(key.decode())
        struct.pack_into("<I", data, at, value)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("head_count", {"attention.head_count": MAX_HEADS + 1}),
        (
            "block_count",
            {"attention.head_count": MAX_HEADS, "block_count": MAX_HEADS_OF_LAYERS // MAX_HEADS + 1},
        ),
    ],
)
def test_more_heads_than_any_model_has_are_an_error(
    name: str, values: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=name):
        LLM(changed(tmp_path / "m.gguf", **values), device="cpu", threads=1)


def test_steps_of_too_many_launches_are_an_error_when_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at each of its requests."""
    monkeypatch.setattr(device, "MAX_LAUNCHES", 20)
    with pytest.raises(DeviceError, match="20 at most"):
        LLM(changed(tmp_path / "m.gguf"), device="cpu", threads=1, context=64)
