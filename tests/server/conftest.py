"""A server with a real model, shared by all tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.tiny_model import write_tiny_model
from tests.packages import model_path
from tests.server.servers import Running, serving


@pytest.fixture(scope="session", autouse=True)
def no_proxy() -> Iterator[None]:
    """Clients connect directly, without a proxy from the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "*")
        yield


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model is smollm2."""
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "smollm2.gguf").symlink_to(model_path("smollm2"))
    arguments = (folder / "smollm2.gguf", "--device", "cpu", "--kv-memory", "0.5")
    with serving(folder, *arguments, batch=8, context=2048, shutdown=2) as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a tiny random model, a small context and a short timeout."""
    folder = tmp_path_factory.mktemp("tiny")
    model = write_tiny_model(folder / "tiny.gguf")
    arguments = (model, "--device", "cpu", "--threads", "1")
    with serving(
        folder, *arguments, batch=8, context=128, timeout=20, shutdown=2, access_log=False
    ) as server:
        yield server
