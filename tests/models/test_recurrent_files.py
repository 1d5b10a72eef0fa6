"""Files of models with recurrent layers whose sizes or tensors are wrong: a typed error that names what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.errors import ModelFileError
from tandem.gguf.file import GGUF
from tandem.model.model import open_model
from tests.models.test_reference import GOLDENS

pytestmark = pytest.mark.fast


def error_of(monkeypatch: pytest.MonkeyPatch, name: str, keys: dict[str, Any], without: str = "") -> str:
    """What is said of a golden with other keys, or without a tensor. A key whose value is None is missing."""
    opened = GGUF.open

    def changed(path: str | Path) -> GGUF:
        gguf = opened(path)
        architecture = gguf.metadata["general.architecture"]
        gguf.metadata = dict(gguf.metadata) | {f"{architecture}.{key}": value for key, value in keys.items()}
        gguf.metadata = {key: value for key, value in gguf.metadata.items() if value is not None}
        if without:
            del gguf.tensors[without]
        return gguf

    monkeypatch.setattr(GGUF, "open", changed)
    with pytest.raises(ModelFileError) as caught:
        open_model(GOLDENS / f"{name}.gguf")
    assert "\n" not in str(caught.value)
    return str(caught.value)


SIZES: dict[str, tuple[Any, ...]] = {
    "ssm.state_size": (None, 0, 8, 257, -1, "x", 2**40),
    "ssm.group_count": (None, 0, 3, 4, 5000),
    "ssm.time_step_rank": (None, 0, 3, 8),
    "ssm.inner_size": (None, 0, 63, 128),
    "ssm.conv_kernel": (None, 0, 1, 3, 9),
}
WRONG = [
    (name, key, value)
    for name in ("mamba2", "granitehybrid", "nemotron_h", "falcon-h1", "qwen35")
    for key, values in SIZES.items()
    for value in values
]
WRONG += [("lfm2", "shortconv.l_cache", value) for value in (None, 0, 1, 4, 9)]
for name in ("lfm2", "granitehybrid"):
    heads = [0, 0, 0, 0], [2, 0], [2, 1, 0, 0], [0, 2, 0, 2**31], [0, -2, 0, 0]
    WRONG += [(name, "attention.head_count_kv", np.array(value)) for value in heads]
WRONG += [("nemotron_h", "feed_forward_length", np.array(value)) for value in ([0, 64], [0, 64, 0, 32, 0])]
WRONG += [("nemotron_h", "feed_forward_length", None), ("nemotron_h", "feed_forward_length", 64)]


@pytest.mark.parametrize(("name", "key", "value"), WRONG)
def test_wrong_sizes(name: str, key: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of(monkeypatch, name, {key: value})


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("lfm2", "token_embd_norm.weight"),
        ("lfm2", "blk.0.shortconv.conv.weight"),
        ("lfm2", "blk.0.shortconv.in_proj.weight"),
        ("qwen35", "blk.0.ssm_conv1d.weight"),
        *[("mamba2", f"blk.0.ssm_{part}") for part in ("a", "d", "dt.bias", "norm.weight", "in.weight")],
        *[("mamba2", f"blk.0.ssm_conv1d.{part}") for part in ("weight", "bias")],
        ("falcon-h1", "blk.1.ssm_out.weight"),
        ("nemotron_h", "blk.1.ffn_up.weight"),
        ("nemotron_h", "blk.2.attn_q.weight"),
    ],
)
def test_missing_tensors(name: str, tensor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tensor in error_of(monkeypatch, name, {}, without=tensor)
