"""Models that Ollama's clients make of served ones: a Modelfile, copies, deletion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ollama
import pytest

from tandem.errors import RequestError
from tandem.server.ollama.create import read_modelfile
from tests.cli.tiny_model import write_tiny_model
from tests.loopback_hub import LoopbackHub
from tests.server.servers import Running, serving

MODELFILE = """
# a comment
FROM tiny
PARAMETER temperature 0.5
parameter stop "zz"
PARAMETER stop yy
PARAMETER num_predict 3
SYSTEM \"\"\"You are
Mario.\"\"\"
MESSAGE user hi there
MESSAGE assistant Hello.
LICENSE \"\"\"free
FROM nothing\"\"\"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("create")
    model = write_tiny_model(folder / "tiny.gguf")
    with serving(
        folder, model, "--device", "cpu", "--threads", "1", batch=4, context=128, shutdown=2
    ) as server:
        yield server


def prompt(server: Running, model: str, text: str = "x") -> str:
    body = {"messages": [{"role": "user", "content": text}], "model": model}
    return str(server.ask("/apply-template", body)[2]["prompt"])


@pytest.mark.fast
def test_a_line_of_a_text_is_no_comment() -> None:
    found = read_modelfile(
        '# one\nFROM tiny\n  # two\nSYSTEM """Use headings:\n# Title\n"""\nPARAMETER seed 1'
    )
    assert found.system == "Use headings:\n# Title\n" and found.parameters == {"seed": 1}


@pytest.mark.fast
def test_a_modelfile_is_read() -> None:
    found = read_modelfile(MODELFILE)
    assert found.from_ == "tiny" and found.system == "You are\nMario."
    assert found.parameters == {"temperature": 0.5, "stop": ["zz", "yy"], "num_predict": 3}
    assert [(one.role, one.content) for one in found.messages or []] == [
        ("user", "hi there"),
        ("assistant", "Hello."),
    ]
    with pytest.raises(RequestError, match="the Modelfile has ADAPTER"):
        read_modelfile("FROM tiny\nADAPTER ./lora.gguf")
    with pytest.raises(RequestError, match="the Modelfile is not valid: messages"):
        read_modelfile("FROM tiny\nMESSAGE robot beep")


def test_a_model_is_created_copied_and_deleted(server: Running) -> None:
    client = ollama.Client(host=server.url)
    parameters = {"temperature": 0.0, "num_predict": 3}
    made = list(client.create("mario", from_="tiny", system="ab", parameters=parameters, stream=True))
    assert made[-1].status == "success"
    answer = client.chat("mario:latest", [{"role": "user", "content": "x"}])
    assert answer.eval_count == 3
    assert (
        client.chat("mario", [{"role": "user", "content": "x"}], options={"num_predict": 2}).eval_count == 2
    )
    assert "system\nab" in prompt(server, "mario") and "system" not in prompt(server, "tiny")
    shown = client.show("mario")
    assert "temperature 0.0" in str(shown.parameters) and "SYSTEM" in str(shown.modelfile)
    assert client.copy("mario", "luigi").status == "success"
    assert prompt(server, "luigi") == prompt(server, "mario")
    assert [str(one.model) for one in client.ps().models] == ["tiny"], "they share a loaded model"
    client.create("mario", from_="mario", system="cd")
    assert "system\ncd" in prompt(server, "mario") and "system\nab" in prompt(server, "luigi")
    assert client.delete("mario").status == "success" and client.delete("luigi").status == "success"
    assert [str(one.model) for one in client.list().models] == ["tiny"]
    with pytest.raises(ollama.ResponseError, match="mario") as missing:
        client.chat("mario", [{"role": "user", "content": "x"}])
    assert missing.value.status_code == 404


def test_a_modelfile_makes_a_model(server: Running) -> None:
    status, _, body = server.ask("/api/create", {"name": "file", "modelfile": MODELFILE, "stream": False})
    assert (status, body) == (200, {"status": "success"})
    text = prompt(server, "file")
    assert "You are\nMario." in text and text.index("hi there") < text.index("Hello.") < text.index(
        "x<|im_end|>"
    )
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    body = {
        "model": "angles",
        "from": "tiny",
        "template": template,
        "parameters": {"num_ctx": 64},
        "stream": False,
    }
    assert server.ask("/api/create", body)[0] == 200
    assert prompt(server, "angles") == "<x>"
    assert server.ask("/props?model=angles")[2]["default_generation_settings"]["n_ctx"] == 64


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        ({"model": "a"}, 400, "from is missing"),
        ({"model": "a", "from": "nothing"}, 404, "no model is called nothing"),
        ({"model": "tiny", "from": "tiny"}, 400, "choose another name"),
        ({"model": "a b", "from": "tiny"}, 400, "is no name for a model"),
        ({"model": "a", "from": "tiny", "parameters": {"temp": 1}}, 400, "temp"),
        ({"model": "a", "from": "tiny", "parameters": {"top_p": 7}}, 400, "parameters: top_p"),
        ({"model": "a", "from": "tiny", "parameters": {"num_ctx": "x"}}, 400, "context='x'"),
        ({"model": "a", "from": "tiny", "template": "{{ .System }} {{ .Prompt }}"}, 400, "Go's format"),
        ({"model": "a", "from": "tiny", "template": "{% if messages %}"}, 400, "template is broken"),
        ({"model": "a", "from": "tiny", "template": "{% include 'x' %}"}, 400, "has the statement Include"),
        ({"model": "a", "from": "tiny", "files": {"a.gguf": "sha256:0"}}, 400, "files"),
        ({"model": "a", "from": "/etc/passwd"}, 404, "no model is called"),
    ],
)
def test_a_wrong_request_creates_nothing(
    server: Running, body: dict[str, object], status: int, problem: str
) -> None:
    got, _, error = server.ask("/api/create", {"stream": False, **body})
    assert got == status and problem in error["error"]
    assert "a" not in [one["name"] for one in server.ask("/api/tags")[2]["models"]]


def test_only_the_operator_changes_models(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    model = write_tiny_model(tmp_path / "tiny.gguf")
    with serving(tmp_path / "home", model, "--device", "cpu", "--api-keys", keys, shutdown=2) as server:
        key = {"authorization": "Bearer secret"}
        for path, body in (
            ("/api/create", {"model": "a", "from": "tiny"}),
            ("/api/copy", {"source": "tiny", "destination": "a"}),
        ):
            assert server.ask(path, body, **key)[0] == 403
        client = ollama.Client(host=server.url, headers=key)
        with pytest.raises(ollama.ResponseError, match="only the operator"):
            client.delete("tiny")


def test_a_downloaded_model_is_deleted_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf")
    with LoopbackHub({"user/repo": {"other-F32.gguf": model.read_bytes()}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        with serving(tmp_path / "home", model, "--device", "cpu", "--threads", "1", context=64) as server:
            client, name = ollama.Client(host=server.url), "hf.co/user/repo:F32"
            client.pull(name)
            assert list((tmp_path / "hub").rglob("*.gguf"))
            assert client.delete(name).status == "success"
            assert not list((tmp_path / "hub").rglob("*.gguf"))
            with pytest.raises(ollama.ResponseError, match="delete its file"):
                client.delete("tiny")
            assert model.exists() and [str(one.model) for one in client.list().models] == ["tiny"]
