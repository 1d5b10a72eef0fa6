"""A model as a flat list of ops, independent of devices: architectures/* build it and fuse.py rewrites it.

A value has one row per token of the step ("tokens"), per row of logits ("rows"), or per token and expert that it uses
("slots"). `SHAPES` lists the ops that architectures may emit; each entry checks the inputs and returns the widths of
the outputs. fuse.py adds fused ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tandem.errors import ProgramError
from tandem.kernels.abi import MAX_CONVOLUTION, MAX_HEAD_DIM, MAX_STATE_ROWS

# Of an encoder of texts: what is added to a token's embedding, by position and type, and the result for each token.
PLACES, HIDDEN = "places", "hidden"


@dataclass(eq=False)
class Value:
    name: str
    width: int  # columns, float32
    count: str = "tokens"  # or "rows", or "slots": one for each expert that a token uses (kernels/experts.py)
    exposed: bool = False  # the host reads it after the step, or writes it before


class Matrix(NamedTuple):
    """A weight matrix by its name in the file."""

    name: str
    rows: int  # outputs
    columns: int  # inputs


class Vector(NamedTuple):
    """Float32 constants by name: a tensor of the file, or a table the architecture computes."""

    name: str
    size: int


@dataclass(eq=False)
class Op:
    kind: str
    inputs: list[Value]
    outputs: list[Value]
    attrs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{', '.join(v.name for v in self.outputs)} = {self.kind}({', '.join(v.name for v in self.inputs)})"


class Routing(NamedTuple):
    """How the tokens of a layer choose experts (kernels/route.py)."""

    experts: int
    used: int  # by a token
    sigmoid: bool = False  # scores are the sigmoid of the logits, not the softmax
    normalise: bool = True  # weights add up to 1
    scale: float = 1.0  # of the weights
    # n_group of a model's config; a token uses experts of the best `groups_used` of them.
    expert_groups: int = 1
    groups_used: int = 1  # topk_group
    group_top: int = 1  # experts whose scores rank a group
    bias: Vector | None = None  # added to the scores for the choice, not to the weights
    expert_scales: Vector | None = None  # a factor of the weights for each expert


class Heads(NamedTuple):
    """The attention shape of a layer, shared by its rope, store and attention ops."""

    layer: int
    group: int  # KV group: layers that keep the same positions share block tables
    q_heads: int
    kv_heads: int
    head_dim: int
    rot_dim: int
    interleaved: bool  # RoPE pairs (2i, 2i+1), as GPT-J, instead of (i, i + rot_dim / 2), as GPT-NeoX
    table: Vector  # RoPE's cosines and sines: [positions][rot_dim / 2][2]
    window: int  # 0: all positions
    scale: float
    softcap: float = 0.0
    eps: float = 1e-6
    key_mean: Vector | None = None  # subtracted from keys in int8 (rope.py): [kv_heads][head_dim]
    q_table: Vector | None = None  # of queries, where it differs from that of keys
    sinks: Vector | None = None  # a score for each head, in its softmax beside those of keys
    # Tokens see fewer than in other layers of the model: of an image those before them only, or of a text near ones.
    second_work: bool = False


class LatentHeads(NamedTuple):
    """The shape of a layer with latent attention (kernels/attention_latent.py)."""

    layer: int
    group: int  # KV group
    q_heads: int
    latent: int  # what is stored for all heads together
    rotated: int  # and the key that RoPE turns
    scale: float

    # A row of the cache takes the memory of a key and a value of half its elements.
    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        return (self.latent + self.rotated) // 2


class DeltaHeads(NamedTuple):
    """The heads of a layer with a gated delta rule (kernels/delta_rule.py)."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    tiled: bool  # value heads that share a key head are k_heads apart; else neighbours

    @property
    def width(self) -> int:
        """Columns of queries, keys and values together."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


class ScanHeads(NamedTuple):
    """The heads of a Mamba-2 layer (kernels/ssm_scan.py)."""

    heads: int
    groups: int  # of neighbouring heads, which share B and C
    head_dim: int
    state_rows: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def width(self) -> int:
        """Columns of x, B and C together."""
        return self.inner + 2 * self.groups * self.state_rows


def layer_states(ops: Iterable[Op]) -> list[int]:
    """Returns the bytes of each layer's recurrent state for one sequence; none: no layer has one."""
    return [4 * int(op.attrs["state"]) for op in ops if op.attrs.get("state")]


