"""Each API returns reasoning apart from the response's text, in its own field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.tiny_model import CHATML, write_tiny_model
from tests.server.servers import Running, serving

EFFORT = "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"
TEMPLATE = (
    CHATML
    + EFFORT
    + "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\\n' }}{% endif %}"
)
# The only output that the grammar allows.
SAID = {"structured_outputs": {"regex": "hm, so</think>\\n\\nYes[.]"}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("thinker")
    model = write_tiny_model(folder / "thinker.gguf", template=TEMPLATE)
    with serving(folder, model, "--device", "cpu", "--threads", "1", context=512, shutdown=2) as server:
        yield server


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_openai(thinker: Running) -> None:
    chat = "/v1/chat/completions"
    answer = thinker.ask(chat, thinker.chat(**SAID))[2]
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    assert (message["reasoning_content"], message["content"]) == ("hm, so", "Yes.")
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in events(thinker.ask(chat, thinker.chat(stream=True, **SAID))[2])
    ]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm, so"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    for more in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message = thinker.ask(chat, thinker.chat(max_tokens=5, **more))[2]["choices"][0]["message"]
        assert len(message["content"]) == 5 and "reasoning_content" not in message


def test_responses(thinker: Running) -> None:
    ask: Any = {"input": "Hi", "temperature": 0, "max_output_tokens": 9}
    [item] = thinker.ask("/v1/responses", ask)[2]["output"]
    assert item["type"] == "reasoning" and len(item["content"][0]["text"]) == 9
    types = [event["type"] for event in events(thinker.ask("/v1/responses", {**ask, "stream": True})[2])]
    assert "response.reasoning_text.delta" in types and "response.output_text.delta" not in types
    [item] = thinker.ask("/v1/responses", {**ask, "reasoning": {"effort": "none"}})[2]["output"]
    assert item["type"] == "message"


def test_anthropic(thinker: Running) -> None:
    ask = thinker.chat(max_tokens=9)
    [block] = thinker.ask("/v1/messages", ask)[2]["content"]
    assert block["type"] == "thinking" and len(block["thinking"]) == 9
    deltas = [
        event.get("delta", {}) for event in events(thinker.ask("/v1/messages", {**ask, "stream": True})[2])
    ]
    assert "".join(delta.get("thinking", "") for delta in deltas) == block["thinking"]
    [block] = thinker.ask("/v1/messages", {**ask, "thinking": {"type": "disabled"}})[2]["content"]
    assert block["type"] == "text"


def test_ollama(thinker: Running) -> None:
    ask: Any = {"model": "thinker", "stream": False, "options": {"temperature": 0, "num_predict": 9}}
    message = thinker.ask("/api/chat", {**ask, "messages": thinker.chat()["messages"]})[2]["message"]
    assert len(message["thinking"]) == 9 and not message["content"]
    said = thinker.ask("/api/generate", {**ask, "prompt": "Hi", "think": False})[2]
    assert len(said["response"]) == 9 and "thinking" not in said


def test_reasoning_effort_reaches_the_template(thinker: Running) -> None:
    """The template writes it into the prompt: one token per letter."""
    chat = thinker.chat(max_tokens=1)
    ollama: Any = {
        "model": "thinker",
        "messages": chat["messages"],
        "stream": False,
        "options": {"num_predict": 1},
    }

    def openai(**more: Any) -> int:
        return thinker.ask("/v1/chat/completions", {**chat, **more})[2]["usage"]["prompt_tokens"]

    def responses(**more: Any) -> int:
        return thinker.ask("/v1/responses", {"input": "Hi", "max_output_tokens": 1, **more})[2]["usage"][
            "input_tokens"
        ]

    def anthropic(**more: Any) -> int:
        return thinker.ask("/v1/messages/count_tokens", {"messages": chat["messages"], **more})[2][
            "input_tokens"
        ]

    def generate(**more: Any) -> int:
        return thinker.ask("/api/chat", {**ollama, **more})[2]["prompt_eval_count"]

    assert openai(reasoning_effort="high") == openai() + 4
    assert responses(reasoning={"effort": "low"}) == responses() + 3
    assert anthropic(output_config={"effort": "max"}) == anthropic() + 3
    assert generate(think="medium") == generate() + 6
