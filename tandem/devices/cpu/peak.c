// The peak rate of a core: int8 dot products of registers, with the instructions of the matmul kernels. It is written in
// assembly because a compiler would remove unused results. Each round has 12 independent sums, more than the latency of an
// instruction. The values in the registers do not matter.
#include "core.h"

#define SUMS(sum) sum(4) sum(5) sum(6) sum(7) sum(8) sum(9) sum(10) sum(11) sum(12) sum(13) sum(14) sum(15)
#define AVX512(i) "vpdpbusd %%zmm0, %%zmm1, %%zmm" #i "\n\t"
#define AVX2(i) "vpmaddubsw %%ymm0, %%ymm1, %%ymm2\n\tvpmaddwd %%ymm3, %%ymm2, %%ymm2\n\tvpaddd %%ymm2, %%ymm" #i ", %%ymm" #i "\n\t"
#define REPEAT(rounds, sum)                                                                                           \
    for (int64_t round = 0; round < rounds; round++)                                                                  \
        __asm__ volatile(SUMS(sum) : : : "xmm2", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",    \
                         "xmm12", "xmm13", "xmm14", "xmm15");                                                         \
    __asm__ volatile("vzeroupper" : : : "xmm0", "xmm1", "xmm3")

// Returns the number of multiplications and additions in `rounds`; 0: there is no loop for the instruction set.
EXPORT int64_t tandem_peak(const char *isa, int64_t rounds) {
    if (!strcmp(isa, "avx512")) {
        REPEAT(rounds, AVX512);
        return rounds * 12 * 64 * 2;
    }
    if (!strcmp(isa, "avx2")) {
        REPEAT(rounds, AVX2);
        return rounds * 12 * 32 * 2;
    }
    return 0;
}
