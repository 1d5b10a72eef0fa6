"""Tries the clients of other projects on a running server: what their documentation shows for chat, streaming, tools,
structured output, embeddings and errors.

    python tests/server/try_clients.py [http://127.0.0.1:8000] [MODEL] [CLIENT...]

Clients that are not installed are left out. It prints one line for each example, and fails if one does.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

EXAMPLES: dict[str, list[Callable[[], Any]]] = {}
URL, MODEL = "http://127.0.0.1:8000", "smollm2"
ASK = "What is the weather in Paris?"
HELLO: Any = [{"role": "user", "content": "Say hello."}]
FACT: Any = [{"role": "user", "content": "Extract the city: Paris is the capital of France."}]


def example(client: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        EXAMPLES.setdefault(client, []).append(function)
        return function

    return add


class City(BaseModel):
    """A city."""

    name: str
    country: str


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The name of the city.
    """
    return f"It is sunny in {city}."


WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOL: Any = {"type": "function", "function": WEATHER}


# ---- openai


def openai_client() -> Any:
    import openai

    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


@example("openai")
def openai_chat_and_streams() -> None:
    client = openai_client()
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=10)
    assert answer.choices[0].message.content and answer.usage.total_tokens
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=10, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) and chunks[-1].usage
    with client.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=10) as events:
        assert [event.type for event in events].count("content.done") == 1
        assert events.get_final_completion().choices[0].message.content


@example("openai")
def openai_tools() -> None:
    client = openai_client()
    messages = [{"role": "user", "content": ASK}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice="required", max_tokens=200
    )
    [call, *_] = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments)["city"]
    messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}]
    final = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], max_tokens=20)
    assert final.choices[0].message


@example("openai")
def openai_parsed_tools_and_output() -> None:
    import openai

    client = openai_client()
    parsed = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=City, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, City)
    called = client.chat.completions.parse(
        model=MODEL,
        messages=HELLO,
        tools=[openai.pydantic_function_tool(City)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, City)


@example("openai")
def openai_responses() -> None:
    client = openai_client()
    first = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=20)
    assert first.output_text
    second = client.responses.create(
        model=MODEL, input="Again.", previous_response_id=first.id, max_output_tokens=20
    )
    assert second.output_text
    parsed = client.responses.parse(model=MODEL, input="A city", text_format=City, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, City)
    tool = {"type": "function", **WEATHER, "strict": True}
    tool["parameters"] = {**WEATHER["parameters"], "additionalProperties": False}
    called = client.responses.create(
        model=MODEL, input=ASK, tools=[tool], tool_choice="required", max_output_tokens=200
    )
    [call, *_] = [item for item in called.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    history = [{"role": "user", "content": ASK}, *called.output, result]
    assert client.responses.create(model=MODEL, input=history, tools=[tool], max_output_tokens=20).id
    with client.responses.stream(model=MODEL, input="Say hello.", max_output_tokens=10) as events:
        kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")


@example("openai")
def openai_completions_embeddings_models() -> None:
    client = openai_client()
    assert client.completions.create(model=MODEL, prompt="Once", max_tokens=5).choices[0].text
    found = client.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
    assert len(found.data) == 2 and found.data[0].embedding
    assert client.models.list().data and client.models.retrieve(MODEL).id


@example("openai")
def openai_errors() -> None:
    import openai

    client = openai_client()
    for error, call in (
        (openai.NotFoundError, lambda: client.chat.completions.create(model="none-such", messages=HELLO)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=[])),
        (openai.BadRequestError, lambda: client.responses.create(model=MODEL, input=[{"type": "nothing"}])),
    ):
        try:
            call()
        except error as found:
            assert found.body and found.body["message"]
        else:
            raise AssertionError(f"no {error.__name__}")


@example("openai")
def openai_async() -> None:
    import openai

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
        answers = await asyncio.gather(
            *(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5) for _ in range(4))
        )
        assert all(answer.choices[0].message.content for answer in answers)

    asyncio.run(run())


# ---- anthropic


def claude() -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)


ANTHROPIC_TOOL: Any = {
    "name": WEATHER["name"],
    "description": WEATHER["description"],
    "input_schema": WEATHER["parameters"],
}


