"""`tandem inspect`: what is in a model's file, and what this machine makes of it."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from typing import Any

from tandem.cli.models import model_file
from tandem.cli.run import open_llm
from tandem.cli.terminal import human_size, print_json, print_table


def main(options: argparse.Namespace) -> int:
    if options.program:
        return _program(options)
    from tandem.model.model import open_model

    model = open_model(model_file(options.model))
    layouts = model.layouts()
    config = dataclasses.asdict(model.config)
    tensors = [_tensor(info, layouts.get(name)) for name, info in model.gguf.tensors.items()]
    if options.json:
        print_json({"file": str(model.gguf.path), "config": config, "tensors": tensors})
        return 0
    _print_config(model.gguf.path, config)
    rows = [
        (t["name"], " x ".join(map(str, t["shape"])), t["format"], human_size(t["bytes"]), t["path"])
        for t in tensors
    ]
    print_table(("TENSOR", "SHAPE:", "FORMAT", "SIZE:", "PATH"), rows)
    formats = Counter[str]()
    for tensor in tensors:
        formats[tensor["format"]] += tensor["bytes"]
    parts = ", ".join(f"{name} {human_size(size)}" for name, size in formats.most_common())
    print(f"\n{len(tensors)} tensors, {human_size(formats.total())}: {parts}")
    return 0


def _tensor(info: Any, layout: str | None) -> dict[str, Any]:
    """A row of the table; `layout` is what a matrix becomes on the device."""
    if layout is None:
        path = "f32 vector"
    else:
        converted = "" if layout == info.format.name.lower() else f" (converted from {info.format.name})"
        path = f"matmul {layout}{converted}"
    return {
        "name": info.name,
        "shape": list(info.shape),
        "format": info.format.name,
        "bytes": info.nbytes,
        "path": path,
    }


def _print_config(path: object, config: dict[str, Any]) -> None:
    print(path)
    width = max(map(len, config)) + 2
    for key, value in config.items():
        if isinstance(value, (tuple, list)) and len(set(map(str, value))) == 1 and len(value) > 1:
            value = f"{value[0]} in all {len(value)}"
        print(f"{key:{width}}{value}")
    print()


def _program(options: argparse.Namespace) -> int:
    with open_llm(options) as llm:
        program = llm.engine.program
        counts = {"tokens": 1, "rows": 1, "work": 1}
        if options.json:
            print_json(
                [
                    {
                        "kernel": launch.kernel.name,
                        "value": launch.name,
                        "items": launch.grid.total(counts),
                        "bytes": launch.cost(counts).bytes,
                        "operations": launch.cost(counts).ops,
                        "barrier": launch.barrier,
                    }
                    for launch in program.launches
                ]
            )
        else:
            print(llm.program_text())
    return 0
