"""The clients of Anthropic, Ollama and LiteLLM, unmodified, on a real server with a real model."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import anthropic
import ollama
import pytest

from tandem import LLM
from tests.packages import model_path
from tests.server.servers import Running
from tests.server.test_openai_client import ASK_WEATHER, HELLO, TOOLS, WEATHER, Person

ANTHROPIC_TOOLS: Any = [
    {"name": WEATHER["name"], "description": "weather", "input_schema": WEATHER["parameters"]}
]


@pytest.fixture(scope="module")
def claude(smollm2: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=smollm2.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llama(smollm2: Running) -> ollama.Client:
    return ollama.Client(host=smollm2.url)


def ask(client: anthropic.Anthropic, messages: Any = HELLO, **options: Any) -> Any:
    options = {"max_tokens": 20, "extra_body": {"temperature": 0}, **options}
    return client.messages.create(model="smollm2", messages=messages, **options)


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    with LLM(model_path("smollm2"), device="cpu", context=2048, batch=1) as llm:
        system = {"role": "system", "content": "You are a pirate."}
        expected = llm.chat([system, *HELLO], max_tokens=20)
    message = ask(claude, system="You are a pirate.", metadata={"user_id": "me"})
    assert message.content[0].text == expected.text and message.stop_reason == "max_tokens"
    usage = message.usage
    assert usage.output_tokens == 20
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected.usage.prompt_tokens
    counted = claude.messages.count_tokens(model="smollm2", messages=HELLO, system="You are a pirate.")
    assert counted.input_tokens == expected.usage.prompt_tokens
    long: Any = [{"role": "user", "content": "word " * 3000}]
    # More than the context.
    assert claude.messages.count_tokens(model="smollm2", messages=long).input_tokens > 3000
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* 2048 tokens"):
        ask(claude, long)
    with claude.messages.stream(
        model="smollm2",
        messages=HELLO,
        system="You are a pirate.",
        max_tokens=20,
        extra_body={"temperature": 0},
    ) as stream:
        assert "".join(stream.text_stream) == expected.text
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_anthropic_stop_and_prefill(claude: anthropic.Anthropic) -> None:
    counting: Any = [
        {"role": "user", "content": "Count to ten."},
        {"role": "assistant", "content": "1, 2, 3,"},
    ]
    message = ask(claude, counting, stop_sequences=["6", "nothing"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "6")
    assert message.content[0].text == " 4, 5, "


def test_anthropic_tools(claude: anthropic.Anthropic) -> None:
    options: Any = {
        "tools": ANTHROPIC_TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    message = ask(claude, ASK_WEATHER, max_tokens=80, **options)
    [block] = message.content
    assert block.type == "tool_use" and block.name == "get_weather" and block.input["city"] == "Paris"
    assert message.stop_reason == "tool_use"
    with claude.messages.stream(
        model="smollm2", messages=ASK_WEATHER, max_tokens=80, extra_body={"temperature": 0}, **options
    ) as stream:
        assert stream.get_final_message().content[0].input == block.input
    result: Any = {
        "type": "tool_result",
        "tool_use_id": block.id,
        "content": [{"type": "text", "text": "17 C"}],
    }
    history = [
        *ASK_WEATHER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert "17" in ask(claude, history, tools=ANTHROPIC_TOOLS, max_tokens=30).content[0].text


def test_anthropic_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model is called claude"):
        claude.messages.create(model="claude", max_tokens=5, messages=HELLO)
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="mmproj") as refused:
        ask(claude, [{"role": "user", "content": [image]}])
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="`container` is not supported"):
        ask(claude, container="x")


def test_ollama_chat(llama: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 20, "num_ctx": 2048}
    whole = llama.chat(model="smollm2", messages=HELLO, options=options)
    streamed = list(llama.chat(model="smollm2:latest", messages=HELLO, options=options, stream=True))
    assert whole.message.content and whole.done_reason == "length" and whole.eval_count == 20
    assert "".join(part.message.content or "" for part in streamed) == whole.message.content
    assert streamed[-1].done and streamed[-1].eval_count == 20 and (streamed[-1].total_duration or 0) > 0
    person = llama.chat(
        model="smollm2", messages=[{"role": "user", "content": "Ann is 31 and has a dog. Answer in JSON."}],
        format=Person.model_json_schema(), options={"temperature": 0},
    )  # fmt: skip
    assert Person.model_validate_json(person.message.content or "").name == "Ann"
    told = llama.chat(model="smollm2", messages=ASK_WEATHER, tools=TOOLS, options=options)
    assert told.message.content or told.message.tool_calls


def test_ollama_generate_and_embed(llama: ollama.Client) -> None:
    greedy = {"temperature": 0, "num_predict": 6}
    raw = llama.generate(model="smollm2", prompt="The capital of France is", raw=True, options=greedy)
    assert "Paris" in raw.response
    chat = llama.generate(model="smollm2", prompt="Say hello to my cat.", options=greedy, logprobs=True)
    assert chat.response and chat.logprobs and len(chat.logprobs) == 6
    vectors = llama.embed(model="smollm2", input=["a cat", "a dog"]).embeddings
    assert len(vectors) == 2 and len(vectors[0]) == 576


def test_ollama_models(llama: ollama.Client, smollm2: Running) -> None:
    [listed] = llama.list().models
    assert listed.model == "smollm2" and listed.details and listed.details.quantization_level == "Q4_1"
    shown = llama.show("smollm2")
    assert shown.modelinfo and shown.modelinfo["general.architecture"] == "llama"
    assert shown.template and "im_start" in shown.template
    assert [model.model for model in llama.ps().models] == ["smollm2"]
    assert llama.pull("smollm2").status == "success"  # already served
    assert smollm2.ask("/api/version")[2]["version"]
    head = urllib.request.Request(smollm2.url, method="HEAD")  # the first request of Ollama's command line
    assert urllib.request.urlopen(head).status == 200
    for name, message in (
        ("/etc/hostname", "cannot be downloaded"),
        ("nonsense", "no model is called nonsense"),
    ):
        with pytest.raises(ollama.ResponseError, match=message):
            llama.pull(name)
    with pytest.raises(ollama.ResponseError, match="no model is called"):
        llama.chat(model="gpt", messages=HELLO)
    with pytest.raises(ollama.ResponseError, match="`mirostat` is not supported"):
        llama.chat(model="smollm2", messages=HELLO, options={"mirostat": 2})


def test_ollama_unloads_and_loads(llama: ollama.Client) -> None:
    assert llama.generate(model="smollm2", keep_alive=0).done_reason == "unload"
    assert not llama.ps().models
    assert llama.generate(model="smollm2", keep_alive="10m").done_reason == "load"
    [model] = llama.ps().models
    assert model.expires_at and model.expires_at.year < 3000
    for forever in (-1, 1e300, "999999999h"):
        assert llama.generate(model="smollm2", keep_alive=forever).done_reason == "load"
        assert llama.ps().models[0].expires_at.year == 9999  # type: ignore[union-attr]


def test_litellm(smollm2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through all three APIs."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or its import uses the network
    import litellm

    litellm.telemetry = False
    bases = {"openai": f"{smollm2.url}/v1", "ollama_chat": smollm2.url, "anthropic": smollm2.url}
    for provider, base in bases.items():
        options: Any = {"api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 16}
        whole = litellm.completion(f"{provider}/smollm2", HELLO, **options)
        parts = litellm.completion(f"{provider}/smollm2", HELLO, stream=True, **options)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == whole.choices[0].message.content != ""
        assert whole.usage.completion_tokens == 16
        options["_skip_mcp_handler"] = True  # or it imports another package
        options |= {"tools": TOOLS, "tool_choice": "required", "max_tokens": 80, "parallel_tool_calls": False}
        if provider == "ollama_chat":
            continue  # Ollama has no tool_choice, and this model would not call without it
        asked = f"{provider}/smollm2", ASK_WEATHER
        whole = litellm.completion(*asked, **options).choices[0]
        [call] = whole.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, arguments["city"], whole.finish_reason) == (
            "get_weather",
            "Paris",
            "tool_calls",
        )
        chunks = list(litellm.completion(*asked, stream=True, **options))
        [call] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == arguments
    # Recognised by its words; aider, among others, depends on LiteLLM's exception.
    for provider in "openai", "anthropic":
        with pytest.raises(litellm.ContextWindowExceededError, match="2048 tokens"):
            long = [{"role": "user", "content": "word " * 3000}]
            litellm.completion(f"{provider}/smollm2", long, api_base=bases[provider], api_key="none")
    vectors = litellm.embedding("openai/smollm2", ["a cat"], api_base=bases["openai"], api_key="none")
    assert len(vectors.data[0]["embedding"]) == 576
