"""Runs the checks of `tandem doctor`. A check is a function that takes a Place and yields Findings."""

from __future__ import annotations

import getpass
import math
import re
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tandem import __version__
from tandem.doctor import caches, gpu, host, npu
from tandem.doctor.finding import Check, Finding, Place, from_error
from tandem.errors import TandemError
from tandem.settings import home_folder

SCHEMA = 1
CHECKS: tuple[Check, ...] = (
    host.versions,
    host.cpu,
    host.memory,
    host.bandwidth,
    gpu.kernel,
    gpu.vulkan,
    gpu.devices,
    gpu.gpu_memory,
    gpu.chosen,
    npu.npu,
    caches.models,
    caches.caches,
)


def examine(place: Place | None = None) -> Iterator[Finding]:
    """Runs every check. A check that raises becomes a finding."""
    place = place or Place()
    for check in CHECKS:
        try:
            yield from check(place)
        except (TandemError, ImportError, OSError) as error:
            yield from_error(check.__name__.replace("_", " "), error)


def as_data(findings: list[Finding]) -> dict[str, Any]:
    """The findings for JSON, without names of users, hosts and folders."""
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
    """The same data without home folder, user and host names, which an error of a driver or the system may quote, and
    without numbers that JSON lacks."""
    home, names = str(home_folder()), {_user(), socket.gethostname(), socket.gethostname().split(".")[0]}
    names -= {"root", "localhost"}  # not personal
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
    except (KeyError, OSError):  # a user id without a name
        return ""
