"""/api/create, /api/copy and /api/delete of a local server delete, stall and fill nothing but what they name."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tandem.engine.model_manager import ModelManager, ModelSpec
from tandem.errors import RequestError, TemplateError
from tandem.model.catalogue import SHORT_NAMES
from tandem.model.model_files import CachedModel
from tandem.model.template_sandbox import compile_template
from tandem.server.core.prompt import GenerationRequest
from tandem.server.core.serving import Server
from tandem.server.http import background
from tandem.server.http.background import WorkerThread
from tandem.server.ollama import create
from tandem.server.ollama.create import MAX_TEXT, MAX_TEXTS, read_modelfile
from tandem.server.presets import Preset
from tandem.server.settings import ServerSettings
from tests.cli.tiny_model import write_tiny_model
from tests.server.servers import Running, serving


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def server(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """It has a downloaded model, and another file whose name is that of a download."""
    folder = tmp_path_factory.mktemp("created")
    downloaded(cache, "user/first", "first-F32.gguf")
    short = write_tiny_model(folder / "smollm2.gguf")
    options = ("--device", "cpu", "--threads", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(cache))
        with serving(
            folder, "hf.co/user/first", short, *options, context=64, shutdown=1, aliases=["*"]
        ) as server:
            yield server
            assert "Traceback" not in server.log.read_text()


def downloaded(cache: Path, repo: str, name: str) -> Path:
    folder = cache / f"models--{repo.replace('/', '--')}" / "snapshots" / "c0"
    folder.mkdir(parents=True, exist_ok=True)
    return write_tiny_model(folder / name)


def delete(server: Running, name: str) -> tuple[int, str]:
    answer = httpx.request("DELETE", f"{server.url}/api/delete", json={"model": name})
    return answer.status_code, answer.text


def test_nothing_is_deleted_but_the_model_that_is_named(server: Running, cache: Path) -> None:
    repo, _, quant = SHORT_NAMES["smollm2"].partition(":")
    first = cache / "models--user--first" / "snapshots" / "c0" / "first-F32.gguf"
    namesake = downloaded(cache, repo, f"other-{quant}.gguf")  # what the short name would download
    unserved = downloaded(cache, "user/unserved", "m-F32.gguf")
    for name in ("first-typo", "", "smollm2", "smollm2:latest", "hf.co/user/unserved", "user/unserved:F32"):
        assert delete(server, name)[0] == 404, name
    copy = {"source": "hf.co/user/first", "destination": "copied"}
    assert server.ask("/api/copy", copy)[0] == 200
    assert delete(server, "hf.co/user/first") == (
        400,
        '{"error":"copied has the same file: delete it first"}',
    )
    assert all(path.exists() for path in (first, namesake, unserved))
    assert delete(server, "copied")[0] == 200 and delete(server, "copied")[0] == 404
    with ThreadPoolExecutor(4) as pool:  # one of them deletes it
        names = ["hf.co/user/first", "User/First", "hf.co/user/first", "user/first"]
        statuses = sorted(status for status, _ in pool.map(lambda name: delete(server, name), names))
    assert statuses == [200, 404, 404, 404] and not first.exists()


@pytest.mark.fast
@pytest.mark.parametrize("way", ["path", "draft", "copied meanwhile"])
def test_no_file_is_deleted_that_another_model_has(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    path, other = downloaded(tmp_path, "user/first", "first-F32.gguf"), write_tiny_model(tmp_path / "o.gguf")
    specs = {"hf.co/user/first": ModelSpec("hf.co/user/first")}
    if way == "path":
        specs["other"] = ModelSpec(str(path))
    elif way == "draft":
        specs["other"] = ModelSpec(str(other), {"draft": "user/first:F32"})

    async def go() -> None:
        models, find = ModelManager(specs), create._download_of

        def copied(server: Server, name: str) -> CachedModel:
            found = find(server, name)
            models.add("other", specs[name])
            return found

        if way == "copied meanwhile":
            monkeypatch.setattr(create, "_download_of", copied)
        server = Server(models, ServerSettings())
        request = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(server=server)))
        with pytest.raises(RequestError, match="other has the same file"):
            await create.delete(request, create.DeleteRequest(model="user/first"))  # type: ignore[arg-type]
        await models.close()

    asyncio.run(go())
    assert path.exists()


@pytest.mark.parametrize("name", ["a\n", "\na", "a b", "é", "a" * 81, "a\0", ""])
def test_a_name_that_no_line_of_a_log_may_have_is_refused(server: Running, name: str) -> None:
    body = {"source": "smollm2", "destination": name}
    assert server.ask("/api/copy", body)[0] == 400


@pytest.mark.fast
@pytest.mark.parametrize("value", ["[" * 60_000, '{"a":' * 10_000, "9" * 60_000, "-" * 60_000])
def test_a_value_of_a_modelfile_is_a_text_if_it_is_no_json(value: str) -> None:
    found = read_modelfile(f"FROM tiny\nPARAMETER num_ctx {value}")
    assert found.parameters == {"num_ctx": value}


@pytest.mark.fast
@pytest.mark.parametrize("part", ["{{a}}", "{{" + "+".join("a" * 100) + "}}", "{{[" + "1," * 999 + "]}}"])
def test_a_template_of_many_parts_is_refused_before_it_is_compiled(part: str) -> None:
    """64 KB took 10 s, and Python's compiler let no other thread run for 0.7 s of them."""
    source, begun = part * (MAX_TEXT // len(part)), time.monotonic()
    with pytest.raises(TemplateError, match=r"has \d+ parts"):
        compile_template(source)
    assert time.monotonic() - begun < 5


def test_the_texts_of_created_models_have_a_limit(server: Running) -> None:
    messages = [{"role": "user", "content": "x" * MAX_TEXT}] * 63
    body = {"from": "smollm2", "messages": messages, "stream": False}
    made = MAX_TEXTS // (63 * MAX_TEXT)
    for i in range(made):
        assert server.ask("/api/create", {"model": f"large{i}", **body})[0] == 200
    status, _, error = server.ask("/api/create", {"model": "more", **body})
    assert status == 400 and "characters of text at most" in error["error"]
    assert server.ask("/api/create", {"model": "large0", **body})[0] == 200, "it replaces itself"
    for i in range(made):
        assert delete(server, f"large{i}")[0] == 200


@pytest.mark.fast
@pytest.mark.parametrize("stop", ["x" * 1000, ["x" * 500] * 2])
def test_stop_strings_count_as_texts(stop: str | list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """256 models had a gigabyte of them."""
    monkeypatch.setattr(create, "MAX_TEXTS", 2500)
    server = Server(ModelManager({"tiny": "tiny.gguf"}), ServerSettings())
    made = Preset("a", "tiny", sampling={"stop": stop})
    for name in ("a", "b"):
        create._add(server, dataclasses.replace(made, name=name), "tiny")
    with pytest.raises(RequestError, match="characters of text at most"):
        create._add(server, dataclasses.replace(made, name="c"), "tiny")


@pytest.mark.fast
def test_a_small_request_with_the_texts_of_a_preset_is_a_large_one() -> None:
    """It held up the thread for small requests with megabytes of messages."""
    message = {"role": "user", "content": "x" * MAX_TEXT}
    preset = Preset("p", "tiny", messages=(message, message))

    async def thread_of(name: str) -> WorkerThread:
        Server(ModelManager({}), ServerSettings(presets=(preset,)))._apply_preset(
            name, GenerationRequest(name)
        )
        return background._thread.get()

    assert asyncio.run(thread_of("p")) is background._large
    assert asyncio.run(thread_of("other")) is background._small


def test_metrics_do_not_grow_with_names(server: Running) -> None:
    """Each name that a client made up had 13 KB for ever."""
    for source, name in (("smollm2", "a1"), ("a1", "a2")):
        assert server.ask("/api/copy", {"source": source, "destination": name})[0] == 200
        assert server.ask("/completion", {"model": name, "prompt": "a", "n_predict": 1})[0] == 200
    assert delete(server, "a1")[0] == 200 and delete(server, "a2")[0] == 200
    metrics = server.ask("/metrics")[2]
    assert 'tandem_requests_total{finish_reason="length",model="smollm2"} 2.0' in metrics
    assert 'model="a' not in metrics
