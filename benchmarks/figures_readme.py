"""The one table of README.md: tokens per second beside llama.cpp, on the CPU and on the GPU."""

from __future__ import annotations

import math
from statistics import median

from benchmarks.figures import TITLES, figure, read, rows_of
from benchmarks.figures_gpu import peer_rates, rates_by_label

CPU_MEASURES = ("prefill 512", "decode", "decode, batch 8", "decode, batch 32")
GPU_LABELS = ("prefill 512", *(f"decode 64, batch {batch} at 128" for batch in (1, 8, 32)))


@figure
def readme_table() -> str:
    data, served = read(""), {model["name"]: model["rounds"] for model in read("serving")["models"]}
    rows = []
    for model in data["models"]:
        found = {row["measure"]: row for row in model["rows"]}
        pairs = [(found[name]["ours"]["median"], found[name]["peer"]["median"]) for name in CPU_MEASURES]
        cells = [_pair(*pair) for pair in pairs]
        if rounds := served.get(model["name"]):
            rates = [
                [each["16 clients"][side]["tokens_per_s"] for each in rounds] for side in ("ours", "peer")
            ]
            cells.append(_pair(*map(median, rates)))
        rows.append([TITLES[model["name"]], "CPU", *cells, *["-"] * (5 - len(cells))])
    ours, peer = rates_by_label(), peer_rates("cuda")
    cells = [_pair(math.floor(ours[label]), peer[label]) for label in GPU_LABELS]  # as docs/VULKAN.md rounds
    rows.append(["Gemma 3 27B, Q4_0 (random weights)", "H200", *cells, "-"])
    machine, gpu = data["machine"], read("h200")["device"].split(",")[0]
    head = [
        "model",
        "device",
        "prefill, 512 tokens",
        "decode, batch 1",
        "batch 8",
        "batch 32",
        "server, 16 clients",
    ]
    cpu = f"{machine['cores']} cores of an {machine['cpu']}, {data['date'][:10]}"
    return (
        f"{rows_of(head, rows)}\n\nTokens per second: **Tandem** / llama.cpp, with the same model and threads. "
        f"CPU: {cpu}.\n"
        f"{gpu}: Tandem through Vulkan, {read('h200')['date']}; "
        "llama.cpp build 0c1e57098 through CUDA, from an earlier run."
    )


def _pair(ours: float, peer: float) -> str:
    return f"**{ours:,.0f}** / {peer:,.0f}"
