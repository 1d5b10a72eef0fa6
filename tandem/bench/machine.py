"""Facts about the machine of a measurement, and the processor time that other processes took."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from tandem.bench.result import Machine

STEAL = 8  # columns of /proc/stat: user nice system idle iowait irq softirq steal
SYS = Path("/sys")
DISTURBED = 0.05  # share of the machine's processor time by other processes, above which a round is disturbed


def machine_facts() -> Machine:
    governor = SYS / "devices/system/cpu/cpu0/cpufreq/scaling_governor"
    return {
        "cpu": cpu_fields().get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "governor": governor.read_text().strip() if governor.exists() else None,
        "load_before": os.getloadavg()[0],
    }


def disturbed(others: float) -> str:
    """A warning if other processes took more than DISTURBED; else ""."""
    return f"other processes took {others:.0%} of the machine" if others > DISTURBED else ""


def cpu_fields() -> dict[str, str]:
    """The fields of the last core in /proc/cpuinfo."""
    with open("/proc/cpuinfo") as lines:
        return dict(line.strip().replace("\t", "").split(": ", 1) for line in lines if ": " in line)


def busy_seconds() -> float:
    """Processor seconds of all processes of the machine, and the time that a hypervisor stole."""
    with open("/proc/stat") as lines:
        fields = [int(field) for field in lines.readline().split()[1 : 1 + STEAL]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / float(os.sysconf("SC_CLK_TCK"))
