"""Generated model files and saved states, and a runner that survives what they do to the process.

Each case is made from its number alone, so a failure can be run again: `run_file(folder, number)`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import random
import resource
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

from tandem import LLM
from tandem.engine.kv_snapshot import CHECKSUM, MAGIC
from tandem.errors import ContextError, StateFileError, TandemError
from tandem.gguf.file import GGUF
from tandem.gguf.formats import FORMATS, Format
from tests.gguf_files import Key, Tensor, build, tiny_keys, tiny_tensors
from tests.models.draft_heads import write_with_draft_head
from tests.models.test_bad_files import address_space
from tests.models.test_reference import GOLDENS

MODELS = sorted(path.stem for path in GOLDENS.glob("*.gguf"))  # one or more of each family
ODD = (
    0,
    1,
    2,
    3,
    7,
    255,
    256,
    4096,
    2**16,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**60,
    2**63,
    2**64 - 1,
)
ODD_FLOATS = (0.0, -0.0, -1.0, 1.0, 1e-45, 1e-12, 1e12, 1e30, float("inf"), float("-inf"), float("nan"))
SECONDS, MEMORY = 20, 2 << 30  # limits of a case; bytes above what the process has before
PROMPT = list(range(3, 40))


# ---- model files


class Golden:
    """A sound file, and where its header ends and has values."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        with GGUF.open(path) as gguf:
            self.values = list(gguf._value_at.values())
            self.header = min(tensor.offset for tensor in gguf.tensors.values())


GOLDEN: dict[str, Golden] = {}
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of numbers, by type


def odd_number(rng: random.Random, width: int = 0) -> bytes:
    width = width or rng.choice((1, 2, 4, 8))
    kind = rng.randrange(4)
    if kind == 0 and width == 4:
        return struct.pack("<f", rng.choice(ODD_FLOATS))
    if kind == 1:
        return rng.randbytes(width)
    return struct.pack("<Q", rng.choice(ODD))[:width]


def change_value(data: bytearray, at: int, rng: random.Random) -> None:
    """Changes a value of the metadata: seldom its type or length, without which the file is at once refused."""
    (kind,) = struct.unpack_from("<I", data, at - 4)
    if rng.random() < 0.1:
        at, number = at - 4, struct.pack("<I", rng.randrange(14))
    elif kind in WIDTHS:
        number = odd_number(rng, WIDTHS[kind])
    else:  # a text or an array: its length or element type, or what follows
        at, number = (
            at + (rng.randrange(12) if rng.random() < 0.2 else rng.randrange(12, 200)),
            odd_number(rng),
        )
    data[at : at + len(number)] = number


