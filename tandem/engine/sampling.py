"""How a sequence is sampled: its row of sampling parameters, its logit adjustments, and sampling on the host.

The user's parameters are in params.py; the sampler on the device is kernels/sample.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tandem.engine.params import SamplingParams
from tandem.errors import RequestError
from tandem.kernels import sample
from tandem.kernels.abi import ADJUSTMENT_INTS, LOGIT_ADJUSTMENT, SAMPLING_PARAMETERS, SAMPLING_RESULT, column
from tandem.kernels.kernel import Array
from tandem.program.step_inputs import Ints

if TYPE_CHECKING:
    from tandem.engine.sequence import Sequence

NO_LOGPROBS = -1
TOKEN, COUNT, BIAS = (column(LOGIT_ADJUSTMENT, field) for field in ("token", "count", "bias"))


class Sampled(NamedTuple):
    """One sampled token."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log-probabilities


class SamplingState:
    __slots__ = (
        "_adjustments",
        "_early_adjustments",
        "_min_tokens",
        "_params",
        "adjusts_logits",
        "counts_tokens",
        "masked",
        "param_row",
        "prompt_tokens",
        "result_row",
        "seed",
        "wants_logprobs",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt: list[int],
        eos_ids: frozenset[int],
        seed: int,
        masked: bool,
        prompt_tokens: int,
    ) -> None:
        """`prompt`: the tokens of its texts. `prompt_tokens`: the number of all of its tokens."""
        self._params, self.seed = params, seed
        # What each step reads is here too: a step touches little memory, and caches are cold after it.
        self.prompt_tokens, self.wants_logprobs = prompt_tokens, params.logprobs is not None
        self.masked = masked  # a constraint says which tokens may come next
        self.counts_tokens = params.uses_history  # penalties depend on how often each token was used
        self._min_tokens = params.min_tokens
        self._adjustments = self._early_adjustments = _adjustments(params, prompt)
        if params.min_tokens:
            no_stop = {**params.logit_bias, **dict.fromkeys(eos_ids, -math.inf)}
            self._early_adjustments = _adjustments(replace(params, logit_bias=no_stop), prompt)
        self.adjusts_logits = self.counts_tokens or len(self._early_adjustments) > 0
        self.param_row: Ints | None = None  # SAMPLING_PARAMETERS as int32, made at the first use
        self.result_row = -1  # its row in the results of the last step that sampled it

    def adjustments_at(self, index: int, draft_tokens: Items[int] = ()) -> Ints:
        """Returns the logit adjustments of output token `index`, after draft tokens: LOGIT_ADJUSTMENT as int32 [n, 4].
        Before min_tokens they ban the stop tokens."""
        adjustments = self._early_adjustments if index < self._min_tokens else self._adjustments
        for token in draft_tokens if self.counts_tokens else ():
            adjustments = _counted(adjustments, token)
        return adjustments

    def count(self, token: int) -> None:
        """Counts one more use of a token."""
        self._adjustments = _counted(self._adjustments, token)
        self._early_adjustments = _counted(self._early_adjustments, token)

    def make_param_row(self) -> Ints:
        p, row = self._params, np.zeros(1, SAMPLING_PARAMETERS)
        row["temperature"], row["top_k"] = p.temperature, min(p.top_k, 2**31 - 1)
        row["top_p"], row["min_p"] = p.top_p, p.min_p
        row["repeat_penalty"] = p.repeat_penalty
        row["presence_penalty"], row["frequency_penalty"] = p.presence_penalty, p.frequency_penalty
        row["seed_low"], row["seed_high"] = self.seed & 0xFFFFFFFF, self.seed >> 32
        row["top_logprobs"] = NO_LOGPROBS if p.logprobs is None else p.logprobs
        row["masked"] = self.masked
        self.param_row = made = row.view(np.int32)
        return made


def _adjustments(params: SamplingParams, prompt: list[int]) -> Ints:
    """Returns the rows of LOGIT_ADJUSTMENT as int32 [n, ADJUSTMENT_INTS], sorted by token as the kernel needs."""
    used = Counter(prompt) if params.uses_history else Counter[int]()
    tokens = sorted(used.keys() | params.logit_bias.keys())
    adjustments = np.zeros((len(tokens), ADJUSTMENT_INTS), np.int32)
    adjustments[:, TOKEN] = tokens
    adjustments[:, COUNT] = [used[token] for token in tokens]
    adjustments.view(np.float32)[:, BIAS] = [params.logit_bias.get(token, 0.0) for token in tokens]
    return adjustments


def _counted(adjustments: Ints, token: int) -> Ints:
    """Returns the adjustments after one more use of a token."""
    at = int(np.searchsorted(adjustments[:, TOKEN], token))
    if at == len(adjustments) or adjustments[at, TOKEN] != token:
        adjustments = np.insert(adjustments, at, 0, axis=0)
        adjustments[at, TOKEN] = token
    else:
        adjustments = adjustments.copy()
    adjustments[at, COUNT] += 1
    return adjustments


# ---- on the host


def sample_on_host(sequence: Sequence, logits: Array, param_row: Any) -> Sampled | RequestError:
    """Samples the next token of a request with a logits processor. Slow: the whole batch waits for it.

    `logits`: float32 [vocab], which the processor changes. NumPy then samples as the kernel would. Returns an error
    if the processor failed."""
    processor = sequence.request.params.logits_processor
    assert processor is not None
    try:
        changed = processor(list(sequence.tokens), logits)
        changed = np.asarray(logits if changed is None else changed, np.float32)
    except Exception as error:  # the user's code may raise anything
        return RequestError(f"the logits processor failed: {error!r}")
    if changed.shape != logits.shape:
        return RequestError(
            f"the logits processor made {changed.shape} of {logits.shape}: keep the logits' shape"
        )
    if not (changed > -np.inf).any():
        return RequestError("the logits processor leaves no token: keep one logit above -inf")
    return _sample(sequence, changed, param_row)


def _sample(sequence: Sequence, logits: Array, param_row: Any) -> Sampled:
    adjustments = sequence.sampling.adjustments_at(len(sequence.generated))
    arrays: dict[str, Any] = {
        "logits": logits[None],
        "params": np.array([param_row], np.int32).view(SAMPLING_PARAMETERS)[:, 0],
        "adjustments": np.ascontiguousarray(adjustments).view(LOGIT_ADJUSTMENT).reshape(-1),
        "out": np.zeros(1, SAMPLING_RESULT),
    }
    arrays["params"]["first_adjustment"], arrays["params"]["adjustments"] = 0, len(adjustments)
    if sequence.constraint:
        arrays["masks"] = sequence.constraint.mask[None]
    out = sample.reference(arrays, {"vocab": len(logits)}, {"rows": 1})["out"][0]
    if sequence.request.params.logprobs is None:
        return Sampled(int(out["token"]))
    count = int(out["top_count"])
    best = zip(out["top_ids"][:count].tolist(), out["top_logprobs"][:count].tolist(), strict=True)
    return Sampled(int(out["token"]), float(out["logprob"]), tuple(best))
