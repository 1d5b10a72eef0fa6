// Generated from abi.py by `make abi`: do not edit.
#pragma once
#include <stdint.h>

enum {

// ---- Launches (launch.h): the arguments of every kernel
    MAX_BUFFERS = 8,  // addresses of a launch
    MAX_SCALARS = 16,  // 32-bit scalars of a launch
    LAUNCH_BYTES = 128,  // size of both, the push constants that every Vulkan device has

// ---- StepInputs: int32 tables that the host writes before each step
    HEADER_TOKENS = 0,  // tokens of the step
    HEADER_ROWS = 1,  // tokens that are sampled
    HEADER_WORK = 2,  // entries of the attention work list
    HEADER_ADJUSTMENTS = 3,  // logit adjustments
    HEADER_MASKS = 4,  // rows up to the last one with a token mask
    HEADER_SEQUENCES = 5,  // sequences that have tokens in the step
    HEADER_INPUTS = 6,  // rows of activations that the host gives
    HEADER_INTS = 16,  // size of the header
    TOKEN_ID = 0,  // columns of the token table, [tokens][TOKEN_INTS]
    TOKEN_POSITION = 1,
    TOKEN_SEQUENCE = 2,  // row of the block tables
    TOKEN_SOURCE = 3,  // 0: TOKEN_ID; above: 1 + row of the other slot's results; below: -1 - row of inputs
    TOKEN_SLOT = 4,  // KV slot in group 0; TOKEN_SLOT + g in group g
    TOKEN_INTS = 8,
    WORK_ROW = 0,  // columns of the attention work list, [work][WORK_INTS]: the first token of the entry
    WORK_ROWS = 1,  // consecutive tokens of one sequence
    WORK_SEQUENCE = 2,  // row of the block tables
    WORK_POSITION = 3,  // position of the first token in its sequence
    WORK_LAST = 4,  // its tokens see the positions up to this one, besides their own and earlier ones
    WORK_INTS = 8,
    CHUNK_TOKEN = 0,  // first token
    CHUNK_TOKENS = 1,  // consecutive tokens of one sequence; 0: an unused row
    CHUNK_SOURCE = 2,  // slot with the state before the first token; -1: the zero state
    CHUNK_INTS = 4,
    MAX_STATE_ROWS = 256,  // rows of a head's state matrix: columns of a key
    MAX_CONVOLUTION = 8,  // taps of a short convolution

// ---- KV cache: [blocks][kv_heads]{K [head_dim][KV_BLOCK], V [KV_BLOCK][head_dim]}; int8 has float16 scales after V
    KV_BLOCK = 16,  // tokens of a KV block; a KV slot is block * KV_BLOCK + position in the block
    KV_SCALED = 32,  // elements of a head that share a scale in int8
    KV_F16 = 0,  // data types of keys and values, the scalar `kv` of a kernel
    KV_F32 = 1,
    KV_Q8 = 2,  // int8
    MAX_HEAD_DIM = 512,  // elements of an attention head

// ---- Activations quantised to int8: [ceil(tokens / Q8_TILE)][columns / Q8_COLUMNS] of Q8_BLOCK
    Q8_TILE = 16,  // tokens of a block
    Q8_COLUMNS = 32,  // columns of a block, which share a scale
    Q8_BLOCK_BYTES = 768,

// ---- Weights in panels (panels.h): PANEL_ROWS rows interleaved, in chunks of some columns. Comments: bytes of a chunk
    PANEL_ROWS = 16,  // rows of a panel, one SIMD lane per row
    GLU_ROWS = 32,  // in a GLU matmul, gate and up alternate by this many rows, so that one work item has both
    q4_0_BYTES = 288,  // 256 nibbles, 16 half scales
    q4_0_SPAN = 32,
    q4_0_FINE = 0,
    q4_1_BYTES = 320,  // 256 nibbles, 16 half scales, 16 half minima
    q4_1_SPAN = 32,
    q4_1_FINE = 0,
    q5_0_BYTES = 352,  // 256 nibbles, 64 fifth bits, 16 half scales
    q5_0_SPAN = 32,
    q5_0_FINE = 0,
    q5_1_BYTES = 384,  // 256 nibbles, 64 fifth bits, 16 half scales, 16 half minima
    q5_1_SPAN = 32,
    q5_1_FINE = 0,
    q8_0_BYTES = 544,  // 512 quants + 128, 16 half scales
    q8_0_SPAN = 32,
    q8_0_FINE = 0,
    q4_k_BYTES = 2304,  // 8 x 256 nibbles, 3 x 64 packed scales, 16 half d, 16 half dmin
    q4_k_SPAN = 256,
    q4_k_FINE = 0,
    q5_k_BYTES = 2816,  // 8 x 256 nibbles, 8 x 64 fifth bits, then as q4_k
    q5_k_SPAN = 256,
    q5_k_FINE = 0,
    q6_k_BYTES = 3360,  // 8 x 256 nibbles, 8 x 128 upper bits, 256 scales, 16 half d
    q6_k_SPAN = 256,
    q6_k_FINE = 1,
    q3_k_BYTES = 1760,  // 8 x 128 low bits, 8 x 64 third bits, 192 scales, 16 half d
    q3_k_SPAN = 256,
    q3_k_FINE = 1,
    q2_k_BYTES = 1344,  // 8 x 128 quants, 256 scales and minima, 16 half d, 16 half dmin
    q2_k_SPAN = 256,
    q2_k_FINE = 1,
    iq4_nl_BYTES = 288,  // 256 nibbles, 16 half scales
    iq4_nl_SPAN = 32,
    iq4_nl_FINE = 0,
    iq4_xs_BYTES = 2176,  // 8 x 256 nibbles, 96 packed scales, 16 half d
    iq4_xs_SPAN = 256,
    iq4_xs_FINE = 0,
    mxfp4_BYTES = 272,  // 256 nibbles, 16 exponents
    mxfp4_SPAN = 32,
    mxfp4_FINE = 0,
    f16_BYTES = 32,
    f16_SPAN = 1,
    f16_FINE = 0,
    bf16_BYTES = 32,
    bf16_SPAN = 1,
    bf16_FINE = 0,
    f32_BYTES = 64,
    f32_SPAN = 1,
    f32_FINE = 0,

// ---- Mixtures of experts: which experts each token uses, and the tokens of each expert
    MAX_EXPERTS = 1024,  // experts of a layer
    MAX_EXPERTS_USED = 32,  // of a token
    GROUP_EXPERTS = 0,  // in the header: experts in use
    GROUP_HEADER = 16,  // size of the header
    GROUP_EXPERT = 0,  // columns of an expert in use
    GROUP_SLOT = 1,  // its first slot
    GROUP_TOKENS = 2,  // its tokens
    GROUP_INTS = 4,

// ---- Scalars of kernels with a few named values
    ACTIVATION_SILU = 0,  // activation functions, the scalar `activation`
    ACTIVATION_GELU = 1,  // in its tanh form
    ACTIVATION_SIGMOID = 2,
    ACTIVATION_IDENTITY = 3,
    ACTIVATION_SQUARED_RELU = 4,  // max(0, x)^2
    EPILOGUE_STORE = 0,  // epilogues of a matmul, the scalar `epilogue`: store the sums
    EPILOGUE_SILU_GLU = 1,  // silu(gate) * up
    EPILOGUE_GELU_GLU = 2,  // gelu(gate) * up
    EPILOGUE_CLAMPED_GLU = 3,  // gate * sigmoid(1.702 gate) * (up + 1), with gate up to 7 and up from -7 to 7
    SCORE_SOFTMAX = 0,  // scores of experts, the scalar `score`
    SCORE_SIGMOID = 1,
    PART_NORM = 1,  // bits of the rope kernel's scalar `parts`: RMS norm of each head
    PART_ROPE = 2,  // rotation by position
    PART_STORE = 4,  // keys and values to the KV cache
    PART_SHIFT = 8,  // a mean is subtracted from stored keys; never with PART_NORM, which uses the same buffer

// ---- Sampling: a row of each for every sampled token, except that a row may have any number of logit adjustments
    MAX_TOP_LOGPROBS = 20,  // most likely tokens that a result may hold
    SAMPLING_INTS = 16,
    ADJUSTMENT_INTS = 4,
    RESULT_INTS = 64,
};

typedef struct {
    int8_t q[16][32];
    float scale[16];
    float sum[16];
    float low[16];
    float high[16];
} q8_block;

typedef struct {
    float temperature;
    int32_t top_k;
    float top_p;
    float min_p;
    float repeat_penalty;
    float presence_penalty;
    float frequency_penalty;
    uint32_t seed_low;
    uint32_t seed_high;
    uint32_t counter;
    int32_t first_adjustment;
    int32_t adjustments;
    int32_t top_logprobs;
    int32_t masked;
    int32_t unused[2];
} sampling_parameters;

typedef struct {
    int32_t token;
    int32_t count;
    float bias;
    int32_t unused;
} logit_adjustment;

typedef struct {
    int32_t token;
    float logprob;
    int32_t top_count;
    int32_t unused;
    int32_t top_ids[20];
    float top_logprobs[20];
    int32_t padding[20];
} sampling_result;
