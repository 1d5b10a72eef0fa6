"""The pass that fuses launches for single tokens: a matmul and the norm after it. RoPE inside attention needs matrix
units: see test_matrices.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from tandem.devices.vulkan import tuned
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.fuse_launches import SCRATCH, SINGLE, step_program
from tandem.engine.image_encoder import encoder_program
from tandem.errors import ProgramError
from tandem.kernels import all_kernels
from tandem.kernels.dispatch_table import dispatch
from tandem.kernels.kernel import Buffer, Kernel
from tandem.kernels.matmul import make_case
from tandem.kernels.panels import panel_layout
from tandem.model.synthetic import SyntheticModel, SyntheticVision
from tandem.plan.predict import Planned
from tandem.program.hazards import place_barriers
from tandem.program.program import Launch, Program, Tensor
from tandem.program.validate import READ_ONLY, validate
from tests.vulkan import fused_pairs
from tests.vulkan.test_dispatch import MATRICES

H200 = replace(MATRICES, register_coopmat=True, cores=132)
ONE = {**fused_pairs.ONE, SINGLE: 1}
FUSED = {"attention_prefetch", "attention_rope", "matmul_norm_partials_q4_0", "norm_finish"}


@pytest.mark.parametrize("layout", ["q4_0", "q4_k", "q6_k", "q8_0"])
def test_a_norm_takes_the_partials_that_the_matmul_before_has_left(device: VulkanDevice, layout: str) -> None:
    for dim, options in ((32, "post q8"), (512, "q8"), (1056, "post"), (5376, "post q8")):
        fused_pairs.check_norm(device, layout, dim, options, np.random.default_rng(dim))


def test_a_norm_is_right_after_a_matmul_with_any_choice_of_the_tuner(device: VulkanDevice) -> None:
    gpu, case = device.capabilities, make_case("q4_0", 1, 1056, 512, 0, 0, np.random.default_rng(0))
    choices = tuned.candidates("matmul_q4_0", case.scalars, fused_pairs.ONE, gpu)
    assert choices
    for choice in choices:
        with gpu.choices.trying(choice):
            fused_pairs.check_norm(device, "q4_0", 1056, "post q8", np.random.default_rng(0))


def test_a_matmul_that_another_launch_reads_too_is_not_fused(device: VulkanDevice) -> None:
    pair = fused_pairs.norm_pair(device, "q4_0", 32, "post q8", np.random.default_rng(0))
    recording = fused_pairs.record(device, pair.given, fused_pairs.ONE)
    assert "norm_finish" in fused_pairs.kernels_of(recording)
    launches = recording.program.launches
    recording.program = replace(recording.program, launches=[*launches, launches[-1]])
    assert fused_pairs.kernels_of(recording) == ["matmul_q4_0", "norm", "norm"]
    recording.program = replace(recording.program, launches=launches)
    alone = step_program(recording.program, ONE, device.capabilities, begin=0, end=1)
    assert [launch.kernel.name for launch in alone.launches] == ["matmul_q4_0"], "half of a pair"


def test_scalars_that_are_compiled_in_are_those_of_the_launch(
    device: VulkanDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with memory of its own."""
    monkeypatch.setattr(device, "capabilities", replace(device.capabilities, kind="discrete"))
    pair = fused_pairs.norm_pair(device, "q4_0", 1056, "post q8", np.random.default_rng(0))
    program = fused_pairs.record(device, pair.given, fused_pairs.ONE).program
    launches = step_program(program, ONE, device.capabilities).launches
    found = [dispatch(each.kernel.name, each.scalars, ONE, device.capabilities) for each in launches]
    assert len(found) == 2 and all(each.compiled_scalars for each in found)
    for dim, options in ((512, "q8"), (1056, "post q8")):
        fused_pairs.check_norm(device, "q4_0", dim, options, np.random.default_rng(dim))


# ---- fused launches are declared


@pytest.fixture(scope="module")
def program() -> Program:
    return Planned(SyntheticModel("gemma-3-27b:q4_0", layers=2), 64).program


