"""Structured output: outputs obey their constraints, beside unconstrained requests; impossible ones are refused."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tandem import LLM, SamplingParams
from tandem.engine.structured_output import ConstraintCompiler, grammar_text
from tandem.errors import OutOfMemoryError, RequestError
from tests.cli.tiny_model import write_tiny_model
from tests.engine.simulation import FixedCost
from tests.models.test_reference import GOLDENS

pytestmark = pytest.mark.fast
pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


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
    choices = [f"number {i}" for i in range(2000)]
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


def test_constrained_beside_unconstrained_requests(llm: LLM, path: Path) -> None:
    """A mask is for its row alone; with draft tokens and two steps in flight too."""
    plain = llm.generate(["one", "two"], max_tokens=30)
    with LLM(path, threads=1, context=512, batch=8, device="cpu", prompt_lookup=True) as other:
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
def test_drafts_obey_the_constraint(llm: LLM, path: Path, temperature: float) -> None:
    """The same output as without drafts, and some of it was drafted, also where a draft reaches the end."""
    constraints: list[dict[str, Any]] = [
        {"regex": "(abcd|dcba|[0-9]){30}!"},
        {"regex": "(ab){40}"},
        {"json_schema": SCHEMA, "logit_bias": {ord(" "): -50.0, ord("\n"): -50.0, ord("\t"): -50.0}},
        {"regex": "[ab]{60}", "repeat_penalty": 1.2, "frequency_penalty": 0.1},
        {"repeat_penalty": 0.8, "presence_penalty": -0.2},
    ]
    with LLM(path, threads=1, context=512, batch=8, device="cpu", prompt_lookup=True) as other:
        speculator = other.engine.scheduler.speculator
        assert speculator
        speculator.cost_model = FixedCost(0.01)
        for constraint in constraints:
            common = {"temperature": temperature, "seed": 5, "max_tokens": 80, **constraint}
            prompt = "abcdabcd dcba 0123012301230123"
            before = speculator.accepted
            assert other.generate(prompt, **common).token_ids == llm.generate(prompt, **common).token_ids
            assert speculator.accepted > before, constraint
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


@pytest.mark.parametrize("prompt_lookup", [False, True])
def test_a_constraint_beyond_a_limit_fails_only_its_request(
    llm: LLM, path: Path, prompt_lookup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete output is an error, also if a draft exceeds the limit."""
    from llguidance import LLMatcher, LLParserLimits

    class Impatient:
        grammar_from_lark = LLMatcher.grammar_from_lark

        def __new__(cls, *args: Any, **options: Any) -> Any:
            return LLMatcher(*args, **options | {"limits": LLParserLimits(step_max_items=60)})

    with LLM(path, threads=1, context=512, batch=8, device="cpu", prompt_lookup=prompt_lookup) as other:
        if speculator := other.engine.scheduler.speculator:
            speculator.cost_model = FixedCost(0.01)
        beside = other.stream("one", max_tokens=30)
        first = next(beside).text
        monkeypatch.setattr("llguidance.LLMatcher", Impatient)
        for repeats in range(3, 11):  # before the limit, so that it is met anywhere in a draft
            grammar = f'start: "ab"{{{repeats}}} e\ne: e e e | e e | /[a-z ]/ | ""'
            with pytest.raises(RequestError, match=r"constraint is too complex: .*Too many items"):
                other.generate("ab" * 12, grammar=grammar, max_tokens=100)
        assert first + "".join(token.text for token in beside) == llm.generate("one", max_tokens=30).text
        assert other.engine.cache.free_blocks == other.engine.cache.blocks


def many(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(count)}}


def test_too_many_optional_properties_are_refused_at_once(llm: LLM) -> None:
    """Wherever they are; and as many as may be are answered."""
    for schema in (
        many(500),
        {"type": "array", "items": {"anyOf": [{"type": "null"}, many(1500)]}},
        json.dumps(many(496)),
    ):
        with pytest.raises(
            RequestError, match=r"json_schema cannot be used: an object has .* may have 495: require"
        ):
            llm.prepare("x", json_schema=schema)
    required = many(500) | {"required": [f"k{i}" for i in range(20)]}
    for schema in (many(495), required):
        assert llm.generate("x", json_schema=schema, max_tokens=4).finish_reason == "length"


