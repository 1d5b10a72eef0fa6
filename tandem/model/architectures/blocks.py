"""The parts that families share, for their `tensors` and `build`."""

from __future__ import annotations

from collections.abc import Callable

from tandem.model.config import SCALED_NORM, ModelConfig
from tandem.program.graph import Builder, Routing, Value, Vector

Shapes = dict[str, tuple[int, ...]]
Layer = Callable[[Builder, ModelConfig, int, Value, int], Value]
# Hidden states that the host reads, and that which it writes.
HIDDEN, DRAFT_HIDDEN, DRAFT_INPUT = "result_hidden", "draft.result_hidden", "draft.hidden"


def common_tensors(c: ModelConfig, ffn_norm: str = "ffn_norm") -> Shapes:
    """Embedding, attention, feed-forward and head: name -> shape. `ffn_norm`: the norm before the feed-forward."""
    q, kv = c.q_heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = ends(c)
    for i in range(c.stored_layers):
        shapes |= _norm_tensors(c, f"blk.{i}.attn_norm") | _norm_tensors(c, f"blk.{i}.{ffn_norm}")
        shapes |= {
            f"blk.{i}.attn_q.weight": (q, c.dim),
            f"blk.{i}.attn_k.weight": (kv, c.dim),
            f"blk.{i}.attn_v.weight": (kv, c.dim),
            f"blk.{i}.attn_output.weight": (c.dim, q),
        }
        shapes |= expert_tensors(c, i) if c.has_experts(i) else dense_tensors(c, i)
        if c.output_bias:
            shapes[f"blk.{i}.attn_output.bias"] = (c.dim,)
        if c.sinks:
            shapes[f"blk.{i}.attn_sinks.weight"] = (c.q_heads,)
        if c.qkv_bias:
            shapes |= {
                f"blk.{i}.attn_q.bias": (q,),
                f"blk.{i}.attn_k.bias": (kv,),
                f"blk.{i}.attn_v.bias": (kv,),
            }
    return shapes | (_draft_tensors(c) if c.draft_layers else {})


def _draft_tensors(c: ModelConfig) -> Shapes:
    shapes: Shapes = {"eh_proj": (c.dim, 2 * c.dim), "enorm": (c.dim,), "hnorm": (c.dim,)}
    own: Shapes = {"shared_head_norm": (c.dim,)}
    own |= dict.fromkeys(("embed_tokens", "shared_head_head"), (c.vocab, c.dim))
    shapes |= {name: own[name] for name in c.draft_tensors}
    return {f"blk.{c.layers}.nextn.{name}.weight": shape for name, shape in shapes.items()}


def ends(c: ModelConfig) -> Shapes:
    """Embedding, last norm and head."""
    shapes: Shapes = {"token_embd.weight": (c.vocab, c.dim)} | _norm_tensors(c, "output_norm")
    if not c.tied_head:
        shapes["output.weight"] = (c.vocab, c.dim)
    return shapes


def _norm_tensors(c: ModelConfig, name: str) -> Shapes:
    kinds = ("weight", "bias") if c.norm_bias else ("weight",)
    return {f"{name}.{kind}": (c.dim,) for kind in kinds}


def dense_tensors(c: ModelConfig, layer: int) -> Shapes:
    shapes = _gated_tensors(layer, "", c.dim, c.ffn_dim)
    if c.ffn_bias:
        shapes |= {
            f"blk.{layer}.ffn_{part}.bias": (n,)
            for part, n in (("gate", c.ffn_dim), ("up", c.ffn_dim), ("down", c.dim))
        }
    return {name: shape for name, shape in shapes.items() if c.ffn_gated or "ffn_gate" not in name}


def _gated_tensors(layer: int, suffix: str, dim: int, ffn_dim: int) -> Shapes:
    return {
        f"blk.{layer}.ffn_gate{suffix}.weight": (ffn_dim, dim),
        f"blk.{layer}.ffn_up{suffix}.weight": (ffn_dim, dim),
        f"blk.{layer}.ffn_down{suffix}.weight": (dim, ffn_dim),
    }


