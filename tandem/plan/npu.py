"""Predicts what the NPU of a Phoenix would add to its iGPU, from published rates: an estimate, not yet run.

A partition of a matmul takes `dispatch + max(operations / rate, bytes / bandwidth)` on either device, and all
partitions together at least their bytes over the bandwidth of the shared memory
(devices/tensor_parallel/cost.py divides the columns).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tandem.bench.hardware import HOST_SHARE, NOT_RUN, Hardware
from tandem.bench.step_cost import weights_read
from tandem.devices.tensor_parallel.cost import (
    MIN_GAIN,
    Rates,
    StepCost,
    gain,
    is_divisible,
    place_attention,
    place_columns,
)
from tandem.errors import DeviceError
from tandem.plan.predict import Planned
from tandem.program.program import Launch, Program

Data = dict[str, Any]
STATUS = "emulated; not yet run on a Phoenix"
INT32_TOP_S = 4.57  # published rate with int32 results, which our runtime uses
GOOD_SHADER = 0.55  # assumed fraction of the matrix units' peak that a good shader reaches
PROMPTS = (16, 32, 64, 128, 256, 512)
BATCHES = (1, 8)


def npu_plan(planned: Planned, hardware: Hardware, prompt: int, depth: int) -> Data:
    """Predicts speeds with the columns of matmuls divided between iGPU and NPU. `depth`: tokens that each decoding
    sequence has in the KV cache."""
    if hardware.npu is None:
        raise DeviceError(f"{hardware.name} has no known NPU: leave --npu out, or use phoenix-780m")
    copy = _copy_bytes(planned.program)
    npu, kinds = _npu(planned, hardware, copy), _Kinds(planned.program)
    needed = planned.memory(hardware).needed + copy
    prefill = []
    for name, prompt_of in (("a good shader", _good_prompt), ("our kernels", _our_prompt)):
        found = {tokens: prompt_of(planned, kinds, tokens, hardware, npu) for tokens in {*PROMPTS, prompt}}
        pays = [tokens for tokens in PROMPTS if found[tokens]["gain"] >= MIN_GAIN]
        prefill.append({"shader": name, **found[prompt], "min_prompt_tokens": min(pays, default=None)})
    decode = [_decode(kinds, batch, depth, hardware, npu) for batch in BATCHES]
    return {
        "status": f"{NOT_RUN}; {STATUS}",
        "rates": {
            "int8_top_s": npu.ops / 1e12,
            "gb_s": npu.bandwidth / 1e9,
            "dispatch_us": npu.dispatch * 1e6,
            "weights": npu.weights,
            "shared_gb_s": hardware.usual_gb_s,
        },
        "memory": {
            "copy": copy,
            "needed": needed,
            "bytes": hardware.memory_gib * 2**30,
            "fits": needed <= hardware.memory_gib * 2**30 * HOST_SHARE,
        },
        "prefill": prefill,
        "decode": decode,
        "attention": _attention(planned, kinds, prompt, hardware, npu),
    }


def _copy_bytes(program: Program) -> float:
    """Bytes of the NPU's int8 copy of the weights of all matmuls that can be divided."""
    one = {"tokens": 1, "rows": 1, "work": 1}
    return sum(launch.cost(one).ops / 2 for launch in program.launches if is_divisible(launch))


def _npu(planned: Planned, hardware: Hardware, copy: float) -> Rates:
    """The NPU's rates. Its weights are int8: more bytes than most formats on the iGPU."""
    assert hardware.npu
    igpu = sum(weights_read(launch) for launch in planned.program.launches if is_divisible(launch))
    return Rates(
        INT32_TOP_S * 1e12, hardware.npu["gb_s"] * 1e9, hardware.npu["dispatch_us"] * 1e-6, copy / igpu
    )


def _launch(hardware: Hardware) -> float:
    return hardware.calibration.launch_us["matmul"] * 1e-6


class _Kinds:
    """One launch of each kind in a step, and how many of each there are: layers are alike."""

    def __init__(self, program: Program) -> None:
        kinds: dict[tuple[object, ...], Launch] = {}
        times: Counter[tuple[object, ...]] = Counter()
        for launch in program.launches:
            key = launch.kernel.name, *sorted(launch.scalars.items())
            kinds.setdefault(key, launch)
            times[key] += 1
        self.program = Program(list(kinds.values()), program.max_counts, program.arena_bytes)
        self.times = [times[key] for key in kinds]

    def summed(self, sums: Sequence[StepCost], tokens: int, predicted: float | None = None) -> Data:
        """`predicted`: seconds without the NPU, of which it saves what it does in the sum."""
        each = [pair for s in sums for pair in zip(s.launches, self.times, strict=True)]
        alone, together = (sum(n * getattr(placed, f) for placed, n in each) for f in ("alone", "seconds"))
        if predicted is not None:
            alone, together = predicted, predicted - (alone - together)
        helped = sum(n * placed.seconds for placed, n in each if placed.fractions[1])
        columns = sum(n * placed.seconds * placed.fractions[1] for placed, n in each)
        return {
            "without_npu_tokens_per_s": tokens / alone,
            "with_npu_tokens_per_s": tokens / together,
            "speedup": alone / together,
            "gain": gain(alone, together),
            "recommended": gain(alone, together) >= MIN_GAIN,
            "npu_column_share": columns / helped if helped else 0.0,
        }


