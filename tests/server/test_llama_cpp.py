"""The paths and fields of llama-server, and what vLLM and Ollama share with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import ollama
import openai
import pytest

from tandem.gguf.file import GGUF
from tandem.model.fill_in_middle import FillInMiddle, prompt_ids
from tandem.model.tokenizer import Tokenizer
from tests.packages import model_path
from tests.server.servers import Running, serving

MEANING = "I believe the meaning of life is"


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A code model that answers to other names too."""
    folder = tmp_path_factory.mktemp("coder")
    (folder / "coder.gguf").symlink_to(model_path("qwen2.5-coder-0.5b"))
    arguments = (
        folder / "coder.gguf",
        "--device",
        "cpu",
        "--kv-memory",
        "0.3",
        "--alias",
        "fim",
        "--alias",
        "*",
    )
    with serving(folder, *arguments, batch=4, context=1024, shutdown=2) as server:
        yield server


def test_completion(smollm2: Running) -> None:
    body = {"prompt": MEANING, "n_predict": 8, "temperature": 0}
    status, _, whole = smollm2.ask("/completion", {**body, "return_tokens": True})
    assert status == 200 and whole["stop"] and whole["stop_type"] == "limit" and not whole["truncated"]
    assert whole["tokens_predicted"] == len(whole["tokens"]) == whole["timings"]["predicted_n"] == 8
    text = smollm2.ask("/completions", {**body, "stream": True})[2]
    parts = [json.loads(line[6:]) for line in text.split("\n\n")[:-1]]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [part["stop"] for part in parts] == [False] * 8 + [True]
    word = whole["content"].split()[1]
    stopped = smollm2.ask("/completion", {**body, "stop": [word]})[2]
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    same = smollm2.ask("/v1/completions", {"prompt": MEANING, "max_tokens": 8, "temperature": 0})[2]
    assert same["choices"][0]["text"] == whole["content"]
    chosen = smollm2.ask(
        "/completion", {**body, "response_fields": ["content", "generation_settings/n_predict"]}
    )
    assert chosen[2] == {"content": whole["content"], "generation_settings/n_predict": 8}


def test_prompts_of_texts_and_tokens(smollm2: Running) -> None:
    ids = smollm2.ask("/tokenize", {"content": MEANING})[2]["tokens"]
    body = {"n_predict": 4, "temperature": 0}
    [first, second] = smollm2.ask("/completion", {**body, "prompt": [ids, {"prompt_string": MEANING}]})[2]
    assert first["content"] == second["content"] != ""
    mixed = smollm2.ask(
        "/completion",
        {**body, "prompt": [*ids[:3], smollm2.ask("/detokenize", {"tokens": ids[3:]})[2]["content"]]},
    )
    assert mixed[2]["tokens_evaluated"] == len(ids)
    assert smollm2.ask("/completion", {**body, "prompt": []})[0] == 400


def test_probabilities_and_bias(smollm2: Running) -> None:
    body = {"prompt": MEANING, "n_predict": 3, "temperature": 0, "n_probs": 4}
    found = smollm2.ask("/completion", body)[2]["completion_probabilities"]
    assert len(found) == 3 and all(len(one["top_logprobs"]) == 4 and one["logprob"] <= 0 for one in found)
    after = smollm2.ask("/completion", {**body, "post_sampling_probs": True})[2]["completion_probabilities"]
    assert after[0]["prob"] == pytest.approx(np.exp(found[0]["logprob"]), rel=1e-4)
    likeliest = found[0]["token"]
    for bias in ([[likeliest, False]], {str(found[0]["id"]): -100}):
        other = smollm2.ask("/completion", {**body, "logit_bias": bias})[2]["completion_probabilities"]
        assert other[0]["id"] != found[0]["id"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"grammar": 'root ::= "a"{5,5} b\nb ::= [x-z] # a letter\n'}, r"aaaaa[xyz]"),
        ({"grammar": 'start: "ab"'}, "ab"),
        ({"json_schema": {"const": "42"}}, '"42"'),
        ({"guided_regex": "[0-9]{3}"}, r"\d{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_json": {"const": 7}}, "7"),
        ({"guided_grammar": 'root ::= "q"'}, "q"),
        ({"response_format": {"type": "json_object", "schema": {"const": "x"}}}, '"x"'),
    ],
)
def test_constraints(smollm2: Running, fields: dict[str, Any], expected: str) -> None:

    status, _, answer = smollm2.ask("/chat/completions", smollm2.chat(max_tokens=12, **fields))
    assert status == 200 and re.fullmatch(expected, answer["choices"][0]["message"]["content"])