def expert_tensors(c: ModelConfig, layer: int) -> Shapes:
    one = _gated_tensors(layer, "_exps", c.dim, c.expert_dim)
    shapes: Shapes = {f"blk.{layer}.ffn_gate_inp.weight": (c.experts, c.dim)}
    shapes |= {name: (c.experts, *shape) for name, shape in one.items()}
    if c.expert_bias:
        shapes[f"blk.{layer}.ffn_gate_inp.bias"] = (c.experts,)
        shapes |= {f"{name.removesuffix('weight')}bias": (c.experts, shape[0]) for name, shape in one.items()}
    if c.expert_choice_bias:
        shapes[f"blk.{layer}.exp_probs_b.bias"] = (c.experts,)
    if c.shared_expert_dim:
        shapes |= _gated_tensors(layer, "_shexp", c.dim, c.shared_expert_dim)
    if c.shared_expert_gate:
        shapes[f"blk.{layer}.ffn_gate_inp_shexp.weight"] = (c.dim,)
    return shapes


def without_norms(shapes: Shapes) -> Shapes:
    """Without the norms before attention and feed-forward."""
    return {
        name: shape
        for name, shape in shapes.items()
        if ".attn_norm." not in name and ".ffn_norm." not in name
    }


def without_attention(shapes: Shapes, layer: int) -> Shapes:
    """Without the matrices of a layer's attention."""
    parts = {f"blk.{layer}.attn_{part}.weight" for part in ("q", "k", "v", "output")}
    return {name: shape for name, shape in shapes.items() if name not in parts}


def layer_vectors(c: ModelConfig, names: dict[str, int]) -> Shapes:
    return {f"blk.{i}.{name}.weight": (size,) for i in range(c.stored_layers) for name, size in names.items()}


def norm(b: Builder, c: ModelConfig, x: Value, name: str, result: str | None = None) -> Value:
    weight = Vector(f"{name}.weight", x.width)
    if c.layer_norm:
        bias = Vector(f"{name}.bias", x.width) if c.norm_bias else None
        return b.layer_norm(x, weight, bias, c.eps, result or name)
    return b.norm(x, weight, c.eps, result or name)


def project(b: Builder, c: ModelConfig, x: Value, name: str, rows: int, biased: bool, result: str) -> Value:
    bias = Vector(f"{name}.bias", rows) if biased else None
    return b.matmul(x, c.matrix(name, rows, x.width), result, bias=bias)


def qkv(b: Builder, c: ModelConfig, layer: int, h: Value) -> tuple[Value, Value, Value]:
    def part(name: str, heads: int) -> Value:
        return project(
            b, c, h, f"blk.{layer}.attn_{name}", heads * c.head_dim, c.qkv_bias, f"blk.{layer}.{name}"
        )

    return part("q", c.q_heads), part("k", c.kv_heads), part("v", c.kv_heads)


def head_norms(c: ModelConfig, layer: int) -> tuple[Vector, Vector]:
    return Vector(f"blk.{layer}.attn_q_norm.weight", c.head_dim), Vector(
        f"blk.{layer}.attn_k_norm.weight", c.head_dim
    )


def attention_output(b: Builder, c: ModelConfig, layer: int, attended: Value) -> Value:
    return project(b, c, attended, f"blk.{layer}.attn_output", c.dim, c.output_bias, f"blk.{layer}.attn_out")


def feed_forward(b: Builder, c: ModelConfig, layer: int, h: Value, activation: str) -> Value:
    """A feed-forward, gated or not, or a mixture of experts if the layer has one."""
    if c.has_experts(layer):
        return _experts(b, c, layer, h, activation)
    if c.ffn_gated:
        return gated(b, c, layer, h, activation, "", c.ffn_dim)
    name = f"blk.{layer}.ffn_%s"
    f = b.activate(
        project(b, c, h, name % "up", c.ffn_dim, c.ffn_bias, name % "up"), activation, name % "act"
    )
    return project(b, c, f, name % "down", c.dim, c.ffn_bias, name % "out")


def gated(
    b: Builder, c: ModelConfig, layer: int, h: Value, activation: str, suffix: str, ffn_dim: int
) -> Value:
    name = f"blk.{layer}.ffn_%s{suffix}"
    gate, up = (project(b, c, h, name % p, ffn_dim, c.ffn_bias, name % p) for p in ("gate", "up"))
    f = b.glu(gate, up, activation, name % "act")
    return project(b, c, f, name % "down", c.dim, c.ffn_bias, name % "out")


def _experts(b: Builder, c: ModelConfig, layer: int, h: Value, activation: str) -> Value:
    """A router, the experts that each token uses, and a shared expert if there is one."""
    name = f"blk.{layer}.ffn_%s"
    logits = project(b, c, h, name % "gate_inp", c.experts, c.expert_bias, name % "router")
    return routed(b, c, layer, h, logits, activation, result=name % "out")