def _good_prompt(planned: Planned, kinds: _Kinds, tokens: int, hardware: Hardware, npu: Rates) -> Data:
    """Prefill with a good shader on the iGPU."""
    rate = hardware.matrix_tflop_s * 1e12 * GOOD_SHADER
    return _prompt(planned, kinds, tokens, hardware, npu, rate)


def _our_prompt(planned: Planned, kinds: _Kinds, tokens: int, hardware: Hardware, npu: Rates) -> Data:
    """Prefill with our kernels on the iGPU: the predicted rate of matmuls, and the predicted total time."""
    ops = seconds = total = 0.0
    for step in planned.prompt_steps(tokens):
        counts = {"tokens": sum(count for _, count in step), "rows": 1, "work": len(step)}
        for launch, predicted in planned.predict_each(hardware, step):
            if is_divisible(launch):
                ops += launch.cost(counts).ops
                seconds += predicted.total - predicted.launches
        total += planned.predict(hardware, step).total
    return _prompt(planned, kinds, tokens, hardware, npu, ops / seconds, total)


def _prompt(
    planned: Planned,
    kinds: _Kinds,
    tokens: int,
    hardware: Hardware,
    npu: Rates,
    rate: float,
    predicted: float | None = None,
) -> Data:
    """`rate`: operations per second of the iGPU; `predicted`: as in _Kinds.summed."""
    memory = hardware.usual_gb_s * 1e9
    igpu, sums = Rates(rate, memory, _launch(hardware)), []
    for step in planned.prompt_steps(tokens):
        ((begin, count),) = step
        counts = {"tokens": count, "rows": 1, "work": count}
        sums.append(place_columns(kinds.program, counts, [igpu, npu], memory, begin + count // 2 or 1))
    return {
        "tokens": tokens,
        "peak_fraction": rate / (hardware.matrix_tflop_s * 1e12),
        "tflop_s": rate / 1e12,
        **kinds.summed(sums, tokens, predicted),
    }


def _decode(kinds: _Kinds, batch: int, depth: int, hardware: Hardware, npu: Rates) -> Data:
    """Decode with kernels that read at the memory's usual rate. Both devices share that bandwidth."""
    memory = hardware.usual_gb_s * 1e9
    igpu = Rates(hardware.dot_top_s * 1e12, memory, _launch(hardware))
    counts = {"tokens": batch, "rows": batch, "work": batch}
    found = place_columns(kinds.program, counts, [igpu, npu], memory, depth + 1)
    return {"batch": batch, "depth": depth, **kinds.summed([found], batch)}


def _attention(planned: Planned, kinds: _Kinds, tokens: int, hardware: Hardware, npu: Rates) -> Data:
    """Only attention on the NPU."""
    memory = hardware.usual_gb_s * 1e9
    igpu = Rates(hardware.matrix_tflop_s * 1e12 * GOOD_SHADER, memory, _launch(hardware))
    counts = {"tokens": min(tokens, planned.step_tokens), "rows": 1, "work": tokens}
    found = place_attention(kinds.program, counts, [igpu, npu], memory, planned.context - 1)
    return {"depth": planned.context - 1, **kinds.summed([found], counts["tokens"])}


def npu_lines(plan: Data) -> list[str]:
    """The lines that `tandem plan --npu` prints."""
    rates, memory, best = plan["rates"], plan["memory"], plan["prefill"][0]
    lines = [
        f"with the NPU ({plan['status']}): int8 at {rates['int8_top_s']:.2f} TOP/s, {rates['gb_s']:.0f} GB/s of the "
        f"{rates['shared_gb_s']:.0f} that all share, {rates['dispatch_us']:.0f} us per dispatch, "
        f"{rates['weights']:.1f} bytes of weights for one of the iGPU's",
        f"  its own copy of the weights takes {memory['copy'] / 1e9:,.1f} GB more, {memory['needed'] / 1e9:,.1f} in "
        f"all of the machine's {memory['bytes'] / 1e9:,.1f}: "
        + ("fits" if memory["fits"] else "DOES NOT FIT"),
    ]
    for row in plan["prefill"]:
        shortest = row["min_prompt_tokens"]
        pays = f"pays from prompts of {shortest} on" if shortest else "does not pay up to 512"
        lines.append(
            f"  prompt of {row['tokens']} with {row['shader']} ({row['peak_fraction']:.0%} of the peak, "
            f"{row['tflop_s']:.1f} TFLOP/s): "
            f"{row['without_npu_tokens_per_s']:,.0f} tok/s alone, {row['with_npu_tokens_per_s']:,.0f} with the NPU "
            f"({row['speedup']:.2f}x; {row['npu_column_share']:.0%} of the columns of what it helps with); {pays}"
        )
    for row in plan["decode"]:
        lines.append(
            f"  decoding {row['batch']} at depth {row['depth']}, read at the usual rate: "
            f"{row['without_npu_tokens_per_s']:,.1f} tok/s alone, "
            f"{row['with_npu_tokens_per_s']:,.1f} with the NPU: "
            + ("it would help" if row["recommended"] else "no help, for both read the same memory")
        )
    row = plan["attention"]
    lines.append(
        f"  attention alone on the NPU, {row['depth']} deep: {row['speedup']:.2f}x"
        + ("" if row["speedup"] > 1 else ", slower than without")
    )
    decoding = max((row["speedup"] for row in plan["decode"] if row["recommended"]), default=0.0)
    lines.append(
        f"  at most about {best['speedup']:.1f}x for prompts against a good shader, and "
        + (f"{decoding:.1f}x for decoding" if decoding else "nothing for decoding")
    )
    return lines
