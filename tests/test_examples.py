"""Every script in examples/ runs, and prints what it is there to show."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.model.catalogue import DEFAULT_MODEL
from tests.packages import model_path

EXAMPLES = Path(__file__).parent.parent / "examples"
QWEN, SMOLLM = DEFAULT_MODEL, "smollm2"  # SmolLM2 where what the model says does not matter: it is faster
# script: the models it is given, and patterns that are in its output, in this order
CASES: dict[str, tuple[list[str], list[str]]] = {
    "async_client": ([QWEN], ["France: Paris", "Italy: Rome", "Japan: Tokyo", "8 answers in"]),
    "async_llm": ([QWEN], ["France is Paris", "hot is cold", "cancelled: True"]),
    "batch": ([SMOLLM], ["France is Paris", "Canada is Ottawa", "same tokens: True"]),
    "chat": ([QWEN], ["immutable", r"\(1, 2, 3\)", r"\[1, 2, 3\]"]),
    "draft_model": ([SMOLLM, SMOLLM], ["return n \\* factorial", "same text: True"]),
    "embeddings": ([QWEN], ["nearest to: Stock markets", "Investors sold", "The bank raised"]),
    "json_schema": (
        [QWEN],
        [r'\{"name": "Ann Smith", "age": 31, "city": "Dublin"\}', "love.*: positive", "hate.*: negative"],
    ),
    "local_server": ([SMOLLM], [r"http://127.0.0.1:\d+ \['smollm2"]),
    "logits_processor": ([QWEN], ["as it is:", "without e:", r"letters e: [1-9]\d* and 0\n"]),
    "perplexity": ([QWEN], [r"a sentence: perplexity \d{1,2}\.\d over", r"other order: perplexity \d{3,}\."]),
    "prefix_cache": ([SMOLLM], [r"prompt, 0 of them cached", r"prompt, [1-9]\d\d of them cached"]),
    "prompt_lookup": (
        [SMOLLM],
        [
            r"[1-9]\d* of \d+ draft tokens accepted",
            r"with prompt lookup [\d.]+ s for \d\d tokens",
            "same tokens: True",
        ],
    ),
    "read_profile": ([SMOLLM], [r"memory \d+ GB/s", "prefill 16:", "matmul_q4_1", "decode 8", "matmul_q4_1"]),
    "save_restore": ([SMOLLM], [r"saved \d{3} tokens", r"restore \d{3} of \d{3}", "the same answer: True"]),
    "split_devices": ([SMOLLM], ["Paris", "cpu,cpu:.*Paris.*15 of 30 layers", "same tokens: True"]),
    "stream": ([QWEN], ["Mercury", "Venus", "Neptune", r"stop: \d+ tokens, \d+ tokens/s"]),
    "tools": ([QWEN], [r"calls get_weather\(\{'city': 'Paris'\}\)", "18 degrees"]),
}


@pytest.mark.parametrize("name", CASES)
def test_it_runs(name: str) -> None:
    models, expected = CASES[name]
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *(str(model_path(model)) for model in models)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert re.search(".*".join(f"(?:{pattern})" for pattern in expected), run.stdout, re.DOTALL), run.stdout


@pytest.mark.fast
def test_each_is_short_and_says_how_to_run_it() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert {path.stem for path in scripts} == CASES.keys()
    listed = (EXAMPLES / "README.md").read_text()
    for path in scripts:
        source = path.read_text()
        doc = ast.get_docstring(ast.parse(source)) or ""
        assert f"python examples/{path.name} [MODEL]" in doc and len(source.splitlines()) < 60
        assert f"[{path.name}]({path.name})" in listed, f"examples/README.md does not list {path.name}"
        assert DEFAULT_MODEL in source, "the default model is the one that `make run` fetches"
