"""Runs `tandem serve` on a free port while a `with` block lasts. The examples that need a server use it.

python examples/local_server.py [MODEL]     starts a server, lists its models, stops it
"""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def local_server(model: str) -> Iterator[str]:
    """The URL of a server for `model`."""
    command = [sys.executable, "-m", "tandem", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next((line for line in process.stderr if "listening at" in line), None)
            if line is None:
                raise SystemExit("the server did not start: run `tandem serve` to see why")
            yield line.split()[-1]
        finally:
            process.terminate()
            process.communicate()


def post(url: str, body: object) -> dict:
    """The JSON that a POST of JSON is answered with."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
    with local_server(model) as url, urllib.request.urlopen(f"{url}/v1/models") as response:
        print(url, [each["id"] for each in json.load(response)["data"]])
