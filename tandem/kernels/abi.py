"""The binary interface of kernels: every constant and memory layout that Python, C and Slang share.

This file is the only definition. `make abi` (`python -m tandem.kernels.generate_abi`) writes abi.h and abi.slang from
it; tests/ops/test_abi.py checks that both are up to date, that the C compiler lays out the same structs, and that no
other file defines one of these names. The comment on a constant's line goes into the generated files too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# ---- Launches (launch.h): the arguments of every kernel

MAX_BUFFERS = 8  # addresses of a launch
MAX_SCALARS = 16  # 32-bit scalars of a launch
LAUNCH_BYTES = 128  # size of both, the push constants that every Vulkan device has

# ---- StepInputs: int32 tables that the host writes before each step

HEADER_TOKENS = 0  # tokens of the step
HEADER_ROWS = 1  # tokens that are sampled
HEADER_WORK = 2  # entries of the attention work list
HEADER_ADJUSTMENTS = 3  # logit adjustments
HEADER_MASKS = 4  # rows up to the last one with a token mask
HEADER_SEQUENCES = 5  # sequences that have tokens in the step
HEADER_INPUTS = 6  # rows of activations that the host gives
HEADER_INTS = 16  # size of the header
# The first header fields by name; a Grid multiplies its items by one of them.
COUNTS = ("tokens", "rows", "work")

TOKEN_ID = 0  # columns of the token table, [tokens][TOKEN_INTS]
TOKEN_POSITION = 1
TOKEN_SEQUENCE = 2  # row of the block tables
TOKEN_SOURCE = 3  # 0: TOKEN_ID; above: 1 + row of the other slot's results; below: -1 - row of inputs
TOKEN_SLOT = 4  # KV slot in group 0; TOKEN_SLOT + g in group g
TOKEN_INTS = 8

WORK_ROW = 0  # columns of the attention work list, [work][WORK_INTS]: the first token of the entry
WORK_ROWS = 1  # consecutive tokens of one sequence
WORK_SEQUENCE = 2  # row of the block tables
WORK_POSITION = 3  # position of the first token in its sequence
WORK_LAST = 4  # its tokens see the positions up to this one, besides their own and earlier ones
WORK_INTS = 8

# For layers with a recurrent state: a state slot holds the state of a sequence after one of its tokens, for all layers.
# `chunks` is [sequences][CHUNK_INTS], one for each sequence in the step, then [tokens]: the slot that gets the state
# after each token; -1: none.
CHUNK_TOKEN = 0  # first token
CHUNK_TOKENS = 1  # consecutive tokens of one sequence; 0: an unused row
CHUNK_SOURCE = 2  # slot with the state before the first token; -1: the zero state
CHUNK_INTS = 4
MAX_STATE_ROWS = 256  # rows of a head's state matrix: columns of a key
MAX_CONVOLUTION = 8  # taps of a short convolution

# ---- KV cache: [blocks][kv_heads]{K [head_dim][KV_BLOCK], V [KV_BLOCK][head_dim]}; int8 has float16 scales after V

KV_BLOCK = 16  # tokens of a KV block; a KV slot is block * KV_BLOCK + position in the block
KV_SCALED = 32  # elements of a head that share a scale in int8
KV_F16 = 0  # data types of keys and values, the scalar `kv` of a kernel
KV_F32 = 1
KV_Q8 = 2  # int8
KV_TYPES = ("f16", "f32", "q8")  # their names, by index
MAX_HEAD_DIM = 512  # elements of an attention head

# ---- Activations quantised to int8: [ceil(tokens / Q8_TILE)][columns / Q8_COLUMNS] of Q8_BLOCK

Q8_TILE = 16  # tokens of a block
Q8_COLUMNS = 32  # columns of a block, which share a scale

Q8_BLOCK = np.dtype(
    [
        ("q", np.int8, (Q8_TILE, Q8_COLUMNS)),
        ("scale", np.float32, Q8_TILE),  # x = q * scale
        # scale * (sum of the 32 q), the factor of a weight's minimum or zero point
        ("sum", np.float32, Q8_TILE),
        # the same for columns 0-15, for formats with 16 weights per scale (Q6_K)
        ("low", np.float32, Q8_TILE),
        ("high", np.float32, Q8_TILE),  # the same for columns 16-31
    ]
)
Q8_BLOCK_BYTES = Q8_BLOCK.itemsize

# ---- Weights in panels (panels.h): PANEL_ROWS rows interleaved, in chunks of some columns. Comments: bytes of a chunk


class PanelFormat(NamedTuple):
    span: int  # columns of a chunk
    bytes: int  # bytes of a chunk of PANEL_ROWS rows, as many as in the GGUF file
    fine: int = 0  # 1: two scales per 32 columns, one for each 16; 0: one
    quantised: int = 1  # 1: multiplied by int8 activations; 0: float weights, multiplied by float32


PANEL_ROWS = 16  # rows of a panel, one SIMD lane per row
GLU_ROWS = 32  # in a GLU matmul, gate and up alternate by this many rows, so that one work item has both
PANEL_FORMATS = {
    "q4_0": PanelFormat(32, 288),  # 256 nibbles, 16 half scales
    "q4_1": PanelFormat(32, 320),  # 256 nibbles, 16 half scales, 16 half minima
    "q5_0": PanelFormat(32, 352),  # 256 nibbles, 64 fifth bits, 16 half scales
    "q5_1": PanelFormat(32, 384),  # 256 nibbles, 64 fifth bits, 16 half scales, 16 half minima
    "q8_0": PanelFormat(32, 544),  # 512 quants + 128, 16 half scales
    "q4_k": PanelFormat(256, 2304),  # 8 x 256 nibbles, 3 x 64 packed scales, 16 half d, 16 half dmin
    "q5_k": PanelFormat(256, 2816),  # 8 x 256 nibbles, 8 x 64 fifth bits, then as q4_k
    "q6_k": PanelFormat(256, 3360, fine=1),  # 8 x 256 nibbles, 8 x 128 upper bits, 256 scales, 16 half d
    "q3_k": PanelFormat(256, 1760, fine=1),  # 8 x 128 low bits, 8 x 64 third bits, 192 scales, 16 half d
    "q2_k": PanelFormat(256, 1344, fine=1),  # 8 x 128 quants, 256 scales and minima, 16 half d, 16 half dmin
    "iq4_nl": PanelFormat(32, 288),  # 256 nibbles, 16 half scales
    "iq4_xs": PanelFormat(256, 2176),  # 8 x 256 nibbles, 96 packed scales, 16 half d
    "mxfp4": PanelFormat(32, 272),  # 256 nibbles, 16 exponents
    "f16": PanelFormat(1, 32, quantised=0),
    "bf16": PanelFormat(1, 32, quantised=0),
    "f32": PanelFormat(1, 64, quantised=0),
}

# ---- Mixtures of experts: which experts each token uses, and the tokens of each expert

MAX_EXPERTS = 1024  # experts of a layer
MAX_EXPERTS_USED = 32  # of a token
# `groups` is a header, then [experts][GROUP_INTS] for the experts in use, then [tokens][used] slots. A slot is a row of
# the activations in the order of experts; those of an expert begin with a tile of their own.
GROUP_EXPERTS = 0  # in the header: experts in use
GROUP_HEADER = 16  # size of the header
GROUP_EXPERT = 0  # columns of an expert in use
GROUP_SLOT = 1  # its first slot
GROUP_TOKENS = 2  # its tokens
GROUP_INTS = 4

# ---- Scalars of kernels with a few named values

ACTIVATION_SILU = 0  # activation functions, the scalar `activation`
ACTIVATION_GELU = 1  # in its tanh form
ACTIVATION_SIGMOID = 2
ACTIVATION_IDENTITY = 3
ACTIVATION_SQUARED_RELU = 4  # max(0, x)^2
EPILOGUE_STORE = 0  # epilogues of a matmul, the scalar `epilogue`: store the sums
EPILOGUE_SILU_GLU = 1  # silu(gate) * up
EPILOGUE_GELU_GLU = 2  # gelu(gate) * up
EPILOGUE_CLAMPED_GLU = 3  # gate * sigmoid(1.702 gate) * (up + 1), with gate up to 7 and up from -7 to 7
SCORE_SOFTMAX = 0  # scores of experts, the scalar `score`
SCORE_SIGMOID = 1
PART_NORM = 1  # bits of the rope kernel's scalar `parts`: RMS norm of each head
PART_ROPE = 2  # rotation by position
PART_STORE = 4  # keys and values to the KV cache
PART_SHIFT = 8  # a mean is subtracted from stored keys; never with PART_NORM, which uses the same buffer

# ---- Sampling: a row of each for every sampled token, except that a row may have any number of logit adjustments

MAX_TOP_LOGPROBS = 20  # most likely tokens that a result may hold

SAMPLING_PARAMETERS = np.dtype(
    [
        ("temperature", np.float32),  # 0 or less: the highest logit
        ("top_k", np.int32),  # 0 or less: off
        ("top_p", np.float32),  # 1 or more: off
        ("min_p", np.float32),  # 0: off
        ("repeat_penalty", np.float32),  # 1: off
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("seed_low", np.uint32),
        ("seed_high", np.uint32),
        ("counter", np.uint32),  # number of tokens that the request has sampled before
        ("first_adjustment", np.int32),  # index of the row's first logit adjustment
        ("adjustments", np.int32),  # number of logit adjustments of the row
        # number of most likely tokens wanted, up to MAX_TOP_LOGPROBS; -1: no log-probabilities
        ("top_logprobs", np.int32),
        ("masked", np.int32),  # 1: only tokens whose bit of the row's mask is set
        ("unused", np.int32, 2),
    ]
)
LOGIT_ADJUSTMENT = np.dtype(
    [
        ("token", np.int32),
        ("count", np.int32),  # occurrences of the token that the penalties count
        ("bias", np.float32),  # added first; -inf bans the token
        ("unused", np.int32),
    ]
)
SAMPLING_RESULT = np.dtype(
    [
        ("token", np.int32),
        ("logprob", np.float32),
        ("top_count", np.int32),  # entries of the two arrays that are in use
        ("unused", np.int32),
        ("top_ids", np.int32, MAX_TOP_LOGPROBS),  # the most likely first
        ("top_logprobs", np.float32, MAX_TOP_LOGPROBS),
        ("padding", np.int32, 20),  # to 256 bytes
    ]
)
SAMPLING_INTS = SAMPLING_PARAMETERS.itemsize // 4
ADJUSTMENT_INTS = LOGIT_ADJUSTMENT.itemsize // 4
RESULT_INTS = SAMPLING_RESULT.itemsize // 4


def column(row: np.dtype[np.void], field: str) -> int:
    """The index of a field in a row of 32-bit words."""
    assert row.fields is not None
    return row.fields[field][1] // 4
