"""`tandem inspect MODEL`: a model's configuration, tensors and launches; without MODEL: the devices of this machine."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import Counter
from typing import Any

from tandem.cli.loading import model_file
from tandem.cli.run import open_llm
from tandem.cli.terminal import human_size, print_json, print_table
from tandem.errors import RequestError
from tandem.kernels.layout import Layout


def main(options: argparse.Namespace) -> int:
    if options.model is None:
        if options.program:
            raise RequestError("--program needs a model: name one")
        from tandem.cli import inspect_device

        return inspect_device.main(options)
    if options.program:
        return _program(options)
    from tandem.kernels.panels import panel_layout
    from tandem.model.model import open_model

    model = open_model(model_file(options.model))
    layouts = model.layouts(panel_layout)
    config = dataclasses.asdict(model.config)
    tensors = [_tensor(info, layouts.get(name)) for name, info in model.gguf.tensors.items()]
    if options.json:
        print_json({"file": str(model.gguf.path), "config": config, "tensors": tensors})
        return 0
    print(model.gguf.path)
    for key, value in config.items():
        print(f"{key:19}{_plain(value)}")
    print()
    rows = [
        (t["name"], " x ".join(map(str, t["shape"])), t["format"], human_size(t["bytes"]), t["path"])
        for t in tensors
    ]
    print_table(("TENSOR", "SHAPE:", "FORMAT", "SIZE:", "PATH"), rows)
    formats = Counter[str]()
    for tensor in tensors:
        formats[tensor["format"]] += tensor["bytes"]
    weights = sum(math.prod(tensor["shape"]) for tensor in tensors)
    parts = ", ".join(f"{name} {human_size(size)}" for name, size in formats.most_common())
    print(
        f"\n{len(tensors)} tensors, {weights / 1e6:,.0f} million weights, {human_size(formats.total())}: {parts}"
    )
    return 0


def _tensor(info: Any, layout: Layout | None) -> dict[str, Any]:
    """A row of the table. `layout`: the panel layout of a matrix on the device; None for a vector."""
    if layout is None:
        path = "f32 vector"
    else:
        converted = "" if layout.name == info.format.name.lower() else f" (converted from {info.format.name})"
        path = f"matmul {layout.name}{converted}"
    return {
        "name": info.name,
        "shape": list(info.shape),
        "format": info.format.name,
        "bytes": info.nbytes,
        "path": path,
    }


def _plain(value: Any) -> str:
    """A value of the configuration as text; values for each layer as counts of equal ones."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(part)}" for key, part in value.items() if part)
    if isinstance(value, (tuple, list)):
        counts = Counter(_plain(part) for part in value)
        return "; ".join(part if len(value) == 1 else f"{part} ({count}x)" for part, count in counts.items())
    return str(value)


def _program(options: argparse.Namespace) -> int:
    with open_llm(options) as llm:
        counts = {"tokens": 1, "rows": 1, "work": 1}
        program = llm.device.step_program(llm.program, counts, single=True)
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