def mutated(rng: random.Random, name: str = "") -> bytes:
    """A golden model with some bytes changed, in its values, types, names, tensor infos or weights."""
    name = name or rng.choice(MODELS)
    if name not in GOLDEN:
        GOLDEN[name] = Golden(GOLDENS / f"{name}.gguf")
    golden = GOLDEN[name]
    data = bytearray(golden.data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        kind = rng.random()
        if kind < 0.55:
            change_value(data, rng.choice(golden.values), rng)
        elif kind < 0.9:  # a number in the tensor infos (the last part of the header) or in the weights
            begin = golden.header - 4096 if kind < 0.65 else golden.header
            at, number = rng.randrange(max(24, begin), len(data)), odd_number(rng)
            data[at : at + len(number)] = number
        else:  # bytes more or less, or a part of the file again
            at, begin = rng.randrange(4, len(data)), rng.randrange(golden.header)
            data[at : at + rng.randrange(33)] = data[begin : begin + rng.randrange(33)]
    if rng.random() < 0.05:
        del data[rng.randrange(1, len(data)) :]
    return bytes(data)


def synthesized(rng: random.Random) -> bytes:
    """A header made up from keys that models have, with values of any kind, and some tensors."""
    names = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length",
             "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
             "rope.scaling.type", "rope.scaling.factor", "attention.sliding_window",
             "attention.key_length")  # fmt: skip
    architecture = rng.choice(("llama", "qwen2", "qwen3", "gemma2", "gemma3", "", "llama\0", "x" * 300))
    keys: list[Key] = [("general.architecture", "str", architecture)]
    for name in rng.sample(names, rng.randrange(len(names) + 1)):
        kind = rng.choice(
            ("u32", "u32", "u64", "i32", "f32", "str", "bool", "[u32]", "[f32]", "[str]", "[[u32]]")
        )
        value: Any = {
            "u32": rng.choice(ODD) % 2**32, "u64": rng.choice(ODD), "i32": rng.choice(ODD) % 2**31 - 9,
            "f32": rng.choice((*ODD_FLOATS[:7], 1e30)), "str": rng.choice(("", "yarn", "linear", "\0", "é" * 9)),
            "bool": True, "[u32]": [rng.randrange(9)] * rng.randrange(5), "[f32]": [1.0, float("nan")],
            "[str]": ["a"] * rng.randrange(5), "[[u32]]": [[1], []],
        }[kind]  # fmt: skip
        keys.append((f"{architecture}.{name}", kind, value))
    keys += rng.sample(tiny_keys()[2:], rng.randrange(len(tiny_keys()) - 2))
    file = build(keys, rng.sample(tiny_tensors(), rng.randrange(len(tiny_tensors()) + 1)))
    data = file.data
    for _ in range(rng.choice((0, 1, 3))):
        at = rng.choice(list(file.marks.values()))
        number = odd_number(rng)
        data[at : at + len(number)] = number
    return bytes(data)


EXPERT_COUNTS = (0, 1, 2, 3, 5, 8, 33, 1024, 1025, 2**31, 2**32 - 1)
WIDTHS_OF_FEED_FORWARD = (16, 32, 48, 64, 96, 100, 256)
# Also inf, NaN.
HOSTILE_HALVES = 0x0000, 0x8000, 0x0001, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFFFF


def hostile_rows(format: Format, shape: tuple[int, ...], rng: random.Random) -> np.ndarray:
    """Blocks of random bytes: uint8 [..., row bytes]. In some, a half is infinite, not a number, or as small or
    as large as halves are, wherever the scale is; or all bytes are equal (255 is MXFP4's scale that is no number)."""
    *rows, columns = shape
    blocks = np.frombuffer(rng.randbytes(math.prod(rows) * format.row_bytes(columns)), np.uint8)
    blocks = blocks.reshape(-1, format.block_bytes).copy()
    for half in rng.sample(HOSTILE_HALVES, rng.randrange(4) if format.block_bytes > 1 else 0):
        some = np.array(rng.choices(range(len(blocks)), k=rng.choice((1, 9, len(blocks)))))
        at = rng.choice((0, format.block_bytes - 2, rng.randrange(format.block_bytes - 1)))
        blocks[some, at], blocks[some, at + 1] = half & 255, half >> 8
    if rng.random() < 0.2:
        blocks[rng.randrange(len(blocks))] = rng.choice((0, 127, 128, 255))
    return blocks.reshape(*rows, -1)


