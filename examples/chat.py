"""A conversation: each answer is added to the messages, so that the next question can refer to it.

python examples/chat.py [MODEL]
"""

import sys

from tandem import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
QUESTIONS = ["What is a tuple in Python?", "Show me one with three numbers.", "And as a list?"]

with LLM(MODEL) as llm:
    messages = [{"role": "system", "content": "Answer in one short sentence."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        result = llm.chat(messages, max_tokens=40)
        messages.append({"role": "assistant", "content": result.text})
        print(f"> {question}\n{result.text}")
