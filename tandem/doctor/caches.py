"""`tandem doctor`: what is kept on the disk: models, compiled pipelines, tuned choices; and what of it is damaged."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from tandem.devices.choices import read_choices
from tandem.doctor.finding import Finding, Place
from tandem.errors import ModelFileError, ModelNotFoundError
from tandem.settings import read_settings

HEADER_BYTES = 32  # of a pipeline cache: size, version, vendor, device, the driver's UUID
UUID = slice(16, 32)


def models(_: Place) -> Iterator[Finding]:
    from tandem.gguf.file import GGUF
    from tandem.model.catalogue import DEFAULT_MODEL
    from tandem.model.registry import list_models

    found, damaged = list_models(), []
    for model in found:
        try:
            GGUF.open(model.files[0]).close()
        except (ModelFileError, ModelNotFoundError):
            damaged.append(model)
    size = sum(model.size for model in found)
    parts = list(read_settings().cache.glob("models--*--*/blobs/*.incomplete"))
    data = {"models": len(found), "bytes": size, "damaged": len(damaged), "unfinished": len(parts)}
    told = (
        f"{len(found)} on this machine, {size / 1e9:.1f} GB"
        if found
        else f"none yet: `tandem pull {DEFAULT_MODEL}` fetches one"
    )
    if damaged:
        fix = "`tandem rm` it, then `tandem pull` it again (or delete it in the program it belongs to)"
        names = tuple(model.name for model in damaged)
        yield Finding("models", "fail", f"{told}; {len(damaged)} damaged", fix, data, names)
    elif parts:
        fix = "`tandem pull` the model again to go on"
        yield Finding("models", "warn", f"{told}; {len(parts)} downloads were not finished", fix, data)
    else:
        yield Finding("models", "pass", told, data=data)


def kept(_: Place) -> Iterator[Finding]:
    """What Tandem made itself. It does without what is damaged, so that costs time alone."""
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
    told = (
        f"files of compiled pipelines: {data['pipelines']}, of tuning: {data['tuned']}, of measured rates: "
        f"{data['measured']}; {data['bytes'] / 1e6:.1f} MB"
    )
    if damaged:
        names = tuple(map(str, damaged))
        fix = "delete what is damaged: it is made anew"
        yield Finding("caches", "warn", f"{told}; {len(damaged)} damaged", fix, data, names)
    elif not os.access(next(p for p in (folder, *folder.parents) if p.exists()), os.W_OK):
        fix = "let it be written, or set XDG_CACHE_HOME: every start compiles anew"
        yield Finding("caches", "warn", "the cache's folder may not be written", fix, data, (str(folder),))
    else:
        yield Finding("caches", "pass", told, data=data)


def is_pipeline_cache(path: Path) -> bool:
    """Its header names the driver that its file name does."""
    try:
        head = path.read_bytes()[:HEADER_BYTES]
    except OSError:
        return False
    return len(head) == HEADER_BYTES and path.name.startswith(head[UUID].hex())


def is_tuned(path: Path) -> bool:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        read_choices(path)
    return not told


def is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (OSError, ValueError):
        return False
