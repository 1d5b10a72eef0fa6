"""Answers have the form that was asked for, beside others that need none, and impossible forms are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM
from tandem.errors import RequestError
from tests.cli.tiny_model import write_tiny_model
from tests.engine.simulation import Willing
from tests.models.test_reference import GOLDENS

pytestmark = pytest.mark.fast
pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 120},
                   "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
    "required": ["name", "age", "tags"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("grammar") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, threads=1, context=512, batch=8, device="cpu") as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_regular_expressions_choices_and_grammars(llm: LLM, temperature: float) -> None:
    for seed in range(5):
        common = {"temperature": temperature, "seed": seed, "max_tokens": 100}
        result = llm.generate("x", regex=r"[0-9]{3}-[a-f]{2,5}!", **common)
        assert re.fullmatch(r"[0-9]{3}-[a-f]{2,5}!", result.text) and result.finish_reason == "stop"
        assert llm.generate("x", choices=["yes", "no", 'maybe "so"'], **common).text in (
            "yes",
            "no",
            'maybe "so"',
        )
        few = ["a", "ab", "abab", "b c"]  # also one that begins another
        assert llm.generate("x", choices=few, **common).text in few
        text = llm.generate("x", grammar='start: "<" word ("," word){2} ">"\nword: /[xyz]{2}/', **common).text
        assert re.fullmatch(r"<[xyz]{2}(,[xyz]{2}){2}>", text)


def test_thousands_of_choices(llm: LLM) -> None:
    choices = [f"number {i}" for i in range(5000)]
    assert llm.generate("x", choices=choices, max_tokens=20).text in choices


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_json_of_a_schema(llm: LLM, schema: Any) -> None:
    for seed in range(5):
        bias = {ord(" "): -50.0, ord("\n"): -50.0, ord("\t"): -50.0}  # this model likes to fill space
        text = llm.generate(
            "x", json_schema=schema, temperature=1.0, seed=seed, max_tokens=300, logit_bias=bias
        ).text
        found = json.loads(text)
        assert set(found) == {"name", "age", "tags"} and isinstance(found["age"], int) and found["age"] <= 120


def test_beside_others(llm: LLM, path: Path) -> None:
    """A mask is for its row alone; with guesses and two steps in flight too."""
    plain = llm.generate(["one", "two"], max_tokens=30)
    with LLM(path, threads=1, context=512, batch=8, device="cpu", lookup=True) as other:
        for engine in (llm, other):
            streams = [engine.stream(prompt, max_tokens=30) for prompt in ("one", "two")]
            digits = engine.stream("x", regex="[0-9]{20}", max_tokens=30)
            texts = ["", "", ""]
            for _ in range(31):
                for i, stream in enumerate((*streams, digits)):
                    texts[i] += "".join(token.text for token in [next(stream, None)] if token)
            assert texts[:2] == [result.text for result in plain]
            assert re.fullmatch("[0-9]{20}", texts[2])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_guesses_keep_to_the_form(llm: LLM, path: Path, temperature: float) -> None:
    """The same answers as without, and some of it was guessed: also where a guess reaches the form's end."""
    forms: list[dict[str, Any]] = [
        {"regex": "(abcd|dcba|[0-9]){30}!"},
        {"regex": "(ab){40}"},
        {"json_schema": SCHEMA, "logit_bias": {ord(" "): -50.0, ord("\n"): -50.0, ord("\t"): -50.0}},
        {"regex": "[ab]{60}", "repeat_penalty": 1.2, "frequency_penalty": 0.1},
        {"repeat_penalty": 0.8, "presence_penalty": -0.2},
    ]
    with LLM(path, threads=1, context=512, batch=8, device="cpu", lookup=True) as other:
        speculator = other.engine.scheduler.speculator
        assert speculator
        speculator.worth = Willing(0.01)
        for form in forms:
            common = {"temperature": temperature, "seed": 5, "max_tokens": 80, **form}
            prompt = "abcdabcd dcba 0123012301230123"
            before = speculator.right
            assert other.generate(prompt, **common).token_ids == llm.generate(prompt, **common).token_ids
            assert speculator.right > before, form
            assert other.engine.cache.free_blocks == other.engine.cache.blocks


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"regex": "(a"}, "regex cannot be used: .*"),
        ({"grammar": "start: nothing"}, "grammar cannot be used: .*"),
        ({"json_schema": {"type": "no such type"}}, "json_schema cannot be used: .*"),
        ({"json_schema": "{"}, "json_schema cannot be used: .*"),
        ({"json_schema": 5}, "json_schema must be a dict or its JSON"),
        ({"regex": 5}, "regex must be a text"),
        ({"choices": [""]}, "choices must be a list of texts"),
        ({"choices": "yes"}, "choices must be a list of texts"),
        ({"choices": ["a"], "regex": "a"}, "give one of regex and choices"),
    ],
    ids=str,
)
def test_refused_with_the_reason(llm: LLM, params: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        llm.generate("x", **params)


@pytest.mark.parametrize("lookup", [False, True])
def test_a_form_that_meets_a_limit_fails_its_request_alone(
    llm: LLM, path: Path, lookup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is of the answer is not taken for all of it; also if the limit is met while a guess is looked at."""
    from llguidance import LLMatcher, LLParserLimits

    many = {"properties": {f"k{i}": {"type": "string"} for i in range(1500)}, "type": "object"}
    with pytest.raises(RequestError, match=r"form is too intricate: .* items; max is"):
        llm.generate("x", json_schema=many, max_tokens=9)

    class Impatient:
        grammar_from_lark = LLMatcher.grammar_from_lark

        def __new__(cls, *args: Any, **options: Any) -> Any:
            return LLMatcher(*args, limits=LLParserLimits(step_max_items=60), **options)

    with LLM(path, threads=1, context=512, batch=8, device="cpu", lookup=lookup) as other:
        if speculator := other.engine.scheduler.speculator:
            speculator.worth = Willing(0.01)
        beside = other.stream("one", max_tokens=30)
        first = next(beside).text
        monkeypatch.setattr("llguidance.LLMatcher", Impatient)
        for repeats in range(3, 11):  # before the limit, so that it is met anywhere in a guess
            grammar = f'start: "ab"{{{repeats}}} e\ne: e e e | e e | /[a-z ]/ | ""'
            with pytest.raises(RequestError, match=r"form is too intricate: .*Too many items"):
                other.generate("ab" * 12, grammar=grammar, max_tokens=100)
        assert first + "".join(token.text for token in beside) == llm.generate("one", max_tokens=30).text
        assert other.engine.cache.free_blocks == other.engine.cache.blocks


def test_forms_begin_without_the_space_that_some_vocabularies_add() -> None:
    """What has to come is tokenized as the continuation that it is."""
    with LLM(GOLDENS / "llama.gguf", threads=1, context=128, batch=2, device="cpu") as llm:
        assert llm.tokenizer.add_space_prefix
        assert llm.generate("x", choices=["{yes}"], max_tokens=20).text == "{yes}"
        assert llm.generate("x", json_schema={"const": {"a": 1}}, max_tokens=40).text.startswith("{")
