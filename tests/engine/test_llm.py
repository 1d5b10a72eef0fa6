"""The Python API: what streams, threads and wrong arguments get, on a model that babbles for ever."""

from __future__ import annotations

import gc
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandem import LLM, TandemError
from tandem.engine import scheduler
from tandem.engine.output import OutputReader
from tandem.engine.sequence import Sequence
from tandem.errors import DeadlineError, DeviceError, DoesNotFitError, RequestError, StateFileError
from tandem.kernels.abi import KV_BLOCK
from tests.cli.tiny_model import write_tiny_model

pytestmark = pytest.mark.fast

PROMPTS = ("Once upon a time", "The capital of France", "x")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llm") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, threads=2, context=256, batch=4) as llm:
        yield llm


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], max_tokens=20, logprobs=2)
    tokens = list(llm.stream(PROMPTS[0], max_tokens=20, logprobs=2))
    assert "".join(token.text for token in tokens) == whole.text and len(whole.text) == 20
    assert [token.id for token in tokens] == whole.token_ids
    assert [token.logprob for token in tokens] == whole.logprobs
    assert [token.finish_reason for token in tokens] == [None] * 19 + ["length"]
    assert [token.usage is None for token in tokens] == [True] * 19 + [False]


def test_streams_read_in_any_order_lose_nothing(llm: LLM) -> None:
    """A step serves all: what one stream's reader did not ask for is there when the other's does."""
    alone = [list(llm.stream(prompt, max_tokens=9)) for prompt in PROMPTS]
    first, second, third = (llm.stream(prompt, max_tokens=9) for prompt in PROMPTS)
    mixed: list[list[Any]] = [[next(first)], [next(second)], list(third)]
    llm.generate("another request", max_tokens=30)
    mixed[1] += second
    mixed[0] += first
    for one, other in zip(alone, mixed, strict=True):
        assert [(t.id, t.text, t.finish_reason) for t in one] == [
            (t.id, t.text, t.finish_reason) for t in other
        ]


def test_a_stop_string_in_what_was_sampled_meanwhile(llm: LLM) -> None:
    text = llm.generate(PROMPTS[0], max_tokens=20).text
    stop = text[5:7]
    stream = llm.stream(PROMPTS[0], max_tokens=20, stop=stop)
    tokens = [next(stream)]
    llm.generate("another request", max_tokens=30)
    tokens += stream
    assert "".join(token.text for token in tokens) == text[: text.index(stop)]
    assert [token.finish_reason for token in tokens].count("stop") == 1 and tokens[-1].finish_reason == "stop"
    assert tokens[-1].usage and tokens[-1].usage.completion_tokens == len(tokens) == text.index(stop) + 2


def test_a_closed_stream_is_cancelled(llm: LLM) -> None:
    stream = llm.stream("x", max_tokens=100)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.scheduler.running and not llm.engine.scheduler.waiting


def test_threads_share_one_engine(llm: LLM) -> None:
    alone = {prompt: llm.generate(prompt, max_tokens=60).text for prompt in PROMPTS}
    got: dict[str, str] = {}

    def read(prompt: str) -> None:
        got[prompt] = "".join(token.text for token in llm.stream(prompt, max_tokens=60))

    readers = [threading.Thread(target=read, args=(prompt,)) for prompt in PROMPTS]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert got == alone


def test_a_stream_may_be_collected_during_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the garbage collector happens to run: in a thread that has the engine's lock."""
    expected = llm.generate("x", max_tokens=2).token_ids
    left: list[Any] = [llm.stream("abc", max_tokens=50)]
    left.append(left)
    next(left[0])
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (gc.collect(), step())[1])
    del left
    assert llm.generate("x", max_tokens=2).token_ids == expected
    assert llm.engine.cache.free_blocks == llm.engine.cache.blocks