@pytest.mark.fast
def test_fused_programs_are_valid(program: Program) -> None:
    """Of one token, of several sequences with one each, and of prompts, with activations expanded or not."""
    kernels = set()
    for tokens, single in ((1, 1), (2, 1), (64, 1), (1, 0), (16, 0), (512, 0)):
        counts = {"tokens": tokens, "rows": min(tokens, 16), "work": tokens if single else 1, SINGLE: single}
        for gpu in (H200, MATRICES):
            made = step_program(program, counts, gpu)
            validate(made)
            kernels |= {launch.kernel.name for launch in made.launches}
    assert kernels >= FUSED | {"expand_coopmat", "expand_coopmat_reg", "rope", "attention", "norm"}


@pytest.mark.parametrize(
    "name",
    [
        "llama-3-8b:q4_k",
        "gemma-3-27b:q4_k_m",
        "gemma-4-26b-a4b:q4_k_m",
        "gpt-oss-20b:mxfp4",
        "qwen3-30b-a3b:q4_k",
        "qwen3.6-27b:q4_k_m",
        "qwen3.6-35b-a3b:q4_k",
        "glm-4.7-flash:q4_k_m",
        "llama-3-8b:f16",
    ],
)
def test_steps_of_every_size_are_valid(name: str) -> None:
    """On a GPU with matrix units whose cores are known: workgroups share the last tiles of a prompt's matmuls."""
    program, shared = Planned(SyntheticModel(name, layers=4), 1024).program, 0
    for tokens in (1, 2, 4, 8, 9, 16, 33, 64, 65, 128, 129, 256, 512):
        for single in (0, 1) if tokens <= 64 else (0,):
            rows = min(tokens, 16)
            counts = {"tokens": tokens, "rows": rows, "work": tokens if single else 1, SINGLE: single}
            made = step_program(program, counts, H200)
            validate(made)
            shared += sum("part_sums" in launch.buffers for launch in made.launches)
    assert shared


def test_a_vision_encoder_is_valid() -> None:
    model = SyntheticVision(SyntheticModel("gemma-3-27b:q4_0").config)
    program, layout, _ = encoder_program(model, panel_layout)
    limits = layout.limits
    counts = {"tokens": limits.tokens, "rows": limits.logits_rows, "work": limits.work, SINGLE: 0}
    validate(step_program(program, counts, H200))


@pytest.mark.fast
def test_a_step_of_one_token_has_no_other_launches(program: Program) -> None:
    names = [launch.kernel.name for launch in step_program(program, ONE, H200).launches]
    layer = [
        "matmul_q4_0",
        "attention_prefetch",
        "attention_rope",
        "matmul_norm_partials_q4_0",
        "norm_finish",
        "matmul_q4_0",
        "matmul_norm_partials_q4_0",
        "norm_finish",
    ]
    last = [*layer[:-2], "matmul_q4_0", "norm", "norm", "matmul_q6_k", "sample"]
    assert names == ["embed_q6_k", "norm", *layer, *last]
    barriers = [launch.barrier for launch in step_program(program, ONE, H200).launches]
    beside = [i for i, name in enumerate(names) if name == "attention_prefetch"]
    assert [i for i, barrier in enumerate(barriers) if not barrier] == [0, *beside]


@pytest.mark.fast
def test_a_mixture_has_few_launches() -> None:
    """Few tokens are routed, grouped and quantised in one; experts read tokens, and the norm adds up their outputs."""
    program = Planned(SyntheticModel("qwen3-30b-a3b:q4_k", layers=2), 64).program
    made = {}
    for tokens, single in ((1, 1), (8, 1), (64, 1), (512, 0)):
        counts = {"tokens": tokens, "rows": min(tokens, 16), "work": tokens if single else 1, SINGLE: single}
        for gpu in (MATRICES, H200):
            step = step_program(program, counts, gpu)
            validate(step)
            made[tokens] = [launch.kernel.name for launch in step.launches]
    attention = [
        "matmul_q4_k",
        "attention_prefetch",
        "attention_rope",
        "matmul_norm_partials_q4_k",
        "norm_finish",
    ]
    routed = ["matmul_f32", "route_group"]
    experts = ["expert_matmul_tokens_q4_k", "expert_matmul_q4_k", "combine_norm"]
    assert made[1][2:12] == [*attention, *routed, *experts]
    assert made[8][2:10] == [attention[0], attention[2], attention[0], "norm", *routed, *experts[:2]]
    assert "route_group" not in made[64] and "gather_tokens" not in made[64]
    of_prompt = ["expand_expert_tokens", experts[0], "expand_slots", *experts[1:]]
    begin = made[512].index(of_prompt[0])
    assert made[512][begin : begin + 5] == of_prompt


