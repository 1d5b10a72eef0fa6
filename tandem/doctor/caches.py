"""Checks of `tandem doctor`: models and caches on the disk (compiled pipelines, tuned choices, measured rates)."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from tandem.devices.tuned_choices import MAX_BYTES, read_choices
from tandem.doctor.finding import Finding, Place
from tandem.errors import ModelFileError, ModelNotFoundError
from tandem.files import open_regular, read_regular
from tandem.settings import read_settings

HEADER_BYTES = 32  # of a pipeline cache: size, version, vendor, device, the driver's UUID
UUID = slice(16, 32)


def models(_: Place) -> Iterator[Finding]:
    from tandem.gguf.file import GGUF
    from tandem.model.catalogue import DEFAULT_MODEL
    from tandem.model.locate import list_models

    found, damaged = list_models(), []
    for model in found:
        try:
            GGUF.open(model.files[0]).close()
        except (ModelFileError, ModelNotFoundError):
            damaged.append(model)
    size = sum(model.size for model in found)
    parts = list(read_settings().cache.glob("models--*--*/blobs/*.incomplete"))
    data = {"models": len(found), "bytes": size, "damaged": len(damaged), "unfinished": len(parts)}
    found_text = (
        f"{len(found)} on this machine, {size / 1e9:.1f} GB"
        if found
        else f"none yet: `tandem pull {DEFAULT_MODEL}` downloads one"
    )
    if damaged:
        fix = "`tandem rm` it, then `tandem pull` it again (or delete it in the program it belongs to)"
        names = tuple(model.name for model in damaged)
        yield Finding("models", "fail", f"{found_text}; {len(damaged)} damaged", fix, data, names)
    elif parts:
        fix = "`tandem pull` the model again to resume"
        yield Finding("models", "warn", f"{found_text}; {len(parts)} unfinished downloads", fix, data)
    else:
        yield Finding("models", "pass", found_text, data=data)


def caches(_: Place) -> Iterator[Finding]:
    """Cached files of Tandem. A damaged one is ignored and made again, so it only costs time."""
    folder = read_settings().pipelines
    kinds = {"*.pipelines": is_pipeline_cache, "*.tuned": is_tuned, "*.json": is_json}
    files = {pattern: sorted(folder.glob(pattern)) for pattern in kinds}
    damaged = [path for pattern, sound in kinds.items() for path in files[pattern] if not sound(path)]
    data = {
        "pipelines": len(files["*.pipelines"]),
        "tuned": len(files["*.tuned"]),
        "measured": len(files["*.json"]),
        "bytes": sum(path.stat().st_size for paths in files.values() for path in paths),
        "damaged": len(damaged),
    }
    found_text = (
        f"files: {data['pipelines']} of compiled pipelines, {data['tuned']} of tuning, {data['measured']} of measured "
        f"rates; {data['bytes'] / 1e6:.1f} MB"
    )
    if damaged:
        names = tuple(map(str, damaged))
        fix = "delete the damaged files: they are made again"
        yield Finding("caches", "warn", f"{found_text}; {len(damaged)} damaged", fix, data, names)
    elif not os.access(next(p for p in (folder, *folder.parents) if p.exists()), os.W_OK):
        fix = "make it writable, or set XDG_CACHE_HOME: without it every start compiles the pipelines"
        yield Finding("caches", "warn", "the cache folder is not writable", fix, data, (str(folder),))
    else:
        yield Finding("caches", "pass", found_text, data=data)


def is_pipeline_cache(path: Path) -> bool:
    """Whether the header has the driver's UUID that the file name begins with."""
    try:
        with open_regular(path) as file:
            head = file.read(HEADER_BYTES)
    except OSError:
        return False
    return len(head) == HEADER_BYTES and path.name.startswith(head[UUID].hex())


def is_tuned(path: Path) -> bool:
    with warnings.catch_warnings(record=True) as found_text:
        warnings.simplefilter("always")
        read_choices(path)
    return not found_text


def is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(read_regular(path, MAX_BYTES)), dict)
    except (OSError, ValueError, RecursionError):
        return False
