"""Replays an agent's requests to `tandem serve` and to llama-server, with a model that has recurrent layers.

    python -m benchmarks.agent --peer LLAMA_SERVER [--model FILE] [--requests 20] [--tokens 30000] [--output FILE]

Each request has all that was said before; both servers go on from their own answers. Ours has keys and values of one
context and checkpoints in a tenth of that (`--kv-memory`); llama-server one slot, and its own default for checkpoints.
Without FILE, random weights in the shape of Qwen 3.5 0.8B, with four layers (hybrid_file.py): what is computed again
does not depend on them, and little time is spent on the rest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import serving_processes as servers
from benchmarks.against_llama_cpp import machine, output_of, versions
from benchmarks.hybrid_file import write_hybrid
from tandem.engine.kv_size import context_bytes
from tandem.kernels.abi import KV_BLOCK
from tandem.model.model import open_model
from tests.engine.agent_transcript import AgentRequest, replay, transcript

SHAPE, LAYERS = "qwen3.5-0.8b:q4_k_m", 4
VOCAB = 150_000  # ids below it are texts in any tokenizer of Qwen
STEP = 512  # tokens


def run(port: int, requests: list[AgentRequest]) -> dict[str, Any]:
    """What each request read, and the seconds of its prompt."""
    seconds: list[float] = []

    def answer(prompt: list[int], count: int) -> tuple[list[int], int]:
        wanted = {
            "prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "return_tokens": True,
            "cache_prompt": True,
        }  # fmt: skip
        found = ask(port, "/completion", wanted)
        seconds.append(found["timings"]["prompt_ms"] / 1e3)
        return found["tokens"], found["timings"]["prompt_n"]

    begun, rows = time.perf_counter(), []
    for read in replay(requests, answer):
        rows.append({**read._asdict(), "again": read.again, "seconds": seconds[-1]})
    return {"requests": rows, "seconds": time.perf_counter() - begun}


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body else None
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def ours(file: Path, options: argparse.Namespace, requests: list[AgentRequest]) -> dict[str, Any]:
    with open_model(file) as model:
        nbytes = context_bytes(model.config, options.context // KV_BLOCK, STEP, "f16")
    more = ["--batch", "1", "--kv-memory", str(nbytes / 1e9)]
    with servers.tandem(
        file, threads=options.threads, device="cpu", context=options.context, options=more
    ) as server:
        found = run(server.port, requests)
        [state] = ask(server.port, "/live")["models"].values()
    return found | {"kv_bytes": nbytes, "states": state["states"]}


def peer(file: Path, options: argparse.Namespace, requests: list[AgentRequest]) -> dict[str, Any]:
    with servers.llama_cpp(
        options.peer,
        file,
        threads=options.threads,
        slots=1,
        context=options.context,
        options=options.peer_options,
    ) as server:
        return run(server.port, requests)


def line(side: str, found: dict[str, Any]) -> str:
    later = found["requests"][1:]
    prompts, again = sum(row["prompt"] for row in later), sum(row["again"] * row["prompt"] for row in later)
    return (
        f"| {side} | {max(row['again'] for row in later):.1%} | {again / prompts:.1%} | {again:.0f} of {prompts} "
        f"| {sum(row['seconds'] for row in later):.1f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.agent", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peer", metavar="LLAMA_SERVER", help="without it, only ours is measured")
    parser.add_argument("--peer-options", nargs="*", default=[], metavar="OPTION", help="more of its options")
    parser.add_argument("--model", type=Path, metavar="FILE")
    parser.add_argument("--requests", type=int, default=20, metavar="N")
    parser.add_argument("--tokens", type=int, default=30_000, metavar="N", help="of the last prompt")
    parser.add_argument("--context", type=int, default=32_768, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    requests = transcript(options.requests, options.tokens, VOCAB)
    with tempfile.TemporaryDirectory() as folder:
        file = options.model or Path(folder, "hybrid.gguf")
        if not options.model:
            write_hybrid(file, SHAPE, LAYERS)
        sides: dict[str, Callable[..., dict[str, Any]]] = {"Tandem": ours}
        if options.peer:
            sides["llama.cpp"] = peer
        found = {side: measure(file, options, requests) for side, measure in sides.items()}
    print("| | most of a prompt | of all prompts | tokens computed again | prompts |\n|---|---|---|---|---|")
    for side, each in found.items():
        print(line(side, each))
    states = found["Tandem"]["states"]
    print(
        f"checkpoints: {states['slots']} slots of {states['slot_bytes'] / 1e6:.1f} MB beside "
        f"{found['Tandem']['kv_bytes'] / 1e6:.0f} MB of keys and values; kept {states['kept']}, hits {states['hits']}, "
        f"{states['evicted']} evicted"
    )
    if options.output:
        about = {
            "date": datetime.now(UTC).isoformat(timespec="minutes"), "machine": machine(),
            "settings": {
                "requests": options.requests, "tokens": options.tokens, "context": options.context,
                "threads": options.threads, "peer_options": options.peer_options, "shape": SHAPE, "layers": LAYERS,
            },
            "versions": versions(None)
            | ({"peer": output_of(options.peer, "--version").partition("\n")[0]} if options.peer else {}),
        }  # fmt: skip
        options.output.write_text(json.dumps(about | {"sides": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
