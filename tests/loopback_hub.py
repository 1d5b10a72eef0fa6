"""A Hugging Face hub on loopback: the parts a pull uses, and the ways it can go wrong.

`with LoopbackHub({"user/repo": {"model-Q4_0.gguf": b"..."}}) as hub:` then point HF_ENDPOINT at `hub.url`.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

COMMIT = "5ca1ab1e" * 5


class LoopbackHub:
    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        self.repos = repos
        # File -> bytes to send before hanging up, per request.
        self.cut_after: dict[str, list[int]] = defaultdict(list)
        self.status: dict[str, list[int]] = defaultdict(list)  # file or repo -> status to answer, per request
        self.wrong_bytes: set[str] = set()  # files whose content is not what their sum says
        self.ranges = True  # whether it honours Range
        self.token: str | None = None  # what a file's request must carry
        self.bytes_per_second: float | None = None
        self.requests: list[str] = []  # "METHOD path"
        # File -> (first byte, count), per request.
        self.sent: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def __enter__(self) -> LoopbackHub:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(f"{self.command} /{path}")
        if path.startswith("api/models/"):
            self._listing("/".join(path.split("/")[2:4]))
        elif path.split("/")[2:3] == ["resolve"]:
            self._resolve(path)
        elif path.startswith("cdn/"):
            self._file(*path.split("/", 3)[1:])
        else:
            self._answer(404, b"")

    def _listing(self, repo: str) -> None:
        if self.hub.status[repo]:
            self._answer(self.hub.status[repo].pop(0), b"")
        elif repo not in self.hub.repos:
            self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        else:
            files = self.hub.repos[repo].items()
            siblings = [
                {
                    "rfilename": name,
                    "size": len(data),
                    "lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)},
                }
                for name, data in files
            ]
            siblings.append({"rfilename": "README.md", "size": 5})
            self._answer(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())

    def _resolve(self, path: str) -> None:
        user, repo, _, _commit, name = path.split("/", 4)
        if self.hub.token and self.headers["Authorization"] != f"Bearer {self.hub.token}":
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif self.hub.status[name]:
            self._answer(self.hub.status[name].pop(0), b"")
        else:  # the real hub keeps large files on another host too, which must not see the token
            port = self.server.server_address[1]
            self._answer(
                302, b"", {"Location": quote(f"http://localhost:{port}/cdn/{user}/{repo}/{name}", ":/")}
            )

    def _file(self, user: str, repo: str, name: str) -> None:
        data = self.hub.repos[f"{user}/{repo}"][name]
        if self.headers["Authorization"]:
            return self._answer(400, b"")
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        first, status = 0, 200
        if self.hub.ranges and (wanted := self.headers["Range"]):
            first, status = int(wanted.removeprefix("bytes=").removesuffix("-")), 206
            if first >= len(data):
                return self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        body = data[first:]
        if name in self.hub.wrong_bytes:
            body = body[:-1] + bytes([body[-1] ^ 1])
        cut = self.hub.cut_after[name].pop(0) if self.hub.cut_after[name] else len(body)
        records = self.hub.sent[name]
        # Now: who has read it all may look before this thread goes on.
        records.append((first, len(body[:cut])))
        at = len(records) - 1
        self._head(status, len(body), headers)
        records[at] = first, self._send(body[:cut])
        self.close_connection = True
        return None

    def _send(self, body: bytes) -> int:
        rate = self.hub.bytes_per_second
        step = len(body) if rate is None else max(1, int(rate * 0.02))
        sent = 0
        try:
            for start in range(0, len(body), step or 1):
                self.wfile.write(body[start : start + step])
                sent += len(body[start : start + step])
                if rate is not None:
                    time.sleep(0.02)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has gone
        return sent

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._head(status, len(body), headers or {})
        self.wfile.write(body)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
