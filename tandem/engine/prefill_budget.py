"""Limits the prompt tokens that a step computes while other sequences decode (chunked prefill)."""

from __future__ import annotations

from collections import deque

MAX_SLOWDOWN = 2.0  # maximum time of a step with prompt tokens, in decode steps before the prompt arrived
SPREADS = 3.0  # margin of the budget, in average deviations of the step time
MIN_EXTRA = 0.5  # time that prompts may always add to a step, in decode steps, so that they make progress
RECHECK_STEPS = 16  # steps with prompts after which one without measures the decode step again
WINDOW = 9  # decode steps in a median, since other processes delay single steps
SMOOTHING = 0.2  # weight of a new measurement in the averages of steps with prompts
MAX_OUTLIER = 2.0  # maximum of a new measurement, as a multiple of the average
INITIAL_TOKENS = 16  # tokens per prompt until there are measurements


class PrefillBudget:
    """Learns the time of a prompt token from step times, and limits prompt tokens so that decoding stays fast.

    A prompt token takes longer in a longer prompt, since attention reads all of it, and in a smaller chunk. Both change
    slowly from step to step, so an average of recent steps follows them. Decode steps also become slower while outputs
    grow; MAX_SLOWDOWN refers to the decode step before the current prompts arrived.
    """

    def __init__(self) -> None:
        self._decode_step = 0.0  # seconds of a recent step without prompts
        # The same by batch size: 0, 1, 2 to 3, 4 to 7 ... sequences.
        self._decode_steps = [0.0]
        self._recent = [deque[float](maxlen=WINDOW)]  # recent times; `_decode_steps` are their medians
        # `_decode_steps` when the current prompts arrived; empty: there are no prompts.
        self._before_prompts: list[float] = []
        self._steps_since_decode = 0  # steps with prompts since the last one without
        self._skipped = False  # prompts were left out of a step, to measure one without
        self._token = 0.0  # seconds that a prompt token adds
        self._spread = 0.0  # average deviation of a step with prompts from its expected time, in seconds

    def observe(self, prompt_tokens: int, decodes: int, seconds: float) -> None:
        """Learns from a step of `decodes` decoding sequences."""
        if not prompt_tokens:
            size = decodes.bit_length()
            while size >= len(self._decode_steps):
                self._decode_steps.append(0.0)
                self._recent.append(deque(maxlen=WINDOW))
            recent = self._recent[size]
            recent.append(seconds)
            self._decode_step = self._decode_steps[size] = sorted(recent)[len(recent) // 2]
            if not self._skipped:
                self._before_prompts = []
            self._steps_since_decode, self._skipped = 0, False
        else:
            self._steps_since_decode += decodes > 0
            if decodes and not self._before_prompts:
                self._before_prompts = self._decode_steps.copy()
            extra = seconds - self._expected(self._decode_steps, decodes) if decodes else seconds
            if self._token and decodes:
                self._spread = _average(self._spread, abs(extra - prompt_tokens * self._token))
            self._token = _average(self._token, max(extra, 0.0) / prompt_tokens)

    def tokens(self, prompts: int, decodes: int) -> int:
        """Returns the tokens of all prompts together that the next step may compute in addition to `decodes` decoding
        sequences. They grow with the number of prompts, so that many prompts do not wait long."""
        step = self._expected(self._decode_steps, decodes)
        if not step or not self._token:
            return INITIAL_TOKENS * prompts
        if self._steps_since_decode >= RECHECK_STEPS:
            # Reset here: a step with draft tokens is not observed, and would be skipped for ever.
            self._steps_since_decode, self._skipped = 0, True
            return 0
        usual = min(step, self._expected(self._before_prompts, decodes)) if self._before_prompts else step
        room = max(MAX_SLOWDOWN * usual - step - SPREADS * self._spread, MIN_EXTRA * step)
        return prompts * max(1, round(room / self._token))

    def _expected(self, decode_steps: list[float], decodes: int) -> float:
        """Returns the seconds of a decode step of this batch size, or of the next smaller measured one."""
        measured = [seconds for seconds in decode_steps[: decodes.bit_length() + 1] if seconds]
        return measured[-1] if measured else self._decode_step


def _average(old: float, new: float) -> float:
    """Returns a running average that limits outliers."""
    if not old:
        return new
    return old + SMOOTHING * ((new if new < MAX_OUTLIER * old else MAX_OUTLIER * old) - old)