@example("anthropic")
def anthropic_messages() -> None:
    client = claude()
    answer = client.messages.create(model=MODEL, max_tokens=10, messages=HELLO, system="Be brief.")
    assert answer.content[0].text and answer.usage.output_tokens
    with client.messages.stream(model=MODEL, max_tokens=10, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == stream.get_final_text()
    assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    assert [model.id for model in client.models.list()]


@example("anthropic")
def anthropic_tools() -> None:
    client = claude()
    messages: Any = [{"role": "user", "content": ASK}]
    options: Any = {"model": MODEL, "max_tokens": 200, "tools": [ANTHROPIC_TOOL]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = client.messages.create(messages=messages, tool_choice=choice, **options)
    [use, *_] = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and use.input["city"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny"}
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(messages=messages, **options).content is not None
    with client.messages.stream(
        messages=messages[:1], tool_choice={"type": "tool", "name": "get_weather"}, **options
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_message().content[0].input["city"]


@example("anthropic")
def anthropic_tool_runner() -> None:
    import anthropic

    client = claude()

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather in a city.

        Args:
            city: The name of the city.
        """
        return f"Sunny in {city}"

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=50,
        tools=[get_weather],
        messages=[{"role": "user", "content": ASK}],
        max_iterations=2,
    )
    assert [message.role for message in runner]


@example("anthropic")
def anthropic_structured_output() -> None:
    client = claude()
    answer = client.messages.parse(model=MODEL, max_tokens=200, messages=HELLO, output_format=City)
    assert isinstance(answer.parsed_output, City)


@example("anthropic")
def anthropic_errors() -> None:
    import anthropic

    try:
        claude().messages.create(model="none-such", max_tokens=5, messages=HELLO)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"


# ---- ollama


@example("ollama")
def ollama_chat() -> None:
    import ollama

    client = ollama.Client(URL)
    answer = client.chat(MODEL, HELLO, options={"num_predict": 10})
    assert answer.message.content and answer.eval_count
    parts = list(client.chat(MODEL, HELLO, stream=True, options={"num_predict": 10}))
    assert parts[-1].done and "".join(part.message.content or "" for part in parts)
    assert client.generate(MODEL, "Why?", options={"num_predict": 5}).response
    shaped = client.chat(MODEL, HELLO, format=City.model_json_schema(), options={"num_predict": 200})
    assert City.model_validate_json(shaped.message.content or "")
    called = client.chat(
        MODEL, [{"role": "user", "content": ASK}], tools=[get_weather], options={"num_predict": 60}
    )
    assert called.message
    assert len(client.embed(MODEL, ["a", "b"]).embeddings) == 2
    assert client.list().models and client.show(MODEL).modelinfo and client.ps()
    try:
        client.chat("none-such", HELLO)
    except ollama.ResponseError as error:
        assert error.status_code == 404


# ---- litellm


@example("litellm")
def litellm_all() -> None:
    import litellm

    litellm.suppress_debug_info = True
    openai = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
    ollama = {"model": f"ollama_chat/{MODEL}", "api_base": URL}
    anthropic = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}
    vllm = {**openai, "model": f"hosted_vllm/{MODEL}"}
    for provider in (openai, ollama, anthropic, vllm):
        answer = litellm.completion(messages=HELLO, max_tokens=10, **provider)
        assert answer.choices[0].message.content, provider
        parts = list(litellm.completion(messages=HELLO, max_tokens=10, stream=True, **provider))
        assert "".join(part.choices[0].delta.content or "" for part in parts), provider
    for provider in (openai, anthropic, vllm):
        called = litellm.completion(
            messages=[{"role": "user", "content": ASK}],
            tools=[TOOL],
            tool_choice="required",
            max_tokens=200,
            **provider,
        )
        assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["city"], provider
    for provider in (openai, ollama, vllm):
        shaped = litellm.completion(messages=HELLO, response_format=City, max_tokens=200, **provider)
        assert City.model_validate_json(shaped.choices[0].message.content), provider
    assert litellm.embedding(input=["a"], **openai).data[0]["embedding"]
    assert litellm.embedding(**{**ollama, "model": f"ollama/{MODEL}"}, input=["a"]).data[0]["embedding"]
    assert litellm.text_completion(
        prompt="Once", max_tokens=5, **{**openai, "model": f"text-completion-openai/{MODEL}"}
    )
    assert litellm.responses(input="Say hello.", max_output_tokens=10, **openai).output
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 100_000}], **openai)
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("no ContextWindowExceededError")


# ---- LangChain


def langchain_models() -> list[Any]:
    from langchain_anthropic import ChatAnthropic
    from langchain_ollama import ChatOllama
    from langchain_openai import ChatOpenAI

    return [
        ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=200),
        ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=200, use_responses_api=True),
        ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_tokens=200),
        ChatOllama(model=MODEL, base_url=URL, num_predict=200),
    ]


@example("langchain")
def langchain_chat() -> None:
    for model in langchain_models():
        assert model.invoke("Say hello.").text, model
        assert "".join(chunk.text for chunk in model.stream("Say hello.")), model
        assert len(model.batch(["Hi", "Hello"])) == 2


@example("langchain")
def langchain_tools() -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    weather = tool(get_weather)
    for model in langchain_models()[:3]:
        bound = model.bind_tools([weather], tool_choice="any")
        question = HumanMessage(ASK)
        answer = bound.invoke([question])
        [call, *_] = answer.tool_calls
        assert call["args"]["city"], model
        results = [
            ToolMessage(weather.invoke(one["args"]), tool_call_id=one["id"]) for one in answer.tool_calls
        ]
        assert model.bind_tools([weather]).invoke([question, answer, *results])
        total: Any = None
        for chunk in bound.stream([question]):
            total = chunk if total is None else total + chunk
        assert total.tool_calls[0]["args"]["city"], model


@example("langchain")
def langchain_structured_output() -> None:
    for model in langchain_models():
        assert isinstance(model.with_structured_output(City).invoke("A city, please."), City), model
    for method in ("json_schema", "function_calling"):
        found = langchain_models()[0].with_structured_output(City, method=method).invoke("A city, please.")
        assert isinstance(found, City), method


@example("langchain")
def langchain_embeddings_and_agent() -> None:
    from langchain.agents import create_agent
    from langchain_ollama import OllamaEmbeddings
    from langchain_openai import OpenAIEmbeddings

    options: Any = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none"}
    # Sends token ids of its own vocabulary.
    assert len(OpenAIEmbeddings(**options).embed_documents(["a", "b"])) == 2
    assert OpenAIEmbeddings(**options, check_embedding_ctx_length=False).embed_query("a")
    assert OllamaEmbeddings(model=MODEL, base_url=URL).embed_query("a")
    agent = create_agent(langchain_models()[0], tools=[get_weather], system_prompt="Be brief.")
    assert agent.invoke({"messages": [{"role": "user", "content": "Say hello."}]}, {"recursion_limit": 8})[
        "messages"
    ]


# ---- LlamaIndex


@example("llama_index")
def llama_index_all() -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.embeddings.ollama import OllamaEmbedding
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.ollama import Ollama
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=MODEL,
        api_base=f"{URL}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=200,
        context_window=2048,
    )
    other = Ollama(model=MODEL, base_url=URL, context_window=2048, additional_kwargs={"num_predict": 200})
    for one in (llm, other):
        assert one.chat([ChatMessage("Say hello.")]).message.content
        assert one.complete("Say hello.").text
        assert "".join(part.delta or "" for part in one.stream_chat([ChatMessage("Say hello.")]))
        assert isinstance(one.as_structured_llm(City).complete("A city, please.").raw, City)
    weather = FunctionTool.from_defaults(get_weather)
    called = llm.chat_with_tools([weather], user_msg=ASK, tool_required=True)
    assert llm.get_tool_calls_from_response(called)[0].tool_kwargs["city"]
    assert OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="none").get_text_embedding("a")
    assert OllamaEmbedding(MODEL, base_url=URL).get_text_embedding("a")


# ---- pydantic-ai


@example("pydantic_ai")
def pydantic_ai_all() -> None:
    import anthropic
    from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.ollama import OllamaProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    claude = anthropic.AsyncAnthropic(base_url=URL, api_key="none")
    models: list[Any] = [
        OpenAIChatModel(MODEL, provider=openai),
        OpenAIChatModel(MODEL, provider=OllamaProvider(base_url=f"{URL}/v1")),
        OpenAIResponsesModel(MODEL, provider=openai),
        AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=claude)),
    ]
    settings: Any = {"max_tokens": 200}
    for model in models:
        assert Agent(model, model_settings=settings).run_sync("Say hello.").output, model
        for kind in (ToolOutput, NativeOutput):
            agent = Agent(model, output_type=kind(City), model_settings=settings, retries=2)
            assert isinstance(agent.run_sync("A city, please.").output, City), (model, kind)
    assert PromptedOutput
    agent = Agent(models[0], model_settings=settings, system_prompt="Be brief.")
    agent.tool_plain(get_weather)

    async def streamed() -> str:
        async with agent.run_stream("Say hello.") as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    asyncio.run(streamed())


# ---- instructor


@example("instructor")
def instructor_all() -> None:
    import anthropic
    import instructor
    import openai
    from instructor import Mode
    from instructor.core import InstructorRetryException

    raw = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.JSON, Mode.MD_JSON):
        client = instructor.from_openai(raw, mode=mode)
        try:
            found = client.create(
                model=MODEL, messages=FACT, response_model=City, max_tokens=300, max_retries=3
            )
            assert isinstance(found, City), mode
        except InstructorRetryException:  # only the model's skill makes these fit the schema
            assert mode in (Mode.JSON, Mode.MD_JSON), mode
    client = instructor.from_openai(raw, mode=Mode.RESPONSES_TOOLS)
    assert isinstance(
        client.responses.create(model=MODEL, input=FACT, response_model=City, max_output_tokens=300), City
    )
    client = instructor.from_openai(raw)
    parts = list(client.create_partial(model=MODEL, messages=FACT, response_model=City, max_tokens=300))
    assert parts and parts[-1].name
    assert isinstance(
        next(iter(client.create_iterable(model=MODEL, messages=FACT, response_model=City, max_tokens=300))),
        City,
    )
    claude = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key="none"))
    assert isinstance(claude.create(model=MODEL, messages=FACT, response_model=City, max_tokens=300), City)


# ---- OpenAI Agents


@example("agents")
def agents_all() -> None:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    settings = agents.ModelSettings(max_tokens=200)

    async def run() -> None:
        for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
            model = kind(model=MODEL, openai_client=client)
            agent = agents.Agent("Helper", "Be brief.", model=model, model_settings=settings)
            assert (await agents.Runner.run(agent, "Say hello.")).final_output, kind
            typed = agents.Agent("City", "Answer.", model=model, output_type=City, model_settings=settings)
            assert isinstance((await agents.Runner.run(typed, "A city.")).final_output, City), kind
            tool = agents.function_tool(get_weather)
            forced = agents.ModelSettings(max_tokens=200, tool_choice="required")
            caller = agents.Agent(
                "Caller",
                "Call.",
                model=model,
                tools=[tool],
                model_settings=forced,
                tool_use_behavior="stop_on_first_tool",
            )
            assert "sunny" in (await agents.Runner.run(caller, ASK)).final_output, kind
            streamed = agents.Runner.run_streamed(agent, "Say hello.")
            events = [event async for event in streamed.stream_events()]
            assert streamed.final_output and events, kind
            session = agents.SQLiteSession("one")
            await agents.Runner.run(agent, "Say hello.", session=session)
            assert (await agents.Runner.run(agent, "Again.", session=session)).final_output, kind
            other = agents.Agent("Other", "Be brief.", model=model, model_settings=settings, handoffs=[agent])
            assert (await agents.Runner.run(other, "Say hello.", max_turns=4)).new_items, kind

    asyncio.run(run())


def main() -> int:
    global URL, MODEL
    wanted = sys.argv[1:]
    if wanted and wanted[0].startswith("http"):
        URL = wanted.pop(0).rstrip("/")
    if wanted:
        MODEL = wanted.pop(0)
    failed = 0
    for client, examples in EXAMPLES.items():
        if wanted and client not in wanted:
            continue
        module = {"langchain": "langchain_openai"}.get(client, client)
        if importlib.util.find_spec(module) is None:
            print(f"{client:12} not installed")
            continue
        for one in examples:
            try:
                one()
                print(f"{client:12} {one.__name__}: works", flush=True)
            except Exception:
                failed += 1
                print(f"{client:12} {one.__name__}: FAILS\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
