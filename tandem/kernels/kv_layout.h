// One layer's KV cache: [blocks][kv_heads]{K [head_dim][KV_BLOCK tokens], V [KV_BLOCK tokens][head_dim]}.
// K is transposed so that keys of consecutive tokens are SIMD lanes. Elements are float16, float32 or int8. In int8 every
// KV_SCALED elements of a token's head share a float16 scale; the scales follow K and V:
// {scales of K [kv_scales][KV_BLOCK tokens], scales of V [kv_scales][KV_BLOCK tokens]}.
#pragma once
#include "simd.h"

ALWAYS_INLINE int32_t kv_scales(int32_t head_dim) { return (head_dim + KV_SCALED - 1) / KV_SCALED; }

// Bytes of one head's keys and values in a block.
ALWAYS_INLINE size_t kv_head_bytes(int32_t head_dim, int32_t kv) {
    if (kv == KV_Q8) return (size_t)2 * KV_BLOCK * (head_dim + sizeof(half) * kv_scales(head_dim));
    return (size_t)2 * KV_BLOCK * head_dim * (kv == KV_F32 ? sizeof(float) : sizeof(half));
}

// Latent attention: one layer's cache is [blocks][KV_BLOCK tokens] rows for all heads. In int8 the scales follow them:
// [KV_BLOCK tokens][kv_scales]. A row takes the bytes of a key and a value of half its elements.
ALWAYS_INLINE size_t latent_block_bytes(int32_t elements, int32_t kv) { return kv_head_bytes(elements / 2, kv); }

// The scales of the token that is number `inside` of a block.
ALWAYS_INLINE half *latent_scales(const char *block, int32_t elements, int32_t inside) {
    return (half *)(block + (size_t)KV_BLOCK * elements) + (size_t)inside * kv_scales(elements);
}
