"""The HTTP server: OpenAI's, Anthropic's, Ollama's and llama-server's APIs over one set of models.

The path of a chat request, ten files (`tests/server/test_path.py`):

| step | file |
|---|---|
| uvicorn: socket, log, shutdown | `http/uvicorn_server.py` |
| connections, and the size of a request's head | `http/connections.py` |
| origin, API key, size and time limits, access log | `http/middleware.py` |
| JSON body -> pydantic model, unknown fields rejected | `http/bodies.py` |
| threads for parsing, chat templates and tokenizing | `http/background.py` |
| API request -> `GenerationRequest` | `openai/chat.py`; `anthropic/messages.py`, `ollama/chat.py` ... |
| run on the model's `AsyncLLM` | `core/serving.py`; `engine/model_manager.py` and `engine/async_llm.py` |
| chat template, tools, structured output -> `Prompt` | `core/prompt.py`; tools: `conversation.py`, `tool_formats.py` |
| tokens -> `Delta`: text, reasoning, tool calls | `core/output_parser.py` |
| counters and times of requests and steps | `monitoring/metrics.py` |
| server-sent events or JSON lines; client disconnects | `http/bodies.py` again |

An exception becomes an HTTP status and the API's error body in `http/errors.py`.

To add an API, copy the folder `anthropic/`: `messages.py` (request models, endpoints, translation to
`GenerationRequest` and from `Delta`) and `error_body.py`. Add its router to `ROUTERS` of `app.py`, and its error format
to `APIS` of `http/error_formats.py`.
"""
