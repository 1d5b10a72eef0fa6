"""Tuned parameters of launches on the CPU (devices/tuned_choices.py), and their file.

They do not change a bit of the results: they set the panels of a work item and choose between instruction sets that do
the same operations.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from tandem import native
from tandem.devices.tuned_choices import Choice, Choices, read_choices
from tandem.kernels.kernel import Scalars
from tandem.settings import Settings

TUNED = ("matmul", "attention", "norm")
DEVICE = "device"  # the shape name of the number of threads
PANELS = (1, 2, 4, 8, 16)


def tuned_file(folder: Path, threads: int) -> Path:
    """Returns the file for this CPU, this number of threads and this build of the kernels."""
    about = f"{cpu_name()} {native.best_isa()} {threads}"
    built = hashlib.sha256(native.LIBRARY.read_bytes()).hexdigest()[:16]
    return folder / f"cpu-{hashlib.sha256(about.encode()).hexdigest()[:16]}-{built}.tuned"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "stepping")))
    return " ".join(list(dict.fromkeys(names))[:2])


def tuned_choices(settings: Settings, threads: int) -> Choices:
    """Returns the choices for this number of threads."""
    folder = settings.pipelines
    # Usually there is no file, and the library need not be hashed.
    if not settings.tune or next(folder.glob("cpu-*.tuned"), None) is None:
        return Choices()
    return read_choices(tuned_file(folder, threads))


def tuned_threads(settings: Settings) -> int:
    """Returns the default number of threads."""
    if settings.threads_given:
        return settings.threads
    return tuned_choices(settings, settings.threads).by_shape.get(DEVICE, {}).get("threads", settings.threads)


def candidate_threads(threads: int) -> list[Choice]:
    """Returns smaller numbers of threads: fewer may already use the whole memory bandwidth."""
    return [{"threads": n} for n in dict.fromkeys((3 * threads // 4, threads // 2)) if 0 < n < threads]


def candidates(scalars: Scalars) -> list[Choice]:
    choices: list[Choice] = []
    if "panels_per_item" in scalars:
        own, glu = int(scalars["panels_per_item"]), bool(scalars["epilogue"])
        choices += [{"panels_per_item": n} for n in PANELS if n != own and (n >= 4 or not glu)]
    others = native.ISAS[native.ISAS.index(native.best_isa()) + 1 :]
    return choices + [{"isa": native.ISAS.index(isa)} for isa in others if isa != "plain"]
