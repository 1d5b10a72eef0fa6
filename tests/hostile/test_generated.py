"""Generated model files, saved states, encoders and folders to convert: each ends well, or in an error that says what
is wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem import LLM
from tandem.errors import ModelFileError
from tandem.gguf.file import GGUF
from tandem.model.model import SYNTHETIC, open_model
from tandem.server.ollama.models import _model_info
from tests.cli.tiny_model import write_tiny_model
from tests.gguf_files import Key, write
from tests.hostile import generated
from tests.hostile.conversions import run_conversion
from tests.hostile.generated import (
    GOLDENS,
    PROMPT,
    STATES_OF,
    run_cases,
    run_draft_head,
    run_file,
    run_mmproj,
    run_state,
    run_text_encoder,
)
from tests.server.servers import serving

# In a soak; `make test` runs a part.
FILES, STATES, OTHER_FILES, ENCODER_FILES, FOLDERS = 100_000, 10_000, 10_000, 10_000, 20_000


@pytest.mark.parametrize("count", [FILES // 100, pytest.param(FILES, marks=pytest.mark.soak)])
def test_model_files(count: int, tmp_path: Path) -> None:
    problems = run_cases(lambda number: run_file(tmp_path, number), range(count))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", STATES_OF)
@pytest.mark.parametrize("count", [STATES // 80, pytest.param(STATES, marks=pytest.mark.soak)])
def test_saved_states(name: str, count: int, tmp_path: Path) -> None:
    with generated.open_model(name) as llm:
        assert llm.save(PROMPT, tmp_path / "sound") > 16
    sound = (tmp_path / "sound").read_bytes()
    opened: list[LLM] = []

    def case(number: int) -> None:
        if not opened:  # in the child
            opened.append(generated.open_model(name))
        run_state(opened[0], sound, tmp_path, number)

    problems = run_cases(case, range(count))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("run", [run_text_encoder, run_draft_head])
@pytest.mark.parametrize("count", [OTHER_FILES // 100, pytest.param(OTHER_FILES, marks=pytest.mark.soak)])
def test_other_model_files(run: Callable[[Path, int], None], count: int, tmp_path: Path) -> None:
    problems = run_cases(lambda number: run(tmp_path, number), range(count))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("count", [ENCODER_FILES // 50, pytest.param(ENCODER_FILES, marks=pytest.mark.soak)])
def test_vision_encoders(count: int, tmp_path: Path) -> None:
    problems = run_cases(lambda number: run_mmproj(tmp_path, number), range(count))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("count", [FOLDERS // 50, pytest.param(FOLDERS, marks=pytest.mark.soak)])
def test_conversions(count: int, tmp_path: Path) -> None:
    problems = run_cases(lambda number: run_conversion(tmp_path, number), range(count))
    assert not problems, "\n".join(problems)


def test_a_child_with_many_problems_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "SECONDS", 2)

    def case(number: int) -> None:
        raise ValueError("x" * 1500)

    problems = run_cases(case, range(100))
    assert len(problems) == 100 and not [problem for problem in problems if "hangs" in problem]


def test_a_file_of_a_few_bytes_is_no_synthetic_model(tmp_path: Path) -> None:
    """Its key would make the engine take 40 GB."""
    keys: list[Key] = [("general.architecture", "str", "llama"), (SYNTHETIC, "str", "llama-3-70b:q4_0")]
    path = write(tmp_path / "tiny.gguf", keys)
    for model in (path, str(path)):
        with pytest.raises(ModelFileError, match="valid in its own server only"):
            open_model(model)


def test_metadata_of_any_size_makes_a_small_response(tmp_path: Path) -> None:
    """Eight requests to /api/show would hold up everyone for half a minute."""
    path = write_tiny_model(tmp_path / "tiny.gguf", template="x" * 10_000_000)
    with GGUF.open(path) as gguf:
        assert len(gguf.get("tokenizer.chat_template", "")) == 10_000_000
    keys: list[Key] = [("general.architecture", "str", "x" * 1_000_000), ("y" * 60_000, "str", "z")]
    keys += [(f"key {i}", "str", "y" * 900) for i in range(2000)]
    for file in (path, write(tmp_path / "many.gguf", keys)):
        assert len(json.dumps(_model_info("tiny", file, None))) < 1_000_000
    with LLM(path, device="cpu", threads=1, context=64, batch=1) as llm:
        assert llm.chat_template == ""


def test_results_that_are_not_finite_are_an_error_in_every_api(tmp_path: Path) -> None:
    """They were tracebacks, and NaN where clients read JSON."""
    changed = {"encoders/bert-rank": "token_embd_norm.weight", "llama": "output_norm.weight"}
    for name, tensor in changed.items():
        data = bytearray((GOLDENS / f"{name}.gguf").read_bytes())
        with GGUF.open(GOLDENS / f"{name}.gguf") as gguf:
            struct.pack_into("<f", data, gguf.tensors[tensor].offset, float("nan"))
        (tmp_path / Path(f"{name}.gguf").name).write_bytes(data)
    models = (tmp_path / "bert-rank.gguf", tmp_path / "llama.gguf", "--device", "cpu", "--threads", "1")
    with serving(tmp_path, *models, context=100, shutdown=2) as server:
        for model in ("bert-rank", "llama"):
            for path, body in (
                ("/v1/embeddings", {"input": "a"}),
                ("/v1/embeddings", {"input": ["a"] * 300}),
                ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
                ("/embedding", {"content": "a"}),
                ("/api/embed", {"input": "a"}),
                ("/api/embeddings", {"prompt": "a"}),
            ):
                status, _, answer = server.ask(path, {"model": model, **body})
                assert status == 503 and "not finite: fetch the file again" in str(answer), (path, answer)
        query = {"model": "bert-rank", "query": "a", "documents": ["b", "c"]}
        assert server.ask("/v1/rerank", query)[0] == 503
        assert server.ask("/v1/completions", {"model": "llama", "prompt": "a", "max_tokens": 2})[0] == 200
        assert "Traceback" not in server.log.read_text()
