"""The server of most tests here; other files have one with limits of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.cli.tiny_model import write_tiny_model
from tests.packages import model_path
from tests.server.servers import Running, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("hostile")
    model = write_tiny_model(folder / "smollm2.gguf")
    with serving(folder, model, "--device", "cpu", context=2048, batch=8, shutdown=1) as found:
        yield found


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server for 8 streams beside attacks. All of its KV cache has been written: pages that streams are the first to
    use, 24 KB for a token, are no harm that an attack does."""
    context, batch, chance = 2048, 16, random.Random(16)
    folder = tmp_path_factory.mktemp("streaming")
    with serving(folder, model_path("smollm2"), open_files=1024, context=context, batch=batch) as found:
        for _ in range(batch):
            ids = chance.choices(range(1000, 40_000), k=context - 2)
            assert found.ask("/v1/completions", {"prompt": ids, "max_tokens": 1})[0] == 200
        yield found
