"""Generated requests to all APIs that look like clients' own: most parts are right, some odd, some of the wrong kind.

Those of tests/server/test_openapi.py follow the document; these go on from stored responses, call tools,
send images, and combine what clients combine.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from typing import Any

from tests.hostile.images import generated
from tests.hostile.odd_values import GRAMMARS, NAMES, ODD, PATTERNS, PIXEL, ROLES, SCHEMAS, TEXTS

Body = dict[str, Any]


class Requests:
    """Makes requests; `ids` are those of stored responses and conversations that the server has told."""

    def __init__(self, chance: random.Random, model: str) -> None:
        self.chance, self.model = chance, model
        self.ids: list[str] = ["resp_x", "conv_x"]
        self._kinds: tuple[Callable[[], tuple[str, str, Any]], ...] = (
            self.chat,
            self.chat,
            self.completions,
            self.responses,
            self.responses,
            self.messages,
            self.ollama_chat,
            self.ollama_generate,
            self.llama_cpp,
            self.infill,
            self.conversations,
            self.stored,
            self.small,
            self.embeddings,
            self.created,
        )

    def one(self) -> tuple[str, str, Any]:
        """(method, path, body) of the next request; the body of a GET is None."""
        method, path, body = self.chance.choice(self._kinds)()
        if isinstance(body, dict) and body and self.chance.random() < 0.15:
            body = self.damaged(body)
        return method, path, body

    def damaged(self, value: Any, depth: int = 0) -> Any:
        """A value with one part replaced, added or left out."""
        chance = self.chance
        if isinstance(value, dict) and value and (depth == 0 or chance.random() < 0.7):
            name, kind = chance.choice(list(value)), chance.random()
            if kind < 0.1:
                return {other: one for other, one in value.items() if other != name}
            if kind < 0.2:
                return {**value, chance.choice(("x", "stream", "n", "\x00", "type")): chance.choice(ODD)}
            return {**value, name: self.damaged(value[name], depth + 1)}
        if isinstance(value, list) and value and chance.random() < 0.7:
            at = chance.randrange(len(value))
            return [*value[:at], self.damaged(value[at], depth + 1), *value[at + 1 :]]
        return chance.choice(ODD)

    # ---- parts

    def maybe(self, often: float = 0.2, **parts: Callable[[], Any] | tuple[Any, ...]) -> Body:
        """Some of the parts: each a function, or values of which one is chosen."""
        chosen = (name for name in parts if self.chance.random() < often)
        made = ((name, parts[name]) for name in chosen)
        return {name: part() if callable(part) else self.chance.choice(part) for name, part in made}

    def text(self) -> str:
        return "".join(self.chance.choices(TEXTS, k=self.chance.choice((1, 1, 1, 2, 5))))

    def texts(self, most: int = 3) -> list[str]:
        return [self.text() for _ in range(self.chance.randint(0, most))]

    def ids_of_tokens(self) -> list[int]:
        return [
            self.chance.choice((0, 1, 5, 70, 90, 255, 10**6, 2**31 - 1))
            for _ in range(self.chance.randint(0, 6))
        ]

    def model_name(self) -> Any:
        return self.chance.choice(
            (self.model,) * 20
            + ("", "x", f"{self.model}:latest", "../x", "hf.co/a/b", "x" * 5000, "c1", "c2")
        )

    def sampling(self) -> Body:
        return self.maybe(
            0.1,
            temperature=(0, 0.0, 0.7, 1, 100, 1e-30),
            top_p=(0, 0.5, 1, 1e-30),
            top_k=(-1, 0, 1, 40, 2**31 - 1),
            min_p=(0, 0.1, 1),
            seed=(0, -1, 2**63, 2**64 - 1, -(2**63)),
            stop=lambda: self.chance.choice((self.text(), self.texts(5))),
            presence_penalty=(-100, 0, 2),
            frequency_penalty=(-100, 100),
            repeat_penalty=(1e-30, 1.1, 100),
        )

    def schema(self) -> Any:
        return self.chance.choice(SCHEMAS)

    def extended(self) -> Body:
        """Sampling of OpenAI's chat and completions."""
        return self.sampling() | self.maybe(
            0.06,
            logit_bias=lambda: {
                str(self.chance.choice((0, 5, 90, -1, "a", 10**9, 257))): self.chance.choice((-100, 0, 100))
            },
            min_tokens=(0, 3, 2**31 - 1),
            ignore_eos=(True, False),
            priority=(0, 1, 2**31 - 1),
            n=(1, 2, 3, 128),
            structured_outputs=lambda: self.maybe(
                0.4, json=self.schema, regex=PATTERNS, grammar=GRAMMARS, choice=self.texts
            ),
            guided_json=self.schema,
            guided_regex=PATTERNS,
            grammar=GRAMMARS,
            json_schema=self.schema,
            timings_per_token=(True,),
            stream_options=({"include_usage": True}, {"continuous_usage_stats": True}, {}),
        )

    def image(self) -> str:
        kind = self.chance.random()
        if kind < 0.5:
            return PIXEL
        return base64.b64encode(generated(self.chance.randrange(200))).decode() if kind < 0.8 else self.text()

    def image_url(self) -> str:
        start = self.chance.choice(
            ("data:image/png;base64,",) * 6
            + ("data:;base64,", "data:", "http://127.0.0.1:1/", "file:///", "")
        )
        return start + self.image()

    def content(self) -> Any:
        if self.chance.random() < 0.7:
            return self.text()
        parts: list[Body] = [{"type": "text", "text": self.text()} for _ in range(self.chance.randint(0, 3))]
        if self.chance.random() < 0.5:
            parts.append(
                {
                    "type": "image_url",
                    "image_url": self.chance.choice((self.image_url(), {"url": self.image_url()})),
                }
            )
        return parts

    def arguments(self) -> str:
        return self.chance.choice(
            ("{}", '{"a": 1}', '{"a": NaN}', "[]", "", "{", '{"a": "\\ud800"}', "1e999", '"x"', "{}" * 3)
        )

    def tool_call(self) -> Body:
        called = {"name": self.chance.choice(NAMES), "arguments": self.arguments()}
        return {"type": "function", "function": called} | self.maybe(0.7, id=("c1", "c2", "", "x" * 100))

    def message(self) -> Body:
        message: Body = {"role": self.chance.choice(ROLES), "content": self.content()}
        if message["role"] == "assistant":
            message |= self.maybe(
                0.3,
                tool_calls=lambda: [self.tool_call() for _ in range(self.chance.randint(0, 3))],
                content=(None, ""),
                reasoning_content=self.text,
            )
        return message | self.maybe(
            0.7 if message["role"] == "tool" else 0.03, tool_call_id=("c1", "c2", ""), name=NAMES
        )

    def conversation(self) -> list[Body]:
        return [self.message() for _ in range(self.chance.choice((1, 1, 1, 2, 3, 6, 40)))]

    def tool(self) -> Body:
        return {
            "type": "function",
            "function": {"name": self.chance.choice(NAMES)}
            | self.maybe(0.5, description=self.text, parameters=self.schema, strict=(True, False)),
        }

    def tools(self) -> list[Body]:
        return [self.tool() for _ in range(self.chance.choice((0, 1, 1, 2, 5)))]

    # ---- requests

    def chat(self) -> tuple[str, str, Any]:
        named: Body = {"type": "function", "function": {"name": self.chance.choice(NAMES)}}
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
        path = self.chance.choice(("/v1/chat/completions",) * 9 + ("/tokenize", "/apply-template"))
        body: Body = {"messages": self.conversation()}
        if path != "/v1/chat/completions":
            return "POST", path, body
        body |= (
            self.extended()
            | {"max_tokens": self.chance.choice((1, 3, 8))}
            | self.maybe(
                0.15,
                model=self.model_name,
                stream=(True,),
                tools=self.tools,
                tool_choice=("none", "auto", "required", named, allowed),
                logprobs=(True, False),
                top_logprobs=(0, 5, 20),
                response_format=lambda: (
                    {"type": self.chance.choice(("text", "json_object", "json_schema"))}
                    | self.maybe(
                        0.5, json_schema=lambda: {"name": "x", "schema": self.schema()}, schema=self.schema
                    )
                ),
                parallel_tool_calls=(True, False),
                reasoning_effort=("none", "low", "xhigh"),
                verbosity=("low", "high"),
                continue_final_message=(True, False),
                add_generation_prompt=(True, False),
                chat_template_kwargs=(
                    {"enable_thinking": False},
                    {"messages": []},
                    {"range": 1},
                    {"bos_token": [[]]},
                    {"a b": 1},
                ),
            )
        )
        return "POST", path, body

    def completions(self) -> tuple[str, str, Any]:
        prompt: Any = self.chance.choice(
            (self.text(), self.texts(), self.ids_of_tokens(), [self.ids_of_tokens() for _ in range(2)])
        )
        body = (
            {"prompt": prompt, "max_tokens": self.chance.choice((0, 1, 4))}
            | self.extended()
            | self.maybe(
                0.15,
                stream=(True,),
                echo=(True,),
                logprobs=(0, 1, 20),
                suffix=self.text,
                best_of=(1, 2, 5),
                n_predict=(-1, 0, 3),
                model=self.model_name,
            )
        )
        return "POST", "/v1/completions", body

    def item(self) -> Body:
        kind = self.chance.random()
        parts = [{"type": self.chance.choice(("input_text", "output_text", "text")), "text": self.text()}]
        if kind < 0.15:
            return (
                {"type": "input_image", "image_url": self.image_url()}
                if kind < 0.02
                else {
                    "type": "message",
                    "role": "user",
                    "content": [*parts, {"type": "input_image", "image_url": self.image_url()}],
                }
            )
        if kind < 0.3:
            return {
                "type": "function_call",
                "name": self.chance.choice(NAMES),
                "arguments": self.arguments(),
            } | self.maybe(0.7, call_id=("c1", "c2"))
        if kind < 0.4:
            return {
                "type": "function_call_output",
                "call_id": self.chance.choice(("c1", "c2", "")),
                "output": self.chance.choice((self.text(), parts)),
            }
        if kind < 0.5:
            return {"type": "reasoning"} | self.maybe(0.6, content=lambda: parts, summary=lambda: parts)
        return {"role": self.chance.choice(ROLES), "content": self.chance.choice((self.text(), parts))}

    def responses(self) -> tuple[str, str, Any]:
        tool = {"type": "function", "name": self.chance.choice(NAMES), "parameters": self.schema()}
        given: Any = (
            self.text()
            if self.chance.random() < 0.4
            else [self.item() for _ in range(self.chance.randint(0, 4))]
        )
        body: Body = {"input": given, "max_output_tokens": self.chance.choice((1, 3, 8))} | self.maybe(
            0.15,
            stream=(True,),
            previous_response_id=self.id,
            conversation=lambda: self.chance.choice((self.id(), {"id": self.id()})),
            store=(True, False),
            truncation=("auto", "disabled"),
            instructions=self.text,
            temperature=(0, 1),
            top_p=(0, 1),
            tools=lambda: [tool] * self.chance.randint(0, 2),
            tool_choice=("none", "required", {"type": "function", "name": "f"}),
            text=lambda: {
                "format": {
                    "type": self.chance.choice(("text", "json_object", "json_schema")),
                    "schema": self.schema(),
                }
            },
            reasoning=({"effort": "none"}, {}),
            metadata=({"a": "b"}, {"a": [[]]}),
            model=self.model_name,
        )
        others = ("/v1/responses/input_tokens", "/v1/responses/compact")
        return "POST", self.chance.choice(("/v1/responses",) * 5 + others), body

    def id(self) -> str:
        return self.chance.choice(self.ids[-50:])

    def conversations(self) -> tuple[str, str, Any]:
        items = [self.item() for _ in range(self.chance.choice((0, 1, 3, 21)))]
        if self.chance.random() < 0.5:
            return "POST", "/v1/conversations", {"items": items} | self.maybe(0.3, metadata=({"a": 1}, {}))
        return "POST", f"/v1/conversations/{self.id()}/items", {"items": items}

    def stored(self) -> tuple[str, str, Any]:
        path = f"/v1/{self.chance.choice(('responses', 'conversations'))}/{self.id()}"
        items = "input_items" if "responses" in path else "items"
        after = self.chance.choice(
            ("", "?limit=2", "?order=asc&limit=1", "?limit=0", "?limit=x", "?after=item_x", "?order=up")
        )
        kind = self.chance.random()
        return (
            ("DELETE", path, None)
            if kind < 0.1
            else ("GET", path if kind < 0.4 else f"{path}/{items}{after}", None)
        )

    def block(self, depth: int = 0) -> Body:
        kinds: tuple[Body, ...] = (
            *({"type": "text", "text": self.text()},) * 3,
            {"type": "thinking", "thinking": self.text(), "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "c1", "name": self.chance.choice(NAMES), "input": {"a": 1}},
            {
                "type": "tool_result",
                "tool_use_id": "c1",
                "content": [self.block(depth + 1)] if depth < 3 else "x",
            },
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": self.image()}},
            {"type": "image", "source": {"type": "url", "url": self.image_url()}},
        )
        return self.chance.choice(kinds)

    def messages(self) -> tuple[str, str, Any]:
        def content() -> Any:
            return (
                self.text()
                if self.chance.random() < 0.4
                else [self.block() for _ in range(self.chance.randint(0, 3))]
            )

        roles = ("user", "user", "assistant", "system")
        said = [
            {"role": self.chance.choice(roles), "content": content()}
            for _ in range(self.chance.choice((1, 1, 2, 5)))
        ]
        body: Body = {"messages": said} | self.maybe(
            0.15,
            system=content,
            tools=lambda: [{"name": self.chance.choice(NAMES), "input_schema": self.schema()}],
            tool_choice=({"type": "any"}, {"type": "tool", "name": "f"}, {"type": "none"}),
            thinking=({"type": "enabled"}, {"type": "disabled"}),
            output_config=lambda: {"format": {"type": "json_schema", "schema": self.schema()}},
            model=self.model_name,
        )
        if self.chance.random() < 0.15:
            return "POST", "/v1/messages/count_tokens", body
        return (
            "POST",
            "/v1/messages",
            body
            | {"max_tokens": self.chance.choice((1, 5))}
            | self.maybe(
                0.2, stream=(True,), stop_sequences=self.texts, temperature=(0, 1), top_k=(0, 1, 2**31 - 1)
            ),
        )

    def ollama(self) -> Body:
        options = {"num_predict": self.chance.choice((1, 4))} | self.sampling()
        return {"model": self.model_name(), "options": options} | self.maybe(
            0.15,
            stream=(False, True),
            format=lambda: self.chance.choice(("json", "", self.schema())),
            logprobs=(True,),
            top_logprobs=(0, 20),
            think=(True, False, "low"),
            keep_alive=(0, -1, "5m", "1.5h", "x", 1e300, "999999999h", 5),
        )

    def ollama_chat(self) -> tuple[str, str, Any]:
        def message() -> Body:
            call = {"function": {"name": self.chance.choice(NAMES), "arguments": {"a": 1}}}
            return {
                "role": self.chance.choice(("user", "user", "assistant", "system", "tool")),
                "content": self.text(),
            } | self.maybe(
                0.15,
                images=lambda: [self.image()],
                tool_calls=lambda: [call],
                thinking=self.text,
                tool_name=NAMES,
            )

        said = [message() for _ in range(self.chance.choice((0, 1, 1, 1, 2, 6)))]
        return "POST", "/api/chat", self.ollama() | {"messages": said} | self.maybe(0.2, tools=self.tools)

    def ollama_generate(self) -> tuple[str, str, Any]:
        return (
            "POST",
            "/api/generate",
            self.ollama()
            | self.maybe(0.9, prompt=self.text)
            | self.maybe(
                0.15,
                images=lambda: [self.image()],
                suffix=self.text,
                system=self.text,
                raw=(True,),
                context=self.ids_of_tokens,
            ),
        )

    def of_llama_cpp(self) -> Body:
        return (
            {"n_predict": self.chance.choice((0, 1, 4))}
            | self.sampling()
            | self.maybe(
                0.1,
                stream=(True,),
                n_probs=(0, 3, 20),
                post_sampling_probs=(True,),
                return_tokens=(True,),
                grammar=GRAMMARS,
                json_schema=self.schema,
                response_fields=(["content"], ["timings/prompt_n", "/", ""], ["a/b/c"] * 9, []),
                logit_bias=([[5, False], ["a", 1.5]], {"5": -1e6}, [["", 1]], [[2**31 - 1, 1]], {"é": 1}),
                lora=([], [{"id": 0}]),
                id_slot=(-1, 0, 99),
                cache_prompt=(True, False),
                samplers=(["top_k"], 5),
                n_keep=(-1, 10**9),
                t_max_predict_ms=(0, 1),
            )
        )

    def llama_cpp(self) -> tuple[str, str, Any]:
        prompt = self.chance.choice(
            (self.text(), self.texts(), [5, "a", 7], [[5, "a"], "b"], {"prompt_string": self.text()})
        )
        return (
            "POST",
            self.chance.choice(("/completion", "/completions")),
            self.of_llama_cpp() | {"prompt": prompt},
        )

    def infill(self) -> tuple[str, str, Any]:
        extra = [
            {"filename": self.chance.choice(("a.py", "../x", "\n", "")), "text": self.text()}
            for _ in range(2)
        ]
        return (
            "POST",
            "/infill",
            self.of_llama_cpp()
            | {"input_prefix": self.text(), "input_suffix": self.text()}
            | self.maybe(0.3, prompt=self.text, input_extra=lambda: extra),
        )

    def embeddings(self) -> tuple[str, str, Any]:
        mixed = [[5, self.text()], self.text(), self.ids_of_tokens()]
        given: Any = self.chance.choice((self.text(), self.texts(), self.ids_of_tokens(), mixed[0], mixed))
        if self.chance.random() < 0.5:
            return (
                "POST",
                "/v1/embeddings",
                {"input": given} | self.maybe(encoding_format=("float", "base64"), dimensions=(1, 10**9)),
            )
        return (
            "POST",
            "/api/embed",
            {"model": self.model, "input": given} | self.maybe(dimensions=(1, 2), keep_alive=(5, "1m")),
        )

    def created(self) -> tuple[str, str, Any]:
        """Models that a client makes of others, and deletes."""
        name, source = self.chance.choice(("c1", "c2")), self.model_name()
        kind = self.chance.random()
        if kind < 0.3:
            return "DELETE", "/api/delete", {"model": self.chance.choice((name, name, source))}
        if kind < 0.5:
            return "POST", "/api/copy", {"source": source, "destination": self.chance.choice((name, source))}
        lines = (
            "",
            "SYSTEM ",
            "PARAMETER num_ctx ",
            "PARAMETER stop ",
            "MESSAGE user ",
            "TEMPLATE ",
            "# ",
            "FROM ",
        )
        return (
            "POST",
            "/api/create",
            {"model": name, "from": source}
            | self.maybe(
                0.3,
                system=self.text,
                template=(
                    "{% for m in messages %}{{ m.content }}{% endfor %}",
                    "{% if messages %}",
                    "{{ .Prompt }}",
                ),
                parameters=lambda: self.maybe(
                    0.3,
                    num_ctx=(16, 64, 0, -1, "x", [], True),
                    stop=self.texts,
                    temperature=(0, "1"),
                    seed=(1, -1),
                ),
                messages=lambda: [{"role": self.chance.choice(("user", "tool")), "content": self.text()}],
                stream=(True, False),
                modelfile=lambda: "\n".join(self.chance.choice(lines) + self.text() for _ in range(5)),
            ),
        )

    def small(self) -> tuple[str, str, Any]:
        """What runs no model."""
        name = self.chance.choice((self.model, "x", "", "%00", "..%2f..%2fx", "%ff", "%F0%9F%98%80"))
        gets = (
            *(
                "/props",
                "/slots",
                "/v1/models",
                f"/v1/models/{name}",
                "/api/tags",
                "/api/ps",
                "/api/version",
                "/metrics",
                "/live",
            ),
            *(
                f"/props?model={name}",
                f"/slots?model={name}",
                f"/tokenizer_info?model={name}",
                "/page/../x",
                f"/page/{name}",
            ),
        )
        posts: tuple[tuple[str, Body], ...] = (
            (
                "/tokenize",
                {"content": self.text()}
                | self.maybe(with_pieces=(True,), add_special=(True,), parse_special=(False,)),
            ),
            ("/detokenize", {"tokens": self.ids_of_tokens()}),
            ("/api/show", {"model": self.model_name()}),
            ("/v1/rerank", {"query": self.text(), "documents": self.texts()}),
        )
        if self.chance.random() < 0.5:
            return "GET", self.chance.choice(gets), None
        return "POST", *self.chance.choice(posts)