@pytest.mark.parametrize("place", ["remove", "_stop_running", "_publish_and_free_blocks", "_free_blocks"])
def test_an_interrupt_while_a_request_is_removed(llm: LLM, place: str) -> None:
    """Ctrl-C at its last token: it is removed all the same."""

    def interrupted(sequence: Sequence) -> None:
        if sequence.finish_reason:
            patch.undo()
            raise KeyboardInterrupt
        original(sequence)

    original = getattr(llm.engine.scheduler, place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.scheduler, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("abc" * 20, max_tokens=3)
    assert not llm.engine.scheduler.running and len(llm.engine.scheduler._free_table_rows) == 4
    assert llm.engine.cache.free_blocks == llm.engine.cache.blocks


@pytest.mark.parametrize("work", ["generate", "embed"])
def test_an_interrupt_does_not_disturb_other_streams(llm: LLM, work: str) -> None:
    """Ctrl-C at any time, while a stream is open in the same thread: that one goes on with the same tokens."""
    rounds = 150 if work == "generate" else 40

    def disturb() -> None:
        if work == "generate":
            llm.generate(["abc", "zzzz", "hello"], max_tokens=40)
        else:
            llm.embed("x" * 200)

    expected, random = llm.generate("hello", max_tokens=40).token_ids, Random(1)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    usual, came = math.inf, 0
    for _ in range(5):  # others may use this core
        begun = time.perf_counter()
        disturb()
        usual = min(usual, time.perf_counter() - begun)
    try:
        for _ in range(rounds):
            stream = llm.stream("hello", max_tokens=40)
            ids = [next(stream).id for _ in range(3)]
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, usual))
                disturb()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                came += 1
            assert ids + [token.id for token in stream] == expected
            assert llm.engine.cache.free_blocks == llm.engine.cache.blocks
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGALRM, alarm)
    assert came > 20


def test_whatever_counts_as_token_ids(llm: LLM) -> None:
    ids = llm.tokenize("abc")
    expected = llm.generate(ids, max_tokens=3).token_ids
    assert llm.generate(np.array(ids), max_tokens=3).token_ids == expected  # type: ignore[arg-type, call-overload]
    assert (llm.logits(np.array(ids)) == llm.logits(ids)).all()  # type: ignore[arg-type]
    assert [result.token_ids for result in llm.generate(["abc", "abc"], max_tokens=3)] == [expected] * 2


BYTES = (b"x", bytearray(b"x"), memoryview(b"x"))  # they are sequences of numbers, too, but no token ids


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("generate", None),
        ("generate", 5),
        ("generate", [1.5]),
        ("generate", ["a", 5]),
        *((method, bytes_) for method in ("generate", "stream", "embed", "logits") for bytes_ in BYTES),
        ("generate", [b"x"]),
        ("generate", [True, False]),
        ("detokenize", [True]),
        ("generate", {1, 2}),
        ("generate", frozenset({1})),
        ("generate", {1: 2}),
        ("stream", {"role": "user", "content": "hi"}),
        ("chat", {"role": "user", "content": "hi"}),
        ("chat", b"hi"),
        ("generate", [{"role": "user", "content": "hi"}]),
        ("stream", None),
        ("stream", ["a", "b"]),
        ("chat", "hi"),
        ("chat", [5]),
        ("chat", [{"content": "hi"}]),
        ("logits", [1.5]),
    ],
)
def test_not_a_prompt(llm: LLM, method: str, argument: Any) -> None:
    with pytest.raises(RequestError):
        getattr(llm, method)(argument)


def test_copies_of_a_prompt_share_it(llm: LLM) -> None:
    prompt = "Copies of this prompt are computed once, and yet each of them is sampled on its own."
    computed = []
    write = llm.engine.step_slots[0].batch.write
    llm.engine.step_slots[0].batch.write = lambda chunks: (  # type: ignore[method-assign, misc]
        computed.append(sum(chunk.count for chunk in chunks)),
        write(chunks),
    )
    results = llm.generate([prompt] * 4, max_tokens=8, temperature=9.0)
    del llm.engine.step_slots[0].batch.write
    assert len({result.text for result in results}) > 1
    assert sum(computed) < len(prompt) + 3 * KV_BLOCK + 4 * 8


