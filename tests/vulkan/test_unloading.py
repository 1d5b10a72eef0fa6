"""Models that come and go on a GPU give everything back."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
from pathlib import Path

from tandem.engine.model_manager import ModelManager
from tests.cli.tiny_model import write_tiny_model
from tests.engine.test_model_manager import use_of_machine


def use_after_trimming() -> dict[str, int]:
    """What is freed may stay with malloc, some 24 MB at a time after LLVM has compiled: that is not left behind."""
    ctypes.CDLL(None).malloc_trim(0)
    return use_of_machine()


def test_loads_leave_nothing_behind(lavapipe: str, tmp_path: Path) -> None:
    """In a process of its own: what earlier tests have left on the heap decides how much of it malloc gives back."""
    path = write_tiny_model(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "tests.vulkan.test_unloading", lavapipe, str(path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stdout + done.stderr


def check_loads(device: str, path: Path) -> None:
    async def run() -> None:
        models = ModelManager({"tiny": path}, device=device, context=256, batch=2)

        async def load_and_unload() -> None:
            async with models.use("tiny") as llm:
                assert len((await llm.generate("x", max_tokens=2)).token_ids) == 2
                assert models.loaded()[0].device.startswith("vulkan:")
            await models.unload("tiny")
            assert not models.loaded()

        for _ in range(2):
            await load_and_unload()
        before = use_after_trimming()
        for _ in range(4):
            await load_and_unload()
        after = use_after_trimming()
        print(before, after)
        assert after["threads"] <= before["threads"] + 4  # of asyncio's own pool
        assert after["files"] <= before["files"] and after["maps"] <= before["maps"] + 20
        assert after["resident"] < before["resident"] + 25e6  # the driver keeps some of its own
        await models.close()

    asyncio.run(run())


if __name__ == "__main__":
    check_loads(sys.argv[1], Path(sys.argv[2]))