def routed(
    b: Builder,
    c: ModelConfig,
    layer: int,
    h: Value,
    logits: Value,
    activation: str,
    *,
    expert_scales: Vector | None = None,
    result: str,
) -> Value:
    """The experts that each token uses, by the router's logits, and a shared expert if there is one."""
    name = f"blk.{layer}.ffn_%s"
    routing = Routing(
        c.experts,
        c.experts_used,
        c.experts_sigmoid,
        c.experts_normalised,
        c.expert_scale,
        c.expert_groups,
        c.expert_groups_used,
        c.expert_group_top,
        bias=Vector(f"blk.{layer}.exp_probs_b.bias", c.experts) if c.expert_choice_bias else None,
        expert_scales=expert_scales,
    )
    routes = b.route(logits, routing, name % "routes")
    gate, up, down = (
        c.matrix(name % f"{p}_exps", c.experts * rows, columns)
        for p, rows, columns in (
            ("gate", c.expert_dim, c.dim),
            ("up", c.expert_dim, c.dim),
            ("down", c.dim, c.expert_dim),
        )
    )
    biases: list[Vector | None] = [
        Vector(f"{matrix.name.removesuffix('weight')}bias", matrix.rows) if c.expert_bias else None
        for matrix in (gate, up, down)
    ]
    f = b.expert_matmul(
        h, routes, routing, [gate, up], name % "act_exps", activation=activation, biases=biases[:2]
    )
    y = b.expert_matmul(f, routes, routing, [down], name % "out_exps", biases=biases[2:])
    shared = gated(b, c, layer, h, activation, "_shexp", c.shared_expert_dim) if c.shared_expert_dim else None
    share = (
        project(b, c, h, name % "gate_inp_shexp", 1, False, name % "share") if c.shared_expert_gate else None
    )
    return b.combine(y, routes, routing, result, shared, share)


def head(b: Builder, c: ModelConfig, x: Value) -> None:
    """Builds the end of every model: the rows that need logits, the last norm, the LM head and the sampler."""
    if c.draft_layers:  # the draft head reads the hidden state of every token
        b.expose(norm(b, c, x, "output_norm", HIDDEN))
    rows = b.select_rows(x, "result_rows")
    if c.logit_scale == 1.0:
        rows = norm(b, c, rows, "output_norm", "result_norm")
    elif c.layer_norm:  # the scale is in the weights of the norm
        rows = b.layer_norm(rows, Vector(SCALED_NORM, c.dim), None, c.eps, "result_norm")
    else:
        rows = b.norm(rows, Vector(SCALED_NORM, c.dim), c.eps, "result_norm")
    name = "token_embd" if c.tied_head else "output"
    b.sample(b.matmul(rows, c.matrix(name, c.vocab, c.dim), "logits", softcap=c.logit_softcap))


def draft_head(b: Builder, c: ModelConfig, context: int, layer: Layer) -> None:
    """Builds the draft head (MTP): a layer that reads the hidden state of a token, after the last norm, and the
    embedding of the next token, and gives logits of the one after that. Its own hidden state takes the place of the
    first for a further token. It has the model's embedding and LM head, unless the file has others for it."""
    name = f"blk.{c.layers}.nextn.%s"

    def own(tensor: str, models: str) -> str:
        return name % tensor if tensor in c.draft_tensors else models

    e = b.embed(c.matrix(own("embed_tokens", "token_embd"), c.vocab, c.dim), "draft.embedding")
    e = norm(b, c, e, name % "enorm")
    h = norm(b, c, b.expose(b.input(c.dim, DRAFT_INPUT)), name % "hnorm")
    both = b.concat([e, h], "draft.both")
    x = b.matmul(both, c.matrix(name % "eh_proj", c.dim, 2 * c.dim), "draft.x")
    x = layer(b, c, c.layers, x, context)
    head_norm = own("shared_head_norm", "output_norm")
    rows = b.select_rows(x, "draft.result_rows")
    b.expose(norm(b, c, rows, head_norm, DRAFT_HIDDEN))
    rows = norm(b, c, rows, head_norm, "draft.result_norm")
    head = own("shared_head_head", "token_embd" if c.tied_head else "output")
    b.sample(b.matmul(rows, c.matrix(head, c.vocab, c.dim), "draft.logits"))
