"""Memory: nothing is allocated after load, and a model is resident once."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.params import SamplingParams
from tandem.kernels.abi import KV_BLOCK
from tests.engine.tiny_models import VOCAB, opened, write_model
from tests.packages import model_path

STEPS = 200


def in_new_process(call: str, *arguments: object, **environment: str) -> Any:
    """What a function of this module returns, called in a process of its own."""
    code = f"import json, sys; from tests.engine.test_memory import {call} as f; print(json.dumps(f(*sys.argv[1:])))"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    with open("/proc/self/status") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields[field].split()[0]) * 1024


def run_steps(path: str) -> dict[str, int]:
    """Decodes 200 steps of a batch, after the same once to warm up; counts what they took."""
    counter = ctypes.CDLL(None).allocation_calls
    counter.restype = ctypes.c_long
    with opened(Path(path), threads=2, context=512, batch=8) as engine:
        recording, calls = engine.step_slots[0].recording, []
        start = recording.start

        def counted() -> None:
            before = counter()
            start()
            calls.append(counter() - before)

        def decode() -> None:
            prompts = [[(i + j) % VOCAB for j in range(1 + 20 * i)] for i in range(8)]
            engine.run(
                *((prompt, SamplingParams(max_tokens=STEPS, temperature=1.0, seed=1)) for prompt in prompts)
            )

        decode()
        recording.start = counted  # type: ignore[method-assign]
        arenas = {name: engine.device.memory(name).ctypes.data for name in engine.program.arena_bytes}
        resident, maps = memory("VmRSS"), len(Path("/proc/self/maps").read_text().splitlines())
        decode()
        return {
            "steps": len(calls),
            "calls": sum(calls),
            "resident": memory("VmRSS") - resident,
            "maps": len(Path("/proc/self/maps").read_text().splitlines()) - maps,
            "moved": sum(engine.device.memory(name).ctypes.data != at for name, at in arenas.items()),
        }


def test_no_allocation_after_load(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        pytest.skip("no C compiler to build the counter with")
    counter = tmp_path / "counter.so"
    source = Path(__file__).with_name("count_allocations.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(counter)], check=True)
    model = write_model(tmp_path / "tiny.gguf", "Q4_0", "gemma3")
    taken = in_new_process("run_steps", model, LD_PRELOAD=str(counter))
    print(taken)
    assert taken["steps"] >= STEPS
    assert taken["calls"] <= 2  # Python's own heap may happen to grow while it makes the call
    assert taken["moved"] == 0
    assert taken["maps"] <= 2 and taken["resident"] < 2e6


def answer(path: str) -> dict[str, float]:
    """Loads a model, generates 100 tokens; all in bytes."""
    from tandem import LLM

    with LLM(path, device="cpu", threads=2, context=2048) as llm:
        result = llm.generate([1, 2, 3, 4, 5], max_tokens=100, ignore_eos=True)
        assert len(result.token_ids) == 100
        per_token = sum(
            launch.buffers["cache"].nbytes / launch.scalars["blocks"] / KV_BLOCK
            for launch in llm.engine.program.launches
            if launch.kernel.name == "attention" and launch.buffers["cache"]
        )
        return {
            "file": os.path.getsize(path),
            "kv": 105 * per_token,
            "resident": memory("VmRSS"),
            "peak": memory("VmHWM"),
        }


def resident_cache(path: str, kv: str) -> int:
    """How much more is resident once every byte of a context's keys and values is in use."""
    from tandem import LLM

    with LLM(path, device="cpu", threads=1, context=4096, batch=1, kv=kv) as llm:
        before = memory("VmRSS")
        llm.device.memory("kv")[:] = 1
        return memory("VmRSS") - before


def test_int8_keys_and_values_take_half_the_memory() -> None:
    half, full = (in_new_process("resident_cache", model_path("smollm2"), kv) for kv in ("q8", "f16"))
    print(f"a context of 4096: {full / 1e6:.1f} MB of float16, {half / 1e6:.1f} MB of int8 with scales")
    assert full > 90e6 and half < 0.54 * full


@pytest.mark.parametrize(
    "name", ["smollm2", "gemma-3-270m", pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.soak)]
)
def test_a_model_is_resident_once(name: str) -> None:
    used = in_new_process("answer", model_path(name))
    print(f"{name}: " + ", ".join(f"{key} {value / 1e6:.0f} MB" for key, value in used.items()))
    allowed = 1.15 * (used["file"] + used["kv"] + 100e6)
    assert used["resident"] <= allowed
    assert used["peak"] <= allowed
