"""Presets: one file names models with settings of their own, and requests get them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cli import serve
from tandem.errors import RequestError
from tandem.server.settings import read_settings_file
from tests.cli.tiny_model import write_tiny_model
from tests.server.servers import Running, serving

PRESETS = """
[[presets]]
name = "short"
file = "tiny.gguf"
context = 64
pinned = true
system = "ab"
sampling = {temperature = 0.0, max_tokens = 3}
[[presets]]
name = "long"
file = "tiny.gguf"
context = 64
sampling = {max_tokens = 5, seed = 7, stop = ["zz"]}
[[presets]]
name = "other"
file = "tiny.gguf"
kv = "q8"
keep_alive = 0.1
chat_template = "chat.jinja"
chat_template_kwargs = {mark = "<"}
"""
TEMPLATE = "{{ mark }}{{ messages[0]['content'] }}>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("presets")
    write_tiny_model(folder / "tiny.gguf")
    (folder / "chat.jinja").write_text(TEMPLATE)
    with serving(
        folder, "--device", "cpu", "--threads", "1", presets=PRESETS, batch=4, context=128, shutdown=2
    ) as server:
        yield server


def settings(folder: Path, text: str) -> Path:
    (folder / "tandem.toml").write_text(text)
    return folder / "tandem.toml"


@pytest.mark.fast
def test_each_model_is_loaded_as_its_preset_says(tmp_path: Path) -> None:
    file = write_tiny_model(tmp_path / "tiny.gguf")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    found = read_settings_file(settings(tmp_path, PRESETS + 'draft = "tiny.gguf"\n'))
    files = serve._files(found)
    assert files == dict.fromkeys(("short", "long", "other"), file)
    specs = serve._specs(files, found)
    assert specs["short"].options == {"context": 64} and specs["short"].pinned
    assert specs["other"].options == {
        "kv": "q8",
        "draft": file,
        "prompt_lookup": False,
        "chat_template": TEMPLATE,
    }
    assert specs["other"].keep_alive == 0.1 and specs["short"].shares(specs["long"])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("preset", "error"),
    [
        ('name = "a"', "preset a: file is missing"),
        ('name = "a"\nfile = "b"\nkind = 1', "unknown setting kind: use some of name, file"),
        ('name = "a"\nfile = "b"\ncontext = "4096"', "context = '4096' has the wrong type: use int"),
        ('name = "a"\nfile = "b"\ncontext = 0', "preset a: context=0: give a whole number"),
        ('name = "a"\nfile = "b"\nkeep_alive = -1', "use 0 or more seconds"),
        ('name = "a"\nfile = "b"\nkeep_alive = nan', "use 0 or more seconds"),
        ('name = "a"\nfile = "b"\nchat_template = "\\u0000"', "chat template .* cannot be read"),
        ('name = "a"\nfile = "b"\nsampling = {temp = 1}', "sampling has no temp: use some of temperature"),
        ('name = "a"\nfile = "b"\nsampling = {temperature = -1}', "preset a: .*temperature"),
        ('name = "a"\nfile = "b"\nchat_template = "c"', "chat template .* cannot be read"),
        ('name = "a"\nfile = "b"\nprompt_lookup = true\ndraft = "c"', "exclude each other"),
    ],
)
def test_a_wrong_preset_is_named(tmp_path: Path, preset: str, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        read_settings_file(settings(tmp_path, f"[[presets]]\n{preset}\n"))


@pytest.mark.fast
def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny.gguf")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    twice = PRESETS + '[[presets]]\nname = "short"\nfile = "tiny.gguf"\n'
    with pytest.raises(RequestError, match="two models have the name short"):
        serve._files(read_settings_file(settings(tmp_path, twice)))
    with pytest.raises(RequestError, match=r"begin each with \[\[presets\]\]"):
        read_settings_file(settings(tmp_path, 'presets = ["a"]'))


def test_a_request_gets_what_it_does_not_set_itself(server: Running) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"):
        body = {"messages": [{"role": "user", "content": "x"}], "stream": False}
        if path == "/v1/responses":
            body = {"input": "x"}
        more = {"max_tokens": 2} if path == "/v1/messages" else {}
        status, _, short = server.ask(path, {**body, "model": "short", **more})
        assert status == 200, short
        usage = short.get("usage", short)
        kept = {"/v1/messages": ("output_tokens", 2), "/v1/responses": ("output_tokens", 3)}
        name, count = kept.get(path, ("eval_count" if "/api" in path else "completion_tokens", 3))
        assert usage[name] == count
    ask = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "model": "short"}
    assert server.ask("/v1/chat/completions", ask)[2]["usage"]["completion_tokens"] == 4
    [one, two] = (server.ask("/completion", {"prompt": "x", "model": "long"})[2]["content"] for _ in range(2))
    assert one == two, "the preset has a seed"


def test_the_system_message_is_that_of_the_preset(server: Running) -> None:
    def prompt(model: str, *messages: tuple[str, str]) -> str:
        chat = [{"role": role, "content": text} for role, text in messages]
        return str(server.ask("/apply-template", {"messages": chat, "model": model})[2]["prompt"])

    user, system = ("user", "x"), ("system", "c")
    assert prompt("short", user) == prompt("long", ("system", "ab"), user) != prompt("long", user)
    assert prompt("short", system, user) == prompt("long", system, user)
    assert prompt("other", user) == "<x>"
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"mark": "["},
        "model": "other",
    }
    assert server.ask("/apply-template", body)[2]["prompt"] == "[x>"


def test_names_of_a_file_share_a_model_and_the_log_says_which_is_loaded(server: Running) -> None:
    for model in ("short", "long", "other"):
        assert server.ask("/completion", {"prompt": "x", "n_predict": 1, "model": model})[0] == 200
    log = server.log.read_text()
    assert log.count("short is loaded on cpu: 0.0 GB") == 1 and "long is loaded" not in log
    assert [one["id"] for one in server.ask("/v1/models")[2]["data"]] == ["short", "long", "other"]
    props = server.ask("/props?model=long")[2]["default_generation_settings"]
    assert props["params"]["seed"] == 7 and props["params"]["n_predict"] == 5 and props["n_ctx"] == 64
