"""A forward pass to compare with: NumPy, float32, the whole sequence at once, straight from a GGUF file.

It shares nothing with the engine but the file reader and the dequantisation. Read it as the definition of the
architectures: llama, qwen2, qwen3, their mixtures of experts, gemma2 and gemma3 differ only where a line below says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem.gguf import formats
from tandem.gguf.file import GGUF

Array = np.ndarray[Any, np.dtype[Any]]  # float32, unless said otherwise
Capture = dict[str, Array]
PERIOD = {"gemma2": 2, "gemma3": 6}  # every n-th layer is global; in other models with a window, none
QUERY_BLOCK = 256  # rows of the score matrix held at once


class ReferenceModel:
    def __init__(self, path: str | Path) -> None:
        self.file = GGUF.open(path)
        self.metadata, self.tensors = self.file.metadata, self.file.tensors
        self.head_weight: Array | None = None
        self.read_sizes()

    def read_sizes(self) -> None:
        self.architecture: str = self.metadata["general.architecture"]
        self.is_gemma = self.architecture in ("gemma2", "gemma3")
        self.layers: int = self.get("block_count")
        self.hidden_size: int = self.get("embedding_length")
        self.heads: int = self.get("attention.head_count")
        self.kv_heads: int = self.get("attention.head_count_kv", self.heads)
        self.head_size: int = self.get("attention.key_length", self.hidden_size // self.heads)
        self.epsilon = np.float32(self.get("attention.layer_norm_rms_epsilon"))
        self.window: int = self.get("attention.sliding_window", 4096 if self.architecture == "gemma2" else 0)

    def logits(self, ids: Sequence[int], capture: Capture | None = None) -> Array:
        """Logits [tokens, vocabulary]; `capture`, if given, receives the named intermediates."""
        return self.head(self.final_hidden(ids, capture))

    def final_hidden(self, ids: Sequence[int], capture: Capture | None = None) -> Array:
        """The residual stream after the last norm, [tokens, hidden]: what `head` turns into logits."""
        seen: Capture = {} if capture is None else capture
        x = self.weight("token_embd.weight", np.asarray(ids))
        if self.is_gemma:
            x *= np.float32(math.sqrt(self.hidden_size))
        for i in range(self.layers):
            seen[f"blk.{i}.attn_norm"] = h = self.norm(x, f"blk.{i}.attn_norm")
            seen[f"blk.{i}.attn"] = h = self.attention(h, i)
            seen[f"blk.{i}.attn_out"] = h = self.linear(h, f"blk.{i}.attn_output")
            seen[f"blk.{i}.attn_residual"] = x = x + self.norm(h, f"blk.{i}.post_attention_norm")
            seen[f"blk.{i}.ffn_norm"] = h = self.norm(x, f"blk.{i}.ffn_norm")
            if f"blk.{i}.ffn_gate_exps.weight" in self.tensors:
                seen[f"blk.{i}.ffn_out"] = h = self.experts(h, f"blk.{i}.ffn_")
            else:
                gate, up = self.linear(h, f"blk.{i}.ffn_gate"), self.linear(h, f"blk.{i}.ffn_up")
                seen[f"blk.{i}.ffn_act"] = h = (gelu if self.is_gemma else silu)(gate) * up
                seen[f"blk.{i}.ffn_out"] = h = self.linear(h, f"blk.{i}.ffn_down")
            seen[f"blk.{i}.out"] = x = x + self.norm(h, f"blk.{i}.post_ffw_norm")
        seen["result_norm"] = x = self.norm(x, "output_norm")
        return x

    def experts(self, x: Array, name: str) -> Array:
        """A mixture of experts, one token after the other."""
        experts, used = self.get("expert_count"), self.get("expert_used_count")
        gate, up, down = (
            self.weight(f"{name}{part}_exps.weight").reshape(self.tensors[f"{name}{part}_exps.weight"].shape)
            for part in ("gate", "up", "down")
        )
        scores = np.exp(self.linear(x, f"{name}gate_inp"))
        scores /= scores.sum(axis=1, keepdims=True)
        out = np.zeros_like(x)
        for token in range(len(x)):
            chosen = np.argsort(-scores[token], kind="stable")[:used]
            weights = scores[token, chosen]
            if self.architecture not in ("qwen2moe", "olmoe"):
                weights = weights / weights.sum()
            for expert, weight in zip(chosen, weights, strict=True):
                assert expert < experts
                h = silu(gate[expert] @ x[token]) * (up[expert] @ x[token])
                out[token] += weight * (down[expert] @ h)
        if f"{name}gate_shexp.weight" in self.tensors:
            h = silu(self.linear(x, f"{name}gate_shexp")) * self.linear(x, f"{name}up_shexp")
            share = 1 / (1 + np.exp(-(x @ self.weight(f"{name}gate_inp_shexp.weight"))))
            out += share[:, None] * self.linear(h, f"{name}down_shexp")
        return out

    def head(self, hidden: Array) -> Array:
        if self.head_weight is None:  # kept: callers that cannot hold all logits come row block by row block
            tied = "output.weight" not in self.tensors
            self.head_weight = self.weight("token_embd.weight" if tied else "output.weight")
        return soft_cap(hidden @ self.head_weight.T, self.soft_cap_of("final_logit_softcapping", 30.0))

    def attention(self, x: Array, layer: int) -> Array:
        tokens = len(x)
        sliding = self.is_sliding(layer)
        window = self.window if sliding else tokens
        # [heads, tokens, head_size]; the query heads that share a KV head are neighbours
        q, k, v = (
            self.projection(x, f"blk.{layer}.attn_{name}").reshape(tokens, -1, self.head_size).swapaxes(0, 1)
            for name in "qkv"
        )
        rotation = self.rotation(tokens, sliding)
        if self.architecture != "olmoe":  # which has normed Q and K over all heads at once
            q, k = (self.norm(y, f"blk.{layer}.attn_{name}_norm") for name, y in (("q", q), ("k", k)))
        q, k = self.rotate(q, rotation) * np.float32(self.score_scale()), self.rotate(k, rotation)
        k, v = (np.repeat(kv, self.heads // self.kv_heads, axis=0) for kv in (k, v))
        cap = self.soft_cap_of("attn_logit_softcapping", 50.0)
        out = np.empty((tokens, self.heads, self.head_size), np.float32)
        for start in range(0, tokens, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, tokens)
            first = max(0, start - window + 1)
            scores = soft_cap(q[:, start:stop] @ k[:, first:stop].swapaxes(1, 2), cap)
            distance = np.arange(start, stop)[:, None] - np.arange(first, stop)
            scores += np.where((distance >= 0) & (distance < window), np.float32(0), np.float32(-np.inf))
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[start:stop] = (weights @ v[:, first:stop]).swapaxes(0, 1)
        return out.reshape(tokens, -1)

    def projection(self, x: Array, name: str) -> Array:
        y = self.linear(x, name)
        return self.norm(y, f"{name}_norm") if self.architecture == "olmoe" else y

    def is_sliding(self, layer: int) -> bool:
        if not self.window:
            return False
        pattern = self.get("attention.sliding_window_pattern", PERIOD.get(self.architecture, self.layers + 1))
        return bool((layer + 1) % pattern if isinstance(pattern, int) else pattern[layer])

    def score_scale(self) -> float:
        is_27b = (self.architecture, self.layers) in (("gemma3", 62), ("gemma2", 46))
        return (self.hidden_size // self.heads if is_27b else self.head_size) ** -0.5

    def rotation(self, tokens: int, sliding: bool) -> tuple[Array, Array]:
        """Cosine and sine, each [tokens, head_size / 2], with the file's RoPE scaling."""
        local = sliding and self.architecture == "gemma3"  # its sliding layers keep their base, unscaled
        base = self.get("rope.freq_base_swa" if local else "rope.freq_base", 10_000.0)
        pair = np.arange(self.head_size // 2)
        frequency = base ** (-2.0 * pair / self.head_size)
        if "rope_freqs.weight" in self.tensors:
            frequency /= self.weight("rope_freqs.weight")
        scaling = "none" if local else self.get("rope.scaling.type", "linear")
        factor = 1.0 if scaling == "none" else self.get("rope.scaling.factor", 1.0)
        magnitude = 1.0
        if scaling == "yarn":
            # Pairs that turn often within the original context keep their frequency; slow ones are stretched.
            trained = self.get("rope.scaling.original_context_length")

            def pair_that_turns(times: float) -> float:
                return self.head_size * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

            low, high = max(math.floor(pair_that_turns(32)), 0), math.ceil(pair_that_turns(1))
            stretched = np.clip((pair - low) / max(high - low, 0.001), 0, 1)
            frequency *= 1 - stretched + stretched / factor
            magnitude = 1 + 0.1 * math.log(factor)
        else:
            frequency /= factor
        angle = np.arange(tokens)[:, None] * frequency
        cos, sin = magnitude * np.cos(angle), magnitude * np.sin(angle)
        return cos.astype(np.float32), sin.astype(np.float32)

    def rotate(self, x: Array, rotation: tuple[Array, Array]) -> Array:
        """llama turns neighbours (0,1)(2,3)...; the others turn halves (0,n/2)(1,n/2+1)..."""
        cos, sin = rotation
        half = self.head_size // 2
        a, b = (x[..., ::2], x[..., 1::2]) if self.architecture == "llama" else (x[..., :half], x[..., half:])
        turned = a * cos - b * sin, a * sin + b * cos
        # Queries and keys are turned alike, then only multiplied with each other: any order of pairs will do.
        return np.concatenate(turned, axis=-1)

    def norm(self, x: Array, name: str) -> Array:
        """RMS norm, in the architectures that have this one."""
        if f"{name}.weight" not in self.tensors:
            return x
        squares = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(squares + self.epsilon) * self.weight(f"{name}.weight")

    def linear(self, x: Array, name: str) -> Array:
        y: Array = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.tensors else y

    def weight(self, name: str, rows: Any = slice(None)) -> Array:
        values = formats.dequantise(self.tensors[name].format, self.file.raw(name)[rows])
        return values.squeeze(0) if len(self.tensors[name].shape) == 1 else values

    def soft_cap_of(self, key: str, gemma2: float) -> float:
        return float(self.get(key, gemma2 if self.architecture == "gemma2" else 0.0))

    def get(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        assert value is not None, f"the file has no {self.architecture}.{key}"
        return value


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    tanh = np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x))
    return np.float32(0.5) * x * (1 + tanh)


def soft_cap(x: Array, cap: float) -> Array:
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap else x
