"""Runs a small multiple-choice task of lm-eval on the server at the URL given, and prints the results as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

QUESTIONS = [
    ("The capital of France is", ["Paris", "Berlin", "a banana", "Lyon"]),
    ("The opposite of hot is", ["warm", "cold", "big", "red"]),
    ("Two plus two equals", ["five", "three", "four", "a dog"]),
    ("A baby cat is called a", ["puppy", "calf", "foal", "kitten"]),
    ("Water freezes at zero degrees", ["Celsius", "Fahrenheit", "north", "of freedom"]),
    ("The sun rises in the", ["west", "east", "kitchen", "north"]),
    ("Bees make", ["milk", "bread", "honey", "gold"]),
    ("The largest ocean is the", ["Atlantic", "Arctic", "Baltic Sea", "Pacific"]),
]
ANSWERS = [0, 1, 2, 3, 0, 1, 2, 3]


class Rows(list[dict[str, Any]]):
    """The part of the dataset interface that lm-eval uses."""

    @property
    def features(self) -> dict[str, Any]:
        return self[0]


def dataset(**_: Any) -> dict[str, Rows]:
    pairs = zip(QUESTIONS, ANSWERS, strict=True)
    return {"test": Rows({"question": q, "choices": choices, "answer": a} for (q, choices), a in pairs)}


def main(url: str) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    task = {
        "task": "small", "custom_dataset": dataset, "test_split": "test", "output_type": "multiple_choice",
        "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    found = simple_evaluate(
        model="local-completions",
        model_args={"base_url": f"{url}/v1/completions", "model": "smollm2", "tokenizer_backend": "remote"},
        tasks=[task],
        batch_size=8,
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )
    samples = sorted(found["samples"]["small"], key=lambda sample: sample["doc_id"])
    likelihoods = [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples]
    print(json.dumps({"score": found["results"]["small"]["acc,none"], "likelihoods": likelihoods}))


if __name__ == "__main__":
    main(sys.argv[1])
