"""Checks of `tandem doctor` for the host: versions, CPU, memory and its bandwidth."""

from __future__ import annotations

import os
import platform
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from tandem import __version__
from tandem.devices.host_memory import host_memory
from tandem.doctor.finding import Finding, Place, Status
from tandem.settings import read_settings

# Flags of /proc/cpuinfo that kernels use, by the instruction set they are compiled for (devices/cpu/isa.c)
USED = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
    "avx2": ("avx2", "fma", "f16c", "bmi2"),
    "plain": (),
}
# Flags that kernels do not use yet.
UNUSED = "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16"
NEEDED = ("cffi",)  # packages that every command needs, besides NumPy
PACKAGES = (*NEEDED, "fastapi", "uvicorn", "llguidance", "jinja2", "regex", "rich", "prometheus_client")
LITTLE = 2e9  # bytes free: enough only for the smallest models
BUSY = 0.5  # share of the cores used by other processes, above which the measured bandwidth is too low
GOOD_SHARE = 0.6  # of the modules' rate: reads usually reach 0.75 to 0.95
MEMORY_DEVICE, END_OF_TABLE = 17, 127  # DMI structures
MEMORY_TYPES = {0x18: "DDR3", 0x1A: "DDR4", 0x1E: "LPDDR4", 0x22: "DDR5", 0x23: "LPDDR5"}


def versions(place: Place) -> Iterator[Finding]:
    import numpy as np

    system = re.search(r'^PRETTY_NAME="?([^"\n]*)', place.text("etc/os-release"), re.M)
    data = {
        "tandem": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "linux": place.text("proc/sys/kernel/osrelease"),
        "system": system[1] if system else "",
    }
    found = ", ".join(f"{name} {version}" for name, version in data.items() if version and name != "system")
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        fix = f"pip install {' '.join(missing).replace('_', '-')}"
        status: Status = "fail" if set(missing) & set(NEEDED) else "warn"
        yield Finding("versions", status, f"{found}; without {', '.join(missing)}", fix, data)
    else:
        yield Finding("versions", "pass", f"{found}, {data['system']}".removesuffix(", "), data=data)


def cpu(place: Place) -> Iterator[Finding]:
    from tandem import native  # the C core: an error if it is not built

    info = dict(re.findall(r"^(model name|flags)\s*: (.*)$", place.text("proc/cpuinfo"), re.M))
    flags, model = set(info.get("flags", "").split()), info.get("model name", "unknown")
    isa, threads = native.best_isa(), read_settings().threads
    best = next(i for i in native.ISAS if native.load().tandem_isa_supported(i.encode()))
    data = {
        "model": model,
        "threads": threads,
        "cores_allowed": len(os.sched_getaffinity(0)),
        "kernels": isa,
        "features_used": [f for i in native.ISAS[native.ISAS.index(isa) :] for f in USED[i] if f in flags],
        "features_missed": [f for f in USED["avx2"] + USED["avx512"] if f not in flags],
        "features_not_used": [f for f in UNUSED if f in flags],
    }
    found = f"{model}, {threads} threads, kernels for {isa}"
    if isa != best:
        yield Finding("cpu", "warn", f"{found}, though it has {best}", "unset TANDEM_ISA", data)
    elif isa == "plain":
        fix = "use a CPU with AVX2 (since 2013; a virtual machine may hide it): this is a tenth of the usual speed"
        yield Finding("cpu", "warn", f"{found}: it has no AVX2", fix, data)
    else:
        missed = f" (no {', '.join(data['features_missed'])})" if data["features_missed"] else ""
        yield Finding("cpu", "pass", found + missed, data=data)


def memory(place: Place) -> Iterator[Finding]:
    total = memory_total(place)
    free = host_memory(place.root / "proc", place.root / "sys/fs/cgroup")
    data = {"total_bytes": total, "free_bytes": int(free)}
    found = f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of it free"
    if free < LITTLE:
        yield Finding("memory", "warn", found, "close other programs, or use small models", data)
    else:
        yield Finding("memory", "pass", found, data=data)


def memory_total(place: Place) -> int:
    found = re.search(r"^MemTotal:\s*(\d+) kB", place.text("proc/meminfo"), re.M)
    return int(found[1]) * 1024 if found else 0


