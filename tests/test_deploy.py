"""The files of deploy/ and docs/SECURITY.md agree with the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tandem.cli.commands import parse
from tandem.doctor.checks import without_names
from tandem.server.http.connections import RESERVED_FILES
from tandem.server.presets import KINDS
from tandem.server.settings import ServerSettings, read_settings_file
from tandem.settings import read_settings

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[1]


def test_the_settings_file_shows_every_setting_and_its_default(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "tandem.toml").read_text()
    found = dict(re.findall(r"^# (\w+) = (.*?)(?:  +#.*)?$", text, re.MULTILINE))
    assert set(found) == {field.name for field in dataclasses.fields(ServerSettings)} - {"presets", "mcp"}
    shown = {  # examples of settings without a default
        *("models", "context", "threads", "kv_memory", "gpu_memory", "draft", "keep_alive"),
        *("api_keys", "max_prompt", "aliases", "responses", "disk_cache"),
    }
    file = tmp_path / "tandem.toml"
    file.write_text("".join(f"{name} = {value}\n" for name, value in found.items() if name not in shown))
    assert read_settings_file(file) == ServerSettings()
    file.write_text("".join(f"{name} = {value}\n" for name, value in found.items()))
    assert read_settings_file(file).models == ("smollm2",)


def test_the_settings_file_shows_every_setting_of_a_preset(tmp_path: Path) -> None:
    _, _, text = (ROOT / "deploy" / "tandem.toml").read_text().partition("# [[presets]]\n")
    lines = [line.removeprefix("#") for line in text.splitlines()]
    (tmp_path / "tandem.toml").write_text("\n".join(["[[presets]]", *lines]).replace("prompt_lookup =", "# "))
    [preset] = read_settings_file(tmp_path / "tandem.toml").presets
    assert set(re.findall(r"^#   (\w+) =", text, re.MULTILINE)) == set(KINDS)
    assert preset.name == "coder" and preset.pinned and preset.sampling["max_tokens"] == 1000


def test_the_unit_starts_an_existing_command() -> None:
    unit = (ROOT / "deploy" / "tandem.service").read_text()
    [command] = re.findall(r"^ExecStart=\S+/tandem (.*)$", unit, re.MULTILINE)
    assert parse(command.split()).command == "serve"
    [stop] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) > ServerSettings().shutdown
    [files] = re.findall(r"^LimitNOFILE=(\d+)$", unit, re.MULTILINE)
    assert int(files) >= ServerSettings().max_connections + 2 * RESERVED_FILES


def test_a_services_user_needs_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like systemd's DynamicUser, which has no entry in the user database."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_settings().pipelines == tmp_path / "tandem" and without_names({"a": "/b"}) == {"a": "/b"}


def test_every_guarantee_names_an_existing_test() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    text = (ROOT / "docs" / "SECURITY.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    failures = (ROOT / "docs" / "FAILURES.md").read_text()
    named |= set(re.findall(r"`(test_\w+)`", failures))
    assert len(named) > 15 and not [name for name in named if f"def {name}(" not in tests]
    assert all((ROOT / "tests" / name).exists() for name in re.findall(r"`(\w+/test_\w+\.py)`", failures))
    files = re.findall(r"`((?:tests/\w+/)?test_\w+\.py)`", text)
    assert all((ROOT / name).exists() or (ROOT / "tests" / "server" / name).exists() for name in files)
    defaults = {field.name for field in dataclasses.fields(ServerSettings)}
    assert set(re.findall(r"^\| `(\w+)` \(", text, re.MULTILINE)) <= defaults