def state_bytes(ops: Iterable[Op]) -> int:
    """Returns the bytes of a state slot: the recurrent state of all layers for one sequence. 0: they have none."""
    return sum(layer_states(ops))


def _same(op: Op) -> list[int]:
    return [op.inputs[0].width]


def _norm(op: Op) -> list[int]:
    _require(op, op.attrs["weight"].size == op.inputs[0].width, "weight and input differ in width")
    return [op.inputs[0].width]


def _layer_norm(op: Op) -> list[int]:
    for vector in (op.attrs["weight"], op.attrs["bias"]):
        _require(op, vector is None or vector.size == op.inputs[0].width, "weight and input differ in width")
    return [op.inputs[0].width]


def _matmul(op: Op) -> list[int]:
    for matrix, bias in zip(op.attrs["matrices"], op.attrs["biases"], strict=True):
        _require(
            op,
            matrix.columns == op.inputs[0].width,
            f"{matrix.name} has {matrix.columns} columns, "
            f"its input {op.inputs[0].name} is {op.inputs[0].width} wide",
        )
        _require(op, bias is None or bias.size == matrix.rows, f"{matrix.name} and its bias differ in rows")
    return [matrix.rows for matrix in op.attrs["matrices"]]


def _pair(op: Op) -> list[int]:
    a, b = op.inputs[0], op.inputs[-1]
    _require(op, (a.width, a.count) == (b.width, b.count), f"{a.name} and {b.name} differ in shape")
    return [a.width]


def _heads(op: Op) -> list[int]:
    """Two inputs: q and k, or k and v for `store`."""
    heads: Heads = op.attrs["heads"]
    first = heads.kv_heads if op.kind == "store" else heads.q_heads
    widths = [first * heads.head_dim, heads.kv_heads * heads.head_dim]
    _require(op, [v.width for v in op.inputs] == widths, f"widths are not heads x head size, {widths}")
    for weight in op.attrs.get("weights", ()):
        _require(op, weight.size == heads.head_dim, f"{weight.name} is not as long as a head")
    _require(
        op,
        heads.rot_dim % 2 == 0 and heads.rot_dim <= heads.head_dim,
        "RoPE rotates more columns than a head has",
    )
    return [] if op.kind == "store" else widths


def _norm_heads(op: Op) -> list[int]:
    """`attrs["weight"]`: of one head."""
    size = op.attrs["weight"].size
    _require(op, size % 2 == 0 and op.inputs[0].width % size == 0, "the input is not whole heads")
    return [op.inputs[0].width]


def _scale(op: Op) -> list[int]:
    _require(op, op.attrs["factor"].size == 1, f"{op.attrs['factor'].name} is not one number")
    return [op.inputs[0].width]


def _clamp(op: Op) -> list[int]:
    _require(op, op.attrs["limits"].size == 2, f"{op.attrs['limits'].name} is not two numbers")
    return [op.inputs[0].width]


def _slice(op: Op) -> list[int]:
    begin, end = op.attrs["begin"], op.attrs["end"]
    _require(op, 0 <= begin < end <= op.inputs[0].width, "the columns are not in the input")
    return [end - begin]


def _concat(op: Op) -> list[int]:
    _require(op, len({value.count for value in op.inputs}) == 1, "the values differ in rows")
    return [sum(value.width for value in op.inputs)]


def _attention(op: Op) -> list[int]:
    heads: Heads = op.attrs["heads"]
    _require(op, op.inputs[0].width == heads.q_heads * heads.head_dim, "query width is not heads x head size")
    _require(op, heads.q_heads % heads.kv_heads == 0, "query heads are not a multiple of KV heads")
    return [op.inputs[0].width]


def _store_latent(op: Op) -> list[int]:
    heads: LatentHeads = op.attrs["heads"]
    widths = [heads.latent, heads.rotated]
    _require(
        op, [v.width for v in op.inputs] == widths, f"widths are not those of a latent and a key, {widths}"
    )
    _require(
        op, sum(widths) % 2 == 0 and sum(widths) <= 2 * MAX_HEAD_DIM, "a row of the cache has another size"
    )
    return []


