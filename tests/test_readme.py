"""The commands and programs of README.md run, and do what it says they do.

Models that it names are in a cache made of the tests' own files; a hub on loopback has what it pulls.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cli.commands import parse
from tandem.model.catalogue import DEFAULT_MODEL, SHORT_NAMES
from tests.convert.folders import LLAMA, llama_tensors, write_folder
from tests.loopback_hub import LoopbackHub
from tests.packages import model_path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
# A command ends where two spaces begin a remark.
LINES = [re.split(r"  +", line)[0] for language, text in BLOCKS if not language for line in text.splitlines()]
COMMANDS = [line for line in LINES if re.match(r"(git|make|tandem) ", line)]
ANSWER = next(text for language, text in BLOCKS if text.startswith("fetching ")).splitlines()[1]

NOT_RUN = {
    "git clone <this repository> tandem && cd tandem": "there is no address to clone from; CI begins with a clone",
    "make run": "test_make_run runs what it runs; it would make another environment",
}
# What is added to a command so that a test can afford it, and what its output has.
OPTIONS = {
    "tandem serve": "--port 0",
    "tandem bench": "-p 16 -n 8",
    "git diff": "-n 16",
    "tandem run ./model.gguf": "-n 16",
}
OUTPUT = {
    'tandem run qwen2.5-coder-0.5b "Name': "Mercury.*Neptune",
    "tandem run qwen2.5-coder-0.5b": "Paris",  # asked on stdin, as no terminal is there
    "tandem pull": r"gemma-3-4b-it-Q4_K_M\.gguf",
    "tandem convert": r"FOLDER-q8_0\.gguf",
    "tandem list": DEFAULT_MODEL,
    "git diff": r"\w",
    "tandem run ./model.gguf": '"finish_reason"',
    "tandem doctor": "CPU",
    "tandem bench": "prefill 16.*decode 8",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: a cache with the models that README.md has fetched before, and a `git` with a diff."""
    folder = tmp_path_factory.mktemp("readme")
    smollm = model_path("smollm2")
    (folder / "model.gguf").symlink_to(smollm)
    for name, file in ((DEFAULT_MODEL, model_path(DEFAULT_MODEL)), ("qwen2.5-coder-1.5b", smollm)):
        repo, _, quant = SHORT_NAMES[name].partition(":")
        snapshot = folder / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots" / "a"
        snapshot.mkdir(parents=True)
        (snapshot / f"{name}-instruct-{quant.lower()}.gguf").symlink_to(file)
    write_folder(folder / "FOLDER", LLAMA, llama_tensors("llama", 4, 1))
    (folder / "bin").mkdir()
    (folder / "bin" / "git").write_text("#!/bin/sh\necho '-  colour = 1\n+  color = 1'\n")
    (folder / "bin" / "tandem").write_text(
        f"#!{sys.executable}\n"
        "from tandem.model.catalogue import PINS\n"
        "PINS.clear()  # the loopback hub has other bytes\n"
        "from tandem.cli import main\n"
        "raise SystemExit(main())\n"
    )
    for file in (folder / "bin").iterdir():
        file.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def environment(folder: Path) -> Iterator[dict[str, str]]:
    files = {"ggml-org/gemma-3-4b-it-GGUF": {"gemma-3-4b-it-Q4_K_M.gguf": model_path("smollm2").read_bytes()}}
    with LoopbackHub(files) as hub:
        yield os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HF_HUB_CACHE": str(folder / "hub"),
            "HF_ENDPOINT": hub.url,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HOME": str(folder),
            "NO_PROXY": "*",
            "PYTHONPATH": str(ROOT),
        }


def shell(command: str, folder: Path, environment: dict[str, str]) -> str:
    """What a command prints; it has a question on stdin."""
    run = subprocess.run(
        command, shell=True, cwd=folder, env=environment, input="What is the capital of France?",
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_there_are_commands_and_programs() -> None:
    assert len(COMMANDS) >= 10 and len(PROGRAMS) == 2 and NOT_RUN.keys() <= {*COMMANDS, *LINES}
    assert all(any(command.startswith(key) for command in COMMANDS) for key in OUTPUT)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in NOT_RUN and " serve" not in c])
def test_a_command_runs(command: str, folder: Path, environment: dict[str, str]) -> None:
    more = next((options for start, options in OPTIONS.items() if command.startswith(start)), "")
    printed = shell(f"{command} {more}", folder, environment)
    expected = next(pattern for start, pattern in OUTPUT.items() if command.startswith(start))
    assert re.search(expected, printed, re.DOTALL), printed


def test_the_server_shows_its_page(folder: Path, environment: dict[str, str]) -> None:
    [command] = [command for command in COMMANDS if command.startswith("tandem serve")]
    arguments = shlex.split(f"{command} {OPTIONS['tandem serve']}")
    with subprocess.Popen(
        arguments, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        try:
            url = next(line for line in server.stderr if "listening at" in line).split()[-1]
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(url, timeout=60) as page, opener.open(f"{url}/v1/models", timeout=60) as models:
                assert b"<title>" in page.read() and DEFAULT_MODEL.encode() in models.read()
        finally:
            server.terminate()
            server.communicate()


def test_make_run(folder: Path, environment: dict[str, str]) -> None:
    """Its command, without the set-up before it, prints the answer that README.md shows."""
    plan = subprocess.run(
        ["make", "--no-print-directory", "-n", "run"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    command = plan.splitlines()[-1]
    assert command.startswith(f".venv/bin/tandem run {DEFAULT_MODEL} ")
    printed = shell(command.removeprefix(".venv/bin/"), folder, environment)
    assert printed.strip() == ANSWER


def test_the_programs_run(folder: Path, environment: dict[str, str]) -> None:
    expected = [
        "Paris",
        r'Hypertext Transfer Protocol.*stop.*Usage.*Paris.*Tokyo.*\{\s*"name":\s*"Ann",\s*"age":\s*31\s*\}',
    ]
    for program, pattern in zip(PROGRAMS, expected, strict=True):
        run = subprocess.run(
            [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        assert re.search(pattern, run.stdout, re.DOTALL), run.stdout


@pytest.mark.fast
def test_the_command_line_knows_every_command_of_the_docs() -> None:
    page = (ROOT / "docs" / "COMMANDS.md").read_text()
    lines = [re.split(r"  +", line)[0] for line in page.splitlines()]
    commands = [
        line[line.index("tandem ") :] for line in lines if re.match(r"(git diff \| )?tandem \w", line)
    ]
    assert len(commands) > 20
    for command in commands:
        parse(shlex.split(command)[1:])  # it exits with 2 if it does not know an option


@pytest.mark.fast
def test_every_target_of_make_that_is_named_is_there() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in ("README.md", "CONTRIBUTING.md"):
        named = re.findall(r"(?:^|`)make (?!-)([\w-]+)", (ROOT / page).read_text(), re.MULTILINE)
        assert named and set(named) <= set(targets), page


@pytest.mark.fast
@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"])
def test_links_lead_to_files(page: str) -> None:
    """tests/test_site.py does the same for docs/."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert links and not [link for link in links if not ((ROOT / page).parent / link).exists()]
    paths = re.findall(r"`((?:tandem|tests|docs|benchmarks)/[\w/.-]+)`", (ROOT / page).read_text())
    assert page == "CHANGELOG.md" or not [path for path in paths if not (ROOT / path).exists()]
