"""The prefix cache on disk when files are damaged, the disk is full or hangs, or processes are killed: a miss."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.engine import disk_cache
from tandem.engine.block_files import HEADER, BlockFiles
from tandem.engine.load_options import disk_bytes
from tandem.errors import RequestError
from tandem.kernels.abi import KV_BLOCK
from tests.engine.disk_caches import (  # noqa: F401
    OPTIONS,
    PROMPT,
    USABLE,
    answer,
    cache_home,
    disk_stats,
    files_of,
    open_llm,
    prefixes,
    size_of,
)
from tests.hostile.test_failures import largest_file

ROOT = Path(__file__).parents[2]


Damage = Callable[[Path, random.Random, list[Path]], None]


def flip(path: Path, rng: random.Random, _: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def flip_header(path: Path, rng: random.Random, _: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(HEADER)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random, _: list[Path]) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.choice((0, 1, HEADER - 1, HEADER, len(data) - 1, rng.randrange(len(data))))])


def extend(path: Path, rng: random.Random, _: list[Path]) -> None:
    path.write_bytes(path.read_bytes() + bytes(rng.choice((1, 4096))))


def zeros(path: Path, _: random.Random, __: list[Path]) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def other(path: Path, rng: random.Random, files: list[Path]) -> None:
    """A sound file under the name of another."""
    path.write_bytes(rng.choice([file for file in files if file.is_file()]).read_bytes())


def link(path: Path, rng: random.Random, files: list[Path]) -> None:
    target = rng.choice([*files, Path("/dev/zero"), path, Path("/nothing")])
    path.unlink()
    path.symlink_to(target)


def pipe(path: Path, _: random.Random, __: list[Path]) -> None:
    path.unlink()
    os.mkfifo(path)


def subfolder(path: Path, _: random.Random, __: list[Path]) -> None:
    path.unlink()
    path.mkdir()


def gone(path: Path, _: random.Random, __: list[Path]) -> None:
    path.unlink()


DAMAGES: list[Damage] = [flip, flip_header, cut, extend, zeros, other, link, pipe, subfolder, gone]


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.soak)])
def test_damaged_files_are_a_miss(count: int, folder: Path) -> None:
    rng = random.Random(count)
    for name in ("llama", "gemma3-pattern3", "qwen35"):
        with open_llm(name, disk_cache=None) as llm:
            expected = answer(llm)
        with open_llm(name) as llm:
            answer(llm)
        sound = {path: path.read_bytes() for path in files_of(folder)}
        damaged = 0
        for _ in range(count // 3):
            some = rng.sample(sorted(sound), min(len(sound), rng.choice((1, 1, 2, 5))))
            for path in some:
                rng.choice(DAMAGES)(path, rng, sorted(sound))
            with open_llm(name) as llm:
                assert answer(llm) == expected
                assert llm.engine.cache.free_blocks == llm.engine.cache.blocks
                damaged += disk_stats(llm).damaged
            for path, data in sound.items():
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                elif path.is_symlink() or not path.is_file():
                    path.unlink(missing_ok=True)
                path.write_bytes(data)
        assert damaged > count // 20
        shutil.rmtree(folder)


def test_a_folder_that_is_damaged_is_a_miss(folder: Path, tmp_path: Path) -> None:
    with open_llm("llama", disk_cache=None) as llm:
        expected = answer(llm)
    with open_llm("llama") as llm:
        answer(llm)
    [own] = [path for path in folder.iterdir() if path.is_dir()]
    used = folder / "used"

    def link_own() -> None:
        own.rename(tmp_path / "moved")
        own.symlink_to(tmp_path / "moved")

    def make_pipe() -> None:
        used.unlink()
        os.mkfifo(used)

    for damage in (
        lambda: used.write_text("nonsense"),
        lambda: used.write_text("-5"),
        lambda: used.write_text("9" * 24),
        lambda: used.write_text(""),
        make_pipe,
        lambda: (used.unlink(), used.mkdir()),
        lambda: (used.rmdir(), used.symlink_to("/dev/zero")),
        lambda: used.unlink(),
        link_own,
        lambda: (own.unlink(), own.write_text("no folder")),
        lambda: own.unlink(),
    ):
        damage()
        with open_llm("llama") as llm:
            assert answer(llm) == expected
    with open_llm("llama") as llm:
        shutil.rmtree(folder)
        assert answer(llm) == expected
    with open_llm("llama") as llm:  # it was made again
        assert answer(llm) == expected and disk_stats(llm).hits == 1


def test_only_this_user_can_read_prompts(folder: Path) -> None:
    before = os.umask(0)
    try:
        folder.mkdir(parents=True, mode=0o777)
        with open_llm("llama") as llm:
            answer(llm)
    finally:
        os.umask(before)
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    shutil.rmtree(folder)
    for make_wrong in (lambda: folder.symlink_to("/tmp"), lambda: folder.write_text("")):
        make_wrong()
        with pytest.raises(RequestError, match=r"the disk cache cannot use .*prefixes"):
            open_llm("llama")
        folder.unlink()


@pytest.mark.parametrize("room", [0, 40, HEADER, HEADER + 100])
def test_a_full_disk_is_a_miss(room: int, folder: Path) -> None:
    with open_llm("llama", disk_cache=None) as llm:
        expected = answer(llm)
    with largest_file(room):
        with open_llm("llama") as llm:
            assert answer(llm) == expected
        with open_llm("llama") as llm:
            assert answer(llm) == expected and not disk_stats(llm).hits
    assert not files_of(folder), "a part of a file stayed"


@pytest.mark.parametrize("wrong", [0, -1, "20X", "", "G", "nan", "1e400", True, "-3G"])
def test_a_size_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"disk_cache=.*: give a size"):
        open_llm("llama", disk_cache=wrong)


def test_sizes() -> None:
    for text, nbytes in (
        ("20G", 20e9),
        ("1.5g", 1.5e9),
        ("500MB", 5e8),
        (" 3k", 3000),
        ("2T", 2e12),
        (7e6, 7e6),
    ):
        assert disk_bytes(text) == nbytes


WRITER = """
import sys
from pathlib import Path
import numpy as np
from tandem.engine.block_files import BlockFiles
folder, model, budget, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
files = BlockFiles(folder, bytes([model]) * 16, budget)
rng = np.random.default_rng(model)
print("ready", flush=True)
for i in range(count):
    keys = [rng.bytes(17) for _ in range(4)]
    files.write(keys, rng.integers(0, 256, (4, 30_000), np.uint8), i)
