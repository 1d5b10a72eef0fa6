"""What AMD's compiler makes of every shader for a Radeon 780M, in the specialisations that the engine uses.

`python -m tests.vulkan.amd` writes the table of docs/appendix/AMD_PIPELINES.md anew.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem.devices.vulkan.capabilities import Capabilities
from tandem.devices.vulkan.fuse_launches import SINGLE, step_program
from tandem.devices.vulkan.recording import bucket
from tandem.devices.vulkan.shader_modules import SPIRV, find_module, shader_modules
from tandem.engine.engine import STEP_TOKENS
from tandem.kernels.abi import KV_BLOCK
from tandem.kernels.dispatch_table import dispatch
from tandem.kernels.panels import LAYOUTS, panel_layout
from tandem.model.config import Rope
from tandem.model.synthetic import SHAPES, SyntheticModel
from tandem.program.fuse import PASSES, fuse
from tandem.program.lower import lower
from tandem.program.lowering_base import KVCacheShape
from tandem.program.program import Program
from tandem.program.step_inputs import StepLayout, StepLimits
from tandem.program.weight_plan import WeightPlan
from tests.vulkan.machines import PHOENIX
from tests.vulkan.mesa import FAMILIES, Driver, newer_driver, system_driver

DOCUMENT = Path(__file__).parents[2] / "docs" / "appendix" / "AMD_PIPELINES.md"
BEGIN, END = "<!-- table: python -m tests.vulkan.amd -->", "<!-- end of table -->"
CONTEXT, BATCH, LAYERS = 4096, 64, 6
SECONDS = 120  # at most, for all shaders of a driver

STATISTICS = ("VGPRs", "Subgroups per SIMD", "LDS size", "Code size", "Instructions", "Inverse Throughput")

Job = tuple[str, tuple[int, ...], int]  # shader, specialisation constants, subgroup


@dataclass(frozen=True)
class Compiled:
    job: Job
    error: str
    statistics: dict[str, float]
    assembly: str = field(repr=False)

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.assembly))

    @property
    def spills(self) -> int:
        names = ("Spilled SGPRs", "Spilled VGPRs", "Scratch size")
        return int(sum(self.statistics[name] for name in names))

    @property
    def scalar_loads(self) -> int:
        """Loads from a base in scalar registers plus an offset of 32 bits a lane."""
        return self.count(r"\bglobal_load\w+ .*, s\[")

    @property
    def vector_loads(self) -> int:
        """Loads from an address of 64 bits a lane, which takes several instructions to make."""
        return self.count(r"\bglobal_load\w+ .*, off\b")


# ---- what the engine uses


def small_heads() -> SyntheticModel:
    """A SmolLM2, for its heads of 64."""
    model = SyntheticModel("llama-3-8b:q8_0", LAYERS)
    model.config = replace(model.config, dim=576, ffn_dim=1536, q_heads=9, kv_heads=3, head_dim=64, vocab=49152,
                           ropes=(Rope(1e5, 64),))  # fmt: skip
    return model


def programs() -> Iterator[Program]:
    """What models of published shapes, in every layout, are lowered to, on paper; six layers have all there is."""
    models = [SyntheticModel(f"{shape}:q4_0", LAYERS) for shape in SHAPES] + [small_heads()]
    for model in models:
        yield lowered(model, PASSES)
    for layout in LAYOUTS:
        yield lowered(SyntheticModel(f"gemma-3-27b:{layout}", LAYERS), PASSES)
    yield lowered(SyntheticModel("llama-3-8b", LAYERS), (), kv="f32")
    for shape in ("gemma-3-4b", "gemma-3-27b", "qwen2.5-7b"):
        yield lowered(SyntheticModel(f"{shape}:q4_0", LAYERS), PASSES, kv="q8")


def lowered(model: SyntheticModel, passes: tuple[str, ...], kv: str = "f16") -> Program:
    blocks, groups = CONTEXT // KV_BLOCK, len(model.config.windows)
    plan, step = (
        WeightPlan(model.layouts(panel_layout)),
        StepLayout(StepLimits(STEP_TOKENS, BATCH, BATCH, blocks, groups)),
    )
    ops = fuse(model.ops(CONTEXT), plan.layouts, passes)
    return lower(ops, plan, step, KVCacheShape((blocks,) * groups, kv), passes)


def jobs_of(program: Program, device: Capabilities) -> Iterator[Job]:
    """The launches of each bucket: of a prompt, and of a token of each of several sequences, fused or not."""
    sizes = sorted({bucket(count, STEP_TOKENS) for count in range(1, STEP_TOKENS + 1)})
    prompts = [{"tokens": n, "rows": 1, "work": 1} for n in sizes]
    batches = [{"tokens": n, "rows": n, "work": n} for n in sizes if n <= BATCH]
    single = [{**counts, SINGLE: 1} for counts in batches]
    for counts in prompts + batches + single:
        for launch in step_program(program, counts, device).launches:
            found = dispatch(launch.kernel.name, launch.scalars, counts, device)
            yield found.shader or launch.kernel.name, found.constants, found.subgroup


def jobs() -> list[Job]:
    """With matrix units and without, in waves of 32 and of 64 where the engine leaves that to the driver.

    A shader that no model here uses is compiled as it is; but not those on matrix units, which may be for matrices of
    another GPU's shape.
    """
    machines = (PHOENIX, replace(PHOENIX, matrix_shapes=()))
    found = {job for program in programs() for device in machines for job in jobs_of(program, device)}
    used = {shader for shader, _, _ in found}
    found |= {(name, (), 0) for name in shaders() if name not in used}
    return sorted((s, c, size) for s, c, subgroup in found for size in ([subgroup] if subgroup else [32, 64]))


def shaders() -> list[str]:
    """Those that any GPU runs."""
    return sorted(name for name in shader_modules(SPIRV) if not on_matrix_units(name))


def on_matrix_units(shader: str) -> bool:
    return "cooperativeMatrix" in find_module(shader).features


# ---- what the driver makes of it


def compile_all(
    driver: Driver, some: list[Job] | None = None, families: Sequence[str] = FAMILIES
) -> tuple[str, list[Compiled]]:
    """(the driver's name and version, what it says of each job)."""
    wanted = jobs() if some is None else some
    halves = [wanted[::2], wanted[1::2]] if len(wanted) > 50 else [wanted]
    with ThreadPoolExecutor(len(halves)) as pool:
        done = list(pool.map(lambda half: _compile(driver, half, families), halves))
    found = {compiled.job: compiled for _, half in done for compiled in half}
    return done[0][0], [found[job] for job in wanted]


def _compile(driver: Driver, wanted: list[Job], families: Sequence[str]) -> tuple[str, list[Compiled]]:
    """In a process of its own."""
    for family in families:
        done = subprocess.run(
            [sys.executable, "-m", "tests.vulkan.amd_compile"], env=driver.environment(family), capture_output=True,
            text=True, input=json.dumps(wanted), timeout=SECONDS, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.endswith("}")]
        if lines:
            break
    assert lines, f"{driver.manifest}: {done.stderr}"
    found = [Compiled(wanted[i], line.get("error", ""), line.get("statistics", {}), line.get("assembly", ""))
             for i, line in enumerate(lines[1:])]  # fmt: skip
    assert not done.returncode and len(found) == len(wanted), (
        f"{lines[0]['driver']} ends with {done.returncode} near {wanted[len(found)][0]}: {done.stderr}"
    )
    return lines[0]["driver"], found


def table(driver: str, compiled: list[Compiled]) -> str:
    """Markdown, a row a specialisation; where it has two wave sizes, the figures of 32 / 64."""
    heads = ("shader", "constants", "wave", "VGPRs", "waves a SIMD", "LDS", "bytes", "instructions", "cycles", "dot4",
             "wmma", "scalar base", "vector base", "spills")  # fmt: skip
    rows: dict[tuple[str, tuple[int, ...]], list[tuple[object, ...]]] = {}
    for c in compiled:
        figures = [int(c.statistics[name]) for name in STATISTICS] if c.statistics else []
        counted = (c.count(r"\bv_dot4"), c.count(r"\bv_wmma"), c.scalar_loads, c.vector_loads, c.spills)
        rows.setdefault(c.job[:2], []).append((c.job[2], *figures, *counted))
    lines = [
        f"{driver}, {len(compiled)} pipelines.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for (shader, constants), waves in rows.items():
        cells = [" / ".join(map(str, dict.fromkeys(values))) for values in zip(*waves, strict=True)]
        lines.append(f"| {' | '.join([shader, ' '.join(map(str, constants)), *cells])} |")
    return "\n".join(lines)


def main() -> None:
    driver = newer_driver() or system_driver()
    if driver is None:
        sys.exit("no driver: install mesa-vulkan-drivers")
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table(*compile_all(driver))}\n{END}{after}")


if __name__ == "__main__":
    main()
