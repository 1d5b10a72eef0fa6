// Which of the compiled instruction sets this CPU and its operating system support.
#include "core.h"

EXPORT int tandem_isa_supported(const char *name) {
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
               __builtin_cpu_supports("bmi2");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512vnni");
    return !strcmp(name, "plain") || (avx2 && !strcmp(name, "avx2")) || (avx512 && !strcmp(name, "avx512"));
}
