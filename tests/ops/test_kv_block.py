"""KV_BLOCK is written once: with another value in abi.py, kernels, engine and models are still right."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_with_other_blocks(paths: Sequence[str], chosen: str) -> int:
    """Runs tests with blocks of twice the size (tests/other_kv_block.py); returns how many have passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.other_kv_block", "-k", chosen, *paths]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return sum(len(dots) for dots in re.findall(r"^(\.+) ", done.stdout, re.M))


def test_a_kv_block_of_another_size_changes_nothing_else() -> None:
    paths = ["tests/ops/test_kernels.py", "tests/engine/test_kv_cache.py", "tests/engine/test_capture.py"]
    paths += [
        "tests/engine/test_kv_snapshot.py",
        "tests/engine/test_images.py",
        "tests/models/test_goldens.py",
    ]
    kernels = "test_matches_reference and (attention or rope)"
    engine = "test_kv_cache or test_capture or (test_kv_snapshot and not damaged) or test_images"
    models = "test_goldens and (llama or gemma3-pattern3 or qwen35)"
    assert run_with_other_blocks(paths, f"({kernels}) or {engine} or ({models})") > 200
