"""Models with a prefix cache on disk, and the files that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem import LLM, AsyncLLM
from tandem.kernels.abi import KV_BLOCK
from tests.models.test_reference import GOLDENS

PROMPT = [(7 * i) % 250 + 3 for i in range(115)]
USABLE = len(PROMPT) // KV_BLOCK * KV_BLOCK  # tokens of its full blocks
OPTIONS: dict[str, Any] = {"threads": 1, "context": 256, "batch": 2, "device": "cpu", "disk_cache": "100M"}


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(name="folder")
def prefixes(cache_home: Path) -> Path:
    return cache_home / "tandem" / "prefixes"


def files_of(folder: Path) -> list[Path]:
    """The files of blocks and states."""
    return sorted(path for path in folder.glob("*/*") if path.is_file() and not path.is_symlink())


def size_of(folder: Path) -> int:
    """Bytes that the files take on the disk."""
    sizes = []
    for path in folder.glob("*/*"):
        try:
            sizes.append(-(-path.lstat().st_size // 4096) * 4096)
        except FileNotFoundError:  # evicted meanwhile
            continue
    return sum(sizes)


def open_llm(name: str = "gemma3-pattern3", **options: Any) -> LLM:
    return LLM(GOLDENS / f"{name}.gguf", **{**OPTIONS, **options})


def answer(llm: LLM, prompt: list[int] = PROMPT) -> list[int]:
    return llm.generate(prompt, max_tokens=9, temperature=0.0, ignore_eos=True).token_ids


def disk_stats(llm: LLM | AsyncLLM) -> Any:
    return (llm.llm if isinstance(llm, AsyncLLM) else llm).stats().disk
