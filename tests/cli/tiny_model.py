"""A model that loads in no time: a few layers of random weights over bytes, which babbles in small letters for ever."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.gguf_files import Key, Tensor, write

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
DIM = 64


def write_tiny_model(
    path: Path,
    *,
    template: str = CHATML,
    architecture: str = "llama",
    context: int = 100_000,
    layers: int = 1,
    padding: int = 0,
    control: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"),
    more_keys: Sequence[Key] = (),
    more_tensors: Sequence[Tensor] = (),
) -> Path:
    """`padding`: tokens at the vocabulary's end that stand for nothing. `control`: its control tokens; the second ends
    an output."""
    tokens = [*byte_letters(), *control, *(f"[PAD{i}]" for i in range(padding))]
    keys: list[Key] = [
        ("general.architecture", "str", architecture),
        (f"{architecture}.context_length", "u32", context),
        (f"{architecture}.embedding_length", "u32", DIM),
        (f"{architecture}.block_count", "u32", layers),
        (f"{architecture}.feed_forward_length", "u32", DIM),
        (f"{architecture}.attention.head_count", "u32", 2),
        (f"{architecture}.attention.head_count_kv", "u32", 2),
        (f"{architecture}.attention.layer_norm_rms_epsilon", "f32", 1e-5),
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.pre", "str", "gpt-2"),
        ("tokenizer.ggml.tokens", "[str]", tokens),
        ("tokenizer.ggml.token_type", "[i32]", [1] * 256 + [3] * len(control) + [5] * padding),
        ("tokenizer.ggml.merges", "[str]", []),
        ("tokenizer.ggml.eos_token_id", "u32", 257),
        ("tokenizer.chat_template", "str", template),
        *more_keys,
    ]
    return write(path, keys, [*_tensors(tokens, layers), *more_tensors])


def _tensors(tokens: list[str], layers: int) -> list[Tensor]:
    rng = np.random.default_rng(0)
    square, vocabulary = (DIM, DIM), (len(tokens), DIM)
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {f"blk.{i}.{name}.weight": square for i in range(layers) for name in matrices}
    shapes |= {"token_embd.weight": vocabulary, "output.weight": vocabulary}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    letters = [token in string.ascii_lowercase for token in tokens]
    arrays["output.weight"] *= np.array(letters)[:, None]  # nothing else is ever the likeliest
    norms = [f"blk.{i}.{name}_norm.weight" for i in range(layers) for name in ("attn", "ffn")]
    arrays |= {name: np.ones(DIM, np.float32) for name in (*norms, "output_norm.weight")}
    return [(name, "F32", array) for name, array in arrays.items()]


def byte_letters() -> list[str]:
    """How byte-level vocabularies write the 256 bytes: printable ones as themselves, the rest from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]
