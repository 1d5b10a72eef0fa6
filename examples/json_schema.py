"""Structured output: the answer is JSON that conforms to a schema, whatever the model would have said.

    python examples/json_schema.py [MODEL]

`regex=`, `grammar=` (Lark) and `choices=` constrain an answer in the same way.
"""

import json
import sys

from tandem import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
TEXT = "Ann Smith, 31 years old, has lived in Dublin since 2019."
SENTIMENTS = ("positive", "negative")

with LLM(MODEL) as llm:
    question = f"Extract name, age and city as JSON: {TEXT}"
    result = llm.chat([{"role": "user", "content": question}], json_schema=SCHEMA, max_tokens=64)
    print(json.dumps(json.loads(result.text)))

    for review in ("I love this phone", "I hate this phone"):
        question = f"Is the sentiment of '{review}' positive or negative?"
        answer = llm.chat([{"role": "user", "content": question}], choices=SENTIMENTS).text
        print(f"{review}: {answer}")
