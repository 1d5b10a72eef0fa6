"""The validator rejects each kind of broken Program, with one sentence that names the launch."""

from __future__ import annotations

import pytest

from tandem.errors import ProgramError
from tandem.kernels.panels import LAYOUTS
from tandem.program.graph import Builder, Heads, Matrix, Value, Vector
from tandem.program.lower import lower
from tandem.program.lowering_base import KVCacheShape
from tandem.program.program import Tensor
from tandem.program.step_inputs import StepLayout, StepLimits
from tandem.program.validate import validate
from tandem.program.weight_plan import WeightPlan
from tests.program.programs import activation, copy, golden, program

pytestmark = pytest.mark.fast

WEIGHT = Tensor("w", "weights", "f32", 64, 16, 0)
HEADS = Heads(0, 0, 4, 2, 8, 8, False, Vector("rope", 64), 0, 1.0)


def rejected(*launches: object, match: str) -> None:
    with pytest.raises(ProgramError, match=match):
        validate(program(*launches))  # type: ignore[arg-type]


# ---- shapes


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda b: b.matmul(x(32), Matrix("w", 8, 31), "y"), "w has 31 columns, its input x is 32 wide"),
        (lambda b: b.matmul(x(32), Matrix("w", 8, 32), "y", bias=Vector("b", 9)), "w and its bias differ"),
        (lambda b: b.norm(x(32), Vector("w", 33), 1e-6, "y"), "weight and input differ in width"),
        (lambda b: b.add(x(32), x(31), "y"), "x and x differ in shape"),
        (lambda b: b.add(x(32), x(32, "rows"), "y"), "x and x differ in shape"),
        (lambda b: b.glu(x(32), x(64), "silu", "y"), "x and x differ in shape"),
        (lambda b: b.rope(x(32), x(32), HEADS), "heads x head size"),
        (lambda b: b.head_norm(x(32), x(16), (Vector("q", 8), Vector("k", 4)), HEADS), "k is not as long"),
        (lambda b: b.attention(x(32), x(16), x(32), HEADS, "y"), "heads x head size"),
        (lambda b: b.attention(x(16), x(16), x(16), HEADS, "y"), "query width"),
        (lambda b: b.sample(x(32)), "for the selected rows"),
    ],
)
def test_wrong_shape_in_the_op_list(build: object, problem: str) -> None:
    with pytest.raises(ProgramError, match=problem):
        build(Builder())  # type: ignore[operator]


def x(width: int, count: str = "tokens") -> Value:
    return Value("x", width, count)


def test_wrong_shape_of_a_launch() -> None:
    rejected(
        copy(WEIGHT, activation("a", 0, n=15)),
        match=r"launch 0 \(copy -> a\) touches 64 bytes of out; a has 60",
    )


def test_a_real_launch_with_a_tensor_too_small() -> None:
    """Each buffer of each launch in turn: a kernel's extents know all of them."""
    broken = golden("gemma3-pattern3")
    for launch in broken.launches:
        for tensor in launch.buffers.values():
            if tensor is not None:
                whole, tensor.nbytes = tensor.nbytes, tensor.nbytes // 2 // 64 * 64
                with pytest.raises(ProgramError, match=r"touches|has been written|outside of"):
                    validate(broken)
                tensor.nbytes = whole
    validate(broken)


def test_outside_the_arena() -> None:
    rejected(
        copy(WEIGHT, activation("a", 4096 - 32)),
        match=r"launch 0 .*out \(a\) lies outside the activations arena",
    )
    rejected(copy(WEIGHT, activation("a", -1)), match="lies outside the activations arena")  # never placed


def test_a_view_outside_its_base() -> None:
    base = activation("a", 0, n=32)
    view = Tensor("v", "activations", "f32", 64, 16, 68, base)
    rejected(copy(WEIGHT, base), copy(view, activation("b", 512)), match=r"launch 1 .*v\) lies outside of a")


def test_other_buffers_or_scalars_than_declared() -> None:
    launch = copy(WEIGHT, activation("a", 0))
    launch.scalars = {"m": 16}
    rejected(launch, match=r"launch 0 .* gives \['m'\], not the scalars")
    launch = copy(WEIGHT, activation("a", 0))
    launch.buffers = {"x": WEIGHT}
    rejected(launch, match=r"launch 0 .* binds \['x'\], not the buffers")


def test_weights_and_step_inputs_are_not_written() -> None:
    for arena in ("weights", "step"):
        rejected(copy(None, Tensor("t", arena, "f32", 64, 16, 0)), match=f"only read the {arena} arena")


