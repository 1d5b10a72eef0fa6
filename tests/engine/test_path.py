"""How many of our files a newcomer reads to follow a token, found by tracing one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import tandem
from tandem import LLM
from tandem.kernels.abi import KV_BLOCK
from tests.packages import model_path

PACKAGE = Path(tandem.__file__).parent
MAX_FILES = 10  # to read the path of a token in one sitting


def test_a_token_passes_ten_files() -> None:
    """Every file whose functions run between two tokens of a stream, over a whole KV block."""
    seen: set[str] = set()

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (path := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
            seen.add(str(path.relative_to(PACKAGE)))

    with LLM(model_path("smollm2"), device="cpu", context=256) as llm:
        stream = iter(llm.stream("Once upon a time", max_tokens=3 * KV_BLOCK, ignore_eos=True))
        for _ in range(KV_BLOCK):
            next(stream)
        sys.setprofile(trace)
        try:
            for _ in range(KV_BLOCK + 1):
                next(stream)
        finally:
            sys.setprofile(None)
    assert "engine/scheduler.py" in seen and "engine/kv_cache.py" in seen
    assert len(seen) <= MAX_FILES, sorted(seen)
