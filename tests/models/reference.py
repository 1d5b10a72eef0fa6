"""A forward pass to compare with: NumPy, float32, the whole sequence at once, straight from a GGUF file.

It shares nothing with the engine but the file reader and the dequantisation. Read it as the definition of the
architectures: they differ only where a line below says so.
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
# Every n-th layer is global; in other models with a window, none.
PERIOD = {"gemma2": 2, "gemma3": 6, "olmo2": 4, "cohere2": 4, "exaone4": 4, "gpt-oss": 2, "gemma4": 6}
# Pairs of neighbours are rotated (0,1)(2,3)...; in other models those of halves (0,n/2)(1,n/2+1)...
NEIGHBOURS = [
    "llama",
    "mistral3",
    "smollm3",
    "granite",
    "granitemoe",
    "granitehybrid",
    "glm4",
    "cohere2",
    "ernie4_5",
    "ernie4_5-moe",
    "deepseek2",
]
NORMED_OVER_HEADS = ("olmoe", "olmo2")  # Q and K, all heads at once; in other models each head
# Architectures where the norm before the feed-forward is named after attention.
SECOND_NORM = "seed_oss", "gpt-oss", "glm4moe", "qwen35", "qwen35moe", "qwen3next"
GATED = ("qwen35", "qwen35moe", "qwen3next")  # attention whose output has a gate
QUERY_BLOCK = 256  # rows of the score matrix held at once


class ReferenceModel:
    def __init__(self, path: str | Path) -> None:
        self.file = GGUF.open(path)
        self.metadata, self.tensors = self.file.metadata, self.file.tensors
        self.head_weight: Array | None = None
        self.stored: dict[bool, tuple[Array, Array]] = {}  # Gemma 4's last keys and values, sliding or not
        self.read_sizes()

    def read_sizes(self) -> None:
        self.architecture: str = self.metadata["general.architecture"]
        self.is_gemma = self.architecture in ("gemma2", "gemma3", "gemma4")
        self.layers: int = self.get("block_count") - self.get("nextn_predict_layers", 0)
        self.hidden_size: int = self.get("embedding_length")
        self.heads: int = self.get("attention.head_count")
        # Layers without attention have none.
        self.kv_heads = int(np.max(self.get("attention.head_count_kv", self.heads)))
        self.head_size: int = self.get("attention.key_length", self.hidden_size // (self.heads or 1))
        rms = f"{self.architecture}.attention.layer_norm_rms_epsilon" in self.metadata
        self.subtract_mean = not rms  # a file may have both
        kind = "layer_norm" if self.subtract_mean else "layer_norm_rms"
        self.epsilon = np.float32(self.get(f"attention.{kind}_epsilon"))
        self.whole_pairs = self.architecture != "gpt-oss"  # where YaRN begins and ends
        self.rotated: int = self.get("rope.dimension_count", self.head_size)
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
        x *= np.float32(self.get("embedding_scale", 1.0))
        scale = np.float32(self.get("residual_scale", 1.0))
        inputs = self.per_layer_inputs(x, ids) if "per_layer_model_proj.weight" in self.tensors else None
        for i in range(self.layers):
            seen[f"blk.{i}.attn_norm"] = before = self.norm(x, f"blk.{i}.attn_norm")
            if f"blk.{i}.ffn_up_shexp.weight" in self.tensors and self.architecture == "nemotron_h_moe":
                seen[f"blk.{i}.ffn_out"] = h = self.squared_experts(before, f"blk.{i}.")
            elif self.architecture == "nemotron_h" and f"blk.{i}.ffn_up.weight" in self.tensors:
                seen[f"blk.{i}.ffn_act"] = h = self.activated(before, f"blk.{i}.ffn_")
                h = self.linear(h, f"blk.{i}.ffn_down")
            elif f"blk.{i}.ssm_in.weight" in self.tensors:
                seen[f"blk.{i}.attn_out"] = h = self.mamba2(before, f"blk.{i}.")
            elif f"blk.{i}.ssm_out.weight" in self.tensors:
                seen[f"blk.{i}.ssm_norm"] = h = self.gated_delta_net(before, f"blk.{i}.")
                seen[f"blk.{i}.attn_out"] = h = self.linear(h, f"blk.{i}.ssm_out")
            elif f"blk.{i}.shortconv.conv.weight" in self.tensors:
                seen[f"blk.{i}.conv_out"] = h = self.gated_convolution(before, f"blk.{i}.shortconv.")
                seen[f"blk.{i}.attn_out"] = h = self.linear(h, f"blk.{i}.shortconv.out_proj")
            else:
                seen[f"blk.{i}.attn"] = h = self.attention(before, i)
                seen[f"blk.{i}.attn_out"] = h = self.linear(h, f"blk.{i}.attn_output")
            if self.architecture == "falcon-h1":  # which has both
                h = h + self.linear(self.attention(before, i), f"blk.{i}.attn_output")
            if self.architecture in ("mamba2", "nemotron_h", "nemotron_h_moe"):  # whose layers have one part
                seen[f"blk.{i}.out"] = x = x + h
                continue
            if self.architecture not in SECOND_NORM:
                h = self.norm(h, f"blk.{i}.post_attention_norm")
            seen[f"blk.{i}.attn_residual"] = x = x + scale * h
            second = "post_attention_norm" if self.architecture in SECOND_NORM else "ffn_norm"
            seen[f"blk.{i}.{second}"] = h = self.norm(x, f"blk.{i}.{second}")
            h = before if self.architecture == "cohere2" else h  # attention and feed-forward side by side
            if self.architecture == "gemma4" and f"blk.{i}.ffn_gate_inp.weight" in self.tensors:
                h = self.side_by_side(x, h, f"blk.{i}.")
            elif f"blk.{i}.ffn_gate_exps.weight" in self.tensors:
                seen[f"blk.{i}.ffn_out"] = h = self.experts(h, f"blk.{i}.ffn_")
            else:
                seen[f"blk.{i}.ffn_act"] = h = self.activated(h, f"blk.{i}.ffn_")
                seen[f"blk.{i}.ffn_out"] = h = self.linear(h, f"blk.{i}.ffn_down")
            x = x + scale * self.norm(h, f"blk.{i}.post_ffw_norm")
            if inputs is not None:
                h = gelu(self.linear(x, f"blk.{i}.inp_gate")) * inputs[:, i]
                x = x + self.norm(self.linear(h, f"blk.{i}.proj"), f"blk.{i}.post_norm")
            if f"blk.{i}.layer_output_scale.weight" in self.tensors:
                x = x * self.weight(f"blk.{i}.layer_output_scale.weight")
            seen[f"blk.{i}.out"] = x
        last = "token_embd_norm" if self.architecture.startswith("lfm2") else "output_norm"
        seen["result_norm"] = x = self.norm(x, last)
        return x

    def draft_logits(self, ids: Sequence[int]) -> Array:
        """The draft head's logits for each token from the third on, and one more: [tokens - 1, vocabulary]."""
        return self.head(self.draft_hidden(ids, self.final_hidden(ids)[:-1]))

    def draft(self, ids: Sequence[int], count: int) -> list[int]:
        """The likeliest tokens after a text: each reads the draft head's hidden state of the one before."""
        hidden, draft = self.final_hidden(ids)[:-1], list[int]()
        for _ in range(count):
            last = self.draft_hidden([*ids, *draft], hidden)[-1:]
            hidden = np.vstack([hidden, last])
            draft.append(int(self.head(last).argmax()))
        return draft

    def draft_hidden(self, ids: Sequence[int], hidden: Array) -> Array:
        """`hidden`: the hidden state of each token but the last."""
        name = f"blk.{self.layers}.nextn."
        embedded = self.weight("token_embd.weight", np.asarray(ids[1:]))
        both = np.hstack([self.norm(embedded, f"{name}enorm"), self.norm(hidden, f"{name}hnorm")])
        x = self.linear(both, f"{name}eh_proj")
        layer = f"blk.{self.layers}."
        h = self.attention(self.norm(x, f"{layer}attn_norm"), self.layers)
        x = x + self.linear(h, f"{layer}attn_output")
        h = self.norm(x, f"{layer}post_attention_norm")
        if f"{layer}ffn_gate_exps.weight" in self.tensors:
            x = x + self.experts(h, f"{layer}ffn_")
        else:
            x = x + self.linear(self.activated(h, f"{layer}ffn_"), f"{layer}ffn_down")
        return self.norm(x, f"{name}shared_head_norm")

    def per_layer_inputs(self, x: Array, ids: Sequence[int]) -> Array:
        """The embedding that each layer of Gemma 4 E2B and E4B has of a token: [tokens, layers, columns]."""
        table = self.weight("per_layer_token_embd.weight", np.asarray(ids)).reshape(len(x), self.layers, -1)
        projected = self.linear(x, "per_layer_model_proj").reshape(table.shape) / math.sqrt(self.hidden_size)
        normed = self.norm(projected, "per_layer_proj_norm")
        inputs: Array = (normed + math.sqrt(table.shape[-1]) * table) / math.sqrt(2)
        return inputs.astype(np.float32)

    def side_by_side(self, x: Array, h: Array, name: str) -> Array:
        """Gemma 4's dense feed-forward of `h`, plus experts whose router and input are norms of `x`."""
        dense = self.linear(self.activated(h, f"{name}ffn_"), f"{name}ffn_down")
        normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        scaled = normed * self.weight(f"{name}ffn_gate_inp.scale") / np.float32(math.sqrt(self.hidden_size))
        logits, h = self.linear(scaled, f"{name}ffn_gate_inp"), self.norm(x, f"{name}pre_ffw_norm_2")
        scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        gate_up, down = (
            self.weight(f"{name}ffn_{part}_exps.weight").reshape(
                self.tensors[f"{name}ffn_{part}_exps.weight"].shape
            )
            for part in ("gate_up", "down")
        )
        scales, mixed = self.weight(f"{name}ffn_down_exps.scale"), np.zeros_like(x)
        for token in range(len(x)):
            chosen = np.argsort(-scores[token], kind="stable")[: self.get("expert_used_count")]
            for expert in chosen:
                gate, up = np.split(gate_up[expert] @ h[token], 2)
                weight = scores[token, expert] / scores[token, chosen].sum() * scales[expert]
                mixed[token] += weight * (down[expert] @ (gelu(gate) * up))
        return self.norm(dense, f"{name}post_ffw_norm_1") + self.norm(mixed, f"{name}post_ffw_norm_2")

    def activated(self, x: Array, name: str) -> Array:
        """The feed-forward up to its last matrix."""
        up = self.linear(x, f"{name}up")
        if self.architecture == "starcoder2":
            return gelu(up)
        if self.architecture == "nemotron_h":
            return np.square(np.maximum(up, 0))
        if f"{name}gate.weight" in self.tensors:
            gate = self.linear(x, f"{name}gate")
        else:  # the file has both in one matrix
            gate, up = np.split(up, 2, axis=1)
        return (gelu if self.is_gemma else silu)(gate) * up

    def experts(self, x: Array, name: str) -> Array:
        """A mixture of experts, one token after the other."""
        experts, used = self.get("expert_count"), self.get("expert_used_count")
        gate, up, down = (
            self.weight(f"{name}{part}_exps.weight").reshape(self.tensors[f"{name}{part}_exps.weight"].shape)
            for part in ("gate", "up", "down")
        )
        logits = self.linear(x, f"{name}gate_inp")
        if self.architecture in ("glm4moe", "lfm2moe") or self.get("expert_gating_func", 1) == 2:
            scores = 1 / (1 + np.exp(-logits))
        else:
            scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        choice, bias = scores, f"{name.removesuffix('ffn_')}exp_probs_b.bias"
        if bias in self.tensors:
            choice = scores + self.weight(bias)
        biases = {}
        for part in ("gate", "up", "down"):
            stored = f"{name}{part}_exps.bias"
            biases[part] = (
                self.weight(stored) if stored in self.tensors else np.zeros((experts, 1), np.float32)
            )
        activate = clamped if self.architecture == "gpt-oss" else lambda gate, up: silu(gate) * up
        out = np.zeros_like(x)
        for token in range(len(x)):
            chosen = np.argsort(-self.in_best_groups(choice[token]), kind="stable")[:used]
            weights = scores[token, chosen]
            if self.get("expert_weights_norm", self.architecture not in ("qwen2moe", "olmoe")):
                weights = weights / weights.sum()
            weights = weights * np.float32(self.get("expert_weights_scale", 1.0))
            for expert, weight in zip(chosen, weights, strict=True):
                assert expert < experts
                gated = gate[expert] @ x[token] + biases["gate"][expert]
                h = activate(gated, up[expert] @ x[token] + biases["up"][expert])
                out[token] += weight * (down[expert] @ h + biases["down"][expert])
        if f"{name}gate_shexp.weight" in self.tensors:
            h = silu(self.linear(x, f"{name}gate_shexp")) * self.linear(x, f"{name}up_shexp")
            shared = self.linear(h, f"{name}down_shexp")
            if f"{name}gate_inp_shexp.weight" in self.tensors:
                share = 1 / (1 + np.exp(-(x @ self.weight(f"{name}gate_inp_shexp.weight"))))
                shared = share[:, None] * shared
            out += shared
        return out

    def in_best_groups(self, choice: Array) -> Array:
        """A token's scores by which experts are chosen, without those of other groups than the best."""
        groups = choice.reshape(self.get("expert_group_count", 1), -1)
        if len(groups) > 1:
            ranks = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
            groups = np.where(
                np.argsort(np.argsort(-ranks))[:, None] < self.get("expert_group_used_count"), groups, -np.inf
            )
        return groups.reshape(-1)

    def squared_experts(self, x: Array, name: str) -> Array:
        """Nemotron's experts, which have no gate, beside a shared one. Some read and write a projection of the rows."""
        up, down = (
            self.weight(f"{name}ffn_{part}_exps.weight").reshape(
                self.tensors[f"{name}ffn_{part}_exps.weight"].shape
            )
            for part in ("up", "down")
        )
        scores = 1 / (1 + np.exp(-self.linear(x, f"{name}ffn_gate_inp")))
        bias = f"{name}exp_probs_b.bias"
        choice = scores + (self.weight(bias) if bias in self.tensors else 0)
        latent = f"{name}ffn_latent_down.weight" in self.tensors
        rows = self.linear(x, f"{name}ffn_latent_down") if latent else x
        out = np.zeros_like(rows)
        for token in range(len(x)):
            chosen = np.argsort(-choice[token], kind="stable")[: self.get("expert_used_count")]
            total = scores[token, chosen].sum()
            for expert in chosen:
                weight = np.float32(self.get("expert_weights_scale")) * scores[token, expert] / total
                out[token] += weight * (down[expert] @ np.square(np.maximum(up[expert] @ rows[token], 0)))
        out = self.linear(out, f"{name}ffn_latent_up") if latent else out
        shared = np.square(np.maximum(self.linear(x, f"{name}ffn_up_shexp"), 0))
        return out + self.linear(shared, f"{name}ffn_down_shexp")

    def head(self, hidden: Array) -> Array:
        if self.head_weight is None:  # kept: callers that cannot hold all logits come row block by row block
            tied = "output.weight" not in self.tensors
            self.head_weight = self.weight("token_embd.weight" if tied else "output.weight")
        scale = self.get("logit_scale", 1.0)
        scale = 1 / scale if self.architecture.startswith("granite") else scale
        logits = np.float32(scale) * (hidden @ self.head_weight.T)
        return soft_cap(logits, self.soft_cap_of("final_logit_softcapping", 30.0))

    def attention(self, x: Array, layer: int) -> Array:
        tokens = len(x)
        sliding = self.is_sliding(layer)
        window = self.window if sliding else tokens
        heads = {"gemma4": self.gemma4_heads, "deepseek2": self.latent_heads}
        q, k, v = heads.get(self.architecture, self.rotated_heads)(x, layer)
        q = q * np.float32(self.score_scale())
        k, v = (np.repeat(kv, self.heads // len(k), axis=0) for kv in (k, v))
        cap = self.soft_cap_of("attn_logit_softcapping", 50.0)
        out = np.empty((tokens, self.heads, v.shape[-1]), np.float32)
        for start in range(0, tokens, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, tokens)
            first = max(0, start - window + 1)
            scores = soft_cap(q[:, start:stop] @ k[:, first:stop].swapaxes(1, 2), cap)
            distance = np.arange(start, stop)[:, None] - np.arange(first, stop)
            scores += np.where((distance >= 0) & (distance < window), np.float32(0), np.float32(-np.inf))
            if f"blk.{layer}.attn_sinks.weight" in self.tensors:  # one more score, whose value is 0
                sinks = self.weight(f"blk.{layer}.attn_sinks.weight")[:, None, None]
                scores = np.concatenate([scores, np.broadcast_to(sinks, (*scores.shape[:2], 1))], axis=-1)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            weights = weights[..., : stop - first]
            out[start:stop] = (weights @ v[:, first:stop]).swapaxes(0, 1)
        if self.architecture in GATED:
            both = self.linear(x, f"blk.{layer}.attn_q").reshape(tokens, self.heads, 2, self.head_size)
            out = out / (1 + np.exp(-both[:, :, 1]))
        return out.reshape(tokens, -1)

    def rotated_heads(self, x: Array, layer: int) -> tuple[Array, Array, Array]:
        """Q, K and V, each [heads, tokens, head_size]; the query heads that share a KV head are neighbours."""
        tokens = len(x)
        q, k, v = (
            y.reshape(tokens, -1, self.head_size).swapaxes(0, 1)
            for y in self.projections(x, f"blk.{layer}.attn_")
        )
        if self.architecture.startswith("hunyuan"):  # which rotates before it norms
            q, k = self.rotated_pair(q, k, layer, tokens)
        if self.architecture not in NORMED_OVER_HEADS:
            q, k = (self.norm(y, f"blk.{layer}.attn_{name}_norm") for name, y in (("q", q), ("k", k)))
        if not self.architecture.startswith("hunyuan"):
            q, k = self.rotated_pair(q, k, layer, tokens)
        return q, k, v

    def latent_heads(self, x: Array, layer: int) -> tuple[Array, Array, Array]:
        """Keys and values of each head are made of a latent; all heads have the part of a key that is rotated."""
        name, latent = f"blk.{layer}.attn_", self.get("attention.kv_lora_rank")
        size, rotation = self.get("attention.key_length_mla"), self.rotation(len(x), False)
        stored = self.linear(x, f"{name}kv_a_mqa")
        latents = self.norm(stored[:, :latent], f"{name}kv_a_norm")
        low = f"{name}q_a.weight" in self.tensors
        q = (
            self.linear(self.norm(self.linear(x, f"{name}q_a"), f"{name}q_a_norm"), f"{name}q_b")
            if low
            else None
        )
        q = (self.linear(x, f"{name}q") if q is None else q).reshape(len(x), -1, size).swapaxes(0, 1)
        own = size - self.rotated
        k, v = (
            self.weight(f"{name}{part}_b.weight").reshape(self.tensors[f"{name}{part}_b.weight"].shape)
            for part in "kv"
        )
        rotated = np.broadcast_to(
            self.rotate(stored[None, :, latent:], rotation), (len(q), len(x), self.rotated)
        )
        keys = np.concatenate([latents @ k, rotated], axis=-1)
        return (
            np.concatenate([q[..., :own], self.rotate(q[..., own:], rotation)], axis=-1),
            keys,
            latents @ v.swapaxes(1, 2),
        )

    def gemma4_heads(self, x: Array, layer: int) -> tuple[Array, Array, Array]:
        """The last layers read the keys and values of the last layer of their kind that has its own."""
        sliding, name = self.is_sliding(layer), f"blk.{layer}.attn_"
        size, rotation = self.get(f"attention.key_length{'_swa' * sliding}"), self.rotation(len(x), sliding)

        def heads(part: str) -> Array:
            return self.linear(x, f"{name}{part}").reshape(len(x), -1, size).swapaxes(0, 1)

        q = self.rotate(self.norm(heads("q"), f"{name}q_norm"), rotation)
        if layer < self.layers - self.get("attention.shared_kv_layers", 0):
            v = heads("v" if f"{name}v.weight" in self.tensors else "k")
            v = v / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + self.epsilon)
            self.stored[sliding] = self.rotate(self.norm(heads("k"), f"{name}k_norm"), rotation), v
        return q, *self.stored[sliding]

    def gated_delta_net(self, x: Array, name: str) -> Array:
        """Linear attention with a state [key, value] for each head, one token after the other."""
        keys, heads, dim = (self.get(f"ssm.{key}") for key in ("group_count", "time_step_rank", "state_size"))
        tokens = len(x)
        mixed = silu(self.convolved(self.linear(x, f"{name}attn_qkv"), f"{name}ssm_conv1d"))
        q, k, v = np.split(mixed, [keys * dim, 2 * keys * dim], axis=1)
        q, k = (y.reshape(tokens, keys, dim) for y in (q, k))
        q, k = (y / np.sqrt(np.square(y).sum(axis=2, keepdims=True) + 1e-6) for y in (q, k))
        if self.architecture == "qwen3next":  # neighbours share a key; in Qwen 3.5 heads `keys` apart
            q, k = (np.repeat(y, heads // keys, axis=1) for y in (q, k))
            both = self.linear(x, f"{name}ssm_ba").reshape(tokens, keys, 2, heads // keys)
            beta, alpha = (both[:, :, i].reshape(tokens, heads) for i in (0, 1))
        else:
            q, k = (np.tile(y, (1, heads // keys, 1)) for y in (q, k))
            beta, alpha = self.linear(x, f"{name}ssm_beta"), self.linear(x, f"{name}ssm_alpha")
        v = v.reshape(tokens, heads, -1)
        if f"{name}ssm_dt.bias" in self.tensors:
            alpha = alpha + self.weight(f"{name}ssm_dt.bias")
        decay = np.exp(self.weight(f"{name}ssm_a") * np.logaddexp(0, alpha))
        beta = 1 / (1 + np.exp(-beta))
        state, out = np.zeros((heads, dim, v.shape[2]), np.float32), np.empty_like(v)
        for t in range(tokens):
            state = state * decay[t][:, None, None]
            delta = (v[t] - np.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
            state = state + k[t][:, :, None] * delta[:, None]
            out[t] = np.einsum("hkv,hk->hv", state, q[t]) * dim**-0.5
        normed = self.norm(out, f"{name}ssm_norm").reshape(tokens, -1)
        return normed * silu(self.linear(x, f"{name}attn_gate"))

    def mamba2(self, x: Array, name: str) -> Array:
        """A layer of Mamba-2, with a state [rows, columns] for each head, one token after the other."""
        groups, heads, rows, inner = (
            self.get(f"ssm.{key}") for key in ("group_count", "time_step_rank", "state_size", "inner_size")
        )
        shared, tokens = groups * rows, len(x)
        gate, xbc, dt = np.split(self.linear(x, f"{name}ssm_in"), [inner, 2 * inner + 2 * shared], axis=1)
        xbc = silu(self.convolved(xbc, f"{name}ssm_conv1d"))
        values, b, c = np.split(xbc, [inner, inner + shared], axis=1)
        values = values.reshape(tokens, heads, -1)
        b, c = (np.repeat(y.reshape(tokens, groups, rows), heads // groups, axis=1) for y in (b, c))
        if f"{name}ssm_dt.bias" in self.tensors:
            dt = dt + self.weight(f"{name}ssm_dt.bias")
        dt = np.logaddexp(0, dt)
        decay = np.exp(self.weight(f"{name}ssm_a")[:, 0] * dt)
        state, out = np.zeros((heads, rows, inner // heads), np.float32), np.empty_like(values)
        for t in range(tokens):
            state = state * decay[t][:, None, None] + np.einsum("hs,h,hd->hsd", b[t], dt[t], values[t])
            out[t] = np.einsum("hsd,hs->hd", state, c[t]) + self.weight(f"{name}ssm_d") * values[t]
        y = out.reshape(tokens, inner) * silu(gate)
        if f"{name}ssm_norm.weight" in self.tensors:
            y = self.norm(y.reshape(tokens, groups, -1), f"{name}ssm_norm").reshape(tokens, inner)
        return self.linear(y, f"{name}ssm_out")

    def convolved(self, x: Array, name: str) -> Array:
        """Each column's last inputs times its taps."""
        weight = self.weight(f"{name}.weight")
        taps, tokens = weight.shape[1], len(x)
        padded = np.vstack([np.zeros((taps - 1, x.shape[1]), np.float32), x])
        y: Array = sum(padded[j : j + tokens] * weight[:, j] for j in range(taps))
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.tensors else y

    def gated_convolution(self, x: Array, name: str) -> Array:
        """LFM2's convolution between two gates."""
        first, last, values = np.split(self.linear(x, f"{name}in_proj"), 3, axis=1)
        return last * self.convolved(first * values, f"{name}conv")

    def projections(self, x: Array, name: str) -> list[Array]:
        """Q, K and V, which some files have in one matrix."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        if self.architecture in GATED:  # each head of Q is followed by its gate
            both = self.linear(x, f"{name}q").reshape(len(x), self.heads, 2, self.head_size)
            return [both[:, :, 0].reshape(len(x), -1), *(self.linear(x, f"{name}{part}") for part in "kv")]
        if f"{name}qkv.weight" in self.tensors:
            parts = np.split(self.linear(x, f"{name}qkv"), [q, q + kv], axis=1)
        else:
            parts = [self.linear(x, f"{name}{part}") for part in "qkv"]
        if self.architecture in NORMED_OVER_HEADS:
            parts[:2] = self.norm(parts[0], f"{name}q_norm"), self.norm(parts[1], f"{name}k_norm")
        return parts

    def rotated_pair(self, q: Array, k: Array, layer: int, tokens: int) -> tuple[Array, Array]:
        """Q and K rotated by position, in the layers that do so."""
        sliding = self.is_sliding(layer)
        global_alone = self.architecture in ("cohere2", "exaone4") and self.window and not sliding
        if self.architecture.startswith("nemotron_h") or not self.get("rope.scaling.finetuned", True):
            return q, k
        if global_alone or (self.architecture == "smollm3" and (layer + 1) % 4 == 0):
            return q, k
        rotation = self.rotation(tokens, sliding)
        q, k = self.rotate(q, rotation), self.rotate(k, rotation)
        if growth := self.get("attention.temperature_scale", 0.0):
            times = np.arange(tokens) // self.get("rope.scaling.original_context_length")
            q = q * (1 + growth * np.log(1 + times)).astype(np.float32)[:, None]
        return q, k

    def is_sliding(self, layer: int) -> bool:
        if not self.window:
            return False
        pattern = self.get("attention.sliding_window_pattern", PERIOD.get(self.architecture, self.layers + 1))
        return bool((layer + 1) % pattern if isinstance(pattern, int) else pattern[layer])

    def score_scale(self) -> float:
        is_27b = (self.architecture, self.layers) in (("gemma3", 62), ("gemma2", 46))
        if self.architecture == "gemma4":
            return 1.0
        if self.architecture == "deepseek2":
            multiplier, factor = (
                self.get("rope.scaling.yarn_log_multiplier", 0.0),
                self.get("rope.scaling.factor", 1.0),
            )
            return float(
                self.get("attention.key_length_mla") ** -0.5 * (1 + multiplier * math.log(factor)) ** 2
            )
        default = (self.hidden_size // self.heads if is_27b else self.head_size) ** -0.5
        return float(self.get("attention.scale", default))

    def rotation(self, tokens: int, sliding: bool) -> tuple[Array, Array]:
        """Cosine and sine, each [tokens, rotated / 2], with the file's RoPE scaling."""
        # Unscaled, some with a base of their own.
        local = sliding and self.architecture in ("gemma3", "gemma4", "olmo2")
        base = self.get("rope.freq_base", 10_000.0)
        if local:
            base = self.get("rope.freq_base_swa", 10_000.0 if self.architecture == "gemma3" else base)
        rotated = self.get("rope.dimension_count_swa", self.rotated) if local else self.rotated
        pair = np.arange(rotated // 2)
        frequency = base ** (-2.0 * pair / rotated)
        if "rope_freqs.weight" in self.tensors and not local:
            frequency /= self.weight("rope_freqs.weight")
        if "rope_factors_long.weight" in self.tensors:
            length = "long" if tokens > self.get("rope.scaling.original_context_length") else "short"
            frequency /= self.weight(f"rope_factors_{length}.weight")
        scaling = "none" if local else self.get("rope.scaling.type", "linear")
        factor = 1.0 if scaling == "none" else self.get("rope.scaling.factor", 1.0)
        magnitude = self.get("rope.scaling.attn_factor", 1.0)
        if scaling == "yarn":
            # Pairs that turn often within the original context keep their frequency; slow ones are stretched.
            trained = self.get("rope.scaling.original_context_length")

            def pair_that_turns(times: float) -> float:
                return self.rotated * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

            low, high = pair_that_turns(32), pair_that_turns(1)
            if self.whole_pairs:
                low, high = math.floor(low), math.ceil(high)
            low = max(low, 0)
            stretched = np.clip((pair - low) / max(high - low, 0.001), 0, 1)
            frequency *= 1 - stretched + stretched / factor
            multiplier = self.get("rope.scaling.yarn_log_multiplier", 0.0)
            divisor = 1 + 0.1 * multiplier * math.log(factor)
            if self.architecture == "deepseek2" and multiplier:  # whose scores are scaled instead
                divisor = 1 + 0.1 * math.log(factor)
            magnitude *= (1 + 0.1 * math.log(factor)) / divisor
        else:
            frequency /= factor
        angle = np.arange(tokens)[:, None] * frequency
        cos, sin = magnitude * np.cos(angle), magnitude * np.sin(angle)
        return cos.astype(np.float32), sin.astype(np.float32)

    def rotate(self, x: Array, rotation: tuple[Array, Array]) -> Array:
        cos, sin = rotation
        half = cos.shape[-1]
        x, rest = x[..., : 2 * half], x[..., 2 * half :]
        neighbours = self.architecture in NEIGHBOURS
        a, b = (x[..., ::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
        turned = a * cos - b * sin, a * sin + b * cos, rest
        # Queries and keys are turned alike, then only multiplied with each other: any order of pairs will do.
        return np.concatenate(turned, axis=-1)

    def norm(self, x: Array, name: str) -> Array:
        """RMS or layer norm, in the architectures that have this one."""
        weight = name if name in self.tensors else f"{name}.weight"
        if weight not in self.tensors:
            return x
        if self.subtract_mean:
            x = x - x.mean(axis=-1, keepdims=True)
        squares = np.mean(x * x, axis=-1, keepdims=True)
        y = x / np.sqrt(squares + self.epsilon) * self.weight(weight)
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.tensors else y

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


def clamped(gate: Array, up: Array) -> Array:
    gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
    return gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1)


def gelu(x: Array) -> Array:
    tanh = np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x))
    return np.float32(0.5) * x * (1 + tanh)


def soft_cap(x: Array, cap: float) -> Array:
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap else x
