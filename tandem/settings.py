"""What the environment may change. This is the only file that reads it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    isa: str | None  # TANDEM_ISA: avx512, avx2 or plain; None chooses by CPUID
    threads: int  # TANDEM_THREADS: threads of the CPU device
    cache: Path  # HF_HUB_CACHE or HF_HOME/hub: where pulled models live
    hub: str  # HF_ENDPOINT
    hub_token: str | None  # HF_TOKEN


def read_settings() -> Settings:
    env = os.environ
    home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    return Settings(
        isa=env.get("TANDEM_ISA"),
        threads=int(env.get("TANDEM_THREADS") or len(os.sched_getaffinity(0))),
        cache=Path(env.get("HF_HUB_CACHE") or home / "hub"),
        hub=env.get("HF_ENDPOINT") or "https://huggingface.co",
        hub_token=env.get("HF_TOKEN"),
    )
