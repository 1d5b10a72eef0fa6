"""Runs kernels on their cases on a device and compares them with NumPy references, for tests and `tandem report`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from tandem.devices.backends import open_device
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.device import Recording
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.recording import bucket
from tandem.errors import DeviceError, DeviceLostError
from tandem.kernels import all_kernels, attention_dispatch, matmul
from tandem.kernels.abi import COUNTS, KV_SCALED, Q8_BLOCK, Q8_COLUMNS, Q8_TILE
from tandem.kernels.dispatch_table import DISPATCH_RULES
from tandem.kernels.kernel import Array, Case, Kernel
from tandem.kernels.matmul_dispatch import has_coopmat
from tandem.kernels.q8_tiles import q8_unpack
from tandem.program.program import Launch, Program, Tensor

AnyDevice = CPUDevice | VulkanDevice

ARENA = "activations"
ARENA_BYTES = 256 << 20
STEP_BYTES = 64
GUARD = 256  # bytes before and after each buffer
# Bytes of the guards. Around inputs: NaN in every float format, so that a read outside shows; around outputs: not NaN.
INPUT_GUARD, OUTPUT_GUARD = 0xFF, 0x5A
LARGEST_COUNT = 512
# Extra tolerance for GPUs: division and roots are off by a few units in the last place, and denormals may become 0.
MORE_RTOL, MORE_ATOL = 2e-6, 1.2e-38
# Attention on matrix units has queries and weights in float16: the ratio of its error to that of float32, about.
HALF_RATIO = 500.0
ATTENTION_ERROR = 4e-6  # maximum error of attention in float32
# Maximum error of a matmul relative to the RMS of the result: in float16 on matrix units, else in int8 and float32.
MATRIX_ERROR, INTEGER_ERROR = 1e-2, 1e-4
LARGER_MATMULS = "larger matmuls"
LARGE_LAYOUTS = (
    *(
        "q4_0",
        "q4_1",
        "q5_0",
        "q8_0",
        "q4_k",
        "q5_k",
        "q6_k",
        "q3_k",
        "q2_k",
        "iq4_xs",
        "mxfp4",
        "f16",
        "bf16",
    ),
)


class Mismatch(AssertionError):
    """A kernel does not do what its declaration says."""


def require(holds: object, problem: str) -> None:
    if not holds:
        raise Mismatch(problem)


# ---- all kernels


@dataclass(frozen=True)
class Checked:
    kernel: str
    cases: int
    failures: list[str]
    seconds: float


def check_kernels(device: AnyDevice) -> Iterator[Checked]:
    """Each kernel on its cases, then matmuls of the sizes that matrix units take."""
    for kernel in all_kernels().values():
        cases = [case for case in kernel.cases(np.random.default_rng(1)) if runs(device, kernel, case)]
        if cases:
            yield check_kernel(device, kernel.name, iter(cases))
        elif not kernel.gpu_only:
            yield Checked(kernel.name, 0, [f"{kernel.name}: no Vulkan version"], 0.0)
    cases_of_matmuls = large_matmuls(np.random.default_rng(2))
    if isinstance(device, VulkanDevice) and device.capabilities.cores:
        cases_of_matmuls = chain(cases_of_matmuls, shared_matmuls(np.random.default_rng(3)))
    yield check_kernel(device, LARGER_MATMULS, cases_of_matmuls)


def runs(device: AnyDevice, kernel: Kernel, case: Case) -> bool:
    """Whether a device runs such a launch; fused kernels are for GPUs, and some for matrix units."""
    if isinstance(device, CPUDevice):
        return not kernel.gpu_only
    rule = DISPATCH_RULES.get(kernel.name)
    return rule is not None and rule(case.scalars, case.counts, device.capabilities) is not None


def check_kernel(device: AnyDevice, name: str, cases: Iterator[Case]) -> Checked:
    """`name`: of a kernel, or LARGER_MATMULS."""
    begun, count, failures, kernels = time.perf_counter(), 0, [], all_kernels()
    on_matrix_units = isinstance(device, VulkanDevice) and (
        device.capabilities.register_coopmat or has_coopmat(device.capabilities)
    )
    for case in cases:
        count += 1
        kernel = matmul.BY_LAYOUT[case.label.split()[0]] if name == LARGER_MATMULS else kernels[name]
        in_half = on_matrix_units and (
            name.startswith("expert_matmul_") or (name.startswith("matmul_") and case.counts["tokens"] > 1)
        )
        try:
            if name == LARGER_MATMULS or in_half:
                check_matmul(device, kernel, case, MATRIX_ERROR if on_matrix_units else INTEGER_ERROR)
            else:
                check_case(device, kernel, case)
        except DeviceLostError:
            raise
        except (AssertionError, DeviceError) as error:
            failures.append(f"{kernel.name}: {case.label}: {' '.join(str(error).split())[:200]}")
    return Checked(name, count, failures, time.perf_counter() - begun)


def large_matmuls(rng: np.random.Generator) -> Iterator[Case]:
    """Shapes with whole and ragged tiles for the matrix units."""
    for layout in LARGE_LAYOUTS:
        for tokens, rows, columns, epilogue, out_q8 in (
            (12, 144, 1024, 0, 0),
            (30, 256, 1024, 1, 1),
            (64, 200, 2048, 0, 0),
            (100, 336, 1024, 0, 0),
            (200, 384, 1024, 2, 1),
            (512, 8192, 256, 0, 0),
            (4, 4112, 2048, 0, 0),
        ):
            yield matmul.make_case(layout, tokens, rows, columns, epilogue, out_q8, rng)


def shared_matmuls(rng: np.random.Generator) -> Iterator[Case]:
    """Shapes of which workgroups of a large GPU share the last tiles, by columns."""
    for layout in ("q4_0", "q4_k", "q6_k", "f16"):
        for tokens, rows, columns in ((512, 5376, 2048), (512, 21504, 1024)):
            yield matmul.make_case(layout, tokens, rows, columns, 0, 0, rng)


def check_case(device: AnyDevice, kernel: Kernel, case: Case) -> None:
    expected = kernel.reference(case.arrays, case.scalars, case.counts)
    found, gpu = run_kernel(device, kernel, case), isinstance(device, VulkanDevice)
    if kernel.name == "attention_rope":  # on matrix units always; its cache is as exact as that of `rope`
        assert_matches(case, {"cache": found.pop("cache")}, {"cache": expected.pop("cache")}, gpu)
        case = replace(case, atol=HALF_RATIO * ATTENTION_ERROR, rtol=HALF_RATIO * ATTENTION_ERROR)
    elif isinstance(device, VulkanDevice) and kernel.name == "attention" and attention_in_half(device, case):
        case = replace(case, atol=HALF_RATIO * case.atol, rtol=HALF_RATIO * case.rtol)
    assert_matches(case, found, expected, gpu)


def attention_in_half(device: VulkanDevice, case: Case) -> bool:
    """Whether attention runs on matrix units."""
    gpu, counts = device.capabilities, {name: bucket(n, LARGEST_COUNT) for name, n in case.counts.items()}
    return gpu.register_coopmat or "tiles" in attention_dispatch.attention(case.scalars, counts, gpu).shader


def check_matmul(device: AnyDevice, kernel: Kernel, case: Case, bound: float = MATRIX_ERROR) -> None:
    """Checks the error of a matmul relative to the RMS of its result: quants of tiny output blocks may differ."""
    expected = kernel.reference(case.arrays, case.scalars, case.counts)["out"]
    found = run_kernel(device, kernel, case)["out"]
    step: Array = np.zeros(1, np.float32)  # tolerance: a value may round to the neighbouring quant
    if case.scalars["out_q8"]:
        rows = len(found) * Q8_TILE if "groups" in case.arrays else case.counts["tokens"]
        expected, found = (q8_unpack(a, rows) for a in (expected, found))
        blocks = np.abs(expected).reshape(len(expected), -1, 32).max(axis=2, keepdims=True)
        step = np.broadcast_to(blocks * np.float32(1.5 / 127), (*blocks.shape[:2], 32)).reshape(
            expected.shape
        )
    size: Array | float = max(float(np.sqrt(np.mean(expected**2))), 1e-9)
    if "groups" in case.arrays:  # of the rows in use; the largest outputs of a GLU have the largest errors
        size = np.abs(expected) + np.sqrt(np.mean(expected[expected.any(axis=1)] ** 2))
    error = (np.maximum(np.abs(expected - found) - step, 0) / size).max()
    require(error < bound, f"error {error:.2e} relative to the result")


# ---- one kernel on a device


def open_for_checks(name: str, threads: int | None = None) -> AnyDevice:
    """Opens a device with arenas that are large enough for any kernel's case."""
    device = open_device(name, threads=threads, alone=False)
    if not isinstance(device, AnyDevice):
        device.close()
        raise DeviceError(f"kernels are checked on one device at a time, and {name} is several: choose one")
    prepare(device)
    return device


