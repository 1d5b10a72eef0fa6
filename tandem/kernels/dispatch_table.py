"""Which dispatch rule each kernel has; the rules are in NAME_dispatch.py or NAME.py."""

from __future__ import annotations

from functools import partial

from tandem.errors import DeviceError
from tandem.kernels import (
    activate_slots,
    add_input,
    attention_dispatch,
    attention_latent,
    combine,
    combine_norm,
    delta_rule,
    embed,
    expert_matmul,
    expert_matmul_tokens,
    gated_norm,
    gather_tokens,
    glu,
    group_norm,
    group_tokens,
    layer_norm,
    matmul_dispatch,
    norm_dispatch,
    pool,
    quantise,
    rope,
    route,
    route_group,
    sample,
    scale,
    short_conv,
    ssm_scan,
    store_latent,
)
from tandem.kernels.dispatch import Dispatch, DispatchRule, Gpu
from tandem.kernels.kernel import Counts, Scalars
from tandem.kernels.panels import LAYOUTS

# By the kernel's name.
DISPATCH_RULES: dict[str, DispatchRule] = {
    "activate_slots": activate_slots.dispatch,
    "add_input": add_input.dispatch,
    "attention": attention_dispatch.attention,
    "attention_latent": attention_latent.dispatch,
    "attention_prefetch": attention_dispatch.attention_prefetch,
    "attention_rope": attention_dispatch.attention_rope,
    "combine": combine.dispatch,
    "combine_norm": combine_norm.dispatch,
    "delta_rule": delta_rule.dispatch,
    **{f"embed_{layout}": embed.dispatch for layout in LAYOUTS},
    "expand_coopmat": matmul_dispatch.expand_coopmat,
    "expand_coopmat_f32": matmul_dispatch.expand_coopmat,
    "expand_coopmat_reg": matmul_dispatch.expand_coopmat_reg,
    "expand_coopmat_reg_f32": matmul_dispatch.expand_coopmat_reg,
    "expand_expert_tokens": partial(expert_matmul.expand, True),
    "expand_expert_tokens_f32": partial(expert_matmul.expand, True),
    "expand_slots": partial(expert_matmul.expand, False),
    "expand_slots_f32": partial(expert_matmul.expand, False),
    **{f"expert_matmul_{layout}": expert_matmul.dispatch for layout in LAYOUTS},
    **{
        f"expert_matmul_tokens_{layout}": expert_matmul_tokens.dispatch
        for layout in expert_matmul_tokens.BY_LAYOUT
    },
    "gated_norm": gated_norm.dispatch,
    "gather_tokens": gather_tokens.dispatch,
    "glu": glu.dispatch,
    "group_norm": group_norm.dispatch,
    "group_tokens": group_tokens.dispatch,
    "layer_norm": layer_norm.dispatch,
    **{f"matmul_{layout}": matmul_dispatch.matmul for layout in LAYOUTS},
    **{
        f"matmul_norm_partials_{name}": matmul_dispatch.matmul_norm_partials
        for name, layout in LAYOUTS.items()
        if layout.quantised
    },
    "norm": norm_dispatch.norm,
    "norm_finish": norm_dispatch.norm_finish,
    "pool": pool.dispatch,
    "quantise": quantise.dispatch,
    "rope": rope.dispatch,
    "route": route.dispatch,
    "route_group": route_group.dispatch,
    "sample": sample.dispatch,
    "scale": scale.dispatch,
    "short_conv": short_conv.dispatch,
    "ssm_scan": ssm_scan.dispatch,
    "store_latent": store_latent.dispatch,
}


def dispatch(kernel: str, scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    rule = DISPATCH_RULES.get(kernel)
    result = rule(scalars, counts, gpu) if rule else None
    if result is None:
        raise DeviceError(f"{gpu.name} does not run the kernel {kernel}: use the device cpu")
    return result
