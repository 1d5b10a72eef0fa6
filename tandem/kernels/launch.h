// A launch: a kernel with its arguments. setup.py also gives this file to cffi, so it has declarations only.
#pragma once
#include "abi.h"

// The order of buffers and of scalars is the order in the kernel's declaration (tandem/kernels/*.py).
typedef struct {
    void *buffer[MAX_BUFFERS];  // NULL: absent
    union { int32_t i; float f; } scalar[MAX_SCALARS];
} launch_args;

// A kernel computes one work item. The items of a launch are independent of each other and run in any order.
typedef void kernel_fn(const launch_args *args, int32_t item, const int32_t *step);

typedef struct {
    kernel_fn *kernel;
    launch_args args;
    int32_t items;       // work items for each unit of `count` (for example row groups of a matrix)
    int32_t count;       // index of a step header field whose value multiplies `items`; -1: `items` alone
    int32_t count_step;  // tokens or rows that make one unit, such as the tokens of a tile; at least 1
    int32_t most;        // work items at most; 0: any number
    int32_t barrier;     // 1: all earlier launches must have finished
} launch;
