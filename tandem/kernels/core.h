// Included by every C file of the core: the launch, the shared constants, and the names of kernels per instruction set.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "launch.h"

#define EXPORT __attribute__((visibility("default")))
#define CONCAT_(a, b) a##_##b
#define CONCAT(a, b) CONCAT_(a, b)
#define ALWAYS_INLINE static inline __attribute__((always_inline))

_Static_assert(sizeof(launch_args) == LAUNCH_BYTES, "the arguments of a launch are Vulkan's push constants");

// Defines the kernel NAME for the instruction set this file is being compiled for: KERNEL(matmul) -> matmul_avx2.
#define KERNEL(name) \
    EXPORT void CONCAT(name, ISA)(const launch_args *args, int32_t item, const int32_t *step)
