"""`tandem doctor`: what works on this machine and what to do about the rest. A check is a function of a Place."""

from __future__ import annotations

import getpass
import math
import re
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tandem import __version__
from tandem.doctor import caches as doctor_caches
from tandem.doctor import gpu as doctor_gpu
from tandem.doctor import host as doctor_host
from tandem.doctor import npu as doctor_npu
from tandem.doctor.finding import Check, Finding, Place, from_error
from tandem.errors import TandemError
from tandem.settings import home_folder

SCHEMA = 1
CHECKS: tuple[Check, ...] = (
    doctor_host.versions,
    doctor_host.cpu,
    doctor_host.memory,
    doctor_host.bandwidth,
    doctor_gpu.kernel,
    doctor_gpu.vulkan,
    doctor_gpu.devices,
    doctor_gpu.gpu_memory,
    doctor_gpu.chosen,
    doctor_npu.npu,
    doctor_caches.models,
    doctor_caches.kept,
)


def examine(place: Place | None = None) -> Iterator[Finding]:
    """Every check; one that cannot be made is a finding, too."""
    place = place or Place()
    for check in CHECKS:
        try:
            yield from check(place)
        except (TandemError, ImportError, OSError) as error:
            yield from_error(check.__name__.replace("_", " "), error)


def as_data(findings: list[Finding]) -> dict[str, Any]:
    """For JSON: without what is for the screen alone, and without names."""
    counts = Counter(finding.status for finding in findings)
    keys = ("name", "status", "found", "fix", "data")
    data = {
        "schema": SCHEMA,
        "version": __version__,
        "counts": {status: counts[status] for status in ("pass", "warn", "fail")},
        "findings": [{key: getattr(finding, key) for key in keys} for finding in findings],
    }
    found: dict[str, Any] = without_names(data)
    return found


def without_names(data: Any) -> Any:
    """The same data, fit for JSON that strangers read: no home folder, user or host, no numbers that JSON lacks.

    None of them should be in it; but a driver's or the system's error may quote anything.
    """
    home, names = str(home_folder()), {_user(), socket.gethostname(), socket.gethostname().split(".")[0]}
    names -= {"root", "localhost"}  # nobody's, and a word of ours
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if name)
    pattern = re.compile(rf"(?<![\w.-])(?:{words})(?![\w-])") if words else None

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): clean(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [clean(each) for each in value]
        if isinstance(value, str):
            value = value.replace(home, "~") if home != "/" else value
            return pattern.sub("(name)", value) if pattern else value
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return clean(data)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user that has no name
        return ""
