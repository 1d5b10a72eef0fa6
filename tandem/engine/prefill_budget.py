"""How many tokens of prompts a step may compute while others wait for their next token."""

from __future__ import annotations

from collections import deque

MAX_SLOWDOWN = 2.0  # a step with a prompt takes no more than so many as they were before it came
SPREADS = 3.0  # that chance is allowed for
MIN_EXTRA = 0.5  # steps that a prompt may add whatever chance does: it must get on
EVERY = 16  # steps with prompts there is one without: whether the machine has become slower is seen there
LAST = 9  # steps without prompts whose median counts: some are held up, as is the one in which a long prompt arrives
SHARE = 0.2  # of a new measurement in the average of steps with prompts
MAX_OUTLIER = (
    2.0  # averages that a new measurement counts as at most: a step that was held up is not like the next
)
UNKNOWN = 16  # tokens, until there are measurements


class PrefillBudget:
    """Learns from the steps' times what a token of a prompt costs.

    That is more for a longer prompt, since attention looks back at all of it, and for fewer tokens at a time. Both
    change slowly from step to step, so that an average of the last few follows them. The others' own steps become
    longer too while their texts grow: what they had before the prompt came is the measure of what it may cost them.
    """

    def __init__(self) -> None:
        self._step = 0.0  # seconds of a step without prompts, lately
        self._steps = [0.0]  # the same where so many others are there: none, 1, 2 to 3, 4 to 7 ...
        self._last = [deque[float](maxlen=LAST)]  # what these are the medians of
        # `_steps` when the prompts that are being read began; none: there are none
        self._before: list[float] = []
        self._since = 0  # how many steps with prompts ago a step without was measured
        self._left_out = False  # whether prompts had to wait for that
        self._token = 0.0  # seconds that a token of a prompt adds
        self._spread = 0.0  # seconds that a step with prompts is usually off what was expected

    def observe(self, prompt_tokens: int, others: int, seconds: float) -> None:
        """`others`: sequences that had one token in the step."""
        if not prompt_tokens:
            size = others.bit_length()
            while size >= len(self._steps):
                self._steps.append(0.0)
                self._last.append(deque(maxlen=LAST))
            last = self._last[size]
            last.append(seconds)
            self._step = self._steps[size] = sorted(last)[len(last) // 2]
            if not self._left_out:
                self._before = []
            self._since, self._left_out = 0, False
        else:
            self._since += others > 0
            if others and not self._before:
                self._before = self._steps.copy()
            extra = seconds - self._quiet(self._steps, others) if others else seconds
            if self._token and others:
                self._spread = _average(self._spread, abs(extra - prompt_tokens * self._token))
            self._token = _average(self._token, max(extra, 0.0) / prompt_tokens)

    def tokens(self, prompts: int, others: int) -> int:
        """Tokens of all prompts together while `others` wait. Each may add its part, so that many at once are not kept
        waiting for long."""
        step = self._quiet(self._steps, others)
        if not step or not self._token:
            return UNKNOWN * prompts
        if self._since >= EVERY:
            self._since, self._left_out = 0, True  # once: with draft tokens, that step is not measured
            return 0
        usual = min(step, self._quiet(self._before, others)) if self._before else step
        room = max(MAX_SLOWDOWN * usual - step - SPREADS * self._spread, MIN_EXTRA * step)
        return prompts * max(1, round(room / self._token))

    def _quiet(self, steps: list[float], others: int) -> float:
        """Seconds of a step without prompts, of so many or the nearest number below that has been seen."""
        seen = [seconds for seconds in steps[: others.bit_length() + 1] if seconds]
        return seen[-1] if seen else self._step


def _average(old: float, new: float) -> float:
    """One odd step, with others on this machine's cores, does not throw it off."""
    if not old:
        return new
    return old + SHARE * ((new if new < MAX_OUTLIER * old else MAX_OUTLIER * old) - old)