def test_n_completions_of_a_prompt(llm: LLM) -> None:
    sampled = {"max_tokens": 8, "temperature": 9.0}
    three = llm.generate("one prompt", n=3, seed=7, **sampled)
    assert [r.text for r in three] == [
        llm.generate("one prompt", seed=7 + i, **sampled).text for i in range(3)
    ]
    both = llm.generate(["one prompt", "another"], n=2, seed=7, **sampled)
    assert [r.text for r in both[:2]] == [r.text for r in three[:2]] and len(both) == 4
    messages = [{"role": "user", "content": "hi"}]
    assert len({answer.text for answer in llm.chat(messages, n=3, **sampled)}) == 3
    assert [answer.text for answer in llm.chat(messages, n=1)] == [llm.chat(messages).text]
    for wrong in (0, -1, 1.5, "2", 10**9):
        with pytest.raises(RequestError, match="number of answers, 1 to 128"):
            llm.generate("x", n=wrong)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="seed must be"):
        llm.generate("x", n=2, seed="x")


def test_a_deadline_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeadlineError, match=r"timed out after 1e-06 s, with 0 tokens"):
        llm.generate("x", max_tokens=9, timeout=1e-6)
    stream = llm.stream("x", max_tokens=200, timeout=3600)
    next(stream)
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600))
    with pytest.raises(DeadlineError, match="allow more time, or ask for fewer tokens"):
        list(stream)


def test_a_kv_cache_of_a_given_size(path: Path) -> None:
    with LLM(path, threads=1, context=256, kv_memory=3e6) as llm:
        [blocks] = llm.engine.cache.blocks
        assert 0.95 * 3e6 < llm.engine.program.arena_bytes["kv"] <= 3e6
        assert blocks > 256 // KV_BLOCK
    with pytest.raises(DoesNotFitError, match=r"a context of 256 takes .* more than the 0.00 GB allowed"):
        LLM(path, threads=1, context=256, kv_memory=1000)
    with pytest.raises(DoesNotFitError, match=r"of 900000.00 GB does not fit beside the model: .* are left"):
        LLM(path, threads=1, context=256, kv_memory=9e14)
    for wrong in (0, -1, "x"):
        with pytest.raises(RequestError, match="kv_memory="):
            LLM(path, kv_memory=wrong)  # type: ignore[arg-type]


def test_stats(path: Path) -> None:
    with LLM(path, threads=1, context=256, batch=2, prompt_lookup=True) as llm:
        prompt = llm.tokenize("a prompt of several KV blocks " * 3)
        for _ in range(2):
            llm.generate(prompt, max_tokens=20)
        stream = llm.stream(prompt, max_tokens=50)
        next(stream)
        busy = llm.stats()
        assert (busy.running, busy.waiting, busy.preemptions) == (1, 0, 0) and busy.kv[0].used > 0
        stream.close()  # type: ignore[attr-defined]
        idle = llm.stats()
        assert idle.running == 0 and [group.used for group in idle.kv] == [0]
        assert idle.steps >= busy.steps > 0 and idle.prompt_tokens == 3 * len(prompt)
        cached = (len(prompt) - 1) // KV_BLOCK
        assert idle.cached_prompt_tokens == 2 * KV_BLOCK * cached
        assert idle.kv[0].blocks > idle.kv[0].cached >= cached
        assert idle.speculation and idle.speculation.accepted <= idle.speculation.drafted
    with LLM(path, threads=1, context=64, batch=1) as llm:
        assert llm.stats().speculation is None


def test_embeddings(llm: LLM) -> None:
    one = {pooling: llm.embed("some text", pooling=pooling) for pooling in ("mean", "last", "cls")}
    assert all(vector.shape == (64,) and abs(np.linalg.norm(vector) - 1) < 1e-5 for vector in one.values())
    rows = llm.capture(llm.tokenize("some text"), ["result_norm"])["result_norm"]
    assert np.allclose(one["last"], rows[-1] / np.linalg.norm(rows[-1]))
    assert np.allclose(one["mean"], rows.mean(axis=0) / np.linalg.norm(rows.mean(axis=0)))
    assert float(one["mean"] @ llm.embed("some test")) > float(one["mean"] @ llm.embed("QXZ 123"))
    with pytest.raises(RequestError, match="use mean, last or cls"):
        llm.embed("x", pooling="sum")