# ---- overlap and order


def test_overlap_of_two_live_tensors() -> None:
    a, b, c = activation("a", 0), activation("b", 32), activation("c", 128)
    rejected(
        copy(WEIGHT, a),
        copy(WEIGHT, b),
        copy(a, c, y=b),
        match=r"launch 2 .* reads a, but b has been written over",
    )


def test_overlap_inside_a_launch() -> None:
    a, b = activation("a", 0), activation("b", 32)
    rejected(copy(WEIGHT, a), copy(a, b), match=r"launch 1 .* its own operand: a and b share bytes")


def test_use_before_write() -> None:
    a, b = activation("a", 0), activation("b", 64)
    rejected(copy(a, b), match=r"launch 0 \(copy -> b\) reads a, but nothing has written it")


def test_views_of_other_columns_do_not_stand_for_each_other() -> None:
    base = activation("a", 0, n=64)
    q, v = (Tensor(n, "activations", "f32", 4 * 40, 32, 4 * at, base) for n, at in (("q", 0), ("v", 8)))
    validate(program(copy(WEIGHT, base), copy(q, v, n=8)))  # two rows of 32: columns 0 to 7, and 8 to 15
    rejected(copy(WEIGHT, q), copy(v, activation("b", 512)), match="reads v, but nothing has written it")


# ---- barriers


def test_missing_barrier_read_after_write() -> None:
    a, b = activation("a", 0), activation("b", 64)
    rejected(
        copy(WEIGHT, a), copy(a, b, barrier=False),
        match=r"launch 1 \(copy -> b\) reads a after it was written, without a barrier",
    )  # fmt: skip


def test_missing_barrier_write_after_read() -> None:
    a, b = activation("a", 0), activation("b", 64)
    rejected(
        copy(WEIGHT, a), copy(a, b), copy(WEIGHT, a, barrier=False),
        match=r"launch 2 .* writes a after it was read, without a barrier",
    )  # fmt: skip


def test_missing_barrier_write_after_write() -> None:
    a = activation("a", 0)
    rejected(
        copy(WEIGHT, a), copy(WEIGHT, a, barrier=False),
        match=r"launch 1 .* writes a after it was written, without a barrier",
    )  # fmt: skip


def test_missing_barrier_over_aliased_bytes() -> None:
    """Names tell nothing: the memory plan lets tensors share bytes, and views share them with their base."""
    a, b, c = activation("a", 0), activation("b", 64), activation("c", 32)
    view = Tensor("view", "activations", "f32", 32, 8, 32, a)
    rejected(
        copy(WEIGHT, a), copy(view, b, n=8, barrier=False),
        match=r"launch 1 .* reads view \(bytes of a\) after it was written, without a barrier",
    )  # fmt: skip
    rejected(
        copy(WEIGHT, a), copy(a, b), copy(WEIGHT, c, barrier=False),
        match=r"launch 2 .* writes c \(bytes of a\) after it was read, without a barrier",
    )  # fmt: skip
    rejected(
        copy(WEIGHT, a), copy(WEIGHT, c, barrier=False),
        match=r"launch 1 .* writes c \(bytes of a\) after it was written, without a barrier",
    )  # fmt: skip


def test_missing_barrier_between_the_kv_store_and_attention() -> None:
    broken = golden("llama")
    i = next(i for i, launch in enumerate(broken.launches) if launch.kernel.name == "attention")
    broken.launches[i].barrier = False
    with pytest.raises(
        ProgramError, match=rf"launch {i} \(attention -> blk.0.attn\) reads .* after it was written"
    ):
        validate(broken)


def test_launches_that_touch_nothing_in_common_need_no_barrier() -> None:
    a, b, c = activation("a", 0), activation("b", 64), activation("c", 128)
    validate(program(copy(WEIGHT, a, barrier=False), copy(WEIGHT, b, barrier=False), copy(a, c, y=b)))


def test_a_value_that_is_changed_in_place_but_needed_later() -> None:
    b = Builder()
    embedded = b.embed(Matrix("table", 64, 32), "embedded")
    h = b.norm(embedded, Vector("w", 32), 1e-6, "h")
    first = b.add(embedded, h, "first")
    b.add(first, embedded, "second")
    with pytest.raises(
        ProgramError, match=r"first = add\(embedded, h\) changes embedded in place, but second = "
    ):
        lower(
            b.ops,
            WeightPlan({"table": LAYOUTS["f32"]}),
            StepLayout(StepLimits(4, 1, 1, 1)),
            KVCacheShape((1,)),
        )
