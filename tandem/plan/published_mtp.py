"""Rates with and without a draft head (MTP) that others have published, to print beside a prediction."""

from __future__ import annotations

from typing import NamedTuple

SWEEPS = (
    "https://github.com/sudoingX/qwen38-mtp/blob/8c11f6aaaf90ef201982e386684eb8f4d2c3beef/sweeps/apu-igpu.md"
)


class PublishedDrafts(NamedTuple):
    hardware: str
    shape: str
    about: str  # the model and the engine
    plain: float  # tokens per second without drafts
    draft_tokens: int
    accepted: float  # share of all draft tokens
    drafted: float  # tokens per second with them
    source: str

    @property
    def acceptance(self) -> float:
        """The acceptance rate of a draft token whose predecessors were accepted, with this share of all."""
        return rate_of_share(self.accepted, self.draft_tokens)


def rate_of_share(share: float, draft_tokens: int) -> float:
    """The rate a with a + a^2 + ... + a^n = share n."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        if sum(rate**n for n in range(1, draft_tokens + 1)) < share * draft_tokens:
            low = rate
        else:
            high = rate
    return high


_MODEL = "Qwen3.8 27B UD-Q4_K_XL (17.9 GB)"  # of the shape of Qwen3.6 27B
_780M, _8060S = f"{_MODEL}, llama.cpp b10354, Vulkan (Windows)", f"{_MODEL}, llama.cpp, Vulkan (Windows)"
_RADV = f"{_MODEL}, llama.cpp fork at baf6360be, Vulkan (RADV)"
PUBLISHED = (
    PublishedDrafts("phoenix-780m", "qwen3.6-27b", _780M, 4.1, 2, 0.770, 8.4, SWEEPS),
    PublishedDrafts("phoenix-780m", "qwen3.6-27b", _780M, 4.1, 3, 0.730, 8.4, SWEEPS),
    PublishedDrafts("phoenix-780m", "qwen3.6-27b", _780M, 4.1, 4, 0.655, 7.1, SWEEPS),
    PublishedDrafts("strix-halo-8060s", "qwen3.6-27b", _8060S, 11.5, 2, 0.782, 23.7, SWEEPS),
    PublishedDrafts("strix-halo-8060s", "qwen3.6-27b", _8060S, 11.5, 4, 0.658, 23.5, SWEEPS),
    PublishedDrafts("strix-halo-8060s", "qwen3.6-27b", _RADV, 11.9, 2, 0.797, 24.6, SWEEPS),
    PublishedDrafts("strix-halo-8060s", "qwen3.6-27b", _RADV, 11.9, 4, 0.642, 28.7, SWEEPS),
)
