"""Unmodified lm-eval gets the same scores through the server as from the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem import LLM
from tests.packages import CACHE, alone, model_path
from tests.server import lm_eval_task
from tests.server.servers import PATIENCE, Running

LOCK = Path(__file__).parents[2] / "requirements" / "lm-eval.lock"


def installed() -> Path:
    """A separate folder with lm-eval (250 MB)."""
    folder = CACHE / "lm-eval"
    with alone() as scratch:
        if not folder.exists():
            target = ["--target", str(scratch / "found"), "-r", str(LOCK)]
            options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", *target]
            subprocess.run(
                [sys.executable, "-m", "pip", "install", *options], check=True, capture_output=True
            )
            (scratch / "found").rename(folder)
    return folder


def direct() -> list[list[float]]:
    """The log-probability of each choice of each question."""
    found = []
    with LLM(model_path("smollm2"), device="cpu", context=512, batch=8) as llm:
        for question, choices in lm_eval_task.QUESTIONS:
            before = len(llm.tokenize(question))
            results = llm.generate(
                [f"{question} {choice}" for choice in choices], max_tokens=1, prompt_logprobs=0
            )
            scores = [result.prompt_logprobs or [] for result in results]
            found.append([sum(one.logprob for one in tokens[before:] if one) for tokens in scores])
    return found


def test_the_score_is_the_engines_own(smollm2: Running) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed()), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, lm_eval_task.__file__, smollm2.url]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=5 * PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected = direct()
    for ours, theirs in zip(expected, found["likelihoods"], strict=True):
        assert theirs == pytest.approx(ours, abs=1e-4)
    best = [likelihoods.index(max(likelihoods)) for likelihoods in expected]
    right = [a == b for a, b in zip(best, lm_eval_task.ANSWERS, strict=True)]
    assert found["score"] == sum(right) / len(right) > 0.5
