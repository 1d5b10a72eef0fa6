"""Builds the cases that `tandem tune` times: each shape of a Program's launches once, at the sizes of steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tandem.devices.tuned_choices import shape_of
from tandem.kernels import attention, norm
from tandem.kernels.abi import KV_TYPES, PANEL_ROWS
from tandem.kernels.kernel import Array, Case, Counts, Kernel
from tandem.kernels.matmul import random_panels
from tandem.kernels.panels import LAYOUT_NAMES, LAYOUTS
from tandem.kernels.q8_tiles import q8_pack, q8_zeros
from tandem.program.program import Launch, Program

PATTERN_BYTES = 8 << 20  # of random weights, which are repeated
PANELS_OF_GLU = 4
MAX_CHECKED_ROWS, MAX_CHECKED_COLUMNS = 256, 1024  # of a matmul that NumPy computes too
MAX_KEYS = 4096  # of all sequences together
ROWS_PER_ITEM, QUERIES_PER_ITEM = 16, 64  # of attention, as engine/batch.py cuts prompts


@dataclass(frozen=True)
class Shape:
    """Launches that differ only in their buffers."""

    launch: Launch
    name: str  # of what it computes, without the layer
    launches: int  # of a step

    @property
    def kernel(self) -> Kernel:
        return self.launch.kernel

    @property
    def kind(self) -> str:
        return _kind(self.kernel)

    @property
    def count(self) -> str:
        """The count that its size is: "tokens" or "rows"."""
        s = self.launch.scalars
        return "rows" if s.get("count") or s.get("use_rows") else "tokens"

    def counts(self, size: int) -> Counts:
        return {"tokens": size, "rows": size, "work": 0}


def _kind(kernel: Kernel) -> str:
    """Its name, without the layout of a matmul's weights."""
    return "matmul" if kernel.name.startswith("matmul_") else kernel.name


def shapes(program: Program, kinds: Iterable[str]) -> list[Shape]:
    """The shapes of the kernels of `kinds`, those with the most bytes for one token first."""
    one, found = {"tokens": 1, "rows": 1, "work": 1}, dict[str, list[Launch]]()
    for launch in program.launches:
        kind = _kind(launch.kernel)
        if kind in kinds and (
            kind != "norm" or (launch.buffers["weight"] and not launch.scalars["use_rows"])
        ):
            found.setdefault(shape_of(kind, launch.scalars), []).append(launch)
    found = dict(sorted(found.items(), key=lambda item: -sum(launch.cost(one).bytes for launch in item[1])))
    return [
        Shape(alike[len(alike) // 2], re.sub(r"\bblk\.\d+\.|\.\d+$", "", alike[0].name), len(alike))
        for alike in found.values()
    ]


# ---- matmuls


def matmul_case(shape: Shape, tokens: int, max_bytes: int, rng: np.random.Generator) -> Case:
    """A matmul of up to `tokens`, with fewer rows if the weights would exceed `max_bytes`."""
    s = shape.launch.scalars
    layout, columns, rows = LAYOUT_NAMES[int(s["format"])], int(s["columns"]), int(s["rows"])
    group = LAYOUTS[layout].matrix_bytes(PANEL_ROWS * PANELS_OF_GLU, columns)
    if LAYOUTS[layout].matrix_bytes(rows, columns) > max_bytes:
        rows = PANEL_ROWS * PANELS_OF_GLU * (max_bytes // group)
    return _matmul_case(shape, layout, tokens, rows, columns, rng)


def small_matmul(shape: Shape, tokens: int, rng: np.random.Generator) -> Case:
    """A matmul that is small enough for NumPy."""
    s = shape.launch.scalars
    rows, columns = min(MAX_CHECKED_ROWS, int(s["rows"])), min(MAX_CHECKED_COLUMNS, int(s["columns"]))
    return _matmul_case(shape, LAYOUT_NAMES[int(s["format"])], tokens, rows, columns, rng)


def _matmul_case(
    shape: Shape, layout: str, tokens: int, rows: int, columns: int, rng: np.random.Generator
) -> Case:
    s, has = dict(shape.launch.scalars), shape.launch.buffers
    width = rows // (2 if s["epilogue"] else 1)
    stride = -(-width // PANEL_ROWS) * PANEL_ROWS
    x = rng.standard_normal((tokens, columns), np.float32)
    some = max(1, PATTERN_BYTES // LAYOUTS[layout].matrix_bytes(PANEL_ROWS, columns))
    panels = -(-rows // PANEL_ROWS)
    pattern = random_panels(layout, PANEL_ROWS * min(some, panels), columns, rng)
    arrays: dict[str, Array] = {
        "x": q8_pack(x) if LAYOUTS[layout].quantised else x,
        "weights": np.resize(pattern, (panels, *pattern.shape[1:])),
        "out": q8_zeros(tokens, width) if s["out_q8"] else np.zeros((tokens, stride), np.float32),
    }
    if has["bias"] is not None:
        arrays["bias"] = rng.standard_normal(panels * PANEL_ROWS, np.float32)
    s |= {"rows": rows, "columns": columns, "x_stride": columns, "out_stride": stride}
    label = f"{layout} T={tokens} {rows}x{columns}"
    return Case(label, arrays, s, shape.counts(tokens), atol=2e-4, rtol=1e-4)


# ---- norms and attention


def norm_case(shape: Shape, tokens: int, rng: np.random.Generator) -> Case:
    s, has = shape.launch.scalars, shape.launch.buffers
    options = {
        "add": has["add"], "post": has["post_weight"], "q8": s["out_q8"], "rows": s["use_rows"],
        "only": has["weight"] is None,
    }  # fmt: skip
    present = " ".join(name for name, there in options.items() if there)
    case = norm.make_case(rng, f"T={tokens}", 3 * tokens if s["use_rows"] else tokens, int(s["dim"]), present)
    return Case(case.label, case.arrays, case.scalars, shape.counts(tokens), case.atol, case.rtol)


def decode_attention(shape: Shape, sequences: int, keys: int, rng: np.random.Generator) -> Case:
    """Attention of one token in each of `sequences`, over `keys` keys."""
    return _attention_case(shape, [(max(0, keys - 1 - 7 * i % 16), 1) for i in range(sequences)], rng)


def prefill_attention(shape: Shape, tokens: int, rng: np.random.Generator) -> Case:
    """Attention of the first tokens of a prompt."""
    return _attention_case(shape, [(0, tokens)], rng)


def _attention_case(shape: Shape, rows: list[tuple[int, int]], rng: np.random.Generator) -> Case:
    s = shape.launch.scalars
    heads = (int(s["q_heads"]), int(s["kv_heads"]), int(s["head_dim"]))
    max_rows = max(1, min(ROWS_PER_ITEM, QUERIES_PER_ITEM * heads[1] // heads[0]))
    return attention.make_case(
        rng,
        f"T={sum(new for _, new in rows)}",
        heads,
        rows,
        int(s["window"]),
        s["softcap"],
        KV_TYPES[int(s["kv"])],
        int(s["out_q8"]),
        max_rows,
        q_gap=0,
    )


def depths(sequences: int, context: int) -> Iterator[int]:
    """Numbers of keys of each sequence: few, and as many as are cheap to make."""
    few, many = 64, min(context, MAX_KEYS // sequences)
    yield few
    if many > 2 * few:
        yield many
