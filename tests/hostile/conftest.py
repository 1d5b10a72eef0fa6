"""The server of most tests here; other files have one with limits of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.tiny_model import write_tiny_model
from tests.hostile.attacks import serving_streams
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
    with serving_streams(tmp_path_factory.mktemp("streaming"), model_path("smollm2")) as found:
        yield found
