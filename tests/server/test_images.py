"""Images in requests of every API, as its own client sends them; what the server refuses."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.engine.test_images import as_png, picture
from tests.models.test_vision import GOLDENS
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
