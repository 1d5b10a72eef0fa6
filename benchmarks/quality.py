"""Quality: KL divergence from the same weights in float32, and perplexity, teacher-forced over real text.

    python -m benchmarks.quality [MODEL ...] [--windows 50] [--output FILE]

Compares Tandem with a float16 and an int8 KV cache, and llama.cpp (xllamacpp), on the CPU. With one window the text is
the first 1,000 tokens of tests/models/text.txt; with more it is Python's standard library. 50 windows take an hour per
model. Rows are added to the file and replace rows of the same model and number of windows.
"""

from __future__ import annotations

import argparse
import json
import platform
import sysconfig
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.against_llama_cpp import machine, say, versions
from benchmarks.pairs import HERE
from tandem import LLM
from tandem.kernels.abi import KV_BLOCK
from tests.models.llama_cpp import LlamaCpp
from tests.models.reference import ReferenceModel
from tests.models.test_quality import WINDOW, Score, log_softmax, windows
from tests.packages import model_path

MODELS = ("smollm2", "gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
TEXT = HERE.parent / "tests" / "models" / "text.txt"


def text_of(count: int) -> tuple[str, str]:
    """The text of the windows, and its name."""
    if count == 1:
        return TEXT.read_text(), "tests/models/text.txt"
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    return text[: 8 * WINDOW * count], f"the standard library of Python {platform.python_version()}"


def measure(name: str, count: int) -> dict[str, Any]:
    path, (text, title) = model_path(name), text_of(count)
    reference, peer = ReferenceModel(path), LlamaCpp(path, context=WINDOW)
    scores = {side: Score() for side in ("f16", "q8", "llama.cpp")}
    with ExitStack() as stack:
        stack.callback(peer.close)
        llms = {
            kv: stack.enter_context(LLM(path, device="cpu", context=WINDOW, kv=kv)) for kv in ("f16", "q8")
        }
        for ids, targets in windows(peer, text, count):
            hidden, logits = reference.final_hidden(ids), {kv: llm.logits(ids) for kv, llm in llms.items()}
            for row, peer_logits in zip(range(0, WINDOW, peer.batch), peer.logits(ids), strict=True):
                rows = slice(row, row + peer.batch)
                truth = log_softmax(reference.head(hidden[rows]))
                for side, score in scores.items():
                    found = logits[side][rows] if side in logits else peer_logits
                    score.add(truth, found, targets[rows])
        kv_bytes = {
            kv: llm.engine.program.arena_bytes["kv"] / llm.engine.cache.blocks[0] / KV_BLOCK
            for kv, llm in llms.items()
        }
    return {
        "model": name, "file": path.name, "windows": count, "tokens": count * WINDOW, "text": title,
        "kl": {side: score.mean_divergence for side, score in scores.items()},
        "perplexity": {side: score.perplexity for side, score in scores.items()},
        "kv_bytes_per_token": kv_bytes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--windows", type=int, default=1, metavar="N", help="of 1,000 tokens (1)")
    parser.add_argument(
        "--output", type=Path, default=HERE / "results" / f"{datetime.now(UTC):%Y-%m-%d}-quality.json"
    )
    options = parser.parse_args()
    old = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    rows = {(row["model"], row["windows"]): row for row in old}
    for name in options.models:
        found = measure(name, options.windows)
        rows[name, options.windows] = found | {"date": datetime.now(UTC).isoformat(timespec="minutes")}
        say(f"{name}: KL " + ", ".join(f"{side} {kl:.6f}" for side, kl in found["kl"].items()))
        results = {
            "date": datetime.now(UTC).isoformat(timespec="minutes"), "machine": machine(), "versions": versions(None),
            "command": "python -m benchmarks.quality", "rows": list(rows.values()),
        }  # fmt: skip
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