def test_invalid_json_schemas_are_refused(llm: LLM) -> None:
    around: dict[str, Any] = {"type": "object"}
    around["properties"] = {"itself": around}
    for schema in (around, {"const": object()}, {"const": {1, 2}}):
        with pytest.raises(RequestError, match="json_schema cannot be used"):
            llm.prepare("x", json_schema=schema)


class Letters:
    """A vocabulary like real ones: all words of one or two letters, thousands of long ones, and what sums take."""

    def __init__(self) -> None:
        letters = "abcdefghijklmnopqrstuvwxyz "
        words = ["".join(each) for size in (1, 2) for each in product(letters, repeat=size)]
        long = ["".join(Random(i).choices(letters, k=12)) for i in range(2000)]
        self.words = [*"0123456789+-*()", *words, *long, "<end>"]
        self.vocab_size, self.eos_ids, self.bos_id = len(self.words), frozenset({len(self.words) - 1}), None

    def token_bytes(self, id: int) -> bytes:
        return self.words[id].encode()

    def is_hidden(self, id: int) -> bool:
        return id in self.eos_ids

    def encode(self, text: str | bytes, **_: Any) -> list[int]:
        return [self.words.index(letter) for letter in (text if isinstance(text, str) else text.decode())]


def test_ambiguous_grammars_do_not_delay_other_requests() -> None:
    """What comes to half a second a token by llguidance's own limits is refused, at once or where it becomes too much,
    and before that no token takes long."""
    tokenizer: Any = Letters()
    grammar = 'start: e\ne: e e e | e e | /[a-z ]/ | ""'
    rows, slowest, [letter] = (
        np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32),
        0.0,
        tokenizer.encode("a"),
    )
    try:
        found = ConstraintCompiler(tokenizer, tokenizer.vocab_size).compile(SamplingParams(grammar=grammar))
    except RequestError as error:
        assert "Too many items" in str(error)
        return
    for _ in range(400):
        begun = time.process_time()
        found.write_masks(rows)
        slowest = max(slowest, time.process_time() - begun)
        if not found.accept(letter):
            break
    assert "too complex" in found.problem and slowest < 0.2


def test_unambiguous_grammars_may_be_long() -> None:
    tokenizer: Any = Letters()
    sums = (
        'start: sum\nsum: sum ("+" | "-") part | part\npart: part "*" one | one\none: /[0-9]+/ | "(" sum ")"'
    )
    found = ConstraintCompiler(tokenizer, tokenizer.vocab_size).compile(SamplingParams(grammar=sums))
    rows = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)
    for token in tokenizer.encode("(1+2)*3-4*(5+6)" + "+7*8" * 50):
        found.write_masks(rows)
        assert found.accept(token)


def test_constrained_output_begins_without_the_space_that_some_vocabularies_add() -> None:
    """Forced text is tokenized as a continuation."""
    with LLM(GOLDENS / "llama.gguf", threads=1, context=128, batch=2, device="cpu") as llm:
        assert llm.tokenizer.add_space_prefix
        assert llm.generate("x", choices=["{yes}"], max_tokens=20).text == "{yes}"
        assert llm.generate("x", json_schema={"const": {"a": 1}}, max_tokens=40).text.startswith("{")


@pytest.mark.parametrize(
    ("failure", "expected", "words"),
    [
        (ModuleNotFoundError("No module named 'llguidance'"), RequestError, "install it"),
        (ImportError("failed to map segment from shared object"), OutOfMemoryError, "not enough memory"),
        (MemoryError(), MemoryError, None),
    ],
)
def test_a_package_that_cannot_be_loaded_is_not_absent(
    failure: Exception, expected: type[Exception], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "llguidance":
                raise failure

    monkeypatch.delitem(sys.modules, "llguidance")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(expected, match=words):
        grammar_text(SamplingParams(regex="a"))
