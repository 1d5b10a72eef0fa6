"""Matmul: out = x weightsᵀ (+ bias), with soft cap, GLU and quantisation of the result as epilogues."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from tandem.kernels.abi import (
    EPILOGUE_CLAMPED_GLU,
    EPILOGUE_GELU_GLU,
    EPILOGUE_SILU_GLU,
    EPILOGUE_STORE,
    PANEL_ROWS,
)
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.panels import LAYOUT_NAMES, LAYOUTS, VALUES
from tandem.kernels.q8_tiles import q8_bytes, q8_pack, q8_store, q8_tokens_bytes, q8_unpack, q8_zeros


def panels(rows: int) -> int:
    return -(-rows // PANEL_ROWS)


def panels_per_item(rows: int, glu: bool) -> int:
    """Few enough that all threads have items, enough to reuse a tile of activations."""
    return 4 if glu else max(1, min(4, panels(rows) // 32))


def _grid(s: Scalars) -> Grid:
    return Grid(-(-panels(int(s["rows"])) // int(s["panels_per_item"])))


def token_count(s: Scalars, counts: Counts) -> int:
    return counts["rows" if s["count"] else "tokens"]


def layout_of(s: Scalars) -> str:
    return LAYOUT_NAMES[int(s["format"])]


def _x_bytes(s: Scalars, n: int, q8: Callable[[int, int], int] = q8_bytes) -> int:
    columns = int(s["columns"])
    quantised = LAYOUTS[layout_of(s)].quantised
    return q8(n, columns) if quantised else 4 * ((n - 1) * int(s["x_stride"]) + columns)


def _out_bytes(s: Scalars, n: int, q8: Callable[[int, int], int] = q8_bytes) -> int:
    width = int(s["rows"]) // (2 if s["epilogue"] else 1)
    return q8(n, width) if s["out_q8"] else 4 * ((n - 1) * int(s["out_stride"]) + width)


def _extents(s: Scalars, counts: Counts) -> dict[str, int]:
    n, rows = token_count(s, counts), int(s["rows"])
    layout = LAYOUTS[layout_of(s)]
    return {
        "x": _x_bytes(s, n),
        "weights": layout.matrix_bytes(rows, int(s["columns"])),
        "bias": 4 * panels(rows) * PANEL_ROWS,
        "out": _out_bytes(s, n),
    }


def _cost(s: Scalars, counts: Counts) -> Cost:
    n, rows, columns = token_count(s, counts), int(s["rows"]), int(s["columns"])
    activations = _x_bytes(s, n, q8_tokens_bytes) + _out_bytes(s, n, q8_tokens_bytes)
    weights = LAYOUTS[layout_of(s)].matrix_bytes(rows, columns)
    return Cost(bytes=weights + activations, ops=2.0 * n * rows * columns)


def _reference(arrays: Mapping[str, Array], s: Scalars, counts: Counts) -> dict[str, Array]:
    n, rows, columns = token_count(s, counts), int(s["rows"]), int(s["columns"])
    layout = layout_of(s)
    weights = unpack_panels(layout, arrays["weights"], rows, columns).astype(np.float64)
    if LAYOUTS[layout].quantised:
        x = q8_unpack(arrays["x"], n)
    else:
        stride = int(s["x_stride"])
        x = np.stack([arrays["x"].ravel()[t * stride : t * stride + columns] for t in range(n)])
    y = x.astype(np.float64) @ weights.T
    if "bias" in arrays and arrays["bias"].size:
        y += arrays["bias"][:rows]
    if s["softcap"] > 0:
        y = np.tanh(y / s["softcap"]) * s["softcap"]
    if s["epilogue"]:
        pairs = y.reshape(n, -1, 2, 32)
        y = gated(pairs[:, :, 0].reshape(n, -1), pairs[:, :, 1].reshape(n, -1), int(s["epilogue"]))
    out = arrays["out"].copy()
    if s["out_q8"]:
        q8_store(out, y.astype(np.float32))
    else:
        for t in range(n):
            begin = t * int(s["out_stride"])
            out.reshape(-1)[begin : begin + y.shape[1]] = y[t]
    return {"out": out}


def gated(gate: Array, up: Array, epilogue: int) -> Array:
    """The result of a GLU epilogue."""
    if epilogue == EPILOGUE_CLAMPED_GLU:
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0) + 1
        activated: Array = gate / (1 + np.exp(-1.702 * gate))
    elif epilogue == EPILOGUE_SILU_GLU:
        activated = gate / (1 + np.exp(-gate))
    else:
        activated = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return activated * up


def unpack_panels(layout: str, packed: Array, rows: int, columns: int) -> Array:
    """The weights of a packed matrix as float32 [rows, columns]: panels.h in NumPy."""
    info, count = LAYOUTS[layout], panels(rows)
    chunks = packed.reshape(-1).view(np.uint8)[: info.matrix_bytes(rows, columns)]
    chunks = chunks.reshape(count, columns // info.span, info.chunk_bytes)
    if not info.quantised:
        lanes = chunks.reshape(count, columns, -1)
        if layout == "bf16":
            values = (lanes.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = lanes.view(np.float16 if layout == "f16" else np.float32).astype(np.float32)
        return values.transpose(0, 2, 1).reshape(-1, columns)[:rows]
    blocks = info.span // 32
    quants = _panel_quants(layout, chunks, blocks)  # [panels, chunks, blocks, 32 columns, 16 rows]
    scale, minimum = _panel_scales(layout, chunks, blocks)  # [panels, chunks, blocks, 1 or 2, 16 rows]
    parts = scale.shape[3]
    w = (
        quants.reshape(*quants.shape[:3], parts, 32 // parts, PANEL_ROWS) * scale[..., None, :]
        + minimum[..., None, :]
    )
    return (
        w.reshape(count, columns, PANEL_ROWS)
        .transpose(0, 2, 1)
        .reshape(-1, columns)[:rows]
        .astype(np.float32)
    )


def _panel_quants(layout: str, chunks: Array, blocks: int) -> Array:
    """Unpacks quants, or what a table has for them: [panels, chunks, blocks, 32 columns, 16 rows]."""
    shape = chunks.shape[:2]

    def bits(begin: int, count: int) -> Array:
        """Unpacks fields of `count` bits from byte `begin`: [..., 8 steps, 16 rows, 4]."""
        packed = chunks[..., begin : begin + 64 * blocks * count]
        packed = packed.reshape(*shape, blocks, count, 1, PANEL_ROWS, 4)
        fields = packed >> np.arange(0, 8, count, dtype=np.uint8)[:, None, None] & (1 << count) - 1
        return fields.reshape(*shape, blocks, 8, PANEL_ROWS, 4)

    if layout == "q8_0":
        w = chunks[..., :512].reshape(*shape, 1, 8, PANEL_ROWS, 4)
    elif layout == "q2_k":
        w = bits(0, 2)
    elif layout == "q3_k":
        w = bits(0, 2) | bits(128 * blocks, 1) << 2
    else:
        nibbles = chunks[..., : 256 * blocks].reshape(*shape, blocks, 4, PANEL_ROWS, 4)
        w = np.concatenate([nibbles & 15, nibbles >> 4], axis=3)
        if layout.startswith("q5"):
            w = w | bits(256 * blocks, 1) << 4
        if layout == "q6_k":
            w = w | bits(256 * blocks, 2) << 4
    if layout in VALUES:
        w = np.array(VALUES[layout], np.int8)[w]
    return w.transpose(0, 1, 2, 3, 5, 4).reshape(*shape, blocks, 32, PANEL_ROWS).astype(np.float32)


def _panel_scales(layout: str, chunks: Array, blocks: int) -> tuple[Array, Array]:
    """Unpacks scales and minima: [panels, chunks, blocks, 1 or 2 a block, 16 rows]."""

    def halves(begin: int) -> Array:
        numbers = np.ascontiguousarray(chunks[..., begin : begin + 32]).view(np.float16).astype(np.float32)
        return numbers[:, :, None, None]

    def bytes_of(begin: int, *shape: int) -> Array:
        part = chunks[..., begin : begin + math.prod(shape) * PANEL_ROWS]
        return part.reshape(*chunks.shape[:2], *shape, PANEL_ROWS)

    def six_bits(begin: int) -> tuple[Array, Array]:
        low, pairs = bytes_of(begin, 8), bytes_of(begin + 128, 4, 1)
        upper = (pairs >> np.array([[0], [4]], np.uint8)).reshape(low.shape)
        return (low & 15) | (upper & 3) << 4, (low >> 4) | (upper & 12) << 2

    if layout in ("q4_k", "q5_k"):
        begin = 2048 + (512 if layout == "q5_k" else 0)
        s, m = six_bits(begin)
        return s[:, :, :, None] * halves(begin + 192), -(m[:, :, :, None] * halves(begin + 224))
    if layout == "q6_k":
        scale = bytes_of(3072, 8, 2).view(np.int8).astype(np.float32) * halves(3328)
        return scale, -32 * scale
    if layout == "q3_k":
        scale = (np.stack(six_bits(1536), axis=3) - np.float32(32)) * halves(1728)
        return scale, -4 * scale
    if layout == "q2_k":
        both = bytes_of(1024, 8, 2)
        return (both & 15) * halves(1280), -((both >> 4) * halves(1312))
    if layout == "iq4_xs":
        low = bytes_of(2048, 4, 1) >> np.array([[0], [4]], np.uint8) & 15
        upper = bytes_of(2112, 2, 1) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
        s = low.reshape(*low.shape[:2], 8, 1, -1) | upper.reshape(*low.shape[:2], 8, 1, -1) << 4
        scale = (s - np.float32(32)) * halves(2144)
    elif layout == "mxfp4":
        scale = (bytes_of(256, 1, 1).astype(np.uint32) << 23).view(np.float32)
    else:
        begin = {"q5_0": 320, "q5_1": 320, "q8_0": 512}.get(layout, 256)
        scale = halves(begin)
        if layout in ("q4_1", "q5_1"):
            return scale, halves(begin + 32)
    return scale, -{"q4_0": 8, "q5_0": 16, "q8_0": 128}.get(layout, 0) * scale


def _cases(layout: str, rng: np.random.Generator) -> Iterator[Case]:
    for tokens, rows, columns, epilogue, out_q8, bias, softcap in (
        (1, 16, 256, EPILOGUE_STORE, 0, False, 0.0),
        (5, 40, 512, EPILOGUE_STORE, 0, True, 0.0),
        (16, 33, 256, EPILOGUE_STORE, 0, False, 3.0),
        (33, 80, 256, EPILOGUE_STORE, 0, False, 0.0),
        (7, 128, 256, EPILOGUE_SILU_GLU, 0, False, 0.0),
        (19, 64, 512, EPILOGUE_GELU_GLU, 1, False, 0.0),
        (1, 64, 768, EPILOGUE_SILU_GLU, 0, False, 0.0),
        (2, 40, 768, EPILOGUE_STORE, 0, True, 0.0),
        (2, 128, 1280, EPILOGUE_GELU_GLU, 1, False, 0.0),
        (4, 33, 512, EPILOGUE_STORE, 0, False, 0.0),
    ):
        yield make_case(layout, tokens, rows, columns, epilogue, out_q8, rng, bias=bias, softcap=softcap)


def make_case(
    layout: str,
    tokens: int,
    rows: int,
    columns: int,
    epilogue: int,
    out_q8: int,
    rng: np.random.Generator,
    *,
    bias: bool = False,
    softcap: float = 0.0,
) -> Case:
    """Random weights and activations of any shape."""
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    width = rows // (2 if epilogue else 1)
    out = q8_zeros(tokens, width) if out_q8 else np.zeros((tokens, width + 3), np.float32)
    arrays: dict[str, Array] = {
        "x": q8_pack(x) if LAYOUTS[layout].quantised else x,
        "weights": random_panels(layout, rows, columns, rng),
        "out": out,
    }
    if bias:
        arrays["bias"] = np.zeros(panels(rows) * PANEL_ROWS, np.float32)
        arrays["bias"][:rows] = rng.standard_normal(rows)
    scalars = dict(
        format=LAYOUT_NAMES.index(layout),
        rows=rows,
        columns=columns,
        x_stride=columns,
        out_stride=width + 3,
        panels_per_item=4 if epilogue else 2,
        count=0,
        epilogue=epilogue,
        out_q8=out_q8,
        softcap=softcap,
    )
    label = f"{layout} T={tokens} {rows}x{columns} epilogue={epilogue} q8={out_q8}"
    return Case(label, arrays, scalars, {"tokens": tokens, "rows": 0, "work": 0}, atol=2e-4, rtol=1e-4)


# Standard deviation of random weights with a float16 scale of 1: quants times quantised scales, minus minima.
SPREADS = {
    "q4_0": 4.6, "q4_1": 4.6, "q5_0": 9.2, "q5_1": 9.2, "q8_0": 74.0, "q4_k": 257.0, "q5_k": 523.0, "q6_k": 1367.0,
    "q3_k": 43.0, "q2_k": 13.0, "iq4_nl": 71.0, "iq4_xs": 1310.0, "mxfp4": 5.9,
}  # fmt: skip


def random_panels(
    layout: str, rows: int, columns: int, rng: np.random.Generator, size: float | None = None
) -> Array:
    """Random bytes with float16 scales that give sums of order 1 to 100 (weights of order `size`).

    The minima make the mean weight 0: otherwise every sum would be nearly proportional to the sum of the activations,
    and rounding could change its sign.
    """
    info = LAYOUTS[layout]
    count = panels(rows)
    if not info.quantised:
        values = rng.standard_normal((count, columns, PANEL_ROWS)).astype(np.float32) * (size or 0.1)
        if layout == "bf16":
            return np.ascontiguousarray(values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(np.float16 if layout == "f16" else np.float32)
    data = rng.integers(0, 256, (count, columns // info.span, info.chunk_bytes), dtype=np.uint8)
    largest = 1.5 * size / SPREADS[layout] if size else 0.002 if info.span == 256 else 0.01
    scales = rng.uniform(0.2, 1.0, (*data.shape[:2], PANEL_ROWS)) * largest
    if size and layout in ("q4_0", "q5_0", "q6_k", "q3_k"):  # whose quants have a mean of -1/2
        scales[:, 1::2] *= -1
    if layout == "mxfp4":
        data[..., -PANEL_ROWS:] = (scales.astype(np.float32).view(np.uint32) >> 23).astype(np.uint8)
        return data
    # K formats subtract theirs.
    middle = {"q4_1": -7.5, "q5_1": -15.5, "q4_k": 7.5, "q5_k": 15.5, "q2_k": 1.5}.get(layout)
    halves = [scales] if middle is None else [scales, middle * scales]
    packed = np.concatenate(halves, axis=2).astype(np.float16)
    data[..., -packed.shape[2] * 2 :] = packed.view(np.uint8)
    return data


def _kernel(layout: str) -> Kernel:
    return Kernel(
        name=f"matmul_{layout}",
        buffers=(Buffer("x", "r"), Buffer("weights", "r"), Buffer("bias", "r"), Buffer("out", "w")),
        scalars=(
            ("format", "i"),
            ("rows", "i"),
            ("columns", "i"),
            ("x_stride", "i"),
            ("out_stride", "i"),
            ("panels_per_item", "i"),
            ("count", "i"),
            ("epilogue", "i"),
            ("out_q8", "i"),
            ("softcap", "f"),
        ),
        grid=_grid,
        cost=_cost,
        extents=_extents,
        reference=_reference,
        cases=partial(_cases, layout),
    )


BY_LAYOUT = {layout: _kernel(layout) for layout in LAYOUTS}
KERNELS = list(BY_LAYOUT.values())
