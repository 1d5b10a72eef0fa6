"""Requests like those of programs that are not installed here are accepted. Open WebUI's and Continue's follow their
sources, the others the documentation of their protocols."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.servers import Running

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
HI: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
PARTS: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
F: Any = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
CALLED: Any = [
    *HI,
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]  # fmt: skip
CACHED = {"type": "ephemeral"}
SHORT = {"max_tokens": 4}

REQUESTS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "Open WebUI: a title": (
        CHAT,
        {"messages": HI[1:], "stream": False, "max_completion_tokens": 4, "metadata": {"task": "title"}},
        {"authorization": "Bearer none"},
    ),
    "Open WebUI: chat": (
        CHAT, {"messages": HI, "stream": True, "stream_options": {"include_usage": True}, **SHORT}, {},
    ),
    "Open WebUI: Ollama": (
        "/api/chat", {"messages": HI, "stream": True, "options": {"num_predict": 4, "num_ctx": 8192}}, {},
    ),
    "Continue: chat": (
        CHAT,
        {"messages": HI, "temperature": 0.5, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0,
         "stream": True, "stop": ["\n\n\n"], **SHORT},
        {"authorization": "Bearer none", "api_key": "none"},
    ),
    "Continue: completion": (
        COMPLETIONS,
        {"prompt": "<fim_prefix>a<fim_suffix>b<fim_middle>", "stream": True, "stop": ["<fim_prefix>", "\n"], **SHORT},
        {},
    ),
    "LangChain: tools": (
        CHAT,
        {"messages": CALLED, "n": 1, "stream": False, "tools": [{"type": "function", "function": F}],
         "tool_choice": "auto", "parallel_tool_calls": True, "logprobs": False, "seed": None, **SHORT},
        {"x_stainless_lang": "python"},
    ),
    "LlamaIndex": (CHAT, {"messages": PARTS, "temperature": 0.1, "logit_bias": {}, "user": "me", **SHORT}, {}),
    "Vercel AI SDK": (
        CHAT, {"messages": PARTS, "response_format": {"type": "text"}, "stream": True, "tools": [], **SHORT}, {},
    ),
    "OpenAI Agents SDK": (
        RESPONSES,
        {"input": [{"role": "user", "content": "Hi"}], "instructions": "Be brief.", "include": [], "stream": False,
         "tools": [{"type": "function", "strict": False, **F}], "store": True, "truncation": None,
         "max_output_tokens": 4, "reasoning": None, "parallel_tool_calls": False, "tool_choice": "auto"},
        {},
    ),
    "Codex": (
        RESPONSES,
        {"instructions": "Be brief.", "stream": True, "store": False, "prompt_cache_key": "k",
         "include": ["reasoning.encrypted_content"], "max_output_tokens": 4, "tool_choice": "auto",
         "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
         "tools": [{"type": "function", "strict": False, **F}], "parallel_tool_calls": False,
         "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "medium"}},
        {},
    ),
    "Claude Code": (
        f"{MESSAGES}?beta=true",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": CACHED}]}],
         "system": [{"type": "text", "text": "Be brief.", "cache_control": CACHED}], "stream": True,
         "tools": [{"name": "f", "description": "", "input_schema": F["parameters"]}], "temperature": 1,
         "metadata": {"user_id": "me"}, **SHORT},
        {"x_api_key": "none", "anthropic_version": "2023-06-01"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", REQUESTS)
def test_their_requests_are_accepted(smollm2: Running, program: str) -> None:
    path, body, headers = REQUESTS[program]
    status, _, answer = smollm2.ask(path, {"model": "smollm2", **body}, **headers)
    events = answer if isinstance(answer, str) else ""
    assert status == 200 and '"error":{' not in events, answer