def test_wrong_constraints_are_refused(smollm2: Running) -> None:
    for fields in (
        {"grammar": "root ::= this is (not valid GBNF"},
        {"grammar": 'root ::= "a"', "guided_grammar": 'root ::= "b"'},
        {"grammar": 'root ::= "a"', "json_schema": {}},
    ):
        status, _, body = smollm2.ask("/v1/chat/completions", smollm2.chat(**fields))
        assert status == 400 and body["error"]["message"]


def test_the_last_assistant_message_is_continued(smollm2: Running) -> None:
    messages = [{"role": "user", "content": "Count to five."}, {"role": "assistant", "content": "1, 2, 3,"}]
    body = {"messages": messages, "max_tokens": 3, "temperature": 0}
    status, _, answer = smollm2.ask("/v1/chat/completions", body)
    assert status == 200 and answer["choices"][0]["message"]["content"].strip().startswith("4")
    explicit = smollm2.ask(
        "/v1/chat/completions", {**body, "continue_final_message": True, "add_generation_prompt": False}
    )[2]
    assert explicit["choices"] == answer["choices"]
    another = smollm2.ask("/v1/chat/completions", {**body, "continue_final_message": False})[2]
    assert another["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert smollm2.ask("/v1/chat/completions", {**body, **both})[0] == 400
    rendered = smollm2.ask("/apply-template", {"messages": messages})[2]["prompt"]
    assert rendered.endswith("<|im_start|>assistant\n1, 2, 3,")
    client = ollama.Client(smollm2.url)
    found = client.chat("smollm2", messages, options={"num_predict": 3, "temperature": 0})
    assert found.message.content == answer["choices"][0]["message"]["content"]


def test_best_of(smollm2: Running) -> None:
    client = openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0)
    options: Any = {
        "model": "smollm2",
        "prompt": MEANING,
        "max_tokens": 5,
        "temperature": 1.0,
        "seed": 3,
        "logprobs": 0,
    }
    every = client.completions.create(**options, n=4)
    best = client.completions.create(**options, best_of=4)

    def mean(choice: Any) -> float:
        return float(np.mean(choice.logprobs.token_logprobs))

    assert best.choices[0].text == max(every.choices, key=mean).text and len(best.choices) == 1
    assert best.usage and best.usage.completion_tokens == 20
    wrong: Any
    for wrong in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        with pytest.raises(openai.BadRequestError, match="best_of"):
            client.completions.create(**options, **wrong)


def test_props_and_slots(smollm2: Running) -> None:
    props = smollm2.ask("/props")[2]
    assert props["model_path"] == "smollm2.gguf" and props["default_generation_settings"]["n_ctx"] == 2048
    assert "im_start" in props["chat_template"] and props["total_slots"] == 8
    slots = smollm2.ask("/slots")[2]
    assert len(slots) == 8 and not any(slot["is_processing"] for slot in slots)
    status, _, body = smollm2.ask("/rerank", {"query": "a", "documents": ["b"]})
    assert status == 400 and "a reranker" in body["error"]["message"]


def test_pieces(smollm2: Running) -> None:
    text = "unicode 媽 and emoji 🤗"
    tokens = smollm2.ask("/tokenize", {"content": text, "with_pieces": True})[2]["tokens"]
    pieces = [
        one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in tokens
    ]
    assert b"".join(pieces).decode() == text


