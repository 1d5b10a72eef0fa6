"""The pieces that families have in common, for their `tensors` and `build`."""

from __future__ import annotations

from tandem.model.config import ModelConfig
from tandem.program.graph import Builder, Value, Vector

Shapes = dict[str, tuple[int, ...]]


def common_tensors(c: ModelConfig) -> Shapes:
    """Embedding, attention, feed-forward and head: name -> shape."""
    q, kv = c.q_heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: Shapes = {"token_embd.weight": (c.vocab, c.dim), "output_norm.weight": (c.dim,)}
    if not c.tied_head:
        shapes["output.weight"] = (c.vocab, c.dim)
    for i in range(c.layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (c.dim,),
            f"blk.{i}.attn_q.weight": (q, c.dim),
            f"blk.{i}.attn_k.weight": (kv, c.dim),
            f"blk.{i}.attn_v.weight": (kv, c.dim),
            f"blk.{i}.attn_output.weight": (c.dim, q),
            f"blk.{i}.ffn_norm.weight": (c.dim,),
            f"blk.{i}.ffn_gate.weight": (c.ffn_dim, c.dim),
            f"blk.{i}.ffn_up.weight": (c.ffn_dim, c.dim),
            f"blk.{i}.ffn_down.weight": (c.dim, c.ffn_dim),
        }
        if c.qkv_bias:
            shapes |= {
                f"blk.{i}.attn_q.bias": (q,),
                f"blk.{i}.attn_k.bias": (kv,),
                f"blk.{i}.attn_v.bias": (kv,),
            }
    return shapes


def layer_vectors(c: ModelConfig, names: dict[str, int]) -> Shapes:
    return {f"blk.{i}.{name}.weight": (size,) for i in range(c.layers) for name, size in names.items()}


def norm(b: Builder, c: ModelConfig, x: Value, name: str, result: str | None = None) -> Value:
    return b.norm(x, Vector(f"{name}.weight", x.width), c.eps, result or name)


def qkv(b: Builder, c: ModelConfig, layer: int, h: Value) -> tuple[Value, Value, Value]:
    def project(part: str, heads: int) -> Value:
        name, rows = f"blk.{layer}.attn_{part}", heads * c.head_dim
        bias = Vector(f"{name}.bias", rows) if c.qkv_bias else None
        return b.matmul(h, c.matrix(name, rows, c.dim), f"blk.{layer}.{part}", bias=bias)

    return project("q", c.q_heads), project("k", c.kv_heads), project("v", c.kv_heads)


def head_norms(c: ModelConfig, layer: int) -> tuple[Vector, Vector]:
    return Vector(f"blk.{layer}.attn_q_norm.weight", c.head_dim), Vector(
        f"blk.{layer}.attn_k_norm.weight", c.head_dim
    )


def attention_output(b: Builder, c: ModelConfig, layer: int, attended: Value) -> Value:
    return b.matmul(
        attended, c.matrix(f"blk.{layer}.attn_output", c.dim, c.q_heads * c.head_dim), f"blk.{layer}.attn_out"
    )


def feed_forward(b: Builder, c: ModelConfig, layer: int, h: Value, activation: str) -> Value:
    gate = b.matmul(h, c.matrix(f"blk.{layer}.ffn_gate", c.ffn_dim, c.dim), f"blk.{layer}.ffn_gate")
    up = b.matmul(h, c.matrix(f"blk.{layer}.ffn_up", c.ffn_dim, c.dim), f"blk.{layer}.ffn_up")
    f = b.glu(gate, up, activation, f"blk.{layer}.ffn_act")
    return b.matmul(f, c.matrix(f"blk.{layer}.ffn_down", c.dim, c.ffn_dim), f"blk.{layer}.ffn_out")


def head(b: Builder, c: ModelConfig, x: Value) -> None:
    """The rows to be sampled through the last norm and the output matrix to a token."""
    rows = norm(b, c, b.select_rows(x, "result_rows"), "output_norm", "result_norm")
    name = "token_embd" if c.tied_head else "output"
    b.sample(b.matmul(rows, c.matrix(name, c.vocab, c.dim), "logits", softcap=c.logit_softcap))
