// The emulator as Python sees it. setup.py gives this file to cffi, with exports.h.
#include <stdint.h>

typedef struct {
    const char *name;
    int32_t encoding, opcode, bytes;
} rdna3_operation;

typedef struct {
    int32_t operation, at, dual, result;       // number, byte in the code, whether the next one is issued with it
    uint64_t count, lanes, segments, cycles;   // of the last launch: see Instruction in wave.h
} rdna3_instruction;

typedef struct {
    uint64_t address, bytes;
    uint8_t *host;
    int32_t access;  // 2: the launch may read and write it; 1: read; 0: read, if nothing depends on what is there
} rdna3_region;

typedef struct {
    int32_t lanes;                             // of a wave: 32 or 64
    uint32_t threads[3], groups[3];
    uint32_t lds_bytes, scratch_bytes, vgprs;
    uint32_t user_sgprs, group_ids;            // registers set by the driver; bits: which numbers of a workgroup follow
    int32_t wave_number;                       // whether a register with the wave's number in its workgroup follows those
    const uint32_t *user;
    int32_t flush_denormals, counting;
    const rdna3_region *regions;
    uint32_t region_count;
    uint64_t seed, limit;
} rdna3_launch;

typedef struct {
    int32_t kind, instruction, other;
    uint32_t group, wave, lane, other_group, other_wave;
    uint64_t address;
    uint32_t bytes;
    uint64_t executed;
} rdna3_fault;

typedef struct rdna3_program rdna3_program;
int tandem_rdna3_operations(void);
void tandem_rdna3_operation(int i, rdna3_operation *out);
rdna3_program *tandem_rdna3_decode(const uint32_t *words, int count, uint32_t *bad_word);
void tandem_rdna3_free(rdna3_program *program);
int tandem_rdna3_instructions(const rdna3_program *program, rdna3_instruction *out);
int tandem_rdna3_run(rdna3_program *program, const rdna3_launch *launch, rdna3_fault *found);