def _attention_latent(op: Op) -> list[int]:
    heads: LatentHeads = op.attrs["heads"]
    widths = [heads.q_heads * heads.latent, heads.q_heads * heads.rotated]
    _require(op, [v.width for v in op.inputs] == widths, f"widths are not those of queries, {widths}")
    return widths[:1]


def _bidirectional(op: Op) -> list[int]:
    heads: Heads = op.attrs["heads"]
    widths = [n * heads.head_dim for n in (heads.q_heads, heads.kv_heads, heads.kv_heads)]
    _require(op, [v.width for v in op.inputs] == widths, f"widths are not heads x head size, {widths}")
    return _attention(op)


def _pool(op: Op) -> list[int]:
    for vector in op.attrs["affine"] or ():
        _require(op, vector.size == op.inputs[0].width, f"{vector.name} and the input differ in width")
    return [op.inputs[0].width * (op.attrs["group"] if op.attrs["concatenate"] else 1)]


def _route(op: Op) -> list[int]:
    routing: Routing = op.attrs["routing"]
    _require(op, op.inputs[0].width == routing.experts, "there is not one logit for each expert")
    return [routing.used]


def _expert_matmul(op: Op) -> list[int]:
    """`attrs["matrices"]`: the experts' matrices, stacked; two for a GLU, which gives one result."""
    x, routes = op.inputs
    experts = op.attrs["routing"].experts
    for matrix, bias in zip(op.attrs["matrices"], op.attrs["biases"], strict=True):
        _require(op, matrix.columns == x.width, f"{matrix.name} does not have as many columns as {x.name}")
        _require(
            op, matrix.rows % experts == 0, f"{matrix.name} is not the same for each of {experts} experts"
        )
        _require(op, bias is None or bias.size == matrix.rows, f"{matrix.name} and its bias differ in rows")
    _require(op, len({matrix.rows for matrix in op.attrs["matrices"]}) == 1, "gate and up differ in rows")
    _require(op, routes.width == op.attrs["routing"].used, f"{routes.name} does not say which experts")
    return [op.attrs["matrices"][0].rows // experts]


def _activate_slots(op: Op) -> list[int]:
    x, routes = op.inputs
    _require(op, x.count == "slots", f"{x.name} is not what experts computed")
    _require(op, routes.width == op.attrs["routing"].used, f"{routes.name} does not say which experts")
    return [x.width]


def _combine(op: Op) -> list[int]:
    x, _, *shared = op.inputs
    _require(op, x.count == "slots", f"{x.name} is not what experts computed")
    widths = [x.width, 1]
    _require(
        op, [v.width for v in shared] == widths[: len(shared)], "the shared expert differs from the others"
    )
    return [x.width]


def _short_conv(op: Op) -> list[int]:
    channels, taps, bias = op.inputs[0].width, op.attrs["taps"], op.attrs["bias"]
    _require(op, 2 <= taps <= MAX_CONVOLUTION, f"a convolution of {taps} taps, not 2 to {MAX_CONVOLUTION}")
    _require(op, op.attrs["weight"].size == channels * taps, "weight and input differ in width")
    _require(op, bias is None or bias.size == channels, "bias and input differ in width")
    return [channels]


def _delta_rule(op: Op) -> list[int]:
    heads: DeltaHeads = op.attrs["heads"]
    widths = [heads.width, heads.v_heads, heads.v_heads]
    _require(op, [v.width for v in op.inputs] == widths, f"widths are not {widths}")
    _require(op, heads.v_heads % heads.k_heads == 0, "value heads are not a multiple of key heads")
    _require(op, heads.k_dim <= MAX_STATE_ROWS, f"a key has more than {MAX_STATE_ROWS} columns")
    return [heads.v_heads * heads.v_dim]


def _ssm_scan(op: Op) -> list[int]:
    heads: ScanHeads = op.attrs["heads"]
    _require(op, [v.width for v in op.inputs] == [heads.width, heads.heads], "widths are not those of heads")
    _require(op, heads.heads % heads.groups == 0, "heads are not a multiple of groups")
    _require(op, heads.state_rows <= MAX_STATE_ROWS, f"a state has more than {MAX_STATE_ROWS} rows")
    return [heads.inner]


def _group_norm(op: Op) -> list[int]:
    _require(op, op.inputs[0].width % op.attrs["groups"] == 0, "the input is not whole groups")
    return _norm(op)


def _gated_norm(op: Op) -> list[int]:
    _require(op, op.inputs[0].width % op.attrs["weight"].size == 0, "weight and heads differ in width")
    return _pair(op)


def _sample(op: Op) -> list[int]:
    _require(op, op.inputs[0].count == "rows", "logits are for the selected rows, not for every token")
    return []


# The ops that architectures may emit.
SHAPES: dict[str, Callable[[Op], list[int]]] = {
    "input": lambda op: [op.attrs["width"]],  # a row for each token, written by the host
    "embed": lambda op: [op.attrs["matrix"].columns],  # token ids -> rows of a table, times attrs["scale"]
    "norm": _norm,  # RMS norm times a weight
    "layer_norm": _layer_norm,  # mean and variance normalised, times a weight, plus a bias if there is one
    "matmul": _matmul,  # x times each of attrs["matrices"], plus its bias
    "head_norm": _heads,  # RMS norm of each head of q and k
    "norm_heads": _norm_heads,  # RMS norm of each head of one value
    "rope": _heads,  # rotates q and k by position
    "rope_query": _attention,  # rotates q alone
    "store": _heads,  # k and v to the KV cache
    "attention": _attention,  # q over the cached k and v of its sequence
    "store_latent": _store_latent,  # a latent and its rotated key to the KV cache
    "attention_latent": _attention_latent,  # two parts of q over the cached latents of its sequence
    "bidirectional": _bidirectional,  # q over k and v of all tokens of its sequence, which are all in the step
    "pool": _pool,  # groups of neighbouring rows: their mean, or one after the other
    "glu": _pair,  # activation(gate) * up, or the activation alone
    "add": _pair,
    "add_input": _same,  # plus some columns of what the host gives, for tokens of images
    "scale": _scale,  # times a number of the file
    "clamp": _clamp,  # to two numbers of the file
    "concat": _concat,  # the columns of several values beside each other
    "slice": _slice,  # some of the columns
    "route": _route,  # logits of experts -> the experts that each token uses, and their weights
    "expert_matmul": _expert_matmul,  # x times the matrices of the experts in use, gated if there are two
    "activate_slots": _activate_slots,  # an activation of what experts without a gate computed
    "combine": _combine,  # the weighted sum over a token's experts, plus a shared expert's output times its gate
    "short_conv": _short_conv,  # causal convolution over the last tokens of a sequence, with their tail as its state
    "delta_rule": _delta_rule,  # q, k and v; beta; alpha -> linear attention with a matrix for each head as its state
    "ssm_scan": _ssm_scan,  # x, B and C; dt -> the recurrence of Mamba-2 with a matrix for each head as its state
    "group_norm": _group_norm,  # RMS norm of each of several groups of columns times a weight
    "gated_norm": _gated_norm,  # RMS norm of each head times a weight, times silu(gate)
    "select_rows": _same,  # the rows whose next token is sampled
    "sample": _sample,  # logits -> token ids
}


def _require(op: Op, holds: bool, problem: str) -> None:
    if not holds:
        raise ProgramError(f"{op}: {problem}")


class Builder:
    """Collects the ops of a model; architectures call its methods in the order of the computation."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def _emit(self, kind: str, inputs: list[Value], names: list[str], **attrs: Any) -> list[Value]:
        op = Op(kind, inputs, [], attrs)
        widths = SHAPES[kind](op)
        count = inputs[0].count if inputs else "tokens"
        op.outputs = [Value(name, width, count) for name, width in zip(names, widths, strict=True)]
        self.ops.append(op)
        return op.outputs

    def embed(self, matrix: Matrix, name: str, *, scale: float = 1.0, images: bool = True) -> Value:
        """`images`: tokens of an image have the embedding that the host gives, not the row of their id."""
        return self._emit("embed", [], [name], matrix=matrix, scale=scale, images=images)[0]

    def input(self, width: int, name: str) -> Value:
        """A row for each token of the step that the host writes: the patches of an image."""
        return self._emit("input", [], [name], width=width)[0]

    def norm(self, x: Value, weight: Vector, eps: float, name: str) -> Value:
        return self._emit("norm", [x], [name], weight=weight, eps=eps)[0]

    def layer_norm(self, x: Value, weight: Vector, bias: Vector | None, eps: float, name: str) -> Value:
        return self._emit("layer_norm", [x], [name], weight=weight, bias=bias, eps=eps)[0]

    def matmul(
        self, x: Value, matrix: Matrix, name: str, *, bias: Vector | None = None, softcap: float = 0.0
    ) -> Value:
        return self._emit("matmul", [x], [name], matrices=[matrix], biases=[bias], softcap=softcap)[0]

    def head_norm(
        self, q: Value, k: Value, weights: tuple[Vector, Vector], heads: Heads
    ) -> tuple[Value, Value]:
        out = self._emit(
            "head_norm", [q, k], [f"{q.name}_norm", f"{k.name}_norm"], weights=weights, heads=heads
        )
        return out[0], out[1]

    def norm_heads(self, x: Value, weight: Vector, eps: float, name: str) -> Value:
        """RMS norm of each head of `x` alone; a head is as long as the weight."""
        return self._emit("norm_heads", [x], [name], weight=weight, eps=eps)[0]

    def rope(self, q: Value, k: Value, heads: Heads) -> tuple[Value, Value]:
        out = self._emit("rope", [q, k], [f"{q.name}_rope", f"{k.name}_rope"], heads=heads)
        return out[0], out[1]

    def rope_query(self, q: Value, heads: Heads) -> Value:
        """For a layer without keys and values of its own."""
        return self._emit("rope_query", [q], [f"{q.name}_rope"], heads=heads)[0]

    def attention(self, q: Value, k: Value, v: Value, heads: Heads, name: str) -> Value:
        self._emit("store", [k, v], [], heads=heads)
        return self.attend(q, heads, name)

    def attend(self, q: Value, heads: Heads, name: str) -> Value:
        """Attention over keys and values that another layer has stored: that of `heads`."""
        return self._emit("attention", [q], [name], heads=heads)[0]

    def latent_attention(
        self, q: Value, rotated_q: Value, latent: Value, key: Value, heads: LatentHeads, name: str
    ) -> Value:
        """Stores the latent and the rotated key; the result has a latent for each head."""
        self._emit("store_latent", [latent, key], [], heads=heads)
        return self._emit("attention_latent", [q, rotated_q], [name], heads=heads)[0]

    def bidirectional_attention(self, q: Value, k: Value, v: Value, heads: Heads, name: str) -> Value:
        """Without a KV cache: a step has all tokens of a sequence, and each of them sees them all."""
        return self._emit("bidirectional", [q, k, v], [name], heads=heads)[0]

    def pool(
        self,
        x: Value,
        group: int,
        name: str,
        *,
        concatenate: bool = False,
        affine: tuple[Vector, Vector] | None = None,
    ) -> Value:
        """The mean of each `group` of neighbouring rows, or these rows one after the other. The host sets the number of
        rows of the step to that of groups. `affine`: the mean is multiplied by the first and the second is added."""
        pooled = self._emit("pool", [x], [name], group=group, concatenate=concatenate, affine=affine)[0]
        pooled.count = "rows"
        return pooled

    def glu(self, gate: Value, up: Value, activation: str, name: str) -> Value:
        return self._emit("glu", [gate, up], [name], activation=activation)[0]

    def activate(self, x: Value, activation: str, name: str) -> Value:
        return self._emit("glu", [x], [name], activation=activation)[0]

    def route(self, logits: Value, routing: Routing, name: str) -> Value:
        return self._emit("route", [logits], [name], routing=routing)[0]

    def expert_matmul(
        self,
        x: Value,
        routes: Value,
        routing: Routing,
        matrices: list[Matrix],
        name: str,
        *,
        activation: str | None = None,
        biases: list[Vector | None] | None = None,
    ) -> Value:
        """Two matrices are gate and up of a GLU with `activation`."""
        given = biases or [None] * len(matrices)
        out = self._emit(
            "expert_matmul", [x, routes], [name],
            routing=routing, matrices=matrices, biases=given, activation=activation,
        )[0]  # fmt: skip
        out.count = "slots"
        return out

    def activate_slots(self, x: Value, routes: Value, routing: Routing, activation: str, name: str) -> Value:
        """For experts without a gate."""
        return self._emit("activate_slots", [x, routes], [name], routing=routing, activation=activation)[0]

    def combine(
        self,
        x: Value,
        routes: Value,
        routing: Routing,
        name: str,
        shared: Value | None = None,
        gate: Value | None = None,
    ) -> Value:
        """`shared`: the output of the expert that every token uses; `gate`: the logit of its weight."""
        inputs = [x, routes, *(value for value in (shared, gate) if value)]
        out = self._emit("combine", inputs, [name], routing=routing)[0]
        out.count = "tokens"
        return out

    def short_conv(
        self, x: Value, weight: Vector, taps: int, name: str, *, bias: Vector | None = None, silu: bool = True
    ) -> Value:
        state = (taps - 1) * x.width
        return self._emit(
            "short_conv", [x], [name], weight=weight, bias=bias, taps=taps, silu=silu, state=state
        )[0]

    def delta_rule(
        self,
        qkv: Value,
        beta: Value,
        alpha: Value,
        vectors: tuple[Vector, Vector],
        heads: DeltaHeads,
        name: str,
    ) -> Value:
        """`vectors`: dt and a of each value head."""
        state = heads.v_heads * heads.k_dim * heads.v_dim
        inputs = [qkv, beta, alpha]
        return self._emit("delta_rule", inputs, [name], vectors=vectors, heads=heads, state=state)[0]

    def ssm_scan(
        self, xbc: Value, dt: Value, vectors: tuple[Vector, Vector, Vector], heads: ScanHeads, name: str
    ) -> Value:
        """`vectors`: bias of dt, a and d of each head."""
        state = heads.inner * heads.state_rows
        return self._emit("ssm_scan", [xbc, dt], [name], vectors=vectors, heads=heads, state=state)[0]

    def group_norm(self, x: Value, weight: Vector, groups: int, eps: float, name: str) -> Value:
        if groups == 1:
            return self.norm(x, weight, eps, name)
        return self._emit("group_norm", [x], [name], weight=weight, groups=groups, eps=eps)[0]

    def gated_norm(self, x: Value, gate: Value, weight: Vector, eps: float, name: str) -> Value:
        return self._emit("gated_norm", [x, gate], [name], weight=weight, eps=eps)[0]

    def add(self, a: Value, b: Value, name: str) -> Value:
        return self._emit("add", [a, b], [name])[0]

    def add_input(self, x: Value, first: int, name: str) -> Value:
        """Adds columns from `first` on of the row that the host gives for a token of an image, in place of x."""
        return self._emit("add_input", [x], [name], first=first)[0]

    def scale(self, x: Value, factor: Vector, name: str) -> Value:
        """In place of x."""
        return self._emit("scale", [x], [name], factor=factor)[0]

    def concat(self, values: list[Value], name: str) -> Value:
        """All must be results of norms or matmuls, which nothing else reads: no copy."""
        return self._emit("concat", values, [name])[0]

    def expose(self, x: Value) -> Value:
        """The result of a norm, for the host to read after the step; or an input that the host writes before."""
        x.exposed = True
        return x

    def clamp(self, x: Value, limits: Vector, name: str) -> Value:
        return self._emit("clamp", [x], [name], limits=limits)[0]

    def slice(self, x: Value, begin: int, end: int, name: str) -> Value:
        """Columns [begin, end) of x: no copy."""
        return self._emit("slice", [x], [name], begin=begin, end=end)[0]

    def select_rows(self, x: Value, name: str) -> Value:
        selected = self._emit("select_rows", [x], [name])[0]
        selected.count = "rows"
        return selected

    def sample(self, logits: Value) -> None:
        self._emit("sample", [logits], [])
