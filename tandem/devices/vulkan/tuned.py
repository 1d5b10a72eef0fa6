"""Candidate choices for a launch on Vulkan (devices/tuned_choices.py), and the file of a device's choices."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tandem.devices.tuned_choices import NOTHING, Choice
from tandem.devices.vulkan.capabilities import Capabilities
from tandem.devices.vulkan.shader_modules import shader_checksum
from tandem.kernels.attention_dispatch import KEY_SUBGROUPS, MAX_QUERY_FLOATS
from tandem.kernels.dispatch import Dispatch
from tandem.kernels.dispatch_table import dispatch
from tandem.kernels.kernel import Counts, Scalars
from tandem.kernels.matmul import layout_of, token_count
from tandem.kernels.matmul_dispatch import COOPMAT_REG_SUMS, MANY_TOKENS
from tandem.kernels.panels import LAYOUTS

TUNED = ("matmul", "attention", "norm")
THREADS = (32, 64, 128, 256, 512, 1024)
SUBGROUPS = (16, 32, 64)
MAX_DOT_TRIAL_TOKENS = 16  # with more, dot products read weights too often compared to matrix units


def tuned_file(folder: Path, device: Capabilities) -> Path:
    """The file for this device, driver and set of shaders."""
    about = f"{device.name} {device.driver} {device.driver_version} {device.cache_key}"
    return folder / f"vulkan-{hashlib.sha256(about.encode()).hexdigest()[:16]}-{shader_checksum()}.tuned"


def candidates(kernel: str, scalars: Scalars, counts: Counts, device: Capabilities) -> list[Choice]:
    """Choices that change the dispatch, without duplicates."""
    choices: list[Choice] = []
    with device.choices.trying(NOTHING):
        known = [dispatch(kernel, scalars, counts, device)]
    for choice in _proposed(kernel.partition("_")[0], scalars, counts, device, known[0]):
        with device.choices.trying(choice):
            tried = dispatch(kernel, scalars, counts, device)
        if tried not in known and _possible(tried, device):
            known.append(tried)
            choices.append(choice)
    return choices


def _proposed(
    kind: str, scalars: Scalars, counts: Counts, device: Capabilities, rule: Dispatch
) -> Iterator[Choice]:
    if kind == "norm":
        yield from ({"threads": n} for n in THREADS if 32 * n >= scalars["dim"])
    elif kind == "attention":
        yield from _attention_choices(rule, int(scalars["head_dim"]))
    elif not LAYOUTS[layout_of(scalars)].quantised and _path(rule) == "dot":
        yield from ({"threads": n} for n in THREADS)
    else:
        yield from _matmul_choices(scalars, token_count(scalars, counts), device, rule)


def _attention_choices(rule: Dispatch, dim: int) -> Iterator[Choice]:
    """Varies one parameter at a time; their effects are nearly independent."""
    yield from ({"workgroups": 2**n} for n in range(3, 13))
    if rule.shader.startswith("attention_tiles"):
        yield {"tiles": 0}
        return
    if rule.shader == "attention":
        yield from ({"queries": n} for n in (1, 2, 4, 8) if n * dim <= MAX_QUERY_FLOATS)
        return
    yield from ({"key_splits": n} for n in (1, 2, 4, 8, 16))
    yield {"queries": 16}
    yield from ({"rounds": n} for n in (1, 2, 3))
    yield {"multi_subgroup": 0}
    yield from ({"multi_subgroup": 0, "key_splits": n} for n in (1, 2, 4))


def _matmul_choices(scalars: Scalars, tokens: int, device: Capabilities, rule: Dispatch) -> Iterator[Choice]:
    if tokens > 1:
        yield {"integer_dot": 0}
        yield {"integer_dot": 0, "many": MANY_TOKENS}
    if _path(rule) == "register_coopmat":
        many = rule.y > 1 or "_su" in rule.shader  # several groups of tokens: fewer subgroups share rows
        if many:
            yield {"shared": 1}
        split_k, units = ((1, 2, 4), (1, 2, 4)) if many else ((2, 4, 8, 16), (1, 2))
        for some in product((2,) if scalars["epilogue"] else (1, 2), split_k, units):
            shared = {"shared": 0} if many else {}
            yield {**dict(zip(("pairs", "split_k", "units"), some, strict=True)), **shared}
    quantised = LAYOUTS[layout_of(scalars)].quantised
    sizes = [0]
    if device.subgroup_size_control and device.subgroup_min < device.subgroup_max:  # AMD: 32 or 64
        sizes += [n for n in SUBGROUPS if device.subgroup_min <= n <= device.subgroup_max]
    by_rows = quantised and (tokens > 1 or _path(rule) == "rows")
    if by_rows and device.kind != "software" and not device.register_coopmat:
        yield {"rows": 0 if _path(rule) == "rows" else 1}
        for parts, size in product((1, 2, 4, 8), sizes):
            yield {"rows": 1, "split_k": parts, **({"subgroup": size} if size else {})}
    if not quantised or (tokens > MAX_DOT_TRIAL_TOKENS and _path(rule) != "dot"):
        return
    dot = {} if _path(rule) == "dot" else {"integer_dot": 1}
    threads = [n for n in THREADS if n <= max(64, int(scalars["columns"]) // 2)]
    for n, size in product(threads, sizes):
        yield {**dot, "threads": n, **({"subgroup": size} if size else {})}


def _path(dispatch: Dispatch) -> str:
    if re.search(r"_[qxs]u\dn\d$", dispatch.shader):
        return "register_coopmat"
    if dispatch.shader.endswith("_rows"):
        return "rows"
    return "coopmat" if dispatch.expand else "dot"


def _possible(dispatch: Dispatch, device: Capabilities) -> bool:
    """Whether a dispatch is within the limits of the device and of its shader."""
    constants = dispatch.constants
    if match := re.search(r"_[qx]u(\d)n(\d)$", dispatch.shader):
        pairs, tiles = map(int, match.groups())
        threads, split_k = constants[:2]
        units, each = threads // 32 // split_k, 64 * pairs * tiles  # float4s per subgroup
        fits = (
            split_k // 2 * units * each <= COOPMAT_REG_SUMS
            and units * each // (2 if tiles == 8 else 1) <= COOPMAT_REG_SUMS
        )
        return fits and threads <= min(512, device.workgroup_invocations)
    if dispatch.shader.endswith("_rows"):
        threads = constants[0]
        return 32 * threads + 1024 <= device.shared_memory and threads <= device.workgroup_invocations
    if re.search(r"f\d\d_t\d$", dispatch.shader):  # float weights
        threads, partial_sums = constants
        return 4 * partial_sums + 4096 <= device.shared_memory and threads <= device.workgroup_invocations
    if re.search(r"_t\d(_glu)?$", dispatch.shader):
        threads, glu, partial_sums = constants[:3]
        panels = 4 if glu else 1
        own = threads // panels * (2 if dispatch.shader.endswith("_glu") else 1)  # threads per panel
        fits = 4 * partial_sums + 1024 <= device.shared_memory and own >= max(16, device.subgroup_max)
        return fits and threads % device.subgroup_max == 0 and threads <= device.workgroup_invocations
    if dispatch.shader.startswith(("attention_coopmat", "attention_multi_subgroup")):
        key_splits, threads = constants[3], constants[4]
        # With a fraction of KEY_SUBGROUPS, a loop of the shader never ends.
        whole = key_splits % KEY_SUBGROUPS == 0 or "multi_subgroup" not in dispatch.shader
        return key_splits > 0 and whole and threads <= device.workgroup_invocations
    if dispatch.shader.startswith("attention") or dispatch.expand:
        return True
    return device.subgroup_max <= constants[0] <= device.workgroup_invocations