@pytest.mark.parametrize("penalty", [1.0, 1.1])
def test_min_tokens(llm: LLM, penalty: float) -> None:
    end = next(iter(llm.tokenizer.eos_ids))
    eager = {"logit_bias": {end: 100.0}, "max_tokens": 20, "repeat_penalty": penalty}
    assert len(llm.generate("x", **eager).token_ids) == 1
    for least in (1, 2, 7):
        result = llm.generate("x", min_tokens=least, **eager)
        assert len(result.token_ids) == least + 1 and result.finish_reason == "stop"
        assert not set(result.token_ids[:-1]) & llm.tokenizer.eos_ids
    assert llm.generate("x", min_tokens=30, **eager).finish_reason == "length"


@pytest.mark.parametrize("option", ["threads", "context", "batch"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "x", 10**10])
def test_not_a_size(path: Path, option: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{option}="):
        LLM(path, **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("split", 5),
        ("split", [0]),
        ("split", ["a"]),
        ("draft", 5),
        ("gpu_memory", "x"),
        ("kv_memory", -1),
        ("kv_memory", 10**400),
        ("device", 5),
        ("batch", None),
        ("kv", np.array([1, 2])),
        ("prompt_lookup", "yes"),
        ("lookup", "yes"),
        ("placement", np.array([1, 2])),
        ("npu", 5),
    ],
)
def test_not_an_option(path: Path, option: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{option}="):
        LLM(path, **{option: value})


def test_more_threads_than_can_be(path: Path) -> None:
    with pytest.raises(DeviceError, match="between 1 and 256"):
        LLM(path, device="cpu", threads=10**9)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", 5, b"a", None])
def test_not_the_path_of_a_state(llm: LLM, name: Any) -> None:
    for use in (lambda: llm.save("x", name), lambda: llm.restore(name)):
        with pytest.raises(StateFileError, match="file"):
            use()


@pytest.mark.parametrize("wrong", [None, 5, [None], [1.5], [{}]])
def test_not_a_text_and_not_tokens(llm: LLM, wrong: Any) -> None:
    for method in (llm.tokenize, llm.detokenize):
        with pytest.raises(RequestError):
            method(wrong)


@pytest.mark.parametrize("names", [[["x"]], [{}], [5], 5, None, "result_norm", np.array(3)])
def test_not_the_names_of_intermediates(llm: LLM, names: Any) -> None:
    with pytest.raises(RequestError, match="intermediate"):
        llm.capture([1, 2], names)


def test_closed(path: Path) -> None:
    llm = LLM(path, threads=2, context=64, batch=1)
    stream = llm.stream("x", max_tokens=9)
    next(stream)
    llm.close()
    llm.close()
    for use in (lambda: next(stream), lambda: llm.generate("x"), lambda: llm.logits([1])):
        with pytest.raises(DeviceError, match="closed: open the model again"):
            use()


def test_prompt_logprobs_are_built_while_others_compute(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 of them take as long as several steps."""
    build, holders = OutputReader.prompt_logprobs, []

    def noted(output: OutputReader) -> Any:
        holders.append(llm.driver._holder)
        return build(output)

    monkeypatch.setattr(OutputReader, "prompt_logprobs", noted)
    first, *rest = llm.stream("The capital of France", max_tokens=3, prompt_logprobs=1)
    assert first.prompt_logprobs and len(first.prompt_logprobs) == len(llm.tokenize("The capital of France"))
    assert all(token.prompt_logprobs is None for token in rest) and holders == [0]


def test_threads_that_close_at_the_same_time(path: Path) -> None:
    llm = LLM(path, threads=2, context=64, batch=1)
    start = threading.Barrier(5)

    def run(call: Callable[[], object]) -> object:
        start.wait()
        return call()

    with ThreadPoolExecutor(5) as threads:
        step = threads.submit(run, lambda: llm.logits([1] * 60))
        closes = [threads.submit(run, llm.close) for _ in range(4)]
        assert [close.result(60) for close in closes] == [None] * 4 and llm.driver.closed
        with suppress(DeviceError):  # it came last
            step.result(60)


def test_every_error_is_a_tandem_error(llm: LLM) -> None:
    with pytest.raises(TandemError, match=r"unknown parameter 'max_token'; there is: .*max_tokens"):
        llm.generate("x", max_token=5)
