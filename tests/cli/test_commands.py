"""What the commands print, to a person and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.cli.commands import parse
from tandem.cli.options import formatter
from tandem.cli.terminal import print_json, print_table
from tandem.files import modified
from tandem.model import locate
from tandem.model.model_files import CachedModel
from tandem.server.ollama.models import _listed_model
from tests.cli.processes import COMMAND, environment, on_terminal, tandem
from tests.cli.tiny_model import write_tiny_model
from tests.loopback_hub import LoopbackHub


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> object:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_run_streams_the_answer_alone(tiny: Path) -> None:
    done = tandem("run", tiny, "hello", "-n", "12")
    assert done.returncode == 0 and done.stderr == ""
    assert len(done.stdout) == 13 and done.stdout[:-1].isalpha() and done.stdout.endswith("\n")
    assert tandem("run", tiny, "-n", "12", stdin=b"hello\n").stdout == done.stdout
    assert tandem("run", tiny, "hello", "-n", "12", "--raw").stdout != done.stdout
    assert tandem("run", tiny, "hello", "-n", "12", "--system", "Be brief.").stdout != done.stdout


@pytest.mark.fast
@pytest.mark.parametrize("line", ["m,hi,-n,5", "m,-n,5,hi", "-n,5,m,hi", "m,-n,5,--raw,hi"])
def test_the_prompt_may_stand_anywhere(line: str) -> None:
    options = parse(["run", *line.split(",")])
    assert (options.model, options.prompt, options.max_tokens) == ("m", "hi", 5)
    assert parse(["run", "m", "-n", "5", "- a list"]).prompt == "- a list"
    assert parse(["run", "m", "-n", "5"]).prompt is None


def test_run_on_a_terminal_says_how_fast_it_was(tiny: Path, tmp_path: Path) -> None:
    with on_terminal(
        "run", tiny, "hello", "-n", "12", "--prompt-lookup", env=environment(tmp_path)
    ) as terminal:
        assert terminal.exit_code() == 0
    shown = terminal.seen.decode()
    for part in (
        "on the CPU",
        "answer 12 tokens",
        "GB/s",
        "first after",
        "draft tokens accepted in",
        "s saved",
    ):
        assert part in shown


def test_run_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "run", tiny, "hello", "-n", "12", "--temperature", "1", "--seed", "7")
    assert data == run_json(capsys, "run", tiny, "hello", "-n", "12", "--temperature", "1", "--seed", "7") | {
        "usage": data["usage"]
    }
    assert (
        len(data["token_ids"]) == 12 == data["usage"]["completion_tokens"]
        and data["finish_reason"] == "length"
    )
    other = run_json(capsys, "run", tiny, "hello", "-n", "12", "--temperature", "1", "--seed", "8")
    assert other["text"] != data["text"]


def test_inspect(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "inspect", tiny)
    rows = {row["name"]: row for row in data["tensors"]}
    assert data["config"]["layers"] == 1 and rows["output.weight"]["shape"] == [258, 64]
    assert rows["output.weight"]["bytes"] == 258 * 64 * 4 and "matmul" in rows["output.weight"]["path"]
    assert main(["inspect", str(tiny)]) == 0
    shown = capsys.readouterr().out
    assert "blk.0.attn_q.weight" in shown and "12 tensors" in shown


def test_inspect_program(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launches = run_json(capsys, "inspect", tiny, "--program")
    assert {"kernel", "value", "items", "bytes", "operations", "barrier"} == set(launches[0])
    assert main(["inspect", str(tiny), "--program"]) == 0
    assert f"{len(launches)} launches" in capsys.readouterr().out


def test_perplexity(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 10)
    data = run_json(capsys, "perplexity", tiny, text, "--chunk", "100")
    assert data["tokens"] == 4 * 49 and data["perplexity"] > 1 and data["error"] > 0
    assert main(["perplexity", str(tiny), str(text), "--chunk", "100"]) == 0
    assert capsys.readouterr().out.startswith(f"perplexity {data['perplexity']:.4f} ± ")


def test_pull_list_run_rm(tiny: Path, tmp_path: Path) -> None:
    with LoopbackHub({"user/repo": {"tiny-F32.gguf": tiny.read_bytes()}}) as hub:
        env = environment(tmp_path, HF_ENDPOINT=hub.url)
        assert "no models yet" in tandem("list", env=env).stderr
        done = tandem("run", "hf.co/user/repo:F32", "hello", "-n", "5", env=env)
        assert done.returncode == 0 and done.stderr.startswith("fetching tiny-F32.gguf"), done
    # The hub is gone now: what is in the cache needs no network.
    assert tandem("run", "user/repo", "hello", "-n", "5", env=env).stdout == done.stdout
    pulled = json.loads(tandem("pull", "user/repo", "--json", env=env).stdout)
    assert Path(pulled["path"]).read_bytes() == tiny.read_bytes()
    [row] = json.loads(tandem("list", "--json", env=env).stdout)
    assert row["name"] == "hf.co/user/repo:F32" and row["size"] == tiny.stat().st_size
    assert "hf.co/user/repo:F32" in tandem("list", env=env).stdout
    assert "add --yes" in tandem("rm", "user/repo", env=env).stderr
    assert tandem("rm", "user/repo", "--yes", env=env).stdout.startswith("deleted hf.co/user/repo:F32")
    assert not list((tmp_path / "hub").iterdir())


def test_a_reader_that_has_seen_enough(tiny: Path) -> None:
    command = [*COMMAND, "run", str(tiny), "hello", "-n", "5000", "-c", "6000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0


@pytest.mark.fast
def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("tandem 0.")


@pytest.mark.fast
def test_start_up_imports_nothing_heavy() -> None:
    code = "import sys; from tandem.cli import main; main(['list']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([COMMAND[0], "-c", code], capture_output=True, text=True)
    assert not {"numpy", "rich", "ssl", "jinja2", "cffi"} & set(done.stderr.split())


@pytest.mark.fast
def test_help_where_the_terminal_does_not_know_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.get_terminal_size", lambda: os.terminal_size((0, 0)))
    assert formatter("tandem")._width == 78


@pytest.mark.fast
def test_json_has_no_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("inf"), 0.1, float("nan")], "b": Path("ü")})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": [None, 0.1, None],
        "b": "ü",
    }


@pytest.mark.fast
def test_a_table_shows_names_in_the_order_they_have(capsys: pytest.CaptureFixture[str]) -> None:
    marks = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2028\u2029\u2066\u2067\u2068\u2069\ufeff"
    print_table(("NAME",), [(f"{marks}fugg.exe{marks}",)])
    print_json({"name": marks})
    written = capsys.readouterr().out
    assert "\nfugg.exe\n" in written and not set(written) & set(marks)
    assert json.loads(written[written.index("{") :]) == {"name": marks}


@pytest.mark.fast
@pytest.mark.parametrize("seconds", [-(10**18), -1, 10**12, 10**18])
def test_a_file_of_any_date_is_listed(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """File systems have dates before 1970 and after 9999."""
    status = os.stat_result((0o100644, 1, 1, 1, 0, 0, 5, seconds, seconds, seconds))
    model = CachedModel("m", "", "", (), 5, modified(status))
    monkeypatch.setattr(locate, "list_models", lambda: [model])
    assert main(["list"]) == 0
    assert "m " in capsys.readouterr().out
    path = write_tiny_model(tmp_path / "m.gguf")
    with suppress(OSError):  # a file system without such dates
        os.utime(path, (seconds, seconds))
    assert _listed_model("m", path)["modified_at"] >= "1970"


@pytest.mark.fast
def test_json_sends_no_escape_codes_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"name": "a\x1b[2J\x9b2J\x7f\x85\nb"}
    print_json(data)
    assert not set(written := capsys.readouterr().out) & {chr(code) for code in (0x1B, *range(127, 160))}
    assert json.loads(written) == data
