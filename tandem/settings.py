"""What the environment may change. This is the only file that reads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from tandem.errors import DeviceError


class Settings(NamedTuple):
    isa: str | None  # TANDEM_ISA: avx512, avx2 or plain; None chooses by CPUID
    threads: int  # TANDEM_THREADS: threads of the CPU device
    cache: Path  # HF_HUB_CACHE or HF_HOME/hub: where pulled models live
    hub: str  # HF_ENDPOINT
    hub_token: str | None  # HF_TOKEN
    pipelines: Path  # XDG_CACHE_HOME/tandem: compiled GPU programs


def read_settings() -> Settings:
    env = os.environ
    cache = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(env.get("HF_HOME") or cache / "huggingface")
    return Settings(
        isa=env.get("TANDEM_ISA"),
        threads=_threads(env.get("TANDEM_THREADS")),
        cache=Path(env.get("HF_HUB_CACHE") or home / "hub"),
        hub=(env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"),
        hub_token=env.get("HF_TOKEN"),
        pipelines=cache / "tandem",
    )


def _threads(wanted: str | None) -> int:
    """All cores this process may use, unless the user wants fewer."""
    if not wanted:
        return len(os.sched_getaffinity(0))
    if not wanted.isdigit() or not int(wanted):
        raise DeviceError(f"TANDEM_THREADS={wanted}: give a number of threads, 1 or more")
    return int(wanted)
