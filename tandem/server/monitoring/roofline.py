"""Where a step's time goes, and the least it could take: the bytes it must move, over what the memory gives."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.bench import bandwidth
from tandem.bench.profile import launch_seconds
from tandem.bench.rounds import Bench, Workload
from tandem.bench.step_cost import Step, step_costs
from tandem.devices.opening import open_device
from tandem.engine.llm import LLM
from tandem.errors import TandemError
from tandem.program.program import Launch

DEPTH = 256  # positions before the token of the step that is measured
ROOM = 2 << 30  # bytes of a GPU that must be free to measure its memory


def part_of(launch: Launch) -> str:
    """Which part of a model a launch belongs to."""
    if launch.kernel.name == "attention":
        return "attention"
    if not launch.kernel.name.startswith("matmul"):
        return "norms, rotation, sampling"
    if "ffn" in launch.name:
        return "feed-forward"
    return "head" if "logits" in launch.name else "projections"


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float  # measured, each launch alone
    nbytes: float


@dataclass(frozen=True)
class Roofline:
    bandwidth: float | None  # bytes a second that the device's memory gives; None: it could not be measured
    parts: list[Part]  # of a step of one token


def can_measure(llm: LLM) -> bool:
    """Where a model is split between devices, each would have a roofline of its own."""
    return not hasattr(llm.device, "devices")


def measure_parts(llm: LLM) -> list[Part]:
    """Those that take most first; the caller has the lock of an engine with nothing to do."""
    depth = min(DEPTH, llm.context // 2)
    step: Step = [(depth, 1)]
    bench, workload = Bench.on(llm.engine), Workload("decode", 1, depth=depth)
    launches = llm.engine.program.launches
    found: dict[str, tuple[float, float]] = {}
    timed = launch_seconds(bench, workload, step)
    for launch, seconds, cost in zip(launches, timed, step_costs(llm.engine.program, step), strict=True):
        before = found.get(part_of(launch), (0.0, 0.0))
        found[part_of(launch)] = before[0] + seconds, before[1] + cost.bytes
    parts = [Part(name, seconds, nbytes) for name, (seconds, nbytes) in found.items()]
    return sorted(parts, key=lambda part: -part.seconds)


def measure_bandwidth(llm: LLM) -> float | None:
    """Takes about a second of the whole device, and is done by another one: it takes memory and gives it back."""
    if llm.device.name != "cpu" and llm.device.free_memory()[0] < ROOM:
        return None
    try:
        device = open_device(llm.device.name.split()[0], threads=getattr(llm.device, "threads", None))
    except TandemError:
        return None
    try:
        return bandwidth.measure_bandwidth(device, llm.engine.model.nbytes)[0]
    except TandemError:
        return None
    finally:
        device.close()