def quantised(rng: random.Random) -> bytes:
    """A small model, often a mixture of experts: sound but for a few numbers, its weights hostile blocks of any format,
    its formats mixed."""
    name = rng.choice(("llama", "llama", "olmoe", "qwen2moe", "qwen3moe"))
    experts = 0 if name == "llama" and rng.random() < 0.5 else rng.choice((1, 2, 3, 5, 8, 33))
    used = rng.randint(1, min(experts, 4)) if experts else 0
    dim, vocab, heads = 256, 48, 2
    hidden, shared = rng.choice(WIDTHS_OF_FEED_FORWARD), rng.choice((0, 0, 32, 256)) if experts else 0
    formats = rng.sample(list(FORMATS.values()), 2)  # of the matrices

    def rows(tensor: str, shape: tuple[int, ...]) -> Tensor:
        if rng.random() < 0.01:
            shape = rng.choice(
                ((*shape[:-1], 2 * shape[-1]), (shape[0] + 1, *shape[1:]), (1, *shape), shape[1:] or (1,))
            )
        if len(shape) == 1 or "gate_inp" in tensor:
            values = np.array([rng.gauss(1, 1) for _ in range(math.prod(shape))], np.float32)
            return tensor, "F32", values.reshape(shape)
        fitting = [format for format in formats if shape[-1] % format.block == 0]
        format = rng.choice(fitting or [FORMATS[1]])
        return tensor, format.name, hostile_rows(format, shape, rng)

    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, dim), "output_norm": (dim,)}
    shapes |= {f"blk.0.attn_{part}": (dim, dim) for part in ("q", "k", "v", "output")}
    shapes |= {"blk.0.attn_norm": (dim,), "blk.0.ffn_norm": (dim,)}
    head_norm = dim if name == "olmoe" else dim // heads
    if name in ("olmoe", "qwen3moe"):
        shapes |= {"blk.0.attn_q_norm": (head_norm,), "blk.0.attn_k_norm": (head_norm,)}
    for suffix, width in (("_exps" if experts else "", hidden), *([("_shexp", shared)] if shared else [])):
        stack = (experts,) if suffix == "_exps" else ()
        shapes |= {f"blk.0.ffn_{part}{suffix}": (*stack, width, dim) for part in ("gate", "up")}
        shapes[f"blk.0.ffn_down{suffix}"] = (*stack, dim, width)
    if experts:
        shapes["blk.0.ffn_gate_inp"] = (experts, dim)
    if shared and rng.random() < 0.5:
        shapes["blk.0.ffn_gate_inp_shexp"] = (dim,)
    numbers = {
        "block_count": 1, "context_length": 64, "embedding_length": dim, "feed_forward_length": hidden,
        "attention.head_count": heads,
    }  # fmt: skip
    if experts:
        numbers |= {"expert_count": experts, "expert_used_count": used, "expert_feed_forward_length": hidden}
        if shared:
            numbers["expert_shared_feed_forward_length"] = shared
    if rng.random() < 0.2:
        numbers[rng.choice(list(numbers))] = rng.choice(EXPERT_COUNTS)
    keys: list[Key] = [("general.architecture", "str", name)]
    keys += [(f"{name}.{key}", "u32", number) for key, number in numbers.items()]
    if experts and rng.random() < 0.1:
        wrong: Key = rng.choice(
            [(f"{name}.expert_count", "i32", -1), (f"{name}.expert_used_count", "f32", 2.0),
             (f"{name}.expert_used_count", "[u32]", [1, 2]), (f"{name}.expert_count", "str", "8")]
        )  # fmt: skip
        keys = [key for key in keys if key[0] != wrong[0]] + [wrong]
    keys += [
        (f"{name}.attention.layer_norm_rms_epsilon", "f32", 1e-5),
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.tokens", "[str]", [chr(33 + id) for id in range(vocab)]),
        ("tokenizer.ggml.merges", "[str]", []),
    ]
    return bytes(build(keys, [rows(f"{tensor}.weight", shape) for tensor, shape in shapes.items()]).data)


def run_file(folder: Path, number: int) -> None:
    """Loads file `number` and generates tokens: they are right, or an error says what is wrong."""
    rng = random.Random(number)
    path = folder / "generated.gguf"
    kind = rng.random()
    path.write_bytes(synthesized(rng) if kind < 0.1 else quantised(rng) if kind < 0.4 else mutated(rng))
    try:
        with LLM(
            path, device="cpu", threads=1, context=rng.choice((None, 16, 64)), batch=1, kv_memory=1e7
        ) as llm:
            vocab = llm.config["vocab"]
            prompt = [token % vocab for token in PROMPT[:9]]
            first, again = (llm.generate(prompt, max_tokens=3, temperature=0).token_ids for _ in range(2))
            assert first == again and all(0 <= token < vocab for token in first), (first, again)
            assert llm.engine.cache.free_blocks == llm.engine.cache.blocks
            assert isinstance(llm.detokenize(first), str)
    except TandemError as error:
        assert str(error) and "\n" not in str(error)


# ---- models that embed and rank texts, those with draft heads, and vision encoders

