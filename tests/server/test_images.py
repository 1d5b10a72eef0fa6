"""Images in requests of every API, as its own client sends them; what the server refuses."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import ollama
import openai
import pytest

from tandem.engine.images import Image, images_in
from tandem.errors import RequestError
from tandem.model.image_file import read_image
from tandem.server.anthropic import messages
from tandem.server.core.prompt import GenerationRequest, build_prompt, with_verbosity
from tandem.server.core.tool_calls import Message, Tool
from tandem.server.openai import responses
from tests.engine.test_images import as_png, picture
from tests.models.test_vision import GOLDENS, load
from tests.server.servers import Running, serving

PNG = as_png(picture(1))
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("images")
    for name in ("gemma3.gguf", "mmproj-gemma3.gguf"):
        (folder / name).write_bytes((GOLDENS / name).read_bytes())
    arguments = (folder / "gemma3.gguf", "--device", "cpu", "--threads", "1")
    with serving(folder, *arguments, batch=8, context=128, timeout=60, shutdown=2) as running:
        yield running


def test_openai_chat_and_responses(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    text: Any = {"type": "text", "text": "What is this?"}
    picture: Any = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    counts = []
    for content in ([text], [picture, text], [picture, text, picture]):
        answer = client.chat.completions.create(
            model="gemma3", messages=[{"role": "user", "content": content}], max_tokens=3
        )
        assert answer.usage
        counts.append(answer.usage.prompt_tokens)
    assert counts[0] + 6 < counts[1] < counts[2], "an image has four tokens and two around them"
    items: Any = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ]
    response = client.responses.create(
        model="gemma3", input=[{"role": "user", "content": items}], max_output_tokens=3
    )
    assert response.usage and response.usage.input_tokens > counts[0] + 6


def test_a_tool_is_called_after_an_image(tmp_path: Path) -> None:
    for name in ("smolvlm.gguf", "mmproj-smolvlm.gguf"):
        (tmp_path / name).write_bytes((GOLDENS / name).read_bytes())
    properties = {"seen": {"enum": ["cat", "dog"]}}
    schema = {"type": "object", "properties": properties, "required": ["seen"], "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "say", "parameters": schema, "strict": True}}
    picture: Any = [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "text", "text": "A cat or a dog?"},
    ]
    arguments = (tmp_path / "smolvlm.gguf", "--device", "cpu", "--threads", "1")
    with serving(tmp_path, *arguments, batch=2, context=1024, timeout=60, shutdown=2) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model="smolvlm", messages=[{"role": "user", "content": picture}], tools=[tool], tool_choice="required",
            max_tokens=100,
        )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "say"
    assert json.loads(call.function.arguments)["seen"] in ("cat", "dog")


def test_anthropic_and_ollama(server: Running) -> None:
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    source: Any = {"type": "base64", "media_type": "image/png", "data": DATA}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    message = claude.messages.create(
        model="gemma3", max_tokens=3, messages=[{"role": "user", "content": content}]
    )
    asked_tokens = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert asked_tokens > 20
    client = ollama.Client(host=server.url)
    asked = {"role": "user", "content": "What is this?", "images": [PNG]}
    chat = client.chat("gemma3", messages=[asked], options={"num_predict": 3})
    generated = client.generate("gemma3", "What is this?", images=[DATA], options={"num_predict": 3})
    assert chat.prompt_eval_count == generated.prompt_eval_count == asked_tokens


def test_ollama_goes_on_from_a_context_with_an_image(server: Running) -> None:
    """The image is computed behind the earlier tokens. No context comes back: tokens cannot say an image."""
    body = {
        "model": "gemma3",
        "stream": False,
        "options": {"num_predict": 3, "temperature": 0},
        "logprobs": True,
    }
    _, _, first = server.ask("/api/generate", {**body, "prompt": "What is this?"})
    found = []
    for one in (PNG, as_png(picture(2))):
        more = {
            "prompt": "And this?",
            "context": first["context"],
            "images": [base64.b64encode(one).decode()],
        }
        status, _, answer = server.ask("/api/generate", {**body, **more})
        assert status == 200 and "context" not in answer
        assert answer["prompt_eval_count"] > len(first["context"]) + 6
        found.append(answer["logprobs"][0]["logprob"])
    assert found[0] != found[1], "the images matter"


@pytest.mark.fast
def test_images_stand_where_texts_do() -> None:
    """In a result of a tool, beside a wish for the system message; not in a message that is continued."""
    image = {"type": "image", "image": PNG}
    seen: Message = {"role": "tool", "content": [{"type": "text", "text": "A picture:"}, image]}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked: Message = {"role": "user", "content": "Look"}
    called: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    with load() as llm:
        assert llm.engine.encoder
        [_, pixels, _] = llm.engine.encoder.model.parts(read_image(PNG))
        assert isinstance(pixels, np.ndarray)
        for messages, images in (
            ([asked, called, seen], 1),
            ([asked, called, seen, {**seen, "content": "none"}, seen], 2),
            ([asked, {**called, "content": [image]}, seen], 2),
            (with_verbosity([{"role": "system", "content": [image]}, asked], "low"), 1),
        ):
            request = GenerationRequest("m", messages=messages, tools=[Tool("look")])
            ids = build_prompt(llm, request).ids
            assert [span.image.digest for span in images_in(ids)] == [Image(pixels, 4).digest] * images
            assert (
                "A picture:" in (text := llm.tokenizer.decode(ids, special=True)) or seen not in messages
            ), text
        continued = [asked, {"role": "assistant", "content": [image]}]
        with pytest.raises(RequestError, match="a message that is continued cannot have images"):
            build_prompt(llm, GenerationRequest("m", messages=continued, continue_final_message=True))


def asked_of(body: responses.ResponsesRequest) -> list[Message]:
    items = responses.ITEMS.validate_python(responses.new_items(body.input))
    return responses.generation_request(body, items).messages


@pytest.mark.fast
def test_images_of_tool_results_in_each_api() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    block = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
    claude = messages.CountRequest.model_validate({"messages": [{"role": "user", "content": [block]}]})
    output = [{"type": "input_image", "image_url": URL}]
    item = {"type": "function_call_output", "call_id": "1", "output": output}
    body = responses.ResponsesRequest.model_validate({"input": [item]})
    for found in (
        messages.generation_request(claude).messages,
        asked_of(body),
    ):
        assert [(one["role"], one["content"]) for one in found] == [
            ("tool", [{"type": "image", "image": PNG}])
        ]


@pytest.mark.fast
def test_reasoning_belongs_to_the_call_after_it() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    output = {"type": "function_call_output", "call_id": "1", "output": "5"}
    body = responses.ResponsesRequest.model_validate({"input": [reasoning, call, output, call]})
    found = asked_of(body)
    assert [one.get("reasoning_content") for one in found] == ["hm", None, None]
    said = {"role": "assistant", "content": "So:"}
    body = responses.ResponsesRequest.model_validate({"input": [said, reasoning, call]})
    [one] = asked_of(body)
    assert one["reasoning_content"] == "hm" and one["tool_calls"]


def test_the_server_says_that_it_sees(server: Running, tiny: Running) -> None:
    """As the clients of llama.cpp and Ollama ask."""
    for running, vision in ((server, True), (tiny, False)):
        assert running.ask("/props")[2]["modalities"] == {"vision": vision, "audio": False}
        assert [m["vision"] for m in running.ask("/live")[2]["models"].values()] == [vision]
        name = running.ask("/v1/models")[2]["data"][0]["id"]
        assert ("vision" in ollama.Client(host=running.url).show(name).capabilities) == vision


def test_what_is_refused(server: Running) -> None:
    for url, said in (
        ("https://example.com/a.png", "fetches no images"),
        ("http://127.0.0.1:1/a.png", "fetches no images"),
        ("http://169.254.169.254/latest", "fetches no images"),
        ("file:///etc/passwd", "fetches no images"),
        ("/etc/passwd", "fetches no images"),
        ("data:image/png;base64,???", "base64"),
        ("data:image/png;base64,", "no known format"),
        ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "no known format"),
        ("data:image/png;base64," + base64.b64encode(PNG[:200]).decode(), "cannot be read"),
    ):
        content = [{"type": "image_url", "image_url": {"url": url}}]
        status, _, body = server.ask(
            "/v1/chat/completions", {"model": "gemma3", "messages": [{"role": "user", "content": content}]}
        )
        assert status == 400 and said in body["error"]["message"], url
    small = "data:image/png;base64," + base64.b64encode(as_png(picture(1, (2, 2)))).decode()
    many = [{"type": "image_url", "image_url": {"url": small}}] * 1000
    status, _, body = server.ask(
        "/v1/chat/completions", {"model": "gemma3", "messages": [{"role": "user", "content": many}]}
    )
    assert status == 400 and "more than 64 images" in body["error"]["message"]


def test_a_model_without_an_encoder_says_so(tiny: Running) -> None:
    content = [{"type": "image_url", "image_url": {"url": URL}}]
    status, _, body = tiny.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert status == 400 and "mmproj" in body["error"]["message"]