def test_errors_have_the_format_of_llama_server(tiny: Running) -> None:
    status, _, body = tiny.ask("/chat/completions", tiny.chat("word " * 500))
    assert status == body["error"]["code"] == 400 and body["error"]["type"] == "exceed_context_size_error"
    assert body["error"]["n_ctx"] == 128
    assert tiny.ask("/infill", {"input_prefix": "a", "input_suffix": "b"})[0] == 400, "no such tokens"


def test_embeddings_with_dimensions(smollm2: Running) -> None:
    client = openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0)
    whole = np.array(client.embeddings.create(model="smollm2", input="a cat").data[0].embedding)
    part = np.array(client.embeddings.create(model="smollm2", input="a cat", dimensions=64).data[0].embedding)
    assert np.allclose(part, whole[:64] / np.linalg.norm(whole[:64]), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="smollm2", input="a", dimensions=5000)
    older = ollama.Client(smollm2.url).embeddings("smollm2", "a cat")
    assert np.allclose(older.embedding, whole, atol=1e-6)


def test_fill_in_the_middle_in_all_apis(coder: Running) -> None:
    before, after = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
    client = openai.OpenAI(base_url=f"{coder.url}/v1", api_key="none", max_retries=0)
    text = (
        client.completions.create(model="gpt-4o", prompt=before, suffix=after, max_tokens=8, temperature=0)
        .choices[0]
        .text
    )
    assert text.startswith("a + b")
    body = {"input_prefix": before, "input_suffix": after, "n_predict": 8, "temperature": 0}
    assert coder.ask("/infill", body)[2]["content"] == text
    extra = [{"filename": "a.py", "text": "def subtract(a, b): return a - b"}]
    more = coder.ask("/infill", {**body, "input_extra": extra})[2]
    assert more["tokens_evaluated"] > coder.ask("/infill", body)[2]["tokens_evaluated"]
    found = ollama.Client(coder.url).generate(
        "coder", before, suffix=after, options={"num_predict": 8, "temperature": 0}
    )
    assert found.response == text
    assert coder.ask("/v1/models")[2]["data"][0]["aliases"] == ["coder", "fim"]


def test_fill_in_the_middle_tokens() -> None:
    with GGUF.open(model_path("qwen2.5-coder-0.5b")) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
    tokens = tokenizer.fill_in_middle
    assert tokens and [tokenizer.piece(id or 0) for id in tokens] == [
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>",
    ]  # fmt: skip
    text = tokenizer.decode(prompt_ids(tokenizer, "a <|fim_middle|>", "b"), special=True)
    assert text == "<|fim_prefix|>a <|fim_middle|><|fim_suffix|>b<|fim_middle|>"
    assert prompt_ids(tokenizer, "a <|fim_middle|>", "b").count(tokens.middle or 0) == 1, (
        "a text has no control tokens"
    )
    tokenizer.fill_in_middle = FillInMiddle(tokens.prefix, tokens.suffix, None)  # as Codestral's
    assert tokenizer.decode(prompt_ids(tokenizer, "a", "b"), special=True) == "<|fim_suffix|>b<|fim_prefix|>a"


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_goes_on_from_a_context(smollm2: Running, stream: bool) -> None:
    client: Any = ollama.Client(smollm2.url)

    def ask(text: str, **more: Any) -> Any:
        found = client.generate(
            "smollm2", text, options={"num_predict": 8, "temperature": 0}, stream=stream, **more
        )
        return list(found)[-1] if stream else found

    first = ask("My cat is called Zog.")
    assert len(first.context) == first.prompt_eval_count + first.eval_count
    second = ask("What is my cat called?", context=first.context)
    assert second.context[: len(first.context)] == first.context
    assert second.prompt_eval_count > len(first.context)
    with pytest.raises(ollama.ResponseError, match="token id is outside"):
        ask("a", context=[10**8])