def prepare(device: AnyDevice) -> None:
    device.allocate_arena("step", STEP_BYTES)
    device.allocate_arena(ARENA, ARENA_BYTES)


def tensors_of(case: Case) -> dict[str, Tensor]:
    """Aligned tensors for a case's arrays, with a guard on either side of each."""
    found, at = {}, GUARD
    for name, array in case.arrays.items():
        found[name] = Tensor(name, ARENA, str(array.dtype), array.nbytes, offset=at)
        at += -(-array.nbytes // GUARD) * GUARD + GUARD
    require(at <= ARENA_BYTES, f"{case.label}: {at} bytes are more than the arena of the checks")
    return found


def upload(device: AnyDevice, kernel: Kernel, case: Case, tensors: Mapping[str, Tensor]) -> Array:
    """Writes the case's arrays, guards and counts; returns the bytes of the arena."""
    end = max(t.offset + -(-t.nbytes // GUARD) * GUARD for t in tensors.values()) + GUARD
    memory = np.empty(end, np.uint8)
    for buffer in kernel.buffers:
        if buffer.name in tensors:
            tensor, guard = tensors[buffer.name], INPUT_GUARD if buffer.access == "r" else OUTPUT_GUARD
            memory[tensor.offset - GUARD : tensor.offset + -(-tensor.nbytes // GUARD) * GUARD + GUARD] = guard
    for name, tensor in tensors.items():
        memory[tensor.offset : tensor.offset + tensor.nbytes] = case.arrays[name].reshape(-1).view(np.uint8)
    device.write(Tensor("all", ARENA, "u8", end, offset=0), memory)
    set_counts(device, case)
    return memory


def set_counts(device: AnyDevice, case: Case) -> None:
    device.memory("step").view(np.int32)[: len(COUNTS)] = [case.counts[name] for name in COUNTS]


def record(
    device: AnyDevice, kernel: Kernel, case: Case, tensors: Mapping[str, Tensor], times: int = 1
) -> Recording:
    bound = {b.name: tensors.get(b.name) for b in kernel.buffers}
    launches = [Launch(kernel, bound, case.scalars, kernel.name, barrier=True) for _ in range(times)]
    return device.record(Program(launches, dict.fromkeys(COUNTS, LARGEST_COUNT), {ARENA: ARENA_BYTES}))


def run_kernel(device: AnyDevice, kernel: Kernel, case: Case) -> dict[str, Array]:
    """The outputs by name. Raises if anything else was written."""
    tensors = tensors_of(case)
    before = upload(device, kernel, case, tensors)
    record(device, kernel, case, tensors).replay()
    after = device.read(Tensor("all", ARENA, "u8", len(before), offset=0))
    outside = np.ones(len(before), bool)
    outputs = {}
    extents = kernel.extents(case.scalars, case.counts)
    for buffer in kernel.buffers:
        if buffer.name in tensors and "w" in buffer.access:
            tensor, array = tensors[buffer.name], case.arrays[buffer.name]
            size = min(extents.get(buffer.name, tensor.nbytes), tensor.nbytes)
            outside[tensor.offset : tensor.offset + size] = False
            written = after[tensor.offset : tensor.offset + tensor.nbytes].copy()
            outputs[buffer.name] = written.view(array.dtype).reshape(array.shape)
    changed = np.flatnonzero(outside & (before != after))
    if len(changed):
        raise Mismatch(f"{kernel.name} writes outside of its outputs: {where(int(changed[0]), tensors)}")
    return outputs


def where(at: int, tensors: Mapping[str, Tensor]) -> str:
    name, tensor = max(
        ((n, t) for n, t in tensors.items() if t.offset - GUARD <= at), key=lambda item: item[1].offset
    )
    return f"byte {at - tensor.offset} of {name}, which has {tensor.nbytes}"


def time_case(device: AnyDevice, kernel: Kernel, case: Case, repeats: int = 20) -> float:
    """The best time of a launch in seconds: by the device's timestamps if it has them, else by the host's clock."""
    tensors = tensors_of(case)
    upload(device, kernel, case, tensors)
    recording = record(device, kernel, case, tensors, repeats)
    recording.replay()
    if isinstance(device, CPUDevice) or device.capabilities.timestamp_ns:
        # A GPU may run several launches for one.
        each = np.array(recording.replay_timed()).reshape(repeats, -1)
        return float(each.sum(axis=1).min())
    begin = time.perf_counter()
    recording.replay()
    return (time.perf_counter() - begin) / repeats


# ---- comparing


def assert_matches(
    case: Case, got: Mapping[str, Array], expected: Mapping[str, Array], gpu: bool = False
) -> None:
    """Checks the case's tolerances; `gpu`: with the extra tolerance for GPUs."""
    require(set(got) == set(expected), "the reference returns every output that is present, and no other")
    atol, rtol = (case.atol + MORE_ATOL, case.rtol + MORE_RTOL) if gpu else (case.atol, case.rtol)
    for name, want in expected.items():
        if want.dtype == Q8_BLOCK:
            assert_q8_matches(name, got[name], want, atol, rtol, gpu)
        else:
            assert_array_matches(name, got[name], want, atol, rtol)


def assert_array_matches(name: str, got: Array, want: Array, atol: float, rtol: float) -> None:
    """Checks floats with the tolerance, float16 with one unit more, integers exactly, and the gaps between rows."""
    if {"k_scale", "scale"} & set(want.dtype.names or ()):
        assert_kv_q8_matches(name, got, want, atol, rtol)
        return
    if want.dtype.names:
        for field in want.dtype.names:
            assert_array_matches(f"{name}.{field}", got[field], want[field], atol, rtol)
        return
    if want.dtype.kind != "f":
        np.testing.assert_array_equal(got, want, err_msg=name)
        return
    if want.dtype == np.float16:
        atol, rtol = atol + 2.0**-24, rtol + 2.0**-10
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol, atol, equal_nan=True, err_msg=name
    )


def assert_q8_matches(
    name: str, got: Array, want: Array, atol: float, rtol: float, gpu: bool = False
) -> None:
    """Checks scales with the tolerance, quants as equal (a few may be off by 1 if values are inexact), and that sums
    match the quants."""
    scale_atol = atol if gpu else atol / 127
    np.testing.assert_allclose(got["scale"], want["scale"], rtol, scale_atol, err_msg=f"{name}.scale")
    off = np.abs(got["q"].astype(int) - want["q"])
    exact = atol == 0 and rtol == 0
    require(off.max(initial=0) <= (0 if exact else 1), f"{name}: a quant is off by {off.max(initial=0)}")
    # An error of e quantisation steps rounds about 2e of them differently.
    few = max(0.002, 254 * rtol, 2 / off.size)
    require(off.mean() <= few, f"{name}: {off.sum()} of {off.size} quants differ")
    half, more = Q8_COLUMNS // 2, (MORE_RTOL, MORE_ATOL) if gpu else (0.0, 0.0)
    for field, columns in {"sum": slice(None), "low": slice(half), "high": slice(half, None)}.items():
        total = got["q"][..., columns].sum(axis=-1, dtype=np.int32).astype(np.float32)
        np.testing.assert_allclose(got[field], got["scale"] * total, *more, err_msg=f"{name}.{field}")


def assert_kv_q8_matches(name: str, got: Array, want: Array, atol: float, rtol: float) -> None:
    """Checks scales with the tolerance and a unit of float16; quants as equal, or off by 1 in a few and where the scale
    differs."""
    latent = "row" in (want.dtype.names or ())  # whose scales are beside each other
    for field in ("row",) if latent else ("k", "v"):
        scale = "scale" if latent else f"{field}_scale"
        scales, wanted = got[scale], want[scale]
        assert_array_matches(f"{name}.{scale}", scales, wanted, atol / 127, rtol)
        off = np.abs(got[field].astype(int) - want[field])
        same = scales == wanted if latent else (scales == wanted).swapaxes(-1, -2)
        elements = off.shape[-2 if field == "k" else -1]
        same = np.repeat(same, KV_SCALED, axis=-1)[..., :elements]  # of each token, in order
        require(off.max(initial=0) <= 1, f"{name}.{field}: a quant is off by {off.max(initial=0)}")
        few = max(0.002, 254 * rtol) * off.size + 2
        differing = off[same.swapaxes(-1, -2) if field == "k" else same].sum()
        require(differing <= few, f"{name}.{field}: {off.sum()} quants differ")
