"""Shaders compiled by RADV for an AMD GPU that is not here, with what the driver records about each pipeline.

RADV reads the environment when it is loaded and may crash, so it runs in a process of its own: `python -m
tandem.devices.rdna3.compiler`, which answers a JSON line for each that it reads.
"""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tandem.errors import DeviceError
from tandem.settings import read_settings

FAMILIES = ("phoenix", "gfx1150", "gfx1151")  # Radeon 780M, 890M, 8060S: RDNA3 and RDNA3.5
MANIFESTS = "usr/share/vulkan/icd.d/radeon_icd*.json"
MESA = "Mesa 25.0"  # whose record of a pipeline is known here
NEEDED = f"the emulated GPU needs RADV of {MESA}: set TANDEM_RADV to the folder where it is unpacked"


class Job(NamedTuple):
    """A pipeline: see Pipelines.get."""

    shader: str
    constants: tuple[int, ...]
    lanes: int
    scalars: tuple[int, ...] = ()
    q8_sums: bool = True


@dataclass(frozen=True)
class MachineCode:
    """A compute shader as RADV hands it to the GPU."""

    job: Job
    code: bytes
    threads: tuple[int, int, int]  # of a workgroup
    vgprs: int
    lds_bytes: int
    scratch_bytes: int  # a lane
    flush_denormals: bool  # of float32
    # Which scalar registers hold what at the start. None: absent.
    user_sgprs: int
    group_ids: int  # bits: whose numbers of x, y and z follow
    push_pointer: int | None  # the low half of the address of the push constants
    push_values: dict[int, int]  # register of each dword of push constants that is passed by value
    grid_size: int | None  # three registers
    wave_number: bool = False  # whether it follows those
    descriptor_set: int | None = None  # the low half of the address of set 0


# ---- the record that RADV's pipeline cache keeps of a shader

HEADER_BYTES = 32  # of the cache's data; then the number of objects
OBJECT = struct.Struct("<iII")  # type, bytes of its key, bytes of its data, which is aligned
ALIGNMENT = 8
# struct radv_shader_binary of Mesa 25.0: ac_shader_config, radv_shader_info, sizes; the code comes last.
CONFIG = struct.Struct("<14I")
VGPRS_WORD, FLOAT_MODE_WORD, SCRATCH_WORD, RSRC2_WORD = 2, 9, 10, 12
PUSH_MASK_AT, LOCATIONS_AT, THREADS_AT = 56, 80, 820
DESCRIPTOR_SETS = 32  # locations of user data before those below
PUSH_POINTER, PUSH_VALUES, GRID_SIZE = 1, 2, 18
LDS_GRANULE = 512
POINTER_HIGH = 0xFFFF8000  # the high half of 32-bit addresses