@pytest.mark.fast
@pytest.mark.parametrize("tokens", [1, 8])
def test_attention_is_fused_where_values_have_another_format(tokens: int) -> None:
    """As in files of mixed formats: a matmul of query and key, one of the value, and no barrier between them."""
    program = Planned(SyntheticModel("gemma-3-27b:q4_k_m", layers=3), 64).program
    counts = {"tokens": tokens, "rows": tokens, "work": tokens, SINGLE: 1}
    step = step_program(program, counts, H200)
    validate(step)
    names = [launch.kernel.name for launch in step.launches]
    assert names.count("attention_rope") == 3 and not {"rope", "attention"} & set(names)
    assert [launch.barrier for launch in step.launches if launch.name == "blk.2.v"] == [False]
    without = [launch for launch in step.launches if launch.name != "blk.2.v"]
    with pytest.raises(
        ProgramError, match=r"attention_\w+ -> blk.2.attn\) reads .*, but nothing has written it"
    ):
        validate(replace(step, launches=without))


# ---- a declaration that lacks an access

MODELS = ("gemma-3-27b:q4_0", "qwen3-30b-a3b:q4_k", "gpt-oss-20b:mxfp4", "qwen3-30b-a3b:f16")
# In real steps the validator does not miss these accesses: another one asks for the same barriers.
MASKED = {
    ("attention", "scratch", "w"): "launches between two that use scratch memory have barriers",
    ("attention_prefetch", "cache", "r"): "the matmul beside it reads what the norm before has written",
    ("attention_rope", "cache", "w"): "it reads the qkv of the matmul beside the prefetch",
    ("attention_rope", "scratch", "w"): "the matmul after it reads `out`",
    ("combine_norm", "groups", "r"): "it reads `add`, which all experts have written",
    ("combine_norm", "weights", "r"): "it reads `add`, which all experts have written",
    ("combine_norm", "x", "w"): "the matmul after it reads `out`",
    ("expand_coopmat_reg", "x", "r"): "it writes scratch memory after another launch",
    ("expand_expert_tokens_f32", "x", "r"): "it writes scratch memory after another launch",
    ("expand_slots", "x", "r"): "it writes scratch memory after another launch",
    ("expand_slots_f32", "x", "r"): "it writes scratch memory after another launch",
    ("expert_matmul_tokens", "groups", "r"): "it reads `x`, or scratch memory, written later",
    ("expert_matmul_tokens", "x", "r"): "it reads `groups`, or scratch memory, written later",
    ("matmul_norm_partials", "residual", "r"): "the launch after it reads `partials`",
    ("norm_finish", "partials", "r"): "it writes the residual stream that the matmul has read",
    ("norm_finish", "x", "w"): "the matmul after it reads `out`",
    ("route_group", "chosen", "w"): "no launch reads which experts were chosen, only their groups",
    ("route_group", "x", "r"): "it reads `logits`, written later than `x`",
    ("sample", "scratch", "w"): "it is the last launch, after a head that reads the norm",
}


@pytest.fixture(scope="module")
def steps() -> list[Program]:
    """With every fused kernel."""
    made = []
    for name in MODELS:
        program = Planned(SyntheticModel(name, layers=2), 64).program
        for tokens, single in ((1, 1), (2, 1), (16, 0), (512, 0)):
            counts = {
                "tokens": tokens,
                "rows": min(tokens, 16),
                "work": tokens if single else 1,
                SINGLE: single,
            }
            made += [step_program(program, counts, gpu) for gpu in (H200, MATRICES)]
    return made


def family(kernel: Kernel) -> str:
    """The kernel's name without the weight format: one declaration makes the kernels of all formats."""
    return re.sub(r"^(expert_matmul_tokens|expert_matmul|matmul_norm_partials|matmul)_.*", r"\1", kernel.name)


