"""OpenAI's client, unmodified, on a real server with a real model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tandem import LLM
from tests.packages import model_path
from tests.server.servers import Running, serving, wait_until

HELLO: Any = [{"role": "user", "content": "Say hello to my cat."}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": WEATHER}]
ASK_WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris in C?"}]


class Person(BaseModel):
    name: str
    age: int
    pet: Literal["cat", "dog"]


@pytest.fixture(scope="module")
def client(smollm2: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected() -> Any:
    """The engine's response to HELLO without a server."""
    with LLM(model_path("smollm2"), device="cpu", context=2048, batch=1) as llm:
        return llm.chat(HELLO, max_tokens=20)


def test_chat(client: openai.OpenAI, expected: Any) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=HELLO,
        temperature=0,
        max_completion_tokens=20,
        user="me",
        metadata={"a": "b"},
    )
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert answer.usage and answer.usage.completion_tokens == expected.usage.completion_tokens
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.model == "smollm2" and answer.id.startswith("chatcmpl-")


def test_streaming_gives_the_same_text_and_usage(client: openai.OpenAI, expected: Any) -> None:
    stream = client.chat.completions.create(
        model="smollm2", messages=HELLO, temperature=0, max_tokens=20, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.text
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
    usage = chunks[-1].usage
    assert usage and not chunks[-1].choices and usage.completion_tokens == 20
    assert len(chunks) > 15, "tokens come one by one"


def test_sampling_options(client: openai.OpenAI, smollm2: Running) -> None:
    def ask(**options: Any) -> Any:
        return client.chat.completions.create(model="smollm2", messages=HELLO, max_tokens=12, **options)

    several = ask(n=3, seed=5, temperature=1)
    texts = [choice.message.content for choice in several.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in several.choices] == [0, 1, 2]
    assert [c.message.content for c in ask(n=3, seed=5, temperature=1).choices] == texts
    whole = ask(temperature=0).choices[0].message.content
    word = whole.split()[1]
    stopped = ask(temperature=0, stop=[word]).choices[0]
    assert stopped.message.content == whole[: whole.index(word)] and stopped.finish_reason == "stop"
    [token] = smollm2.ask("/tokenize", {"prompt": " cheese"})[2]["tokens"]
    assert "cheese cheese" in ask(temperature=0, logit_bias={str(token): 100}).choices[0].message.content


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    for token in content:
        assert len(token.top_logprobs) == 3 and token.bytes == list(token.token.encode())
        assert token.logprob == max(top.logprob for top in token.top_logprobs) <= 0, (
            "greedy takes the likeliest"
        )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_required_tool_is_called(client: openai.OpenAI, choice: Any) -> None:
    options: Any = {
        "model": "smollm2",
        "messages": ASK_WEATHER,
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 80,
    }
    options |= {"tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**options).choices[0]
    assert answer.finish_reason == "tool_calls" and not answer.message.content
    [call] = answer.message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] == "Paris" and arguments["unit"] in ("C", "F")
    with client.chat.completions.stream(**options) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0].message.tool_calls or []
    assert len(deltas) > 3, "arguments come token by token"
    assert [one.function.arguments for one in streamed] == [call.function.arguments]
    history = [
        *ASK_WEATHER,
        answer.message,
        {"role": "tool", "tool_call_id": call.id, "content": "17 C, rain"},
    ]
    told = client.chat.completions.create(
        model="smollm2", messages=history, tools=TOOLS, temperature=0, max_tokens=30
    )
    assert "17" in (told.choices[0].message.content or "")


def test_strict_tools_may_be_called_or_not(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    answer = client.chat.completions.create(
        model="smollm2", messages=HELLO, tools=tools, temperature=0, max_tokens=12
    )
    message = answer.choices[0].message
    assert message.content or message.tool_calls


def test_structured_outputs(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "Ann is 31 and has a dog. Answer in JSON."}]
    parsed = client.chat.completions.parse(
        model="smollm2", messages=asked, response_format=Person, temperature=0, max_tokens=80
    )
    assert parsed.choices[0].message.parsed == Person(name="Ann", age=31, pet="dog")
    plain = client.chat.completions.create(
        model="smollm2",
        messages=asked,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=200,
    )
    assert isinstance(json.loads(plain.choices[0].message.content or ""), dict)
    strict: Any = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    both = client.chat.completions.parse(
        model="smollm2", messages=asked, response_format=Person, tools=strict, temperature=0, max_tokens=80
    )
    message = both.choices[0].message
    calls = message.tool_calls or []
    assert message.parsed or calls[0].function.parsed_arguments, "the one or the other"
    response = client.responses.parse(model="smollm2", input=asked, text_format=Person, temperature=0)
    assert response.output_parsed == Person(name="Ann", age=31, pet="dog")


