// What the units of a core do at most: int8 dot products of registers, as the matrix products of an instruction set take
// them. In assembly, for a compiler would find that nobody needs the results. Each turn has 12 sums that do not wait for
// each other: more than an instruction's latency. What is in the registers does not matter.
#include "core.h"

#define SUMS(sum) sum(4) sum(5) sum(6) sum(7) sum(8) sum(9) sum(10) sum(11) sum(12) sum(13) sum(14) sum(15)
#define AVX512(i) "vpdpbusd %%zmm0, %%zmm1, %%zmm" #i "\n\t"
#define AVX2(i) "vpmaddubsw %%ymm0, %%ymm1, %%ymm2\n\tvpmaddwd %%ymm3, %%ymm2, %%ymm2\n\tvpaddd %%ymm2, %%ymm" #i ", %%ymm" #i "\n\t"
#define REPEAT(turns, sum)                                                                                            \
    for (int64_t turn = 0; turn < turns; turn++)                                                                      \
        __asm__ volatile(SUMS(sum) : : : "xmm2", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",    \
                         "xmm12", "xmm13", "xmm14", "xmm15");                                                         \
    __asm__ volatile("vzeroupper" : : : "xmm0", "xmm1", "xmm3")

// The operations that `turns` do, a product and a sum each; 0: there is no such loop for the instruction set.
EXPORT int64_t tandem_peak(const char *isa, int64_t turns) {
    if (!strcmp(isa, "avx512")) {
        REPEAT(turns, AVX512);
        return turns * 12 * 64 * 2;
    }
    if (!strcmp(isa, "avx2")) {
        REPEAT(turns, AVX2);
        return turns * 12 * 32 * 2;
    }
    return 0;
}
