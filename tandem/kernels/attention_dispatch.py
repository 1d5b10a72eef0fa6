"""How attention is dispatched on a GPU, alone and with RoPE and the KV store in the same launch."""

from __future__ import annotations

from dataclasses import replace

from tandem.errors import DeviceError
from tandem.kernels import attention_rope as rope_in_attention
from tandem.kernels.abi import KV_BLOCK, KV_TYPES, PART_ROPE, PART_STORE
from tandem.kernels.dispatch import (
    COUNTERS,
    ENOUGH_WORKGROUPS,
    SCRATCH_WORDS_BYTES,
    Dispatch,
    Gpu,
    compiled_scalars,
)
from tandem.kernels.kernel import Counts, Scalars
from tandem.kernels.kv_layout import kv_bytes
from tandem.kernels.matmul_dispatch import has_coopmat

MAX_KV_SPLITS = 64  # workgroups that share the keys of a query
# Subgroups that process the same keys (attention_multi_subgroup.slang); with fewer a loop never ends.
KEY_SUBGROUPS = 4
# Workgroups with several subgroups that fill a large GPU: its cores have room for about one each.
ENOUGH_MULTI_SUBGROUP = 128
MAX_QUERY_FLOATS = 2048  # floats of queries in the shared memory of attention.slang
HEAD_LANES = 32  # lanes that rotate a head of a single token
# Prefetched bytes of a layer's keys and values: more would not stay in cache until attention reads them.
PREFETCH_BYTES = 8 << 20


MATRIX_HEAD_DIMS = (64, 128, 256)  # head sizes that attention on matrix units has


def matrix_head_dim(head_dim: int, gpu: Gpu) -> int:
    """Returns the next head size that is on matrix units, if the GPU has them; else this one."""
    if not has_coopmat(gpu):
        return head_dim
    return next((size for size in MATRIX_HEAD_DIMS if size >= head_dim), head_dim)


