"""What clients of OpenAI, vLLM and llama.cpp send and expect besides the common fields."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from tests.server.servers import Running

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = r'<tool_call>\n\{"name": "f", "arguments": \{"x": 1\}\}\n</tool_call>[a-z ]{40}'


def events(server: Running, body: dict[str, Any]) -> list[Any]:
    """The chunks of a streamed chat."""
    text = server.ask("/v1/chat/completions", {**body, "stream": True})[2]
    return [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]


def test_a_response_without_parallel_calls_ends_after_one(smollm2: Running) -> None:
    body = smollm2.chat(tools=[TOOL], parallel_tool_calls=False, max_tokens=100)
    body["structured_outputs"] = {"regex": CALL}
    answer = smollm2.ask("/v1/chat/completions", body)[2]
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 1
    assert answer["usage"]["completion_tokens"] < 40 and answer["usage"]["prompt_tokens"] > 10
    streamed = events(smollm2, body)
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"
    both = smollm2.ask("/v1/chat/completions", {**body, "parallel_tool_calls": True})[2]
    assert both["usage"]["completion_tokens"] > answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_prompt": True, "id_slot": 3, "timings_per_token": True, "return_progress": True},
        {"request_id": "a", "echo": False, "use_beam_search": False, "length_penalty": 1, "mirostat": 0},
        {"typical_p": 1, "dry_multiplier": 0, "xtc_probability": 0, "skip_special_tokens": True},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(tiny: Running, fields: dict[str, Any]) -> None:
    for path, body in (
        ("chat/completions", tiny.chat(max_tokens=2, add_generation_prompt=True)),
        ("completions", {"prompt": "a", "max_tokens": 2}),
    ):
        assert tiny.ask(f"/v1/{path}", {**body, **fields})[0] == 200
        assert tiny.ask(f"/v1/{path}", {**body, "mirostat": 2})[0] == 400


def test_continuous_usage(tiny: Running) -> None:
    body = tiny.chat(max_tokens=4, ignore_eos=True)
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(tiny, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 4
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks) and not chunks[-1]["choices"]


def test_a_required_call_with_a_response_format_is_a_call(smollm2: Running) -> None:
    body = smollm2.chat(tools=[TOOL], tool_choice="required", max_tokens=60)
    body["response_format"] = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    choice = smollm2.ask("/v1/chat/completions", body)[2]["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"]
    del body["response_format"]
    status, _, refused = smollm2.ask("/v1/chat/completions", {**body, "structured_outputs": {"regex": "a"}})
    assert status == 400 and "strict" not in refused["error"]["message"]


def test_models_in_the_format_of_anthropic(tiny: Running) -> None:
    claude = anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0)
    [model] = list(claude.models.list())
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert claude.models.retrieve("tiny").id == "tiny"
    assert tiny.ask("/v1/models")[2]["data"][0]["object"] == "model"


def test_a_streamed_call_has_no_empty_content(smollm2: Running) -> None:
    chunks = events(smollm2, smollm2.chat(tools=[TOOL], tool_choice="required", max_tokens=60))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None} and deltas[-1] == {}
    assert not any("content" in delta for delta in deltas[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_error_has_its_counts(tiny: Running, stream: bool) -> None:
    status, _, body = tiny.ask("/v1/chat/completions", tiny.chat("word " * 500, stream=stream))
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["n_ctx"] == 128 and body["error"]["n_prompt_tokens"] > 128


def test_times_and_the_software_of_a_response(tiny: Running) -> None:
    for path, body in (
        ("chat/completions", tiny.chat(max_tokens=3, ignore_eos=True)),
        ("completions", {"prompt": "a", "max_tokens": 3, "ignore_eos": True}),
    ):
        whole = tiny.ask(f"/v1/{path}", {**body, "timings_per_token": True})[2]
        assert whole["timings"]["predicted_n"] == 3 and whole["timings"]["predicted_ms"] > 0
        assert whole["system_fingerprint"] and "timings" not in tiny.ask(f"/v1/{path}", body)[2]
        options = {"stream": True, "stream_options": {"include_usage": True}, "timings_per_token": True}
        text = tiny.ask(f"/v1/{path}", {**body, **options})[2]
        chunks = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
        assert chunks[-1]["timings"]["predicted_n"] == 3 and "timings" not in chunks[0]
        assert all(chunk["system_fingerprint"] == whole["system_fingerprint"] for chunk in chunks)


def test_the_tokens_of_a_conversation_are_counted(tiny: Running) -> None:
    counted = tiny.ask("/v1/chat/completions/input_tokens", tiny.chat(max_tokens=1))[2]["input_tokens"]
    assert counted == tiny.ask("/v1/chat/completions", tiny.chat(max_tokens=1))[2]["usage"]["prompt_tokens"]
    assert tiny.ask("/chat/completions/input_tokens", tiny.chat("word " * 500))[2]["input_tokens"] > 500


def test_message_threads_are_refused_so_that_clients_go_on_without(tiny: Running) -> None:
    """As the tool runner of Anthropic's SDK does, from 2.10 on."""
    body = {**tiny.chat(max_tokens=2), "model": "tiny", "thread": {"type": "new"}}
    status, _, answer = tiny.ask("/v1/messages", body)
    assert status == 400 and answer["error"]["details"]["error_code"] == "thread_unsupported_request"
    del body["thread"]
    assert tiny.ask("/v1/messages", body)[0] == 200
