"""Images that clients send are read in a separate process: none stalls others, fills the memory or ends the server."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from tandem.engine import image_reader
from tandem.engine.image_reader import ImageReader
from tandem.engine.images import Image, ImageCache, ImageParts, images_in
from tandem.engine.job_process import JobLimits
from tandem.errors import OutOfMemoryError, QueueFullError, RequestError
from tandem.model.encoders.config import VisionConfig
from tandem.model.vision import VisionModel
from tandem.server.core import images
from tandem.server.core.images import RequestImages
from tests.hostile.attacks import ATTEMPTS, CHAT, MAX_HEALTH, MiB, watched
from tests.hostile.images import bombs, generated, saved
from tests.models.test_vision import GOLDENS, load
from tests.server.servers import Running, serving

SMALL = saved(Pillow.new("RGB", (3, 2), "red"), "PNG")
BOMBS = bombs()
FEW = ("a WebP of 50 million pixels", "a turned JPEG of 36 million pixels", "texts")  # in `make test`
MAX_CHILD = 600 * MiB  # of the process that reads an image, for a moment
MAX_GROWTH = 60 * MiB  # of the server itself
GENERATED = 20_000  # in a soak; `make test` reads a part


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("seeing")
    for name in ("gemma3.gguf", "mmproj-gemma3.gguf"):
        (folder / name).write_bytes((GOLDENS / name).read_bytes())
    arguments = (folder / "gemma3.gguf", "--device", "cpu", "--threads", "1")
    with serving(folder, *arguments, batch=8, context=128, timeout=60, shutdown=2) as running:
        yield running


def image_url(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(data).decode()}}


def asking(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def own_memory(server: Running) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


# ---- bombs


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.soak) for name in BOMBS]
)
def test_a_bomb_harms_nobody(seeing: Running, name: str) -> None:
    body = {"messages": [asking(image_url(BOMBS[name]))], "max_tokens": 1}
    assert seeing.ask(CHAT, body)[0] in (200, 400)  # the process has started
    for _ in range(ATTEMPTS):
        before = own_memory(seeing)
        with watched(seeing) as harm:
            status, _, answer = seeing.ask(CHAT, body)
        print(name, status, harm)
        assert status == 200 or (status == 400 and "give" in answer["error"]["message"]), answer
        assert own_memory(seeing) - before < MAX_GROWTH and harm.memory < MAX_CHILD
        if harm.health < MAX_HEALTH:
            return
    raise AssertionError(harm)


def test_the_server_itself_opens_no_image(seeing: Running) -> None:
    assert seeing.ask(CHAT, {"messages": [asking(image_url(SMALL))], "max_tokens": 1})[0] == 200
    for path in ("/tokenize", "/apply-template", "/v1/messages/count_tokens"):
        one: Any = image_url(SMALL)
        if "count" in path:
            source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(SMALL).decode()}
            one = {"type": "image", "source": source}
        assert seeing.ask(path, {"messages": [asking(one)]})[0] == 200
    assert "_imaging" not in Path(f"/proc/{seeing.process.pid}/maps").read_text()


def test_small_images_do_not_wait_for_large_ones(seeing: Running) -> None:
    large = {"messages": [asking(image_url(BOMBS["a PNG of 50 million pixels"]))], "max_tokens": 1}
    others = [threading.Thread(target=seeing.ask, args=(CHAT, large)) for _ in range(2)]
    for other in others:
        other.start()
    small = {"messages": [asking(image_url(SMALL))], "max_tokens": 1}
    statuses = [seeing.ask(CHAT, small)[0] for _ in range(5)]
    waiting = sum(other.is_alive() for other in others)
    for other in others:
        other.join()
    assert statuses == [200] * 5 and waiting, "they were answered while the large ones were read"


def test_too_many_images_are_refused_before_they_are_read(seeing: Running) -> None:
    bomb = image_url(BOMBS["a PNG of 50 million pixels"])
    for count, said in ((20, "shorten it"), (32, "images have 128"), (65, "more than 64 images")):
        before, one = seeing.cpu_seconds(), bomb if count == 65 else image_url(SMALL)
        status, _, answer = seeing.ask(CHAT, {"messages": [asking(*[one] * count)]})
        assert status == 400 and said in answer["error"]["message"], answer
        assert seeing.cpu_seconds() - before < 0.5
    many = {"messages": [asking(*[image_url(SMALL)] * 10_000)]}
    assert seeing.ask(CHAT, many)[0] == 400


# ---- the process


@pytest.fixture(scope="module")
def vision() -> Iterator[VisionConfig]:
    with VisionModel.open(GOLDENS / "mmproj-gemma3.gguf") as model:
        yield model.config


def pixels_of(parts: ImageParts) -> np.ndarray:
    [pixels] = [part for part in parts if not isinstance(part, str)]
    assert pixels.shape == (56, 56, 3) and pixels.dtype == np.uint8
    return pixels


def reading(check: Callable[[ImageReader], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        reader = ImageReader()
        try:
            await check(reader)
        finally:
            await reader.close()

    asyncio.run(run())


@pytest.mark.parametrize("count", [GENERATED // 200, pytest.param(GENERATED, marks=pytest.mark.soak)])
def test_generated_images(vision: VisionConfig, count: int) -> None:
    """Each gives pixels or an error in a sentence; the process lives."""

    async def check(reader: ImageReader) -> None:
        await reader.read(SMALL, vision)
        process, read = reader._quick._process, 0
        for number in range(count):
            try:
                pixels_of(await reader.read(generated(number), vision))
                read += 1
            except RequestError as error:
                assert len(str(error)) < 300 and "\n" not in str(error), number
        assert reader._quick._process is process and count / 5 < read < count

    reading(check)


def test_an_image_that_does_not_end_is_ended(vision: VisionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(reader: ImageReader) -> None:
        with pytest.raises(RequestError, match="too much time or memory"):
            await reader.read(BOMBS["a PNG of 50 million pixels"], vision)
        assert pixels_of(await reader.read(SMALL, vision)).any()

    monkeypatch.setattr(image_reader, "SLOW", JobLimits(0.2, 20, 0))
    reading(check)


def test_a_killed_process_is_not_the_images_fault(vision: VisionConfig) -> None:
    async def check(reader: ImageReader) -> None:
        await reader.read(SMALL, vision)
        task = asyncio.create_task(reader.read(BOMBS["a PNG of 50 million pixels"], vision))
        while reader._slow._process is None:
            await asyncio.sleep(0.01)
        os.kill(reader._slow._process.pid, signal.SIGKILL)
        with pytest.raises(OutOfMemoryError, match="try again"):
            await task
        assert pixels_of(await reader.read(SMALL, vision)).any()

    reading(check)


def test_a_cancelled_read_does_not_answer_the_next(vision: VisionConfig) -> None:
    async def check(reader: ImageReader) -> None:
        expected = pixels_of(await reader.read(SMALL, vision))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(BOMBS["a PNG of 50 million pixels"], vision), 0.1)
        assert (pixels_of(await reader.read(SMALL, vision)) == expected).all()

    reading(check)


def test_clients_that_leave_do_not_end_the_process(vision: VisionConfig) -> None:
    """It takes half a second to start, for which the others would wait."""

    async def check(reader: ImageReader) -> None:
        await reader.read(SMALL, vision)
        process = reader._quick._process
        for _ in range(20):
            tasks = [asyncio.create_task(reader.read(SMALL, vision)) for _ in range(3)]
            await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
        assert pixels_of(await reader.read(SMALL, vision)).any() and reader._quick._process is process

    reading(check)


# ---- memory


def test_the_images_of_all_requests_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXEL_BYTES", 3 * 3 * 56**2)

    def conversation() -> list[Any]:
        return [{"role": "user", "content": [{"type": "image", "image": SMALL} for _ in range(2)]}]

    async def run() -> None:
        reader = RequestImages()
        with load() as llm:
            async with reader.read(llm, conversation()):
                with pytest.raises(QueueFullError, match="try again later"):
                    async with reader.read(llm, conversation()):
                        pass
            async with reader.read(llm, first := conversation()):
                assert {type(part["image"]) for part in first[0]["content"]} == {ImageParts}
            with pytest.raises(RequestError):
                bad = [{"role": "user", "content": [{"type": "image", "image": b"x"}]}]
                async with reader.read(llm, bad):
                    pass
            assert reader._bytes == 0
            for _ in range(3):  # a request of any size, if it is alone
                monkeypatch.setattr(images, "MAX_PIXEL_BYTES", 1)
                async with reader.read(llm, conversation()):
                    pass
        await reader.close()

    asyncio.run(run())


def test_an_encoded_image_keeps_no_pixels() -> None:
    with load() as llm:
        ids = llm.chat_ids([{"role": "user", "content": [{"type": "image", "image": SMALL}]}])
        llm.generate(ids, max_tokens=1)
        [span] = images_in(ids)
        cached = llm.engine.images.share(span.image)
        assert cached.embeddings is not None and cached.pixels.nbytes == 0


def test_threads_share_the_cache_of_images() -> None:
    """Requests come from threads while the engine's thread evicts."""
    cache, failed = ImageCache(max_bytes=100_000), list[BaseException]()

    def share(seed: int) -> None:
        try:
            for i in range(2000):
                cache.share(Image(np.array([seed, i] * 500), 4))
                cache.evict()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=share, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and sum(image.pixels.nbytes for image in cache._images.values()) <= 100_000