TEXT_ENCODERS = tuple(sorted(path.stem for path in (GOLDENS / "encoders").glob("*.gguf")))
WITH_DRAFT_HEAD = ("qwen35", "qwen35moe", "qwen3next", "glm4moe")


def run_text_encoder(folder: Path, number: int) -> None:
    """Loads model `number` and embeds texts: the vectors are finite, or an error says what is wrong."""
    rng = random.Random(number)
    path, texts = folder / "generated.gguf", ["hello world", "a b c a b"]
    path.write_bytes(mutated(rng, f"encoders/{rng.choice(TEXT_ENCODERS)}"))
    try:
        with LLM(path, device="cpu", threads=1, context=rng.choice((None, 16, 64)), batch=2) as llm:
            first, again = (llm.embed(texts) for _ in range(2))
            assert np.array_equal(first, again) and np.isfinite(first).all()
            if llm.ranks:
                assert np.isfinite(llm.rerank("b", texts)).all()
    except TandemError as error:
        assert str(error) and "\n" not in str(error)


def run_draft_head(folder: Path, number: int) -> None:
    """Loads model `number` and generates tokens, its draft head proposing them."""
    rng = random.Random(number)
    name = rng.choice(WITH_DRAFT_HEAD)
    if (key := f"{name} with a draft head") not in GOLDEN:
        GOLDEN[key] = Golden(write_with_draft_head(folder / f"{name}.gguf", name))
    path = folder / "generated.gguf"
    path.write_bytes(mutated(rng, key))
    try:
        with LLM(path, device="cpu", threads=1, context=64, batch=1, kv_memory=1e7, draft="mtp") as llm:
            prompt = [token % llm.config["vocab"] for token in PROMPT[:9]]
            first, again = (llm.generate(prompt, max_tokens=6, temperature=0, logprobs=1) for _ in range(2))
            # A draft token whose values overflow makes those before it NaN in the attention of the same step.
            overflows = any(not math.isfinite(token.logprob) for token in first.logprobs or ())
            assert first.token_ids == again.token_ids or overflows
            assert llm.engine.cache.free_blocks == llm.engine.cache.blocks
    except TandemError as error:
        assert str(error) and "\n" not in str(error)


ENCODERS = tuple(
    sorted(path.stem.removeprefix("mmproj-") for path in (GOLDENS / "vision").glob("mmproj-*.gguf"))
)


def run_mmproj(folder: Path, number: int) -> None:
    """Loads encoder `number` beside its model, of which one is sound, and encodes an image: there are embeddings, or an
    error says what is wrong."""
    rng = random.Random(number)
    name = rng.choice(ENCODERS)
    paths = [GOLDENS / "vision" / f"{stem}.gguf" for stem in (f"mmproj-{name}", name)]
    odd = rng.random() < 0.3  # the language model
    data = mutated(rng, f"vision/{paths[odd].stem}")
    paths[odd] = folder / paths[odd].name
    paths[odd].write_bytes(data)
    path, model = paths
    picture = np.frombuffer(rng.randbytes(3 * 40 * 60), np.uint8).reshape(40, 60, 3)
    content = [{"type": "image", "image": Pillow.fromarray(picture)}, {"type": "text", "text": "a"}]
    try:
        with LLM(model, device="cpu", threads=1, batch=1, kv_memory=1e7, mmproj=path) as llm:
            chat = [{"role": "user", "content": content}]
            first, again = (llm.chat(chat, max_tokens=2, temperature=0).token_ids for _ in range(2))
            assert first == again and llm.engine.cache.free_blocks == llm.engine.cache.blocks
    except TandemError as error:
        assert str(error) and "\n" not in str(error)


# ---- saved states

# All but the first two have recurrent layers.
STATES_OF = (
    "gemma3-pattern3",
    "deepseek-v3",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "lfm2",
    "mamba2",
    "falcon-h1",
)


def open_model(name: str) -> LLM:
    return LLM(GOLDENS / f"{name}.gguf", device="cpu", threads=1, context=64, batch=2)


