"""`expert_matmul` that reads the activations of tokens directly, so that they are not copied to slots.

For GPUs only. On matrix units (matmul_coopmat_reg.slang) a lane finds the token of its slot in `groups`; elsewhere
(matmul_rows.slang) all experts read the one token of a step.
"""

from __future__ import annotations

from tandem.kernels import expert_matmul
from tandem.kernels.dispatch import FLOAT_TYPES, Dispatch, Gpu
from tandem.kernels.kernel import Counts, Scalars
from tandem.kernels.matmul import layout_of
from tandem.kernels.panels import LAYOUTS


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch | None:
    if on_matrix_units := expert_matmul.dispatch_coopmat(True, scalars, counts, gpu):
        return on_matrix_units
    one, quantised = counts["tokens"] == 1, LAYOUTS[layout_of(scalars)].quantised
    if quantised and expert_matmul.dots_are_fastest(scalars, counts, gpu):
        grouped = expert_matmul.ONE_TOKEN if one else expert_matmul.BY_TOKEN
        return expert_matmul.dispatch_dots(grouped, scalars, counts, gpu)
    return expert_matmul.dispatch_rows(True, scalars, counts, gpu) if one and quantised else None


BY_LAYOUT = {
    name: expert_matmul.kernel(name, by_token=True)
    for name, layout in LAYOUTS.items()
    if layout.quantised or name in FLOAT_TYPES
}
KERNELS = list(BY_LAYOUT.values())
