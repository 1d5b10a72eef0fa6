"""Stored responses and conversations, with OpenAI's client."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from tandem.errors import RequestError
from tandem.server.core import response_store
from tandem.server.core.prompt import GenerationRequest, drop_oldest, with_verbosity
from tandem.server.core.response_store import ResponseStore, StoredItem, stored_items
from tandem.server.openai import responses
from tests.cli.tiny_model import write_tiny_model
from tests.server.servers import Running, serving, wait_until

WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
TIME: Any = {**WEATHER, "name": "get_time"}


@pytest.fixture
def client(smollm2: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, text: str, **more: Any) -> Any:
    return client.responses.create(model="smollm2", input=text, temperature=0, max_output_tokens=12, **more)


def test_a_response_continues_another(client: openai.OpenAI) -> None:
    first = ask(client, "My cat is called Zog.", instructions="Be brief.")
    second = ask(client, "What is my cat called?", previous_response_id=first.id)
    messages: Any = [
        {"role": "user", "content": "My cat is called Zog."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "What is my cat called?"},
    ]
    whole = ask(client, messages)
    assert second.output_text == whole.output_text and second.previous_response_id == first.id
    assert second.usage and whole.usage and second.usage.input_tokens == whole.usage.input_tokens
    items: Any = client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    third = list(ask(client, "And?", previous_response_id=second.id, stream=True))[-1].response
    assert client.responses.retrieve(third.id).output_text == third.output_text
    assert len(client.responses.input_items.list(third.id).data) == 5


def test_retrieve_and_delete(client: openai.OpenAI) -> None:
    response = ask(client, "Hi", metadata={"a": "b"})
    found: Any = client.responses.retrieve(response.id)
    assert found.output_text == response.output_text and found.metadata == {"a": "b"} and found.store
    client.responses.delete(response.id)
    forgotten = ask(client, "Hi", store=False)
    for id in (response.id, forgotten.id, "resp_1"):
        with pytest.raises(openai.NotFoundError, match="no stored response has the id"):
            client.responses.retrieve(id)
        with pytest.raises(openai.NotFoundError):
            ask(client, "Hi", previous_response_id=id)


def test_input_tokens(client: openai.OpenAI) -> None:
    response = ask(client, "Hello there")
    counted = client.responses.input_tokens.count(model="smollm2", input="Hello there")
    assert response.usage and counted.input_tokens == response.usage.input_tokens
    more = client.responses.input_tokens.count(input="Hello there", previous_response_id=response.id)
    assert more.input_tokens > counted.input_tokens


def test_conversations(client: openai.OpenAI) -> None:
    items: Any = [{"type": "message", "role": "user", "content": "My cat is called Zog."}]
    conversation = client.conversations.create(items=items, metadata={"topic": "cats"})
    assert client.conversations.retrieve(conversation.id).metadata == {"topic": "cats"}
    first = ask(client, "What is my cat called?", conversation=conversation.id)
    ask(client, "Why?", conversation={"id": conversation.id})
    listed: Any = client.conversations.items.list(conversation.id, order="asc")
    roles = [one.role for one in listed]
    assert roles == ["user", "user", "assistant", "user", "assistant"]
    assert len(client.conversations.items.list(conversation.id, limit=2).data) == 2
    client.conversations.items.create(conversation.id, items=items)
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        ask(client, "a", conversation=conversation.id, previous_response_id=first.id)
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError, match="no stored conversation"):
        ask(client, "a", conversation=conversation.id)


def test_what_is_added_during_a_response_stays(smollm2: Running) -> None:
    """Two responses to a conversation at the same time, and an item added by hand: the conversation has all of them."""
    _, _, conversation = smollm2.ask("/v1/conversations", {})
    id, item = conversation["id"], {"type": "message", "role": "user", "content": "Meanwhile"}
    body = {"conversation": id, "max_output_tokens": 40}
    with ThreadPoolExecutor() as threads:
        answers = [
            threads.submit(smollm2.ask, "/v1/responses", {**body, "input": text}) for text in ("a", "b")
        ]
        wait_until(lambda: smollm2.running() == 2)
        assert smollm2.ask(f"/v1/conversations/{id}/items", {"items": [item]})[0] == 200
    assert all(answer.result()[2]["conversation"] == {"id": id} for answer in answers)
    _, _, listed = smollm2.ask(f"/v1/conversations/{id}/items?order=asc")
    roles = [one["role"] for one in listed["data"]]
    assert roles == ["user", "user", "assistant", "user", "assistant"]


def test_an_answer_that_cannot_be_stored_is_answered(smollm2: Running) -> None:
    """The conversation is deleted while the response is generated."""
    _, _, conversation = smollm2.ask("/v1/conversations", {})
    id = conversation["id"]
    body = {"conversation": id, "max_output_tokens": 400, "input": "Write a long story."}
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(smollm2.ask, "/v1/responses", body)
        wait_until(smollm2.running)
        deletion = urllib.request.Request(f"{smollm2.url}/v1/conversations/{id}", method="DELETE")
        assert urllib.request.urlopen(deletion).status == 200
    status, _, response = answer.result()
    assert status == 200 and response["output"] and response["conversation"] is None and response["store"]


@pytest.mark.fast
def test_an_answer_that_is_too_large_to_store_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_ENTRY", 3000)
    body = responses.ResponsesRequest(input="a", conversation="conv_1")
    response = responses._response(body, "m")
    response["output"] = [{"id": "msg_1", "text": "x" * 3000}]
    server: Any = SimpleNamespace(responses=ResponseStore(None))

    async def keep() -> None:
        await server.responses.put("conv_1", "{}", [])
        new = stored_items(responses.new_items("a"))
        text = await responses._keep(server, body, response, [], new)
        assert not json.loads(text)["store"] and json.loads(text)["conversation"] is None
        assert await server.responses.items("conv_1") == []
        server.responses.close()

    asyncio.run(keep())


def test_truncation_is_said(smollm2: Running) -> None:
    long = [
        one
        for i in range(40)
        for one in ({"role": "user", "content": f"{i} word " * 40}, {"role": "assistant", "content": "Yes."})
    ]
    body = {
        "input": [*long, {"role": "user", "content": "Hi"}],
        "instructions": "Be kind.",
        "max_output_tokens": 4,
    }
    status, _, refused = smollm2.ask("/v1/responses", body)
    assert status == 400 and refused["error"]["code"] == "context_length_exceeded"
    status, _, answer = smollm2.ask("/v1/responses", {**body, "truncation": "auto"})
    assert status == 200 and answer["truncation"] == "auto" and 0 < answer["dropped_messages"] < 80
    assert answer["usage"]["input_tokens"] < 2048


@pytest.mark.fast
def test_a_compacted_conversation_goes_on(client: openai.OpenAI) -> None:
    first = ask(client, "My cat is called Zog. It eats fish.", instructions="Be brief.")
    compacted: Any = client.responses.compact(
        model="smollm2", previous_response_id=first.id, input="It is 3 years old.", instructions="Be brief."
    )
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    system, summary = compacted.output
    assert system.role == "system" and compacted.object == "response.compaction"
    text = base64.b64decode(summary.encrypted_content).decode()
    assert text.strip() and compacted.usage.output_tokens > 3 and compacted.dropped_messages == 0
    items = [item.model_dump(exclude_none=True) for item in compacted.output]
    then: Any = [*items, {"role": "user", "content": "What is my cat called?"}]
    count = client.responses.input_tokens.count(model="smollm2", input=then).input_tokens
    same: Any = [
        {"role": "system", "content": f"Be brief.\n\nSummary of the conversation so far:\n{text}"},
        {"role": "user", "content": "What is my cat called?"},
    ]
    assert count == client.responses.input_tokens.count(model="smollm2", input=same).input_tokens
    assert ask(client, then).output_text
    with pytest.raises(openai.BadRequestError, match="not one of this server"):
        ask(client, [{"type": "compaction", "encrypted_content": "\u00e9"}, *then])
    with pytest.raises(openai.BadRequestError, match="input is missing"):
        client.responses.compact(model="smollm2")


def test_a_conversation_longer_than_the_context_is_compacted_and_said(client: openai.OpenAI) -> None:
    turns: Any = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"{i}: " + "word " * 150}
        for i in range(21)
    ]
    compacted: Any = client.responses.compact(model="smollm2", input=turns)
    assert compacted.dropped_messages > 0 and [item.type for item in compacted.output] == ["compaction"]


def test_what_truncation_and_verbosity_keep() -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    request = GenerationRequest(None, messages=list(messages))
    assert drop_oldest(request) and request.messages == [messages[0], messages[3]]
    assert request.dropped_messages == 2 and not drop_oldest(request)
    assert with_verbosity(messages, "medium") == messages
    assert with_verbosity(messages, "low")[0]["content"] == "system\n\nAnswer briefly."
    assert with_verbosity(messages[1:], "high")[0] == {"role": "system", "content": "Answer in detail."}


def test_only_allowed_tools_are_called(client: openai.OpenAI, smollm2: Running) -> None:
    choice: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_time"}],
    }
    response: Any = client.responses.create(
        model="smollm2", input="How is the weather?", tools=[WEATHER, TIME], tool_choice=choice, temperature=0,
        max_output_tokens=60, parallel_tool_calls=False,
    )  # fmt: skip
    assert [item.name for item in response.output] == ["get_time"]
    tools = [{"type": "function", "function": {"name": one}} for one in ("get_weather", "get_time")]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools[1:]}}
    body = smollm2.chat(tools=tools, tool_choice=allowed, max_tokens=60, verbosity="low")
    message = smollm2.ask("/v1/chat/completions", body)[2]["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "get_time"


def test_responses_in_a_file_survive_a_restart(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf")
    options: Any = (model, "--device", "cpu", "--threads", "1", "--responses", tmp_path / "r.sqlite")
    with serving(tmp_path / "a", *options, context=128, shutdown=2) as server:
        id = server.ask("/v1/responses", {"input": "a", "max_output_tokens": 2})[2]["id"]
    with serving(tmp_path / "b", *options, context=128, shutdown=2) as server:
        assert server.ask(f"/v1/responses/{id}")[2]["id"] == id


@pytest.mark.fast
def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_ENTRIES", 3)
    monkeypatch.setattr(response_store, "MAX_BYTES", 1000)
    monkeypatch.setattr(response_store, "MAX_ENTRY", 800)
    monkeypatch.setattr(response_store, "MAX_ITEMS", 5)
    one, large = [StoredItem("i", "{}")], [StoredItem("i", "x" * 500)]

    async def use() -> None:
        store = ResponseStore(None)
        for i in range(5):
            await store.put(str(i), "{}", one)
        assert [await store.body(str(i)) is not None for i in range(5)] == [False, False, True, True, True]
        assert store._connection
        assert store._connection.execute("SELECT count(*) FROM items").fetchone() == (3,), "with their items"
        await store.put("large", "x" * 700, [])
        await store.put("larger", "x" * 700, [])
        assert await store.body("large") is None and await store.body("larger") is not None
        for body, items in (("x" * 900, []), ("", large * 2), ("", one * 6)):
            with pytest.raises(RequestError, match="store = false"):
                await store.put("too large", body, items)
        await store.put("grows", "", large)
        assert await store.append("grows", one) and not await store.append("missing", one)
        for more in (large, one * 4):
            with pytest.raises(RequestError, match="begin a new one"):
                await store.append("grows", more)
        assert await store.items("grows") == [*large, *one]
        store.close()

    asyncio.run(use())


@pytest.mark.fast
@pytest.mark.parametrize("outputs", [0, 2])
def test_pages_of_items(outputs: int) -> None:
    """Those before a response, in both orders, from any item on."""
    items = [StoredItem(f"i{n}", str(n)) for n in range(9)]

    async def use() -> None:
        store = ResponseStore(None)
        await store.put("other", "", items)
        await store.put("a", "", items, outputs)
        for newest_first in (False, True):
            expected = items[: 9 - outputs][:: -1 if newest_first else 1]
            for after in (None, "i0", "i3", "i8", "no item"):
                begin = (
                    expected.index(found[0]) + 1 if (found := [i for i in expected if i.id == after]) else 0
                )
                if after == "i8" and outputs and not newest_first:
                    begin = len(expected)
                for limit in (1, 4, 100):
                    page = await store.page("a", limit, after, newest_first=newest_first)
                    wanted = expected[begin:]
                    assert page == (wanted[:limit], len(wanted) > limit), (after, limit, newest_first)
        assert await store.page("b", 1, newest_first=True) is None
        store.close()

    asyncio.run(use())
