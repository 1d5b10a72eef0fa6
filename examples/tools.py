"""Function calling through the server: the model asks for a function, this program runs it, the model answers.

    python examples/tools.py [MODEL]

`tool_choice` makes the first answer a call; its arguments conform to the function's schema.
"""

import json
import sys

from local_server import local_server, post

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
WEATHER = {"Paris": "18 degrees Celsius, light rain", "Cairo": "35 degrees Celsius, sun"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city now",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]

with local_server(MODEL) as url:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    request = {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    reply = post(f"{url}/v1/chat/completions", {**request, "tool_choice": "required"})["choices"][0][
        "message"
    ]
    [call] = reply["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    print(f"the model calls {call['function']['name']}({arguments})")

    found = WEATHER.get(arguments["city"], "unknown")
    messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": found}]
    messages.append({"role": "user", "content": "Answer in one sentence."})  # small models need telling
    answer = post(f"{url}/v1/chat/completions", {**request, "tool_choice": "none"})
    print(answer["choices"][0]["message"]["content"])