def bandwidth(place: Place) -> Iterator[Finding]:
    """The measured read bandwidth, and the memory's channels and peak if the firmware's table is readable."""
    load = float((place.text("proc/loadavg") or "0").split()[0])  # before our own reads
    modules, rate = memory_modules(place), place.read_rate()
    channels, peak = channels_of(modules)
    data = {
        "read_bytes_per_s": rate,
        "load": load,
        "channels": channels or None,
        "peak_bytes_per_s": peak or None,
        "modules": [{"type": m.type, "mt_s": m.speed, "bits": m.bits, "bytes": m.nbytes} for m in modules],
    }
    found = f"{rate / 1e9:.1f} GB/s read"
    busy = (
        " while other processes keep the machine busy" if load > BUSY * len(os.sched_getaffinity(0)) else ""
    )
    if not peak:
        channels_text = "the firmware does not list the memory channels"
        if os.path.exists(place.root / DMI):  # Path.exists raises if the folder is not readable
            channels_text = "channels not readable: `sudo dmidecode -t memory` shows them"
        yield Finding("bandwidth", "pass", f"{found}{busy}; {channels_text}", data=data)
        return
    found += (
        f" of {peak / 1e9:.1f} ({channels} x {modules[0].bits} bits {modules[0].type}-{modules[0].speed})"
        + busy
    )
    if peak < rate:
        yield Finding("bandwidth", "warn", f"{found}: one of the two is wrong", "send in a report", data)
    elif sum(m.bits for m in by_channel(modules).values()) <= 64:
        yield Finding("bandwidth", "warn", f"{found}: one channel", "a second module doubles the speed", data)
    elif rate < GOOD_SHARE * peak:
        fix = "end other programs and try again; set the modules' speed (EXPO, XMP) in the firmware"
        yield Finding("bandwidth", "warn", found, fix, data)
    else:
        yield Finding("bandwidth", "pass", found, data=data)


# ---- the firmware's table of memory modules (SMBIOS)

DMI = "sys/firmware/dmi/tables/DMI"


@dataclass(frozen=True)
class Module:
    channel: str
    type: str
    bits: int
    speed: int  # transfers a second / 1e6, as configured
    nbytes: int


def memory_modules(place: Place) -> list[Module]:
    """The installed modules; empty if the table does not exist or only root may read it."""
    try:
        table = (place.root / DMI).read_bytes()
    except OSError:
        return []
    found, at = [], 0
    while at + 4 <= len(table):
        kind, length = table[at], table[at + 1]
        end = table.find(b"\0\0", at + length)
        if kind == END_OF_TABLE or length < 4 or end < 0:
            break
        if kind == MEMORY_DEVICE and length >= 0x22:
            texts = table[at + length : end].split(b"\0")
            if (module := _module(table[at : at + length], texts)) is not None:
                found.append(module)
        at = end + 2
    return found


def _module(fields: bytes, texts: list[bytes]) -> Module | None:
    def text(offset: int) -> str:
        number = fields[offset]
        return texts[number - 1].decode(errors="replace").strip() if 0 < number <= len(texts) else ""

    bits, size = struct.unpack_from("<HH", fields, 0x0A)
    rated, configured = struct.unpack_from("<H", fields, 0x15)[0], struct.unpack_from("<H", fields, 0x20)[0]
    if size in (0, 0xFFFF) or not 0 < bits <= 128:
        return None  # an empty slot
    megabytes = struct.unpack_from("<I", fields, 0x1C)[0] if size == 0x7FFF else size
    channel = text(0x11) or text(0x10)  # bank, else slot
    kind = MEMORY_TYPES.get(fields[0x12], "memory")
    return Module(channel, kind, bits, configured or rated, megabytes << 20)


def by_channel(modules: list[Module]) -> dict[str, Module]:
    """One module of each channel: two modules on a channel are no faster than one."""
    return {module.channel: module for module in modules}


def channels_of(modules: list[Module]) -> tuple[int, float]:
    """(number of channels, their total bytes per second)."""
    channels = by_channel(modules)
    return len(channels), sum(m.bits / 8 * m.speed * 1e6 for m in channels.values())
