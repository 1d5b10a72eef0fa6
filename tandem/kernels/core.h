// What every C file of the core shares: the launch, the step header, and how kernels are named per instruction set.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define CONCAT_(a, b) a##_##b
#define CONCAT(a, b) CONCAT_(a, b)
#define ALWAYS_INLINE static inline __attribute__((always_inline))

// StepInputs begins with these counts (tandem/program/step_inputs.py writes them).
enum { STEP_TOKENS = 0, STEP_ROWS = 1, STEP_WORK = 2, STEP_HEADER_INTS = 16 };

// Addresses and scalars of a launch: 128 bytes, what Vulkan guarantees for push constants, so a launch has one
// form on every device. The order of both is the order in the kernel's declaration (tandem/kernels/*.py).
typedef struct {
    void *buffer[8];
    union { int32_t i; float f; } scalar[16];
} launch_args;

// A kernel computes one work item; items of a launch are independent of each other and run in any order.
typedef void kernel_fn(const launch_args *args, int32_t item, const int32_t *step);

typedef struct {
    kernel_fn *kernel;
    launch_args args;
    int32_t items;       // work items for each unit of `count` (for example row groups of a matrix)
    int32_t count;       // a STEP_* index whose value at run time multiplies `items`; -1: items alone
    int32_t count_step;  // units are groups of this many (tokens in a tile); 1 or more
    int32_t barrier;     // 1: all launches before this one must have finished
} launch;

// Defines the kernel NAME for the instruction set this file is being compiled for: KERNEL(matmul) -> matmul_avx2.
#define KERNEL(name) \
    EXPORT void CONCAT(name, ISA)(const launch_args *args, int32_t item, const int32_t *step)
