"""The roofline of a decode step: measured time of each part, against its bytes over the measured memory bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.bench import bandwidth
from tandem.bench.profile import launch_seconds, program_of
from tandem.bench.rounds import Bench, Workload
from tandem.bench.step_cost import Step, step_costs
from tandem.devices.backends import open_device
from tandem.engine.llm import LLM
from tandem.errors import TandemError
from tandem.program.program import Launch

DEPTH = 256  # tokens in the KV cache before the measured step
MIN_FREE_BYTES = 2 << 30  # of GPU memory, to measure its bandwidth


def part_of(launch: Launch) -> str:
    """The part of the model that a launch belongs to."""
    if launch.kernel.name.startswith("attention"):
        return "attention"
    if not launch.kernel.name.startswith("matmul"):
        return "norms, RoPE, sampling"
    if "ffn" in launch.name:
        return "feed-forward"
    return "LM head" if "logits" in launch.name else "projections"


@dataclass(frozen=True)
class StepPart:
    name: str
    seconds: float  # sum of its launches, each timed alone
    nbytes: float


@dataclass(frozen=True)
class Roofline:
    bandwidth: float | None  # bytes/s of the device's memory; None: could not be measured
    parts: list[StepPart]  # of a decode step of one token


def can_measure(llm: LLM) -> bool:
    """False for a model split over devices, each of which has its own roofline."""
    return not hasattr(llm.device, "devices")


def measure_parts(llm: LLM) -> list[StepPart]:
    """The parts of a decode step, slowest first. The caller holds the lock of an idle engine."""
    depth = min(DEPTH, llm.context // 2)
    step: Step = [(depth, 1)]
    bench, workload = Bench.on(llm.engine), Workload("decode", 1, depth=depth)
    program = program_of(llm.engine, step)
    found: dict[str, tuple[float, float]] = {}
    timed = launch_seconds(bench, workload, step)
    for launch, seconds, cost in zip(program.launches, timed, step_costs(program, step), strict=True):
        before = found.get(part_of(launch), (0.0, 0.0))
        found[part_of(launch)] = before[0] + seconds, before[1] + cost.bytes
    parts = [StepPart(name, seconds, nbytes) for name, (seconds, nbytes) in found.items()]
    return sorted(parts, key=lambda part: -part.seconds)


def measure_bandwidth(llm: LLM) -> float | None:
    """Measures the memory bandwidth, in about a second, through a second device object that frees its memory."""
    if llm.device.name != "cpu" and llm.device.free_memory()[0] < MIN_FREE_BYTES:
        return None
    try:
        device = open_device(llm.device.name.split()[0], threads=getattr(llm.device, "threads", None))
    except TandemError:
        return None
    try:
        return bandwidth.measure_bandwidth(device, llm.weight_bytes)[0]
    except TandemError:
        return None
    finally:
        device.close()
