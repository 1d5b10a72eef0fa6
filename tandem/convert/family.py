"""The types of families.py, which says what a class is called in GGUF files, and the names that most classes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tandem.convert.hf_config import HFConfig
from tandem.gguf.write import Value
from tandem.kernels.kernel import Array

Keys = dict[str, Value]
MEAN, CLS, LAST, RANK = range(1, 5)  # `pooling_type`


class Experts(NamedTuple):
    """A matrix of each expert, one tensor each: stacked in one."""

    name: str


class Stacked(NamedTuple):
    """Matrices of all experts in one tensor, which has gate and up if there are two names: one after the other, or
    their rows interleaved, as gpt-oss has them. In the latter case the tensor is [experts, columns, rows], or MXFP4."""

    names: tuple[str, ...]
    interleaved: bool = False


class Latent(NamedTuple):
    """The matrix that makes keys and values of a latent: for each head, the rows of its key, then those of its value.
    `keys` is written transposed: [heads, latent, columns of a key]."""

    keys: str
    values: str


# (config, rows or columns that a tensor has) -> those of it that a file has, in this order
Order = Callable[[HFConfig, int], Array]


class Rearranged(NamedTuple):
    """Some rows of a tensor, or its columns in another order, or values that a function changes. The dimensions before
    the last are rows together. `name`: with its ending."""

    name: str
    rows: Order | None = None  # of a vector: its values
    columns: Order | None = None
    change: Callable[[Array], Array] | None = None


Names = dict[str, str | Experts | Stacked | Latent | list[Rearranged]]


# Names in a layer, after "model.layers.N." and before ".weight" or ".bias". A star is the number of an expert.
LAYER: Names = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",  # gate before up
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b",
    "mlp.experts.*.gate_proj": Experts("ffn_gate_exps"),
    "mlp.experts.*.up_proj": Experts("ffn_up_exps"),
    "mlp.experts.*.down_proj": Experts("ffn_down_exps"),
    "block_sparse_moe.experts.*.w1": Experts("ffn_gate_exps"),
    "block_sparse_moe.experts.*.w3": Experts("ffn_up_exps"),
    "block_sparse_moe.experts.*.w2": Experts("ffn_down_exps"),
    "block_sparse_moe.input_linear": Stacked(("ffn_gate_exps", "ffn_up_exps")),
    "block_sparse_moe.output_linear": Stacked(("ffn_down_exps",)),
    **{
        f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp"
        for shared in ("shared_expert", "shared_experts", "shared_mlp")
        for part in ("gate", "up", "down")
    },
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


# Norms after attention and feed-forward, before the residual stream is added.
def _no_keys(c: HFConfig) -> Keys:
    return {}


@dataclass(frozen=True)
class Family:
    architecture: str
    keys: Callable[[HFConfig], Keys] = _no_keys  # after "{architecture}.", beside those of all families
    names: Names = field(default_factory=dict)  # that differ from LAYER
    reordered: bool = False  # rows of Q and K, from pairs (i, i + n/2) to neighbours
    norm_offset: float = 0.0  # added to weights of norms
    layer_norm: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)  # of fields that config.json may leave out
    required: dict[str, Any] = field(default_factory=dict)  # values that files of this architecture imply
    model: dict[str, str] = field(default_factory=lambda: MODEL)  # names outside of layers
    pooling: int = 0  # `pooling_type` of a model that embeds or ranks texts, if its folder does not say
