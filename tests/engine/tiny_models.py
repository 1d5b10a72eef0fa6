"""Random models of two or three layers in any weight format, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tandem.devices.cpu.device import CPUDevice
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Sequence
from tandem.model.architectures import ARCHITECTURES
from tandem.model.config import ModelConfig, Rope
from tandem.model.model import open_model
from tests.gguf_files import Key, write

VOCAB = 320
WINDOW = 24  # of the tiny Gemma: shorter than the prompts of the tests


def write_model(path: Path, format: str, architecture: str = "llama") -> Path:
    """Rows are multiples of 256, as the K formats need. Gemma has two sliding layers and a global one."""
    layers = 3 if architecture == "gemma3" else 2
    config = ModelConfig(
        architecture,
        layers,
        dim=256,
        ffn_dim=512,
        q_heads=4,
        kv_heads=2,
        head_dim=64,
        vocab=VOCAB,
        trained_context=4096,
        eps=1e-5,
        scale=64**-0.5,
        ropes=(Rope(1e4, 64),),
        layer_rope=(0,) * layers,
        layer_window=(0,) * layers,
        tied_head=architecture == "gemma3",
    )
    keys: list[Key] = [
        ("general.architecture", "str", architecture),
        (f"{architecture}.context_length", "u32", config.trained_context),
        (f"{architecture}.embedding_length", "u32", config.dim),
        (f"{architecture}.block_count", "u32", layers),
        (f"{architecture}.feed_forward_length", "u32", config.ffn_dim),
        (f"{architecture}.attention.head_count", "u32", config.q_heads),
        (f"{architecture}.attention.head_count_kv", "u32", config.kv_heads),
        (f"{architecture}.attention.key_length", "u32", config.head_dim),
        (f"{architecture}.attention.layer_norm_rms_epsilon", "f32", config.eps),
        (f"{architecture}.attention.sliding_window", "u32", WINDOW),
        (f"{architecture}.attention.sliding_window_pattern", "u32", 3),
    ]
    if architecture != "gemma3":
        keys = [key for key in keys if "sliding" not in key[0]]
    rng = np.random.default_rng(1)
    tensors = []
    for name, shape in ARCHITECTURES[architecture].tensors(config).items():
        values = rng.standard_normal(shape).astype(np.float32) * (1 if len(shape) == 1 else shape[1] ** -0.5)
        tensors.append((name, format if len(shape) == 2 else "F32", values + (len(shape) == 1)))
    return write(path, keys, tensors)


class WatchedEngine(Engine):
    """Keeps the logits of each token that a request got."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: dict[Sequence, list[bytes]] = {}

    def _collect(self) -> list[Sequence]:
        sampled = super()._collect()
        for sequence, logits in zip(sampled, self._read("logits", len(sampled)), strict=True):
            self.seen.setdefault(sequence, []).append(logits.tobytes())
        return sampled

    def run(self, *requests: tuple[list[int], SamplingParams]) -> list[tuple[list[int], list[bytes]]]:
        """The tokens of each request, and the bits of the logits they came from."""
        sequences = [self.submit(prompt, params) for prompt, params in requests]
        while any(sequence.finish_reason is None for sequence in sequences):
            self.step()
        return [([s.id for s in sequence.generated], self.seen.pop(sequence)) for sequence in sequences]


@contextmanager
def opened(
    path: Path, *, threads: int = 2, context: int = 256, batch: int = 32, **options: Any
) -> Iterator[WatchedEngine]:
    model, device = open_model(path), CPUDevice(threads)
    try:
        yield WatchedEngine.load(model, device, context=context, batch=batch, **options)
    finally:
        device.close()
        model.gguf.close()
