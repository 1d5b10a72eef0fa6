"""The HTTP server: OpenAI's, Anthropic's and Ollama's APIs over one set of models.

The path of a chat request:

| step | file |
|---|---|
| connections, and the size of a request's head | `http/connections.py` |
| origin, API key, size and time limits, access log | `http/middleware.py` (run by `http/uvicorn_server.py`) |
| JSON body -> pydantic model, unknown fields rejected | `http/request_body.py` |
| API request -> `GenerationRequest` | `openai/chat.py`, `anthropic/messages.py`, `ollama/chat.py` ... |
| chat template, tools, structured output -> `Prompt` | `core/prompt.py`, `core/tool_calls.py` |
| run on the model's `AsyncLLM` | `core/serving.py`; `engine/models.py` and `engine/async_llm.py` |
| tokens -> `Delta`: text, reasoning, tool calls | `core/output_parser.py` |
| server-sent events or JSON lines; client disconnects | `http/streaming.py` |
| exception -> HTTP status and the API's error body | `http/errors.py` |

To add an API, copy `anthropic/messages.py` (request models, endpoints, translation to `GenerationRequest` and from
`Delta`), add its router to `ROUTERS` of `app.py`, and its error formats to `APIS` of `http/apis.py`.
"""
