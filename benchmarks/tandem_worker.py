"""Tandem's side of the comparison, with the same commands as llama_cpp_worker.py.

python tandem_worker.py MODEL THREADS ROOM                    serves JSON lines on stdin (see worker.py)
python tandem_worker.py MODEL THREADS --first-token PROMPT    prints the first token of an answer
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

from tandem import LLM, SamplingParams
from tandem.engine.sequence import Sequence

MAX_SEQUENCES = 32


class Side:
    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm.engine
        self.sequences: list[Sequence] = []
        self.inside = 0.0  # seconds in the C core so far
        self.engine.scheduler.prefix_caching = False  # every round computes its prompts
        recording: Any = self.engine.step_slots[0].recording
        self._start, recording.start = recording.start, self._timed_start

    def _timed_start(self) -> None:
        started = time.perf_counter()
        self._start()
        self.inside += time.perf_counter() - started

    def open(self, prompts: list[list[int]]) -> None:
        """Sequences that grow by one token each a step."""
        params = SamplingParams(max_tokens=self.llm.context, temperature=0, ignore_eos=True)
        self.sequences = [self.engine.submit(prompt, params) for prompt in prompts]
        while not all(sequence.generated for sequence in self.sequences):
            self.engine.step()

    def steps(self, count: int) -> dict[str, float]:
        before, started = self.inside, time.perf_counter()
        for _ in range(count):
            if len(self.engine.step()) < len(self.sequences):
                raise RuntimeError("a sequence got no token: there is not enough memory for all of them")
        return {"seconds": time.perf_counter() - started, "inside": self.inside - before}

    def prefill(self, tokens: list[int]) -> dict[str, float]:
        before, started = self.inside, time.perf_counter()
        sequence = self.engine.submit(tokens, SamplingParams(max_tokens=1, temperature=0))
        while sequence.finish_reason is None:
            self.engine.step()
        return {"seconds": time.perf_counter() - started, "inside": self.inside - before}

    def close(self) -> None:
        for sequence in self.sequences:
            self.engine.cancel(sequence)
        self.sequences = []

    def info(self) -> dict[str, Any]:
        """Bytes and parameters of a step, for the comparison with the machine's limits."""
        matrices = {
            name: tensor for name, tensor in self.llm._model.gguf.tensors.items() if len(tensor.shape) > 1
        }
        # Rows of the embedding are looked up, not multiplied; without a head of its own it serves as the head.
        embedding = matrices.pop("token_embd.weight")
        head = matrices.pop("output.weight", embedding)
        one = {"tokens": 1, "rows": 1, "work": 1}
        matmuls = [
            launch for launch in self.engine.program.launches if launch.kernel.name.startswith("matmul")
        ]
        return {
            "device": self.llm.device.describe(),
            "body_parameters": sum(math.prod(tensor.shape) for tensor in matrices.values()),
            "head_parameters": math.prod(head.shape),
            "file_bytes": sum(tensor.nbytes for tensor in [*matrices.values(), head]),
            "bytes": sum(launch.cost(one).bytes for launch in matmuls),
        }


def serve(side: Side) -> None:
    reply: Any = side.info()
    while True:
        print(json.dumps(reply), flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        started = time.process_time()
        reply = getattr(side, request.pop("do"))(**request) or {}
        reply["cpu"] = time.process_time() - started


def main(path: str, threads: str, room: str, *prompt: str) -> None:
    if prompt:
        with LLM(path, device="cpu", threads=int(threads)) as llm:
            for token in llm.stream(prompt[0], max_tokens=1):
                print(token.text, end="", flush=True)
    else:
        serve(Side(LLM(path, device="cpu", threads=int(threads), context=int(room), batch=MAX_SEQUENCES)))


if __name__ == "__main__":
    main(*sys.argv[1:])
