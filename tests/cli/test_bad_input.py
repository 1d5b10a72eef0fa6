"""Whatever is given to the command line: one sentence on stderr that says what to do, and the exit code 1."""

from __future__ import annotations

import hashlib
import io
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM
from tandem.cli import _sentence, main
from tandem.cli.commands import parse
from tandem.devices.cpu import tuned as cpu
from tandem.errors import RequestError
from tandem.model.architectures import ARCHITECTURES
from tests.cli.processes import COMMAND, environment, tandem
from tests.cli.tiny_model import write_tiny_model
from tests.loopback_hub import LoopbackHub

MODEL = bytes(range(256)) * 1000


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub({"user/repo": {"model-Q4_0.gguf": MODEL}}) as hub:
        yield hub


Refused = Callable[..., str]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hub: LoopbackHub
) -> Refused:
    """Runs a command that is to fail; the sentence it fails with."""
    for key, value in environment(tmp_path, HF_ENDPOINT=hub.url).items():
        monkeypatch.setenv(key, value)

    def run(*arguments: str | Path, stdin: bytes = b"") -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        assert main([*map(str, arguments)]) == 1
        shown = capsys.readouterr()
        problem = [line for line in shown.err.splitlines() if not line.startswith("fetching ")]
        assert shown.out == "" and len(problem) == 1 and problem[0].startswith("tandem: "), shown
        return problem[0]

    return run


def whole_files(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file() and path.suffix != ".incomplete"]


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "missing.gguf"
    done = tandem("run", path, "hello")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"tandem: there is no file {path}: check the path\n"


def test_directory(refused: Refused, tmp_path: Path) -> None:
    assert refused("run", tmp_path, "hello") == f"tandem: {tmp_path} is a directory: name a .gguf file in it"


def test_not_a_model(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("This is not a model.")
    assert f"{path}: magic at byte 0" in refused("run", path, "hello")


def test_wrong_architecture_lists_the_known_ones(refused: Refused, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "bird.gguf", architecture="dodo")
    problem = refused("run", path, "hello")
    assert "'dodo'" in problem and ", ".join(sorted(ARCHITECTURES)) in problem and "lacks" not in problem


def test_a_wrong_architecture_says_what_is_missing(refused: Refused, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "mamba.gguf", architecture="mamba")
    assert "it lacks Mamba-1 layers" in refused("run", path, "hello")


def test_prompt_longer_than_the_context(refused: Refused, tiny: Path) -> None:
    problem = refused("run", tiny, "a" * 100, "--context", "64")
    assert "tokens and the context holds 64" in problem and "shorten it" in problem


def test_context_longer_than_the_model_was_trained_for(refused: Refused, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "short.gguf", context=128)
    assert "trained for 128" in refused("run", path, "hello", "--context", "129")


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompt(refused: Refused, tiny: Path, prompt: str) -> None:
    says = "tandem: the prompt is empty: write one after MODEL or pipe one in"
    assert refused("run", tiny, prompt) == says
    assert refused("run", tiny, stdin=prompt.encode()) == says


def test_invalid_utf8_on_stdin(refused: Refused, tiny: Path) -> None:
    says = "tandem: stdin is not UTF-8 text (byte 0xff at offset 5): convert it with iconv"
    assert refused("run", tiny, stdin=b"hello\xff") == says


def test_invalid_utf8_in_a_file(refused: Refused, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("Ångström".encode("latin1"))
    assert f"{path} is not UTF-8 text (byte 0xc5 at offset 0)" in refused("perplexity", tiny, path)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(999999999) %}{% for j in range(999999999) %}{% endfor %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'a' * 10 ** 12 }}",
    ],
)
def test_a_template_that_does_not_end(refused: Refused, tmp_path: Path, template: str) -> None:
    assert "template" in refused("run", write_tiny_model(tmp_path / "loop.gguf", template=template), "hello")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_reaches_out(refused: Refused, tmp_path: Path, template: str) -> None:
    problem = refused("run", write_tiny_model(tmp_path / "out.gguf", template=template), "hello")
    assert "template" in problem and "root:" not in problem


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "2"], "top_p"),
        (["--stop", ""], "stop"),
        (["--threads", "100000"], "threads"),
    ],
)
def test_parameters_out_of_range(refused: Refused, tiny: Path, options: list[str], says: str) -> None:
    assert says in refused("run", tiny, "hello", *options)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"model": None}, "model=None: give the path"), ({"device": None}, "device=None: give a")],
)
def test_the_library_is_given_none(tiny: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        LLM(**{"model": tiny, **options})


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["run"],
        ["run", "m", "p", "--max-tokens", "0"],
        ["run", "m", "p", "--device", "gpu"],
    ],
)
def test_usage(arguments: list[str]) -> None:
    done = tandem(*arguments)
    assert done.returncode == 2 and done.stderr.startswith("usage: tandem")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "m", "-p", "x"], "argument -p/--prompt: 'x' is not a whole number"),
        (["bench", "m", "-d", "1,-2"], "argument -d/--depth: -2 is less than 0"),
        (["bench serve", "http://h", "--rate", "fast"], "argument --rate: 'fast' is not a number"),
        (["bench serve", "http://h", "--timeout", "0"], "argument --timeout: 0 is not a number above 0"),
        (
            ["plan", "m", "--hardware", "h200", "--active", "-3"],
            "argument --active: -3 is not a number above 0",
        ),
        (
            ["plan", "m", "--hardware", "h200", "--target", "nan"],
            "argument --target: nan is not a number above 0",
        ),
        (["tune", "m", "--seconds", "-1"], "argument --seconds: -1 is not a number above 0"),
        (["serve", "--ray", "many"], "argument --ray: 'many' is not a whole number"),
    ],
)
def test_what_is_wrong_with_a_value(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert capsys.readouterr().err.endswith(f"error: {says}\n")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FileNotFoundError(2, "No such file or directory", "x.json"), "x.json: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("what a library says"), "what a library says"),
        (MemoryError(), "out of memory"),
    ],
)
def test_errors_of_the_system_have_no_numbers(error: Exception, says: str) -> None:
    assert _sentence(error) == says