def test_completions(client: openai.OpenAI, smollm2: Running) -> None:
    ids = smollm2.ask("/tokenize", {"prompt": "The capital of France is"})[2]["tokens"]
    prompts: Any = ["The capital of France is", "One, two, three,"]
    answer = client.completions.create(
        model="smollm2", prompt=prompts, temperature=0, max_tokens=4, logprobs=2
    )
    assert "Paris" in answer.choices[0].text and "four" in answer.choices[1].text
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.tokens
    assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text
    by_ids = client.completions.create(
        model="smollm2", prompt=[ids, ids], temperature=0, max_tokens=4, echo=True
    )
    assert [c.text for c in by_ids.choices] == [f"The capital of France is{answer.choices[0].text}"] * 2
    assert by_ids.usage and by_ids.usage.prompt_tokens == 2 * len(ids)
    stream = client.completions.create(
        model="smollm2", prompt=prompts[0], temperature=0, max_tokens=4, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose in May."]
    found = client.embeddings.create(model="smollm2", input=texts)  # as base64, the client's default
    cat, kitten, rates = (one.embedding for one in found.data)
    floats = (
        client.embeddings.create(model="smollm2", input=texts[0], encoding_format="float").data[0].embedding
    )
    assert floats == pytest.approx(cat, abs=1e-6)
    assert math.isclose(sum(x * x for x in cat), 1.0, rel_tol=1e-4)
    assert math.sumprod(cat, kitten) > math.sumprod(cat, rates) if hasattr(math, "sumprod") else True


def test_responses(client: openai.OpenAI, expected: Any) -> None:
    whole = client.responses.create(
        model="smollm2", input=HELLO, temperature=0, max_output_tokens=20, store=False
    )
    assert whole.output_text == expected.text and whole.status == "incomplete"
    assert whole.usage and whole.usage.output_tokens == 20
    types, text = [], ""
    for event in client.responses.create(model="smollm2", input="Hi", temperature=0, stream=True):
        types.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.completed":
            assert event.response.output_text == text
    assert types[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert types[-1] == "response.completed"
    tools: Any = [{"type": "function", **WEATHER, "strict": True}]
    called = client.responses.create(
        model="smollm2", input=ASK_WEATHER, tools=tools, tool_choice="required", temperature=0,
        parallel_tool_calls=False, instructions="Be brief.",
    )  # fmt: skip
    [call] = called.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] == "Paris"
    history: Any = [
        *ASK_WEATHER,
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "17 C"},
    ]
    told = client.responses.create(model="smollm2", input=history, temperature=0, max_output_tokens=20)
    assert told.output_text


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").owned_by == "tandem"
    with pytest.raises(openai.NotFoundError, match="no model is called gpt-9") as missing:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert missing.value.code == "model_not_found"
    for options, message in (
        ({"web_search_options": {}}, "`web_search_options` is not supported"),
        ({"extra_body": {"colour": "red"}}, "`colour` is not supported"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n: "),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(model="smollm2", messages=HELLO, **options)  # type: ignore[call-overload]
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    with pytest.raises(openai.BadRequestError, match="an image must be a data URL"):
        client.chat.completions.create(model="smollm2", messages=image)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as long:
        client.completions.create(model="smollm2", prompt="word " * 3000)
    assert long.value.code == "context_length_exceeded"


def test_a_disconnect_cancels_the_request(client: openai.OpenAI, smollm2: Running) -> None:
    options: Any = {
        "model": "smollm2",
        "messages": HELLO,
        "max_tokens": 1900,
        "extra_body": {"ignore_eos": True},
    }
    before = smollm2.cancelled()
    stream = client.chat.completions.create(**options, stream=True)
    next(stream)
    stream.close()
    wait_until(lambda: smollm2.cancelled() == before + 1)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(**options)
    wait_until(lambda: smollm2.cancelled() == before + 2)
    smollm2.wait_idle()


@pytest.mark.soak
def test_qwen_calls_tools_by_itself(tmp_path: Path) -> None:
    """A model trained to call tools, with its own template."""
    with serving(
        tmp_path, model_path("qwen2.5-coder-0.5b"), "--device", "cpu", batch=4, shutdown=2
    ) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        options: Any = {
            "model": client.models.list().data[0].id,
            "tools": TOOLS,
            "temperature": 0,
            "max_tokens": 100,
        }
        messages = [*ASK_WEATHER]
        answer = client.chat.completions.create(messages=messages, **options).choices[0]
        [call] = answer.message.tool_calls or []
        assert json.loads(call.function.arguments)["city"] == "Paris" and answer.finish_reason == "tool_calls"
        messages += [
            answer.message,
            {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 17}'},
        ]
        options["tool_choice"] = "none"  # or this small model would call again
        told = client.chat.completions.create(messages=messages, **options).choices[0]
        assert "17" in (told.message.content or "")
