"""Who may call a server: hosts, origins, what browsers say of a request, and the warnings about open doors."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.server.settings import ServerSettings
from tests.cli.tiny_model import write_tiny_model
from tests.server.servers import Running, serving

LINK = {"sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server without keys that all machines can reach."""
    folder = tmp_path_factory.mktemp("exposed")
    origins = ["https://friend.example"]
    model = write_tiny_model(folder / "tiny.gguf")
    with serving(folder, model, "--host", "0.0.0.0", cors_origins=origins, shutdown=1) as found:
        yield dataclasses.replace(found, url=found.url.replace("0.0.0.0", "127.0.0.1"))


def test_an_open_server_without_keys_warns(exposed: Running) -> None:
    assert "warning: everyone who can reach 0.0.0.0" in exposed.log.read_text()


def test_an_open_server_without_keys_rejects_names_of_others(exposed: Running) -> None:
    """DNS rebinding: the page of evil.example has this origin, and its name points at the server."""
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"):
        status, _, body = exposed.ask("/v1/models", host=host, origin=f"http://{host}")
        assert status == 403 and "--api-keys" in body["error"]["message"], host
    names = (
        "localhost",
        "192.0.2.7:8000",
        "[2001:db8::1]:8000",
        "tandem",
        "tandem.default.svc.cluster.local",
    )
    for host in (*names, "host.containers.internal", socket.gethostname(), "friend.example"):
        assert exposed.ask("/v1/models", host=host)[0] == 200, host


@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site"])
def test_a_page_of_another_origin_cannot_send_a_get(exposed: Running, site: str) -> None:
    """An image or a script has no Origin; a link to the web page is allowed, one to an endpoint is not."""
    for path in ("/v1/models", "/health", "/metrics", "/live", "/page/chat.js", "/"):
        assert exposed.ask(path, sec_fetch_site=site, sec_fetch_mode="no-cors")[0] == 403, path
    assert exposed.ask("/", sec_fetch_site=site, **LINK)[0] == 200
    assert exposed.ask("/", sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="iframe")[0] == 403
    assert exposed.ask("/v1/models", sec_fetch_site=site, **LINK)[0] == 403
    allowed = exposed.ask("/v1/models", sec_fetch_site=site, origin="https://friend.example")
    assert allowed[0] == 200
    for own in ("same-origin", "none"):
        assert exposed.ask("/v1/models", sec_fetch_site=own)[0] == 200


@pytest.mark.fast
def test_keys_that_others_may_read_bring_a_warning(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1")
    for mode, warns in ((0o644, True), (0o640, True), (0o622, True), (0o600, False), (0o400, False)):
        keys.chmod(mode)
        found = list(ServerSettings(api_keys=keys).warnings())
        assert [f"chmod 600 {keys}" in warning for warning in found] == [True] * warns


@pytest.mark.fast
def test_local_addresses() -> None:
    for host in ("127.0.0.1", "127.0.0.9", "localhost", "::1"):
        assert ServerSettings(host=host).is_loopback and not list(ServerSettings(host=host).warnings())
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        assert not ServerSettings(host=host).is_personal and list(ServerSettings(host=host).warnings())