def attention(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One workgroup per work item, KV head and tile of queries.

    With few items, the keys are split over several workgroups.
    """
    kv_heads, dim = int(scalars["kv_heads"]), int(scalars["head_dim"])
    if kv_bytes(scalars["blocks"], kv_heads, dim, scalars["kv"]) >= 1 << 32:
        raise DeviceError(
            "a layer's keys and values take more than 4 GB: use a smaller --kv-memory or --context"
        )
    rows = 1 if counts["tokens"] <= counts["work"] else 16  # rows of most items
    # Of an item, rounded up to a power of two:
    queries_per_kv_head = 1 << (rows * int(scalars["q_heads"]) // kv_heads - 1).bit_length()
    aligned = scalars["q_stride"] % 4 == 0 and dim in MATRIX_HEAD_DIMS
    if gpu.register_coopmat and aligned and KV_TYPES[int(scalars["kv"])] != "f32":
        return _attention_coopmat(scalars, counts, gpu, queries_per_kv_head, rows)
    choice = gpu.choices.of("attention", scalars, counts["tokens"], counts["work"])
    tiles_of_matrices = rows > 1 and dim in MATRIX_HEAD_DIMS and KV_TYPES[int(scalars["kv"])] != "f32"
    if tiles_of_matrices and has_coopmat(gpu) and choice.get("tiles", 1):
        return _attention_tiles(scalars, counts, gpu, queries_per_kv_head)
    queries = min(choice.get("queries", 8 if dim <= 256 else 4), queries_per_kv_head)
    target_workgroups = ENOUGH_WORKGROUPS.get(gpu.kind, 8)
    tiles = -(-queries_per_kv_head // queries)
    workgroups = _workgroups(scalars, counts, gpu, tiles, queries, 64, target_workgroups)
    loads = 2 if gpu.kind == "software" else 8  # in flight; longer code takes long to compile in software
    constants = (queries, dim, int(scalars["kv"]), loads)
    # With 8 queries a lane has so many registers that RDNA3 holds twice as many waves of 32 as of 64.
    subgroup = 32 if queries == 8 and gpu.vendor == "AMD" and gpu.subgroup_min <= 32 else 0
    return Dispatch(kv_heads, counts["work"], workgroups, "attention", constants, subgroup, scratch="w")


def _attention_tiles(scalars: Scalars, counts: Counts, gpu: Gpu, queries_per_kv_head: int) -> Dispatch:
    """Prompts on matrix units through shared memory: 16 or 32 queries per workgroup of four subgroups."""
    kv_heads, dim = int(scalars["kv_heads"]), int(scalars["head_dim"])
    queries = 32 if queries_per_kv_head > 16 and dim <= 128 else 16
    tiles = -(-queries_per_kv_head // queries)
    target = ENOUGH_WORKGROUPS.get(gpu.kind, 8)
    enough = tiles * kv_heads * counts["work"] >= target  # without splitting keys
    workgroups = tiles if enough else _workgroups(scalars, counts, gpu, tiles, queries, 64, target)
    constants = (queries, dim, int(scalars["kv"]), 0, 128)
    shader = f"attention_tiles_{dim}"
    return Dispatch(kv_heads, counts["work"], workgroups, shader, constants, subgroup=32, scratch="w")


def _attention_coopmat(
    scalars: Scalars, counts: Counts, gpu: Gpu, queries_per_kv_head: int, rows: int
) -> Dispatch:
    """Uses matrix units: one subgroup per 16 queries, or for single tokens KEY_SUBGROUPS together."""
    kv_heads, dim = int(scalars["kv_heads"]), int(scalars["head_dim"])
    choice = gpu.choices.of("attention", scalars, counts["tokens"], counts["work"])
    # Four subgroups together have the lowest latency, but a core has room for few such workgroups.
    pairs, target_workgroups = max(1, kv_heads * counts["work"]), ENOUGH_WORKGROUPS.get(gpu.kind, 1024)
    use_multi_subgroup = choice.get("multi_subgroup", int(4 * pairs <= target_workgroups))
    small = rows == 1 and queries_per_kv_head <= 8 and queries_per_kv_head * dim <= 1024
    multi_subgroup = small and bool(use_multi_subgroup)
    queries = min(choice.get("queries", 16), queries_per_kv_head)
    tiles = -(-queries // 16)
    # Subgroups with the same queries, each with a part of the keys, as shared memory allows.
    default_key_splits = 8 // tiles
    if not use_multi_subgroup:
        default_key_splits = max(1, min(default_key_splits, target_workgroups // pairs))
    if multi_subgroup and counts["work"] == 1 and dim <= 128:
        default_key_splits = 3 * KEY_SUBGROUPS  # 192 keys at once, as registers allow
    key_splits = choice.get("key_splits", 2 if rows > 1 else default_key_splits)
    split_float2s = 32 * queries if multi_subgroup else 0  # float2s of shared memory per key split
    split_bytes = 4 * queries * (dim + 2) + 8 * split_float2s
    while key_splits * split_bytes + 32 * tiles * dim > gpu.shared_memory - 1024:
        several = multi_subgroup and key_splits > KEY_SUBGROUPS
        key_splits = key_splits - KEY_SUBGROUPS if several else key_splits // 2
    multi_subgroup = multi_subgroup and key_splits >= KEY_SUBGROUPS and key_splits % KEY_SUBGROUPS == 0
    # Units of 64 keys per key split, at least, that make a workgroup's part of the keys worth combining.
    rounds = choice.get("rounds", 4 if rows == 1 and not multi_subgroup else 1)
    keys = 64 * rounds * (key_splits // KEY_SUBGROUPS if multi_subgroup else key_splits)
    if multi_subgroup:
        target_workgroups = ENOUGH_MULTI_SUBGROUP
    query_tiles = -(-queries_per_kv_head // queries)
    workgroups = _workgroups(scalars, counts, gpu, query_tiles, queries, keys, target_workgroups)
    shader = f"attention_{'multi_subgroup' if multi_subgroup else 'coopmat'}_{dim}"
    threads, float2s = 32 * tiles * key_splits, max(1, split_float2s * key_splits)
    constants = (queries, dim, int(scalars["kv"]), key_splits, threads, float2s, rounds)
    return Dispatch(kv_heads, counts["work"], workgroups, shader, constants, subgroup=32, scratch="w")


def _workgroups(
    scalars: Scalars, counts: Counts, gpu: Gpu, tiles: int, queries: int, keys: int, target: int
) -> int:
    """Workgroups per work item and KV head: for each tile of queries, one per part of `keys` keys or more.

    `target`: workgroups of the launch that fill the GPU.
    """
    pairs = max(1, int(scalars["kv_heads"]) * counts["work"])
    choice = gpu.choices.of("attention", scalars, counts["tokens"], counts["work"])
    wanted = max(2, choice.get("workgroups", target) // pairs)
    max_keys = min(int(scalars["window"]) or 1 << 30, KV_BLOCK * int(scalars["table_stride"]))
    wanted = max(tiles, min(wanted, tiles * (max_keys // keys + 2)))
    room = SCRATCH_WORDS_BYTES // (4 * queries * (int(scalars["head_dim"]) + 4))
    return max(1, min(wanted, MAX_KV_SPLITS, min(room, COUNTERS) // pairs))


def attention_rope(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch | None:
    """Like multi-subgroup attention for single tokens.

    None if plain attention would use another shader, or if the launch needs a part that this shader lacks.
    """
    plain = attention(rope_in_attention.attention_scalars(scalars), counts, gpu)
    parts, dim = int(scalars["parts"]), int(scalars["head_dim"])
    if not plain.shader.startswith("attention_multi_subgroup"):
        return None
    queries, key_splits = plain.constants[0], plain.constants[3]
    shared = (key_splits + 1) * 4 * queries * (dim + 2) + key_splits * 256 * queries + (32 + 4) * dim + 1024
    whole = not parts & PART_ROPE or scalars["rot_dim"] % 4 == 0
    alone = scalars["window"] == 1  # then no stored key is seen, and its block may have been freed
    if not parts & PART_STORE or not whole or alone or shared > gpu.shared_memory:
        return None
    group = int(scalars["q_heads"] // scalars["kv_heads"])
    if group > queries:
        return None
    constants = (*plain.constants, HEAD_LANES, parts, int(scalars["interleaved"]), group, plain.z, 1)
    compiled = compiled_scalars(gpu, len(rope_in_attention.KERNEL.scalars))
    return replace(plain, shader=f"attention_rope_{dim}", constants=constants, compiled_scalars=compiled)


def attention_prefetch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch | None:
    """For a single token on a discrete GPU. An integrated GPU has small caches and would read everything twice."""
    if gpu.kind != "discrete" or counts["work"] > 1:
        return None
    kv_heads, dim, kv = (int(scalars[name]) for name in ("kv_heads", "head_dim", "kv"))
    blocks = max(1, PREFETCH_BYTES // kv_bytes(1, kv_heads, dim, kv))
    return Dispatch(kv_heads, 4, constants=(1, dim, kv, blocks, 256))
