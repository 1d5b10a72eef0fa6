"""Settings from environment variables. No other file reads the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from tandem.errors import DeviceError


class Settings(NamedTuple):
    isa: str | None  # TANDEM_ISA: avx512, avx2 or plain; None chooses by CPUID
    threads: int  # TANDEM_THREADS: threads of the CPU device
    threads_given: bool  # TANDEM_THREADS is set, and overrides tuning
    tune: bool  # TANDEM_TUNE: 0 does not tune at first use, and ignores what `tandem tune` found
    cache: Path  # HF_HUB_CACHE or HF_HOME/hub: pulled models
    hub: str  # HF_ENDPOINT
    hub_token: str | None  # HF_TOKEN
    pipelines: Path  # XDG_CACHE_HOME/tandem: compiled GPU pipelines, tuning results, first downloads
    radv: Path | None  # TANDEM_RADV: folder of an unpacked Mesa, for the emulated GPU; None: the system's
    peano: Path | None  # PEANO_INSTALL_DIR: AMD's compiler for NPU cores
    ollama: tuple[Path, ...]  # OLLAMA_MODELS, or the default folders of Ollama's user and of its service
    lm_studio: tuple[Path, ...]  # LM Studio's models, in current and older versions
    llama_cpp: Path  # LLAMA_CACHE: models that llama.cpp downloaded


def read_settings() -> Settings:
    env = os.environ
    cache = Path(env.get("XDG_CACHE_HOME") or home_folder() / ".cache")
    home = Path(env.get("HF_HOME") or cache / "huggingface")
    return Settings(
        isa=env.get("TANDEM_ISA"),
        threads=_threads(env.get("TANDEM_THREADS")),
        threads_given=bool(env.get("TANDEM_THREADS")),
        tune=env.get("TANDEM_TUNE") != "0",
        cache=Path(env.get("HF_HUB_CACHE") or home / "hub"),
        hub=(env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"),
        hub_token=env.get("HF_TOKEN"),
        pipelines=cache / "tandem",
        radv=Path(env["TANDEM_RADV"]) if env.get("TANDEM_RADV") else None,
        peano=Path(env["PEANO_INSTALL_DIR"]) if env.get("PEANO_INSTALL_DIR") else None,
        ollama=(Path(env["OLLAMA_MODELS"]),) if env.get("OLLAMA_MODELS") else _ollama_folders(),
        lm_studio=(home_folder() / ".lmstudio" / "models", cache / "lm-studio" / "models"),
        llama_cpp=Path(env.get("LLAMA_CACHE") or cache / "llama.cpp"),
    )


def others_environment() -> dict[str, str]:
    """What a program that is not ours gets of the environment: HF_TOKEN is for the hub only."""
    return {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}


def home_folder() -> Path:
    """The user's home folder; / for a service user without one."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def _ollama_folders() -> tuple[Path, ...]:
    homes = (home_folder(), Path("/usr/share/ollama"), Path("/var/lib/ollama"))
    return tuple(home / ".ollama" / "models" for home in homes)


def _threads(wanted: str | None) -> int:
    """The number of cores that this process may use, unless TANDEM_THREADS says otherwise."""
    if not wanted:
        return len(os.sched_getaffinity(0))
    if not wanted.isdigit() or not int(wanted):
        raise DeviceError(f"TANDEM_THREADS={wanted}: give a number of threads, 1 or more")
    return int(wanted)
