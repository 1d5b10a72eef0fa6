"""StepInputs: the small buffer that the host overwrites before each step, and the results of a step.

kernels/abi.py declares the columns of its tables. If the previous step is still sampling a token, TOKEN_SOURCE names
the row of results that will hold its id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.kernels.abi import (
    ADJUSTMENT_INTS,
    CHUNK_INTS,
    HEADER_ADJUSTMENTS,
    HEADER_INPUTS,
    HEADER_INTS,
    HEADER_MASKS,
    HEADER_ROWS,
    HEADER_TOKENS,
    HEADER_WORK,
    KV_BLOCK,
    RESULT_INTS,
    SAMPLING_INTS,
    TOKEN_INTS,
    WORK_INTS,
)
from tandem.program.program import OTHER_STEP_SLOT, Tensor
from tandem.program.weight_plan import align

KNOWN = 0  # TOKEN_SOURCE of a token whose id the host knows
MAX_BIASES, MAX_STOP_IDS = 1024, 64  # logit biases and stop tokens of a request

# The header field that counts the rows of a table which a step uses; a step may use all rows of the other tables.
IN_USE = {
    "step.tokens": HEADER_TOKENS,
    "step.work": HEADER_WORK,
    "step.second_work": HEADER_WORK,
    "step.rows": HEADER_ROWS,
    "step.params": HEADER_ROWS,
    "step.adjustments": HEADER_ADJUSTMENTS,
    "step.masks": HEADER_MASKS,
    "step.inputs": HEADER_INPUTS,
    "step.angles": HEADER_TOKENS,
}

Ints = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class StepLimits:
    tokens: int  # tokens of a step
    logits_rows: int  # positions of a step whose next token is sampled: rows of its logits and results
    sequences: int
    blocks: int  # entries of a sequence's block table
    groups: int = 1  # KV groups
    vocab: int = 0
    input_width: int = 0  # of the rows that the host gives: an image's patches, or embeddings of its tokens
    samples: bool = True  # tokens; False: an encoder, whose rows are its results
    second_work: bool = (
        False  # some layers see other tokens than others do: they have a work list of their own
    )
    angles: int = 0  # cosines and sines that the host gives for each token; 0: RoPE has a table by position

    @property
    def work(self) -> int:
        return self.tokens  # at most one entry per token

    @property
    def adjustments(self) -> int:
        """Logit adjustments of all rows: in the worst case, a row has one for each token of a full context."""
        return self.logits_rows * (self.blocks * KV_BLOCK + MAX_BIASES + MAX_STOP_IDS) if self.samples else 0


class StepLayout:
    """The tables' places in the "step" arena, and the results of this step slot and of the other one."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.nbytes = 0
        self.header = self._table("header", HEADER_INTS, 1)
        self.tokens = self._table("tokens", TOKEN_INTS, limits.tokens)
        self.work = self._table("work", WORK_INTS, limits.work)
        # The same for layers whose tokens see others: fewer of an image, or near ones only.
        self.second_work = (
            self._table("second_work", WORK_INTS, limits.work) if limits.second_work else self.work
        )
        self.rows = self._table("rows", 1, limits.logits_rows)
        self.params = self._table("params", SAMPLING_INTS, limits.logits_rows)
        self.adjustments = self._table("adjustments", ADJUSTMENT_INTS, limits.adjustments)
        self.masks = self._table("masks", max(1, -(-limits.vocab // 32)), limits.logits_rows)
        self.chunks = self._table("chunks", 1, CHUNK_INTS * limits.sequences + limits.tokens)
        self.inputs = self._table("inputs", align(4 * limits.input_width) // 4, limits.tokens, "f32")
        self.angles = self._table("angles", limits.angles, limits.tokens, "f32")
        self.tables = [
            self._table(f"tables.{g}", limits.blocks, limits.sequences) for g in range(limits.groups)
        ]
        self.result_bytes = 4 * RESULT_INTS * limits.logits_rows
        self.results, self.sampled_before = (
            Tensor(name, arena, "i32", self.result_bytes, RESULT_INTS, 0)
            for name, arena in (("result", "results"), ("result before", OTHER_STEP_SLOT["results"]))
        )

    def _table(self, name: str, width: int, rows: int, dtype: str = "i32") -> Tensor:
        tensor = Tensor(f"step.{name}", "step", dtype, 4 * width * rows, width, self.nbytes)
        self.nbytes += align(tensor.nbytes)
        return tensor


def bytes_in_use(table: Tensor, header: Ints) -> int:
    """Returns the bytes of a table that a step with this header uses."""
    field = IN_USE.get(table.name)
    return table.nbytes if field is None else 4 * table.stride * int(header[field])


class StepInputs:
    """NumPy views of a StepLayout in a device's memory, for the host to write."""

    def __init__(self, layout: StepLayout, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        def view(tensor: Tensor) -> Ints:
            ints = memory[tensor.start : tensor.start + tensor.nbytes].view(np.int32)
            return ints.reshape(-1, max(1, tensor.stride))

        self.limits = layout.limits
        self.header = view(layout.header)[0]
        self.tokens = view(layout.tokens)
        self.work = view(layout.work)
        self.second_work = view(layout.second_work) if layout.limits.second_work else None
        self.rows = view(layout.rows)[:, 0]
        self.params = view(layout.params)
        self.adjustments = view(layout.adjustments)
        self.masks = view(layout.masks)
        chunks, states = np.split(view(layout.chunks)[:, 0], [CHUNK_INTS * self.limits.sequences])
        self.chunks, self.states = chunks.reshape(-1, CHUNK_INTS), states
        self.inputs = view(layout.inputs).view(np.float32)  # [tokens, aligned width]
        self.angles = view(layout.angles).view(np.float32)  # [tokens, angles]
        self.tables = [view(table) for table in layout.tables]