def accesses(launches: Sequence[Launch]) -> Iterator[tuple[Launch, Buffer, str]]:
    """Each access that this pass declares, of fused launches and to scratch memory, where a hazard may follow from it.
    None does if no launch writes the tensor's arena, nor from the `r` of an `rw`: whoever has written the bytes, or
    writes them later, conflicts with its `w` too."""
    for launch in launches:
        for buffer in launch.kernel.buffers:
            tensor = launch.buffers[buffer.name]
            fused = launch.kernel.gpu_only or buffer.name == SCRATCH
            if fused and tensor is not None and tensor.arena not in READ_ONLY:
                yield launch, buffer, buffer.access[-1]


@pytest.mark.fast
def test_every_fused_kernel_is_in_a_step(steps: list[Program]) -> None:
    found = {family(launch.kernel) for step in steps for launch in step.launches if launch.kernel.gpu_only}
    assert found == {family(kernel) for kernel in all_kernels().values() if kernel.gpu_only}


@pytest.mark.fast
def test_the_validator_finds_any_missing_access(steps: list[Program]) -> None:
    """Beside a launch that touches the same bytes and no others: the barriers that follow from a declaration without
    the access are too few for what the kernel does."""
    tried = set()
    for step in steps:
        for launch, buffer, access in accesses(step.launches):
            key = (family(launch.kernel), buffer.name, access)
            if key in tried:
                continue
            tried.add(key)
            tensor = launch.buffers[buffer.name]
            assert tensor
            other = touch(tensor, "w" if access == "r" else "r")
            pair = [other, launch] if access == "r" else [launch, other]
            declared = [without(each, buffer.name, access) if each is launch else each for each in pair]
            check_missing_barrier(step, pair, declared)
    assert len(tried) > 40


def touch(tensor: Tensor, access: Literal["r", "w"]) -> Launch:
    """A launch that does nothing but this."""
    kernel = replace(
        all_kernels()["quantise"],
        name="touch",
        buffers=(Buffer("it", access),),
        scalars=(),
        extents=lambda scalars, counts: {"it": 0},
    )
    return Launch(kernel, {"it": tensor}, {}, "touch")


def check_missing_barrier(step: Program, launches: Sequence[Launch], declared: Sequence[Launch]) -> None:
    """`launches` are valid with their own barriers, and not with those of `declared`."""
    launches, declared = [[replace(each) for each in these] for these in (launches, declared)]
    given = [tensor for launch in launches for tensor in launch.touched("r")]
    place_barriers(launches)
    validate(replace(step, launches=launches), given)
    place_barriers(declared)
    honest = [replace(a, barrier=b.barrier) for a, b in zip(launches, declared, strict=True)]
    with pytest.raises(ProgramError, match="without a barrier"):
        validate(replace(step, launches=honest), given)


@pytest.mark.fast
def test_the_validator_finds_a_missing_access_in_a_step(steps: list[Program]) -> None:
    """What the kernel should have written is read, or there are too few barriers: but for accesses in MASKED."""
    found, missed = set(), set()
    for step in steps:
        for key in sorted({(family(a.kernel), b.name, access) for a, b, access in accesses(step.launches)}):
            (found if key in found or is_found(step, *key) else missed).add(key)
    assert missed - found == MASKED.keys()
    assert len(found) > 25


def is_found(step: Program, name: str, buffer: str, access: str) -> bool:
    declared = [
        without(launch, buffer, access)
        if family(launch.kernel) == name and buffer in launch.buffers
        else replace(launch)
        for launch in step.launches
    ]
    try:
        validate(replace(step, launches=declared))
        place_barriers(declared)
        barriers = [launch.barrier for launch in declared]
        launches = [replace(a, barrier=b) for a, b in zip(step.launches, barriers, strict=True)]
        validate(replace(step, launches=launches))
    except ProgramError:
        return True
    return False


def without(launch: Launch, name: str, access: str) -> Launch:
    """The launch of a copy of its kernel that does not declare one access."""
    declared = launch.kernel.buffers
    assert any(b.name == name and access in b.access for b in declared)
    buffers = [
        Buffer(b.name, b.access.replace(access, ""), b.address) if b.name == name else b for b in declared
    ]  # type: ignore[arg-type]
    return replace(launch, kernel=replace(launch.kernel, buffers=tuple(buffers)))
