"""Nemotron H and Nemotron 3: each layer is one of Mamba-2, attention without RoPE, and a feed-forward of squared ReLU,
or experts of it beside a shared one. Experts may read and write narrower rows: a projection is before and after them.
"""

from __future__ import annotations

from tandem.kernels.abi import GLU_ROWS
from tandem.model.architectures import blocks, llama, mamba2
from tandem.model.config import NO_ROPE, Metadata, ModelConfig
from tandem.program.graph import Builder, Routing, Value, Vector


def config(m: Metadata) -> ModelConfig:
    head_dim, fields = m.head_dim(), m.attention_layers()
    ffn_dims = m.layer_counts("feed_forward_length", zero=True)
    if len(sizes := set(ffn_dims) - {0}) > 1:
        m.gguf.fail(m.key("feed_forward_length"), "feed-forwards differ in size: convert the model again")
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(m.rope(head_dim),),
        ffn_dim=max(sizes, default=0),
        layer_ffn_dim=ffn_dims,
        layer_rope=(NO_ROPE,) * len(ffn_dims),
        ffn_gated=False,
        ffn_bias=m.any_layer_has("ffn_down.bias"),
        **fields,
        **mamba2.scan(m),
        **(_experts(m) if m.architecture == "nemotron_h_moe" else {}),
    )


def _experts(m: Metadata) -> dict[str, object]:
    experts = m.experts()
    if not experts["shared_expert_dim"]:
        m.gguf.fail(m.key("expert_shared_feed_forward_length"), "there is no shared expert: convert it again")
    if (latent := m.count("moe_latent_size", 0, zero=True)) % GLU_ROWS:
        m.gguf.fail(m.key("moe_latent_size"), f"{latent} is no multiple of {GLU_ROWS}: use another model")
    return experts | {
        "experts_sigmoid": True,
        "experts_normalised": m.gguf.get(m.key("expert_weights_norm"), True),
        "expert_latent_dim": latent,
    }


def tensors(c: ModelConfig) -> blocks.Shapes:
    every, shapes = blocks.common_tensors(c), blocks.ends(c)
    for i in range(c.layers):
        shapes[f"blk.{i}.attn_norm.weight"] = (c.dim,)
        if c.ffn_dim_of(i) and c.experts:
            shapes |= _expert_tensors(c, i)
        elif c.ffn_dim_of(i):
            shapes |= _named(every, f"blk.{i}.ffn_up", f"blk.{i}.ffn_down")
        elif c.is_recurrent(i):
            shapes |= mamba2.layer_tensors(c, i)
        else:
            shapes |= _named(every, f"blk.{i}.attn_")
    return shapes


def _expert_tensors(c: ModelConfig, layer: int) -> blocks.Shapes:
    width = c.expert_latent_dim or c.dim
    shapes: blocks.Shapes = {
        "ffn_gate_inp.weight": (c.experts, c.dim),
        "exp_probs_b.bias": (c.experts,),
        "ffn_up_exps.weight": (c.experts, c.expert_dim, width),
        "ffn_down_exps.weight": (c.experts, width, c.expert_dim),
        "ffn_up_shexp.weight": (c.shared_expert_dim, c.dim),
        "ffn_down_shexp.weight": (c.dim, c.shared_expert_dim),
    }
    if c.expert_latent_dim:
        shapes |= {"ffn_latent_down.weight": (width, c.dim), "ffn_latent_up.weight": (c.dim, width)}
    return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}


def _named(shapes: blocks.Shapes, *beginnings: str) -> blocks.Shapes:
    return {name: shape for name, shape in shapes.items() if name.startswith(beginnings)}


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        if c.ffn_dim_of(i) and c.experts:
            mixed = _mixture(b, c, i, h)
        elif c.ffn_dim_of(i):
            mixed = blocks.feed_forward(b, c, i, h, "squared_relu")
        elif c.is_recurrent(i):
            mixed = mamba2.mixer(b, c, i, h)
        else:
            mixed = llama.attention(b, c, i, h, context)
        x = b.add(x, mixed, f"blk.{i}.out")
    blocks.head(b, c, x)


def _mixture(b: Builder, c: ModelConfig, layer: int, h: Value) -> Value:
    name, act = f"blk.{layer}.ffn_%s", "squared_relu"

    def project(x: Value, part: str, rows: int, result: str) -> Value:
        return blocks.project(b, c, x, name % part, rows, False, name % result)

    bias = Vector(f"blk.{layer}.exp_probs_b.bias", c.experts)
    routing = Routing(
        c.experts, c.experts_used, c.experts_sigmoid, c.experts_normalised, c.expert_scale, bias=bias
    )
    routes = b.route(project(h, "gate_inp", c.experts, "router"), routing, name % "routes")
    width = c.expert_latent_dim or c.dim
    x = project(h, "latent_down", width, "latent") if c.expert_latent_dim else h
    up = c.matrix(name % "up_exps", c.experts * c.expert_dim, width)
    down = c.matrix(name % "down_exps", c.experts * width, c.expert_dim)
    f = b.expert_matmul(x, routes, routing, [up], name % "up_exps")
    f = b.activate_slots(f, routes, routing, act, name % "act_exps")
    y = b.expert_matmul(f, routes, routing, [down], name % "out_exps")
    shared = b.activate(project(h, "up_shexp", c.shared_expert_dim, "up_shexp"), act, name % "act_shexp")
    shared = project(shared, "down_shexp", c.dim, "out_shexp")
    if not c.expert_latent_dim:
        return b.combine(y, routes, routing, name % "out", shared)
    y = project(b.combine(y, routes, routing, name % "mixed"), "latent_up", c.dim, "latent_out")
    return b.add(y, shared, name % "out")