def run_state(llm: LLM, sound: bytes, folder: Path, number: int) -> None:
    """Restores state `number`: an error says what is wrong, or the model goes on with tokens of its own."""
    rng = random.Random(number)
    begin = len(MAGIC) + 4
    end = begin + int.from_bytes(sound[len(MAGIC) : begin], "little")
    header, blocks = json.loads(sound[begin:end]), bytearray(sound[end:-CHECKSUM])
    for _ in range(rng.choice((0, 1, 1, 2))):
        odd: Any = rng.choice((None, True, "x", [], {}, -1, 1.5, 1e999, [[]], *ODD))
        change = rng.randrange(6)
        if change == 0:
            header[rng.choice((*header, "other", "images", "states"))] = odd
        elif change == 1:
            header.pop(rng.choice(list(header)))
        elif isinstance(header.get("tokens"), list) and header["tokens"] and change < 5:
            tokens = header["tokens"]
            if change == 2:
                tokens[rng.randrange(len(tokens))] = odd
            elif change == 3:
                del tokens[rng.randrange(len(tokens)) :]
            else:
                tokens += [rng.choice((5, odd))] * rng.randrange(1, 100)
        elif blocks:
            at = rng.randrange(len(blocks))
            blocks[at : at + 8] = rng.randbytes(rng.randrange(17))
    text = json.dumps(header).encode()
    length = len(text) if rng.random() < 0.9 else rng.choice(ODD) % 2**32
    data = bytearray(MAGIC + length.to_bytes(4, "little") + text + blocks)
    if rng.random() < 0.2:
        at = rng.randrange(len(data))
        data[at : at + 4] = rng.randbytes(rng.randrange(9))
    data += blake2b(data, digest_size=CHECKSUM).digest()
    if rng.random() < 0.1:
        data = bytearray(rng.choice((data[: rng.randrange(len(data))], data + b"x", rng.randbytes(100), b"")))
    (folder / "state").write_bytes(data)
    try:
        restored = llm.restore(folder / "state")
    except (StateFileError, ContextError) as error:
        assert str(error) and "\n" not in str(error)
        restored = []
    vocab = llm.config["vocab"]
    assert len(restored) <= llm.context and all(0 <= token < vocab for token in restored)
    if restored and len(restored) < llm.context - 2:
        assert len(llm.generate([*restored, 5], max_tokens=1, temperature=0).token_ids) == 1
    cache = llm.engine.cache
    assert cache.free_blocks == cache.blocks
    assert not cache.states or cache.states.num_free == len(cache.states.references)


# ---- the runner


def run_cases(case: Callable[[int], None], numbers: range) -> list[str]:
    """Runs cases in a child process; one that kills it or takes too long is noted, and the next child goes on."""
    problems: list[str] = []
    progress = mmap.mmap(-1, 8)  # the number of the case that runs, shared with the child
    number = numbers.start
    while number < numbers.stop:
        with tempfile.TemporaryFile() as report:  # not a pipe: a child that fills it would wait
            child = os.fork()
            if child == 0:
                _work(case, range(number, numbers.stop), progress, report.fileno())
            status, number = _watch(child, progress, number)
            report.seek(0)
            problems += report.read().decode(errors="replace").split("\0")[:-1]
        if status:
            problems.append(f"case {number}: {status}")
        number += 1
        if len(problems) > 20:
            break
    return problems


def _work(case: Callable[[int], None], numbers: range, progress: mmap.mmap, writing: int) -> None:
    limit = address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in numbers:
        struct.pack_into("<q", progress, 0, number)
        try:
            case(number)
        except BaseException:
            os.write(writing, f"case {number}: {traceback.format_exc()[-1500:]}\0".encode())
    os._exit(0)


def _watch(child: int, progress: mmap.mmap, begun: int) -> tuple[str, int]:
    """Waits for a child; returns how it failed, or nothing, and the number of its last case."""
    (current,), since = (begun,), time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        (latest,) = struct.unpack_from("<q", progress, 0)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return f"ended with {code}, a signal if negative" if code else "", latest
        if latest != current:
            current, since = latest, time.monotonic()
        elif time.monotonic() - since > SECONDS:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hangs", latest
        time.sleep(0.005)
