"""A model file that is cut short or written while it is open is a typed error: it never kills the process (SIGBUS)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem import LLM
from tandem.devices.cpu.device import CPUDevice
from tandem.engine.engine import Engine
from tandem.errors import ModelFileError
from tandem.gguf.file import GGUF
from tandem.model.model import open_model
from tests.models.test_reference import GOLDENS

MODEL = GOLDENS / "llama.gguf"


def in_child(test: str, path: Path) -> None:
    """Runs a function of this module in a process of its own, which a signal may end."""
    code = f"from pathlib import Path; import {__name__} as module; module.{test}(Path({str(path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\1" * 64)
    os.utime(path, ns=(0, 0))  # the clock of a file system may be coarser than this test


def loading(path: Path, change: Callable[[Path], None], words: str) -> None:
    with open_model(path) as model:
        device = CPUDevice(2)
        change(path)
        with pytest.raises(ModelFileError, match=words):
            Engine.load(model, device, context=64, batch=1)
        device.close()


def loading_a_file_that_is_cut(path: Path) -> None:
    loading(path, cut, "cut short while it was read")


def loading_a_file_that_is_overwritten(path: Path) -> None:
    loading(path, overwrite, "was changed after it was opened")


def saving(path: Path, change: Callable[[Path], None], words: str) -> None:
    other = shutil.copy(MODEL, path.with_name("other.gguf"))
    with (
        LLM(path, device="cpu", threads=1, context=64) as llm,
        LLM(other, device="cpu", threads=1, context=64) as neighbour,
    ):
        expected = llm.generate([5, 6, 7], max_tokens=8).token_ids
        change(path)
        # The weights are in memory of our own.
        assert llm.generate([5, 6, 7], max_tokens=8).token_ids == expected
        with pytest.raises(ModelFileError, match=words):
            llm.save(list(range(3, 40)), path.with_name("state"))
        assert not path.with_name("state").exists()
        assert llm.generate([5, 6, 7], max_tokens=8).token_ids == expected
        assert neighbour.generate([5, 6, 7], max_tokens=8).token_ids == expected


def saving_after_a_cut(path: Path) -> None:
    saving(path, cut, "cut short while it was read")


def saving_after_a_change(path: Path) -> None:
    saving(path, overwrite, "was changed after it was opened")


def reading_the_header(path: Path) -> None:
    """Each read of the header finds the file shorter than the one before."""
    from tandem.gguf.disk_file import DiskFile

    read_into = DiskFile.read_into

    def cut_and_read(self: DiskFile, out: memoryview, offset: int, field: str) -> None:
        os.truncate(self.path, 24)
        read_into(self, out, offset, field)

    DiskFile.read_into = cut_and_read  # type: ignore[method-assign]
    with pytest.raises(ModelFileError, match="cut short while it was read"):
        GGUF.open(path)


@pytest.mark.parametrize(
    "test",
    [
        loading_a_file_that_is_cut,
        loading_a_file_that_is_overwritten,
        saving_after_a_cut,
        saving_after_a_change,
        reading_the_header,
    ],
)
def test_a_file_that_changes(test: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(MODEL, path)
    in_child(test.__name__, path)
