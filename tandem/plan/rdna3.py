"""The time of a launch on an RDNA3 GPU, from what its waves execute: a cost model over documented rates.

A compute unit (CU) has two SIMDs. Each SIMD issues one vector instruction a cycle for 32 lanes, each CU serves its LDS
and its vector memory, and all CUs share the memory. A launch takes as long as the busiest of these, plus the part of
the others that its waves do not overlap: with w waves on a SIMD, one in w has nothing beside it. Three numbers are
fitted (`FITTED`), to rates that others have published for llama.cpp, whose shaders were counted in the same emulator:
docs/appendix/AMD_CALIBRATION.md has the errors, and the sources of the rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.bench.hardware import Hardware

SIMDS = 2  # of a CU
LANES = 32  # of a SIMD
WMMA_CYCLES = 32  # of 16 x 16 x 16
TRANSCENDENTAL_CYCLES = 4  # for 32 lanes
MAX_WAVES = 16  # of a SIMD
LDS_BYTES = 64 << 10  # a CU's share
SEGMENT_CYCLES = 1  # of 64 bytes, in a CU's vector cache
REGISTER_GRANULES = 64  # units in which a SIMD's vector registers are given to waves of 32
L2_WAYS, L2_LINE = 16, 128  # of its lines, in bytes


@dataclass(frozen=True)
class RDNA3Gpu:
    cus: int
    ghz: float
    vgprs: int  # of a SIMD, for waves of 32
    gb_s: float  # of memory, by the data sheet
    l2_bytes: int

    @property
    def simds(self) -> int:
        return SIMDS * self.cus


@dataclass(frozen=True)
class Fitted:
    """The three numbers that are not documented."""

    memory: float  # share of the memory's bandwidth that kernels reach
    compute: float  # share of the cycles in which the busy units of a CU work
    launch_us: float  # of a launch and the barrier before it


FITTED = Fitted(memory=0.896, compute=0.764, launch_us=1.88)  # python -m benchmarks.rdna3_fit


def gpu_of(hardware: Hardware) -> RDNA3Gpu | None:
    """None: not an RDNA3 GPU. No kernel reads faster than the best that was measured."""
    known = hardware.rdna3
    if not known:
        return None
    rate = min(hardware.pin_gb_s, hardware.read_gb_s / FITTED.memory)
    return RDNA3Gpu(known["cus"], known["ghz"], known["vgprs"], rate, known["l2_mib"] << 20)


@dataclass(frozen=True)
class LaunchWork:
    """A launch: what all of its waves execute, and its bytes to and from memory."""

    groups: float
    waves: float
    lanes: int
    vgprs: int
    lds_bytes: int
    dram_bytes: float  # each buffer once
    weight_bytes: float = 0.0  # of these: what each tile of tokens reads
    token_tiles: int = 1  # 1 also where workgroups of the same rows run side by side, as ours do
    input_bytes: float = 0.0  # of dram_bytes: activations, of which each tile of rows reads all
    input_stride: int = L2_LINE  # bytes from a token's activations to the next one's
    tile_tokens: int = 1
    row_tiles: int = 1
    valu: float = 0.0  # instructions; a dual one counts once
    transcendental: float = 0.0  # of these
    wmma: float = 0.0  # of these
    scalar: float = 0.0  # instructions, with branches and loads
    segments: float = 0.0  # of 64 bytes that vector memory accesses touch
    lds_cycles: float = 0.0  # with bank conflicts

    @property
    def valu_cycles(self) -> float:
        """Of SIMDs: waves of 64 take two passes, but matrices are a wave's of 32."""
        passes = self.lanes / LANES
        plain = self.valu - self.transcendental - self.wmma
        return passes * (plain + TRANSCENDENTAL_CYCLES * self.transcendental) + WMMA_CYCLES * self.wmma

    def waves_of_simd(self, gpu: RDNA3Gpu) -> float:
        """How many waves a SIMD holds at a time, as registers, LDS and the size of the launch allow."""
        units = math.ceil(max(self.vgprs, 1) * (self.lanes // LANES) * REGISTER_GRANULES / gpu.vgprs)
        registers = REGISTER_GRANULES // units
        of_group = self.waves / self.groups
        by_lds = LDS_BYTES // self.lds_bytes * of_group / SIMDS if self.lds_bytes else MAX_WAVES
        held = min(MAX_WAVES, registers, by_lds, self.waves / gpu.simds)
        return max(1.0, held)

    def memory_bytes(self, gpu: RDNA3Gpu) -> float:
        """Tiles of tokens that run at the same time share the weights in the cache; the others read them again. Tiles
        of rows share the activations there, unless those of a tile of tokens lie so that they put each other out."""
        held = self.waves_of_simd(gpu) * gpu.simds * self.groups / self.waves  # workgroups
        passes = min(self.token_tiles, max(1.0, self.groups / held))
        again = (passes - 1) * self.weight_bytes
        if self.tile_tokens > lines_kept(self.input_stride, gpu):
            again += (self.row_tiles - 1) * self.input_bytes
        return self.dram_bytes + again


def lines_kept(stride: int, gpu: RDNA3Gpu) -> int:
    """How many lines of the L2 can be `stride` bytes apart: a set holds 16, and large powers of two share few sets."""
    way = gpu.l2_bytes // L2_WAYS
    return way // max(math.gcd(stride, way), L2_LINE) * L2_WAYS


@dataclass(frozen=True)
class LaunchTime:
    """Seconds of each part of a GPU that a launch keeps busy, and of the launch."""

    parts: dict[str, float]
    launch: float
    total: float

    @property
    def bound(self) -> str:
        parts = {**self.parts, "launch": self.launch}
        return max(parts, key=lambda name: parts[name])


def launch_time(work: LaunchWork, gpu: RDNA3Gpu, fitted: Fitted = FITTED) -> LaunchTime:
    cus = min(gpu.cus, work.groups)  # a workgroup runs on one
    cycle = 1 / (cus * gpu.ghz * 1e9 * fitted.compute)  # seconds, of all of them together
    parts = {
        "memory": work.memory_bytes(gpu) / (gpu.gb_s * 1e9 * fitted.memory),
        "valu": work.valu_cycles / SIMDS * cycle,
        "scalar": work.scalar / SIMDS * cycle,
        "lds": work.lds_cycles * cycle,
        "cache": work.segments * SEGMENT_CYCLES * cycle,
    }
    longest = max(parts.values())
    busy = longest + (sum(parts.values()) - longest) / work.waves_of_simd(gpu)
    launch = fitted.launch_us * 1e-6
    return LaunchTime(parts, launch, launch + busy)