def read_record(job: Job, data: bytes) -> MachineCode:
    at, objects = HEADER_BYTES + 4, []
    [count] = struct.unpack_from("<I", data, HEADER_BYTES)
    for _ in range(count):
        _, key, size = OBJECT.unpack_from(data, at)
        begin = -(-(at + OBJECT.size + key) // ALIGNMENT) * ALIGNMENT
        objects.append(data[begin : begin + size])
        at = begin + size
    record = max(objects, key=len)
    config = CONFIG.unpack_from(record)
    rsrc2 = config[RSRC2_WORD]
    [mask] = struct.unpack_from("<Q", record, PUSH_MASK_AT)
    threads = struct.unpack_from("<3I", record, THREADS_AT)
    total = struct.pack("<I", len(record))
    sizes = record.find(total, THREADS_AT)
    code_bytes, executed_bytes = struct.unpack_from("<2I", record, sizes + 8)
    code = record[len(record) - code_bytes :][:executed_bytes]

    def location(kind: int) -> tuple[int, int]:
        return struct.unpack_from("<bB", record, LOCATIONS_AT + 2 * (DESCRIPTOR_SETS + kind))

    (pointer, _), (first, count), (grid, _) = map(location, (PUSH_POINTER, PUSH_VALUES, GRID_SIZE))
    (descriptors, _) = location(-DESCRIPTOR_SETS)
    dwords = [bit for bit in range(64) if mask >> bit & 1][:count]
    user_sgprs = rsrc2 >> 1 & 31
    found = MachineCode(
        job, code, threads, config[VGPRS_WORD], (rsrc2 >> 15 & 511) * LDS_GRANULE,
        config[SCRATCH_WORD] // job.lanes, not config[FLOAT_MODE_WORD] >> 4 & 3, user_sgprs, rsrc2 >> 7 & 7,
        pointer if pointer >= 0 else None, {dword: first + i for i, dword in enumerate(dwords)} if count else {},
        grid if grid >= 0 else None, bool(rsrc2 >> 10 & 1), descriptors if descriptors >= 0 else None,
    )  # fmt: skip
    given = 2 + (descriptors >= 0) + (pointer >= 0) + count + 3 * (grid >= 0)
    plausible = given == user_sgprs and len(dwords) == count and 0 < threads[0] <= 1024 and sizes >= 0
    if not plausible:
        raise DeviceError(f"RADV's record of {job.shader} is not as in {MESA}: {NEEDED}")
    return found


# ---- the driver, in a process of its own


class Compiler:
    """Compiles one pipeline at a time."""

    def __init__(self, folder: Path | None = None, family: str = FAMILIES[0]) -> None:
        """`folder`: where Mesa is unpacked, with its `usr`; None: as the settings say, or the system's."""
        root = folder or read_settings().radv or Path("/")
        manifest = next(iter(sorted(root.glob(MANIFESTS))), None)
        if manifest is None:
            raise DeviceError(f"no {MANIFESTS} in {root}: {NEEDED}")
        values = {"VK_ICD_FILENAMES": manifest, "VK_DRIVER_FILES": manifest, "RADV_FORCE_FAMILY": family,
                  "MESA_SHADER_CACHE_DISABLE": "true"}  # fmt: skip
        if root != Path("/"):
            values["LD_LIBRARY_PATH"] = root / "usr" / "lib" / "x86_64-linux-gnu"
        self._process = subprocess.Popen(
            ["env", *(f"{k}={v}" for k, v in values.items()), sys.executable, "-m", "tandem.devices.rdna3.compiler"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        answer = self._answer()
        self.driver, self.features = str(answer["driver"]), frozenset(answer["features"])
        if MESA not in self.driver:
            self.close()
            raise DeviceError(f"{self.driver} is here: {NEEDED}")

    def compile(self, job: Job) -> MachineCode:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise DeviceError(answer["error"])
        return read_record(job, base64.b64decode(answer["record"]))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):  # drivers print, too
                return dict(json.loads(line))
        raise DeviceError(f"RADV stopped with {self._process.wait()}: {NEEDED}")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        self._process.wait()


def main() -> None:
    from tandem.devices.vulkan.binding import Vulkan
    from tandem.devices.vulkan.device import create_device, create_instance, list_devices
    from tandem.devices.vulkan.pipelines import Pipelines

    with ExitStack() as closing:
        vk = Vulkan()
        [(physical, capabilities)] = list_devices(vk, create_instance(vk, closing))
        device = create_device(vk, physical, capabilities, closing)
        print(
            json.dumps({"driver": capabilities.driver, "features": list(capabilities.features)}), flush=True
        )
        for line in sys.stdin:
            shader, constants, lanes, scalars, q8_sums = json.loads(line)
            with ExitStack() as one:
                pipelines = Pipelines(vk, device, capabilities, None, one)
                pipelines.q8_sums = q8_sums
                try:
                    pipelines.get(shader, tuple(constants), lanes, tuple(scalars))
                    answer = {"record": base64.b64encode(pipelines.cache_data()).decode()}
                except DeviceError as error:
                    answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
