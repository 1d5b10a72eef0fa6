"""An MCP server with three tools, for tests: over HTTP (`http_tool_server`), or as a program that reads lines."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SIDES = {"type": "object", "properties": {"sides": {"enum": [6]}}, "required": ["sides"]}
TOOLS = [
    {"name": "roll_dice", "description": "Rolls a die.", "inputSchema": SIDES},
    {"name": "wait", "description": "Waits for a minute.", "inputSchema": {"type": "object"}},
    {"name": "exit", "description": "Ends the server.", "inputSchema": {"type": "object"}},
]


def answer(message: dict[str, Any]) -> dict[str, Any] | None:
    """The answer to a message of JSON-RPC; None to a notification."""
    if "id" not in message or "method" not in message:
        return None
    method, params = message["method"], message.get("params") or {}
    if method == "initialize":
        about = {"name": "test", "version": "1"}
        result = {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": about,
        }
    elif method == "tools/list":
        begin = int(params.get("cursor", 0))  # a page for each tool
        result = {"tools": TOOLS[begin : begin + 1]}
        if begin + 1 < len(TOOLS):
            result["nextCursor"] = str(begin + 1)
    elif method == "tools/call":
        if params["name"] == "wait":
            time.sleep(60)
        if params["name"] == "exit":
            sys.exit()
        text = f"The die shows 4 of {params['arguments'].get('sides')}."
        result = {"content": [{"type": "text", "text": text}]}
    else:
        return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "no such method"}}
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


@contextmanager
def http_tool_server(token: str = "") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(address, the messages that it gets). Answers to calls are streams of events, others are JSON. The session that
    `tools/list` is asked in is forgotten once, as by a server that has restarted."""
    received: list[dict[str, Any]] = []
    sessions: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_OPTIONS(self) -> None:
            self._respond(204, b"")

        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["content-length"])))
            received.append(message)
            if token and self.headers.get("authorization") != f"Bearer {token}":
                return self._respond(401, b"")
            if message.get("method") == "initialize":
                sessions.add(f"s{len(received)}")
            elif self.headers.get("mcp-session-id") not in sessions:
                return self._respond(404, b"")
            if message.get("method") == "tools/list" and not any(
                m.get("method") == "tools/call" for m in received
            ):
                forgotten = sum(m.get("method") == "initialize" for m in received) == 1
                if forgotten:
                    sessions.clear()
                    return self._respond(404, b"")
            found = answer(message)
            data = json.dumps(found).encode()
            if message.get("method") == "tools/call":
                ping = b'event: message\r\ndata: {"jsonrpc":"2.0","id":"p","method":"ping"}\r\n\r\n'
                return self._respond(200, ping + b"data: " + data + b"\r\n\r\n", "text/event-stream")
            return self._respond(200 if found else 202, data if found else b"", "application/json")

        def _respond(self, status: int, body: bytes, kind: str = "text/plain") -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.send_header("access-control-allow-origin", "*")
            self.send_header("access-control-allow-headers", "*, authorization")
            self.send_header("access-control-expose-headers", "mcp-session-id")
            if status == 200 and sessions:
                self.send_header("mcp-session-id", max(sessions))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp", received
        server.shutdown()


def main() -> None:
    print("a line that is no message", flush=True)
    print('{"jsonrpc":"2.0","id":"p","method":"ping"}', flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("method") == "long":
            print("x" * (2 << 20), flush=True)
        elif found := answer(message):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