print(files.failed, files.evicted, flush=True)
"""


def write_in_process(folder: Path, model: int, budget: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(model), str(budget), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_the_budget_holds_for_two_processes_that_share_a_folder(folder: Path) -> None:
    budget, largest = 600_000, 0
    writers = [write_in_process(folder, model, budget, 150) for model in (1, 2)]
    while any(writer.poll() is None for writer in writers):
        largest = max(largest, size_of(folder))
        time.sleep(0.001)
    for writer in writers:
        out, _ = writer.communicate(timeout=60)
        failed, evicted = map(int, out.split()[1:])
        assert not failed and evicted > 100
    assert 0.5 * budget < largest <= budget, largest
    assert {path.name for path in folder.iterdir()} == {"used", "01" * 16, "02" * 16}


def test_kill_9_while_a_file_is_written(folder: Path) -> None:
    """What has a final name is whole; what does not is removed by the next writer, and the budget holds."""
    rng = random.Random(5)
    for _ in range(6):
        writer = write_in_process(folder, 1, 2_000_000, 10_000)
        assert writer.stdout and writer.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.05))
        writer.kill()
        writer.communicate(timeout=60)
    files = BlockFiles(folder, bytes([1]) * 16, 2_000_000)
    whole = [path for path in files_of(folder) if not path.name.endswith(".part")]
    assert whole
    into = np.empty((1, 30_000), np.uint8)
    for path in whole:
        assert files.read([bytes.fromhex(path.name)], into, 0) == 1
    (folder / ("01" * 16) / f"{bytes(17).hex()}.part").write_bytes(b"unfinished")
    files.write([bytes([7]) * 17], into, 0)
    assert not list(folder.glob("*/*.part")) and size_of(folder) <= 2_000_000


def test_a_prefix_is_evicted_from_its_end(folder: Path) -> None:
    with open_llm("llama") as llm:
        answer(llm)
    count = len(files_of(folder))
    assert count == USABLE // KV_BLOCK
    sizes = {path.stat().st_size for path in files_of(folder)}
    page = 4096 * -(-max(sizes) // 4096)
    with open_llm("llama", disk_cache=page * count - 1) as llm:
        answer(llm, [9] * 40)
    with open_llm("llama") as llm:
        answer(llm)
        stats = llm.stats()
        assert 0 < stats.cached_prompt_tokens < USABLE


def test_a_disk_that_hangs_stalls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm("llama", disk_cache=None) as llm:
        expected = answer(llm)
    with open_llm("llama") as llm:
        answer(llm)
    monkeypatch.setattr(disk_cache, "HANG_SECONDS", 0.3)
    monkeypatch.setattr(disk_cache, "CLOSE_SECONDS", 0.5)
    nothings: dict[str, Any] = {"find": iter(()), "_read": False, "_write_all": 0}
    for method, nothing in nothings.items():
        hangs = threading.Event()
        with monkeypatch.context() as patch, open_llm("llama") as llm:

            def wait(*_: Any, hangs: threading.Event = hangs, nothing: Any = nothing) -> Any:
                hangs.wait(60)
                return nothing

            patch.setattr(BlockFiles, method, wait)
            begun = time.monotonic()
            others = llm.stream([5, 6, 7], max_tokens=100, ignore_eos=True)
            next(others)
            assert answer(llm) == expected
            assert time.monotonic() - begun < 20
            assert len(list(others)) == 99
            llm.close()
            assert time.monotonic() - begun < 40
            hangs.set()


@pytest.mark.parametrize("method", ["find", "read"])
def test_a_reader_without_memory_is_a_miss(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm("llama") as llm:
        expected = answer(llm)

    def fail(*_: Any) -> Any:
        raise MemoryError

    with open_llm("llama") as llm:
        with monkeypatch.context() as patch:
            patch.setattr(BlockFiles, method, fail)
            result = llm.generate(PROMPT, max_tokens=9, temperature=0.0, ignore_eos=True, timeout=20)
            assert result.token_ids == expected
        assert disk_stats(llm).hits == 0
        assert not any(llm.engine.cache.pools[0].references)


def test_a_stream_goes_on_while_another_request_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the stream come while the reader is slow."""
    with open_llm("llama") as llm:
        expected = answer(llm)
    monkeypatch.setattr(disk_cache, "BATCH_BYTES", 1)
    read = BlockFiles.read

    def slow_read(*arguments: Any) -> int:
        time.sleep(0.02)
        return read(*arguments)

    monkeypatch.setattr(BlockFiles, "read", slow_read)
    with open_llm("llama") as llm:
        stream = llm.prepare([5, 6, 7], max_tokens=200, ignore_eos=True)
        other = llm.prepare(PROMPT, max_tokens=9, temperature=0.0, ignore_eos=True)
        llm.driver.submit([stream])
        llm.driver.advance([stream])
        llm.driver.submit([other])
        while not other.sequence.generated:
            llm.driver.advance([stream, other])
        assert len(stream.sequence.generated) > 20, "the stream waited for the disk"
        while not other.done:
            llm.driver.advance([other])
        assert other.result().token_ids == expected and disk_stats(llm).hits == 1


def test_a_cancelled_restore_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm("gemma3-pattern3") as llm:
        expected = answer(llm)
    monkeypatch.setattr(disk_cache, "BATCH_BYTES", 1)
    with open_llm("gemma3-pattern3") as llm:
        for steps in range(6):
            request = llm.prepare(PROMPT, max_tokens=9)
            llm.driver.submit([request])
            for _ in range(steps):
                llm.engine.step()
            llm.driver.cancel([request])
            assert llm.engine.cache.free_blocks == llm.engine.cache.blocks
        assert answer(llm) == expected
