// Which of the compiled instruction sets this CPU and its operating system support, and where their kernels are.
#define _GNU_SOURCE
#include <dlfcn.h>

#include "core.h"

// The address of a kernel as compiled for an instruction set, such as norm_avx2; NULL if there is none.
EXPORT kernel_fn *tandem_kernel(const char *symbol) {
    Dl_info here;
    if (!dladdr((void *)tandem_kernel, &here)) return NULL;
    void *library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);  // this library, which is loaded already
    return library ? (kernel_fn *)dlsym(library, symbol) : NULL;
}

EXPORT int tandem_isa_supported(const char *name) {
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
               __builtin_cpu_supports("bmi2");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512vnni");
    return !strcmp(name, "plain") || (avx2 && !strcmp(name, "avx2")) || (avx512 && !strcmp(name, "avx512"));
}
