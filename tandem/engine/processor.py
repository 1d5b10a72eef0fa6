"""Sampling on the host, for requests with a Python logits processor: a row of logits comes from the device, the
request's function changes it, and NumPy samples as the kernel would. Slow, and all who share the steps wait for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tandem.engine.sequence import Sampled, Sequence
from tandem.errors import RequestError
from tandem.kernels import sample
from tandem.kernels.abi import LOGIT_ADJUSTMENT, SAMPLING_PARAMETERS, SAMPLING_RESULT
from tandem.kernels.kernel import Array


def process(sequence: Sequence, logits: Array, params: Any) -> Sampled | RequestError:
    """The next token, or what is wrong with the processor. `params`: the sequence's row of sampling parameters."""
    processor = sequence.params.logits_processor
    assert processor is not None
    try:
        changed = processor(list(sequence.tokens), logits)
        changed = np.asarray(logits if changed is None else changed, np.float32)
    except Exception as error:  # somebody else's code
        return RequestError(f"the logits processor failed: {error!r}")
    if changed.shape != logits.shape:
        return RequestError(
            f"the logits processor made {changed.shape} of {logits.shape}: keep the logits' shape"
        )
    if not (changed > -np.inf).any():
        return RequestError("the logits processor leaves no token: keep one logit above -inf")
    return _sample(sequence, changed, params)


def _sample(sequence: Sequence, logits: Array, params: Any) -> Sampled:
    adjustments = sequence.adjustments_at(len(sequence.generated))
    arrays: dict[str, Any] = {
        "logits": logits[None],
        "params": np.array([params], np.int32).view(SAMPLING_PARAMETERS)[:, 0],
        "adjustments": np.ascontiguousarray(adjustments).view(LOGIT_ADJUSTMENT).reshape(-1),
        "out": np.zeros(1, SAMPLING_RESULT),
    }
    arrays["params"]["first_adjustment"], arrays["params"]["adjustments"] = 0, len(adjustments)
    if sequence.constraint:
        arrays["masks"] = sequence.constraint.mask[None]
    out = sample.reference(arrays, {"vocab": len(logits)}, {"rows": 1})["out"][0]
    if sequence.params.logprobs is None:
        return Sampled(int(out["token"]))
    count = int(out["top_count"])
    best = zip(out["top_ids"][:count].tolist(), out["top_logprobs"][:count].tolist(), strict=True)
    return Sampled(int(out["token"]), float(out["logprob"]), tuple(best))
