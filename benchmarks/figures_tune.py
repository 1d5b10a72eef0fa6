"""Results of `tandem tune`, for docs/TUNING.md.

From benchmarks/results/DATE-tune-h200.json, -tune-lavapipe.json and -tune-cpu.json, which
`tandem tune ... --output FILE` wrote.
"""

from __future__ import annotations

from typing import Any

from benchmarks.figures import figure, newest, read, rows_of

STEPS = {
    "1 token": ("1 token", "1 row", "1 sequence"),
    "8 tokens": ("8 tokens", "8 rows", "8, 16 sequences"),
    "512 tokens": ("128, 256, 512 tokens", "1 row", "512 tokens"),
    "1, 16 and 128 tokens, their geometric mean": ("all",),
}

OLD_NAMES = {"shares": "split_k"}  # parameters in results of before 2026-11-16


def tuned(kind: str, title: str) -> str:
    try:
        data = read(f"tune-{kind}")
    except SystemExit:
        return f"**{title}**: not measured yet."
    findings = data["findings"]
    chosen = [f for f in findings if f["choice"]]
    head = (
        f"**{title}**: {data['model']} on {data['device'].partition(' (')[0]}, {data['date'][:10]}, "
        f"{data['seconds']:.0f} s, `benchmarks/results/{newest(f'tune-{kind}').name}`. {len(chosen)} of "
        f"{len(findings)} are faster; {sum(len(f['wrong']) for f in findings)} candidates were wrong or refused."
    )
    if data["busy"]:
        head += " **Other processes kept the machine busy.**"
    return "\n\n".join([head, _steps(findings), *([_chosen(chosen)] if chosen else [])])


def _steps(findings: list[dict[str, Any]]) -> str:
    """Sums of those steps whose shapes were all tuned."""
    rows, shapes = [], {size: _shapes(findings, sizes) for size, sizes in STEPS.items()}
    for step, sizes in STEPS.items():
        if shapes[step] != max(shapes.values(), key=len):
            continue
        before, after = (
            sum(f["launches"] * f[key] for f in findings if f["size"] in sizes and f["kernel"] != "threads")
            / 1e3
            for key in ("before_us", "after_us")
        )
        if before:
            rows.append([step, f"{before:,.2f}", f"{after:,.2f}", f"{before / after - 1:+.1%}"])
    return rows_of(["tuned launches of a step", "ms with defaults", "ms tuned", "gain"], rows)


def _shapes(findings: list[dict[str, Any]], sizes: tuple[str, ...]) -> set[tuple[str, str]]:
    return {(f["kernel"], f["shape"]) for f in findings if f["size"] in sizes}


def _chosen(findings: list[dict[str, Any]]) -> str:
    return rows_of(
        ["kernel", "shape", "size", "us by default", "us tuned", "gain", "choice"],
        [
            [
                f["kernel"], f["shape"], f["size"], f"{f['before_us']:,.1f}", f"{f['after_us']:,.1f}",
                f"{f['gain']:+.1%}", _parameters(f["choice"]),
            ]
            for f in findings
        ],
    )  # fmt: skip


def _parameters(choice: dict[str, Any]) -> str:
    return ", ".join(f"{OLD_NAMES.get(name, name)} {value}" for name, value in choice.items())


@figure
def tuned_h200() -> str:
    return tuned("h200", "A GPU")


@figure
def tuned_lavapipe() -> str:
    return tuned("lavapipe", "Lavapipe, a GPU in software")


@figure
def tuned_cpu() -> str:
    return tuned("cpu", "A CPU")
