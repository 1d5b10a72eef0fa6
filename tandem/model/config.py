"""The configuration of a model, read from the metadata of its file: one class for all families."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from tandem.gguf.cursor import label
from tandem.gguf.file import GGUF
from tandem.gguf.formats import dequantise
from tandem.kernels.abi import GLU_ROWS, MAX_EXPERTS, MAX_EXPERTS_USED
from tandem.kernels.kernel import Array
from tandem.program.graph import DeltaHeads, Heads, Matrix, ScanHeads, Vector

MIN_NUMBER, MAX_NUMBER = float(np.float32(1e-12)), 1e12  # of a model's own numbers, which are float32
QUERIES = ".queries"  # after the name of a table for keys: that for queries
SCALED_NORM = "output_norm.scaled"  # weights of the last norm times `ModelConfig.logit_scale`
NO_ROPE = -1  # of `ModelConfig.layer_rope`
NO_ATTENTION = -1  # of `ModelConfig.layer_window`: a layer with a recurrent state
# Tensors of a layer that drafts tokens, of which a file may leave out some: it uses the model's own in their place.
DRAFT_TENSORS = ("embed_tokens", "shared_head_norm", "shared_head_head")
POSITIONS, TYPES = "position_embd.weight", "token_types.weight"  # of encoders: a vector for each
POOLINGS = ("none", "mean", "cls", "last", "rank")  # by `pooling_type` of a file
FINE = 64  # consecutive positions of a table with the same coarse rotation


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: frequencies base^(-2i/rot_dim), scaled as the file says."""

    base: float
    rot_dim: int
    linear: float = 1.0  # positions are divided by this
    # Factor, trained context, beta fast, beta slow, magnitude.
    yarn: tuple[float, float, float, float, float] | None = None
    factors: tuple[float, ...] = ()  # divisor of each frequency (Llama 3)
    long_factors: tuple[float, ...] = ()  # the same for tables of more than `long_from` positions (Phi 3)
    long_from: int = 0
    magnitude: float = 1.0  # of cosines and sines
    whole_pairs: bool = True  # YaRN blends between whole pairs of columns
    # Queries are multiplied by 1 + growth[0] ln(1 + position // growth[1]) (Ministral 3).
    growth: tuple[float, int] = (0.0, 0)

    def table(self, positions: int) -> Array:
        """Returns cosine and sine of each angle: float32 [positions, rot_dim / 2, 2]."""
        half = self.rot_dim // 2
        frequency = self.base ** (-2.0 * np.arange(half) / self.rot_dim)
        magnitude = self.magnitude
        factors = self.long_factors if self.long_factors and positions > self.long_from else self.factors
        if factors:
            frequency = frequency / np.array(factors)
        frequency = frequency / self.linear
        if self.yarn:
            frequency, magnitude = self._yarn(frequency, *self.yarn)
        # Multiplies rotations in float64: 15 times as fast as a cosine and a sine for each position.
        steps = [np.arange(0, positions, FINE), np.arange(FINE)]
        coarse, fine = (np.exp(1j * np.outer(positions, frequency)) for positions in steps)
        rotations: Array = np.empty((len(coarse), FINE, half), np.complex64)
        np.multiply(coarse[:, None], magnitude * fine, out=rotations, casting="same_kind")
        return rotations.view(np.float32).reshape(-1, half, 2)[:positions]

    def grows(self, positions: int) -> bool:
        """Whether the table of queries differs from that of keys."""
        return bool(self.growth[0]) and positions > self.growth[1]

    def query_table(self, positions: int) -> Array:
        factor, length = self.growth
        factors = 1 + factor * np.log(1 + np.arange(positions) // length)
        return self.table(positions) * factors.astype(np.float32)[:, None, None]

    def _yarn(
        self, frequency: Array, factor: float, context: float, fast: float, slow: float, magnitude: float
    ) -> tuple[Array, float]:
        """Keeps fast frequencies, divides slow ones by `factor`, and blends the frequencies between them."""

        def dimension(rotations: float) -> float:
            return float(self.rot_dim * np.log(context / (rotations * 2 * np.pi)) / (2 * np.log(self.base)))

        low, high = dimension(fast), dimension(slow)
        if self.whole_pairs:
            low, high = np.floor(low), np.ceil(high)
        low, high = max(low, 0.0), min(high, self.rot_dim - 1.0)
        ramp = np.clip((np.arange(len(frequency)) - low) / max(high - low, 0.001), 0.0, 1.0)
        return frequency / factor * ramp + frequency * (1.0 - ramp), magnitude * (0.1 * np.log(factor) + 1.0)


def key_mean_name(layer: int) -> str:
    return f"blk.{layer}.attn_k.mean"


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    layers: int
    dim: int
    ffn_dim: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    trained_context: int
    eps: float
    scale: float  # factor of attention scores
    ropes: tuple[Rope, ...]
    layer_rope: tuple[int, ...]  # index into `ropes` of each layer; NO_ROPE: it does not rotate
    layer_window: tuple[int, ...]  # attention window of each layer, in positions; 0: global; or NO_ATTENTION
    interleaved: bool = False
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # bias of the attention output
    ffn_bias: bool = False
    ffn_gated: bool = True  # activation(gate) * up; else activation(up)
    head_norms: bool = False  # on each head of Q and K, where files of a family differ in this
    layer_norm: bool = False  # subtracts means; else RMS norms
    norm_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    sinks: bool = False  # each head has one more score in its softmax, without a value
    experts: int = 0  # of each layer; 0: a dense model
    dense_layers: int = 0  # layers before the first with experts
    experts_used: int = 0  # by a token
    expert_dim: int = 0
    shared_expert_dim: int = 0  # of the expert that every token uses; 0: there is none
    shared_expert_gate: bool = False  # its output is multiplied by the sigmoid of a gate
    experts_normalised: bool = True  # weights of a token's experts add up to 1
    expert_scale: float = 1.0  # of these weights
    experts_sigmoid: bool = False  # scores are sigmoids, not a softmax
    expert_choice_bias: bool = False  # added to the scores for the choice alone
    expert_groups: int = 1  # a token uses experts of the best `expert_groups_used` of them
    expert_groups_used: int = 1
    expert_group_top: int = 1  # experts whose scores rank a group
    expert_latent_dim: int = 0  # columns of what experts read and write; 0: those of the residual stream
    expert_bias: bool = False  # biases of the router and of the experts' matrices
    # Of each layer, where layers differ; else empty.
    layer_head_dim: tuple[int, ...] = ()
    layer_kv_heads: tuple[int, ...] = ()
    layer_ffn_dim: tuple[int, ...] = ()
    # Layers at the end, which read keys and values of the last layer of their kind before them.
    shared_kv_layers: int = 0
    per_layer_dim: int = 0  # of the embedding that each layer has of a token; 0: there is none
    layer_scales: bool = False  # the output of each layer is multiplied by a number
    attention_gate: bool = False  # the output of attention is multiplied by the sigmoid of a gate
    # Latent attention (MLA): keys and values are made of a latent of that many columns, beside a key that RoPE turns.
    latent_dim: int = 0
    query_latent_dim: int = 0  # the same for queries; 0: they have none
    latent_key_dim: int = 0  # columns of a head's query that RoPE does not turn
    latent_value_dim: int = 0  # of a head's value
    conv_taps: int = 0  # of the short convolution of recurrent layers
    conv_bias: bool = False  # of these convolutions
    delta_heads: DeltaHeads | None = None  # of recurrent layers with a gated delta rule
    scan_heads: ScanHeads | None = None  # of layers of Mamba-2
    scan_eps: float = 0.0  # of the norm of the output of their scans; 0: they have none
    draft_layers: int = 0  # 1: after the last layer there is one more, which drafts tokens
    draft_tensors: tuple[str, ...] = ()  # of DRAFT_TENSORS, those that the file has
    # The positions of an image's token are three: its image, row and column. Which of them turns each pair of RoPE;
    # empty: positions are single numbers.
    rope_axes: tuple[int, ...] = ()
    # Layers in which the tokens of an image see each other, if there are any; in the others they see those before them.
    image_attention: tuple[bool, ...] = ()
    deepstack: int = 0  # layers after which further embeddings of an image's tokens are added: the first ones
    encodes: bool = False  # tokens see all of their text: it embeds and ranks texts, and generates none
    pooling: str = ""  # one of POOLINGS, as the file says; "": it does not
    learned_positions: bool = False  # a vector for each position is added to the embedding
    token_types: int = 0  # kinds of tokens with a vector that is added to the embedding: the texts of a pair

    @property
    def windows(self) -> tuple[int, ...]:
        """The KV groups: layers with the same window share block tables. A model without attention has one of no
        layers: its blocks take no memory, but the prefix cache knows prefixes by them."""
        return tuple(sorted(set(self.layer_window) - {NO_ATTENTION})) or (0,)

    @property
    def whole_images(self) -> bool:
        """Whether the tokens of an image are computed in one step, as they see each other."""
        return any(self.image_attention)

    def causal_images(self, layer: int) -> bool:
        """Whether tokens of an image see only those before them in this layer, unlike in others."""
        return self.whole_images and not self.image_attention[layer]

    def sees_near_tokens(self, layer: int) -> bool:
        """Whether tokens see near ones on both sides in this layer."""
        return self.encodes and self.layer_window[layer] > 0

    @property
    def stored_layers(self) -> int:
        """Layers with weights: also the one that drafts tokens."""
        return self.layers + self.draft_layers

    def window_of(self, layer: int) -> int:
        # A layer that drafts sees all positions.
        return self.layer_window[layer] if layer < self.layers else 0

    def is_recurrent(self, layer: int) -> bool:
        return self.window_of(layer) == NO_ATTENTION

    def has_experts(self, layer: int) -> bool:
        return bool(self.experts) and layer >= self.dense_layers

    def head_dim_of(self, layer: int) -> int:
        return self.layer_head_dim[layer] if self.layer_head_dim else self.head_dim

    def kv_heads_of(self, layer: int) -> int:
        return self.layer_kv_heads[layer] if self.layer_kv_heads else self.kv_heads

    def ffn_dim_of(self, layer: int) -> int:
        return self.layer_ffn_dim[layer] if self.layer_ffn_dim else self.ffn_dim

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: its own, or those of the last before with its window."""
        own = self.layers - self.shared_kv_layers
        if layer >= self.layers:
            return layer
        return max(
            i
            for i in range(min(layer + 1, own))
            if self.layer_window[i] == self.layer_window[layer] or i == layer
        )

    def kv_sizes(self, window: int) -> list[tuple[int, int]]:
        """KV heads and head size of each layer with that window, of those that store keys and values."""
        own = [*range(self.layers - self.shared_kv_layers), *range(self.layers, self.stored_layers)]
        return [(self.kv_heads_of(i), self.head_dim_of(i)) for i in own if self.window_of(i) == window]

    def heads(self, layer: int, context: int) -> Heads:
        # A layer that does not rotate uses no table.
        index = max(self.layer_rope[layer], 0) if layer < self.layers else 0
        rope = self.ropes[index]
        return Heads(
            self.kv_layer(layer),
            self.windows.index(self.window_of(layer)),
            self.q_heads,
            self.kv_heads_of(layer),
            self.head_dim_of(layer),
            rope.rot_dim,
            self.interleaved,
            Vector(f"rope.{index}", context * rope.rot_dim),
            self.window_of(layer),
            self.scale,
            self.attention_softcap,
            self.eps,
            self._key_mean(layer),
            Vector(f"rope.{index}{QUERIES}", context * rope.rot_dim) if rope.grows(context) else None,
            Vector(f"blk.{layer}.attn_sinks.weight", self.q_heads) if self.sinks else None,
            layer < self.layers and (self.causal_images(layer) or self.sees_near_tokens(layer)),
        )

    def _key_mean(self, layer: int) -> Vector | None:
        """Returns the mean for keys with a bias, unless there is a soft cap or a sink: scores must change by the same
        number."""
        size = self.kv_heads * self.head_dim
        shifts = self.qkv_bias and not (self.attention_softcap or self.sinks)
        return Vector(key_mean_name(layer), size) if shifts else None

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        return Matrix(f"{name}.weight", rows, columns)


class Metadata:
    """Typed, checked access to the keys of one architecture ("llama.block_count" and the like)."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf = gguf
        self.architecture = gguf.require("general.architecture", str)

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def count(
        self, name: str, default: int | None = None, maximum: int = 1 << 24, *, zero: bool = False
    ) -> int:
        """Returns a positive integer, or 0 if that is allowed. Some files have one per layer; they must be equal."""
        value = self.gguf.get(self.key(name))
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
            value = value.flat[0].item()
        if value is None:
            return self.gguf.require(self.key(name), int)
        if not isinstance(value, int) or not (0 < value <= maximum or (zero and value == 0)):
            shown = label(str(value))
            self.gguf.fail(
                self.key(name), f"{shown} is not a size from 1 to {maximum}: convert the model again"
            )
        return value

    def layer_counts(self, name: str, maximum: int = 1 << 24, *, zero: bool = False) -> tuple[int, ...]:
        """Returns a positive integer for each layer, or 0 if that is allowed; a file may have one for all."""
        key, layers, least = self.key(name), self.layers(), 0 if zero else 1
        value = self.gguf.get(key)
        if not isinstance(value, np.ndarray):
            return (self.count(name, maximum=maximum, zero=zero),) * layers
        if (
            len(value) < layers
            or value.dtype.kind not in "iu"
            or not ((value >= least) & (value <= maximum)).all()
        ):
            self.gguf.fail(
                key, f"these are not {layers} sizes from {least} to {maximum}: convert the model again"
            )
        return tuple(int(count) for count in value[:layers])

    def attention_layers(self, window: int = 0) -> dict[str, object]:
        """The fields of a model that has attention in some layers only: the others have 0 KV heads."""
        key = "attention.head_count_kv"
        counts = self.layer_counts(key, 4096, zero=True)
        if len(heads := set(counts) - {0}) != 1:
            self.gguf.fail(
                self.key(key),
                "the layers with attention must be alike, and there must be one: convert it again",
            )
        return {
            "kv_heads": heads.pop(),
            "layer_window": tuple(window if count else NO_ATTENTION for count in counts),
        }

    def number(self, name: str, default: float | None = None, *, zero: bool = False) -> float:
        """Returns a positive number, or 0 if that is allowed: never one that makes others infinite."""
        key = self.key(name)
        if default is not None and key not in self.gguf.metadata:
            return default
        value = self.gguf.require(key, float)
        if not np.isfinite(value):
            self.gguf.fail(key, "this is not a finite number: convert the model again")
        if not (MIN_NUMBER <= value <= MAX_NUMBER or (zero and value == 0.0)):
            self.gguf.fail(
                key, f"{value:g} is not from {MIN_NUMBER:g} to {MAX_NUMBER:g}: convert the model again"
            )
        return value

    def vocab(self) -> int:
        return int(self.gguf.tensor("token_embd.weight").shape[0])

    def layers(self) -> int:
        """Returns the number of layers, without those at the end that draft tokens."""
        layers, drafting = (
            self.count("block_count", maximum=1024),
            self.count("nextn_predict_layers", 0, zero=True),
        )
        if drafting >= layers:
            self.gguf.fail(
                self.key("nextn_predict_layers"), f"these are all of {layers} layers: convert the model again"
            )
        return layers - drafting

    def draft_head(self) -> dict[str, object]:
        """The fields of the layer that drafts tokens; none if the file has none. Of several, the first is used."""
        name = f"blk.{self.layers()}.nextn."
        if not self.count("nextn_predict_layers", 0, zero=True) or not any(
            tensor.startswith(name) for tensor in self.gguf.tensors
        ):
            return {}
        found = tuple(each for each in DRAFT_TENSORS if self.has(f"{name}{each}.weight"))
        return {"draft_layers": 1, "draft_tensors": found}

    def head_dim(self) -> int:
        """Returns the columns of a head: as the file says, or the width divided by the number of heads."""
        shared = self.count("embedding_length") // self.count("attention.head_count")
        size = self.count("attention.key_length", shared)
        if not size:
            self.gguf.fail(
                self.key("attention.head_count"), "there are more heads than columns: convert it again"
            )
        return size

    def experts(self) -> dict[str, object]:
        """The fields of a mixture of experts."""
        experts = self.count("expert_count", maximum=MAX_EXPERTS)
        used = self.count("expert_used_count", maximum=MAX_EXPERTS_USED)
        if used > experts:
            self.gguf.fail(
                self.key("expert_used_count"),
                f"{used} of {experts} experts cannot be used: convert the model again",
            )
        dim = self.count("expert_feed_forward_length", 0) or self.count("feed_forward_length")
        for name, size in (
            ("expert_feed_forward_length", dim),
            ("embedding_length", self.count("embedding_length")),
        ):
            if size % GLU_ROWS:  # an expert would begin in the middle of another's panel
                self.gguf.fail(
                    self.key(name), f"experts of size {size}, no multiple of {GLU_ROWS}: use another model"
                )
        dense = self.count("leading_dense_block_count", 0, zero=True)
        shared = self.count("expert_shared_feed_forward_length", 0)
        return {
            "experts": experts,
            "experts_used": used,
            "dense_layers": dense,
            "expert_choice_bias": self.has(f"blk.{dense}.exp_probs_b.bias"),
            "expert_scale": self.number("expert_weights_scale", 1.0, zero=True) or 1.0,
            "expert_dim": dim,
            "shared_expert_dim": shared,
            "shared_expert_gate": shared > 0 and self.has(f"blk.{dense}.ffn_gate_inp_shexp.weight"),
        }

    def rope_axes(self, rope: Rope, *, interleaved: bool) -> tuple[int, ...]:
        """Which of three positions turns each pair: `rope.dimension_sections` has the number of pairs of each. They
        follow each other, or take turns as long as there are some of both others."""
        key, pairs = self.key("rope.dimension_sections"), rope.rot_dim // 2
        if (value := self.gguf.get(key)) is None:
            return ()
        sections = np.asarray(value).ravel().tolist()[:3]
        if (
            len(sections) < 3
            or not all(isinstance(n, int) and n >= 0 for n in sections)
            or sum(sections) > pairs
        ):
            self.gguf.fail(key, f"these are not the parts of {pairs} pairs: convert the model again")
        _, rows, columns = sections
        if interleaved:
            ends = (0, 3 * rows, 3 * columns)
            return tuple(i % 3 if i < ends[i % 3] else 0 for i in range(pairs))
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
        return tuple(axes + [0] * (pairs - len(axes)))

    def has(self, tensor: str) -> bool:
        return tensor in self.gguf.tensors

    def any_layer_has(self, name: str) -> bool:
        return any(self.has(f"blk.{i}.{name}") for i in range(self.layers()))

    def rope(self, head_dim: int, default_base: float = 10000.0) -> Rope:
        """RoPE with the file's scaling: none, linear (also if only a factor is given), yarn, or factors in
        `rope_freqs.weight`."""
        kind, rotated = (
            self.gguf.get(self.key("rope.scaling.type"), "linear"),
            self.count("rope.dimension_count", head_dim),
        )
        if rotated % 2 or rotated > head_dim:
            self.gguf.fail(
                self.key("rope.dimension_count"),
                f"{rotated} is not an even number up to the head size, {head_dim}: convert the model again",
            )
        old_factor = self.number("rope.scale_linear", 1.0, zero=True)
        factor = self.number("rope.scaling.factor", old_factor, zero=True) or 1.0
        magnitude = self.number("rope.scaling.attn_factor", 1.0)
        long_factors = self._rope_factors("rope_factors_long.weight", rotated // 2)
        yarn = None
        if kind == "yarn":
            trained = self._trained_context()
            fast, slow = (
                self.number("rope.scaling.yarn_beta_fast", 32.0),
                self.number("rope.scaling.yarn_beta_slow", 1.0),
            )
            # Some models divide the magnitude of YaRN by another, which is the same if the multiplier is 1.
            divisor = (
                0.1 * self.number("rope.scaling.yarn_log_multiplier", 0.0, zero=True) * np.log(factor) + 1
            )
            if divisor <= 0:  # of a factor below 1
                self.gguf.fail(
                    self.key("rope.scaling.yarn_log_multiplier"),
                    f"the magnitude of YaRN is divided by {divisor:g}: convert the model again",
                )
            yarn = (factor, trained, fast, slow, magnitude / divisor)
        elif kind not in ("none", "linear") and not (kind == "longrope" and long_factors):
            self.gguf.fail(
                self.key("rope.scaling.type"),
                f"{label(kind)!r} is unknown: use a model with none, linear or yarn",
            )
        base = self.number("rope.freq_base", default_base)
        if base <= 1.0:  # YaRN divides by its logarithm
            self.gguf.fail(
                self.key("rope.freq_base"), f"{base:g} is not more than 1: convert the model again"
            )
        return Rope(
            base,
            rotated,
            factor if kind == "linear" else 1.0,
            yarn,
            self._rope_factors("rope_freqs.weight", rotated // 2)
            or self._rope_factors("rope_factors_short.weight", rotated // 2),
            long_factors,
            int(self._trained_context()) if long_factors else 0,
            1.0 if yarn else magnitude,
        )

    def _trained_context(self) -> float:
        """Returns the context before RoPE was scaled."""
        key = "rope.scaling.original_context_length"
        return (
            self.number(key) if self.key(key) in self.gguf.metadata else float(self.count("context_length"))
        )

    def _rope_factors(self, name: str, count: int) -> tuple[float, ...]:
        if not self.has(name):
            return ()
        tensor = self.gguf.tensor(name)
        factors = (
            dequantise(tensor.format, self.gguf.raw(name)).ravel()
            if math.prod(tensor.shape) == count  # otherwise a huge one would be read
            else np.zeros(1)
        )
        if not (np.isfinite(factors) & (factors > 0)).all():
            self.gguf.fail(name, f"these must be {count} positive numbers: fetch or convert the file again")
        return tuple(factors.tolist())

    def sliding_layers(self, layers: int, every: int) -> list[bool]:
        """Returns which layers have a sliding window: all but every `every`-th, unless the file says otherwise."""
        key = self.key("attention.sliding_window_pattern")
        pattern = self.gguf.get(key, None)
        if isinstance(pattern, (list, np.ndarray)):  # one flag per layer
            if len(pattern) != layers:
                self.gguf.fail(key, f"{len(pattern)} flags for {layers} layers: convert the model again")
            if not isinstance(pattern, np.ndarray):
                self.gguf.fail(key, "these are arrays, not flags: convert the model again")
            return [bool(flag) for flag in pattern]
        every = pattern if isinstance(pattern, int) and pattern > 0 else every
        return [(i + 1) % every != 0 for i in range(layers)]

    def pooling(self) -> str:
        """How the file says that a text's vector is computed from its tokens; "": it does not."""
        if self.key("pooling_type") not in self.gguf.metadata:
            return ""
        kind = self.count("pooling_type", zero=True)
        if kind >= len(POOLINGS):
            self.gguf.fail(
                self.key("pooling_type"), f"{kind} is unknown: use a model with {', '.join(POOLINGS[1:])}"
            )
        return POOLINGS[kind]

    def encoder_config(
        self, *, head_dim: int, ropes: tuple[Rope, ...], layer_rope: tuple[int, ...], **special: object
    ) -> ModelConfig:
        """Returns the config of a model whose tokens see all of their text, and which has no head."""
        types = self.gguf.tensor(TYPES).shape[0] if self.has(TYPES) else 0
        fields: dict[str, object] = {
            "layer_rope": layer_rope, "layer_norm": True, "norm_bias": True, "encodes": True,
            "learned_positions": self.has(POSITIONS), "token_types": types, "tied_head": True,
        }  # fmt: skip
        return self.config(head_dim=head_dim, scale=head_dim**-0.5, ropes=ropes, **(fields | special))

    def config(
        self, *, head_dim: int, scale: float, ropes: tuple[Rope, ...], **special: object
    ) -> ModelConfig:
        """Returns the config with the fields that every family reads the same way, and `special` ones."""
        layers = self.layers()
        tied, dim = not self.has("output.weight"), self.count("embedding_length")
        windows = cast(tuple[int, ...], special.get("layer_window", (0,) * layers))

        def own(name: str, read: Callable[[], int]) -> int:
            return cast(int, special[name]) if name in special else read()

        q_heads = own("q_heads", lambda: self.count("attention.head_count", maximum=4096))
        kv_heads = own("kv_heads", lambda: self.count("attention.head_count_kv", q_heads, maximum=4096))
        ffn_dim = own(
            "ffn_dim",
            lambda: self.count("feed_forward_length", 0) or self.count("expert_feed_forward_length"),
        )
        if "layer_kv_heads" not in special:
            self._divide_stacked(windows, q_heads * head_dim, kv_heads * head_dim, ffn_dim)
        eps = (
            "attention.layer_norm_epsilon"
            if special.get("layer_norm")
            else "attention.layer_norm_rms_epsilon"
        )
        fields: dict[str, object] = {
            "architecture": self.architecture, "layers": layers, "dim": dim, "ffn_dim": ffn_dim,
            "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "vocab": self.vocab(),
            "trained_context": self.count("context_length"), "eps": self.number(eps),
            "scale": scale, "ropes": ropes, "layer_rope": (0,) * layers, "layer_window": windows,
            "tied_head": tied, "qkv_bias": self.has("blk.0.attn_q.bias"),
            "output_bias": self.has("blk.0.attn_output.bias"), "ffn_bias": self.has("blk.0.ffn_down.bias"),
            "norm_bias": self.has("output_norm.bias"), "pooling": self.pooling(),
        }  # fmt: skip
        config = ModelConfig(**(fields | special))  # type: ignore[arg-type]
        for count in {config.kv_heads, *config.layer_kv_heads}:
            if config.q_heads and config.q_heads % count:
                self.gguf.fail(
                    self.key("attention.head_count"),
                    f"{config.q_heads} heads are not a multiple of {count} KV heads",
                )
        return config

    def _divide_stacked(self, windows: tuple[int, ...], q: int, kv: int, ffn_dim: int) -> None:
        """Gives names to the parts of matrices that some files stack: Q, K and V, and gate and up."""
        for i, window in enumerate((*windows, 0)):  # the last may draft tokens
            for kind in ("weight", "bias"):
                parts = {f"blk.{i}.attn_{part}.{kind}": n for part, n in (("q", q), ("k", kv), ("v", kv))}
                if self.has(stacked := f"blk.{i}.attn_qkv.{kind}") and window != NO_ATTENTION:
                    self.gguf.divide(stacked, parts)
            gate, up = f"blk.{i}.ffn_gate.weight", f"blk.{i}.ffn_up.weight"
            alone = self.has(up) and not self.has(gate)
            if alone and self.gguf.tensor(up).shape[0] == 2 * ffn_dim:
                self.gguf.divide(up, {gate: ffn_dim, up: ffn_dim})