def test_unknown_name(refused: Refused) -> None:
    assert "no model is called smolm2: use smollm2," in refused("run", "smolm2", "hello")


def test_sum_mismatch_during_a_pull(refused: Refused, tmp_path: Path, hub: LoopbackHub) -> None:
    hub.wrong_bytes = {"model-Q4_0.gguf"}
    problem = refused("pull", "hf.co/user/repo:Q4_0")
    assert problem == (
        "tandem: model-Q4_0.gguf arrived damaged (its SHA-256 differs from the hub's); pull it again"
    )
    assert whole_files(tmp_path) == []


def test_disk_full_during_a_pull(refused: Refused, tmp_path: Path, hub: LoopbackHub) -> None:
    blobs = tmp_path / "hub" / "models--user--repo" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(MODEL).hexdigest()}.incomplete").symlink_to("/dev/full")
    problem = refused("pull", "user/repo")
    assert "the disk is full: free some space and pull again" in problem
    assert whole_files(tmp_path) == []


def test_disk_full_for_the_answer(tiny: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "run", str(tiny), "hello", "-n", "5"], stdout=full, stderr=subprocess.PIPE
        )
    assert (
        done.returncode == 1 and b"No space left on device" in done.stderr and b"Traceback" not in done.stderr
    )


def test_no_write_permission(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.write_text("a file where a folder should be, which not even root can write into")
    monkeypatch.setenv("HF_HOME", str(home))
    assert refused("pull", "user/repo").endswith("Not a directory: set HF_HOME to a folder you may write to")


def test_no_network(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    with LoopbackHub({}) as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.url)
    problem = refused("run", "gemma-3-27b", "hello")
    assert "cannot be reached" in problem and "check the network" in problem


def test_rm_deletes_nothing_outside_the_cache(refused: Refused, tiny: Path, tmp_path: Path) -> None:
    assert "is not in the cache" in refused("rm", "--yes", tiny)
    assert tiny.exists()


def test_streams_that_are_closed_are_no_error(tmp_path: Path) -> None:
    command = " ".join([*COMMAND, "list", "--json"])
    for closed in (">&-", "2>&-", "<&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            f"{command} {closed}", shell=True, capture_output=True, env=environment(tmp_path)
        )
        assert (done.returncode, done.stderr) == (0, b""), closed


def test_a_warning_is_one_line(tiny: Path, tmp_path: Path) -> None:
    file = cpu.tuned_file(tmp_path / "tandem", 2)
    file.parent.mkdir()
    file.write_text("damaged")
    changes = {"XDG_CACHE_HOME": str(tmp_path), "TANDEM_TUNE": "1", "TANDEM_THREADS": "2"}
    done = tandem("run", tiny, "tell me", "-n", "1", "--device", "cpu", env=environment(tmp_path, **changes))
    assert done.returncode == 0
    assert done.stderr == f"tandem: {file} is damaged and not used: run `tandem tune` again, or delete it\n"
