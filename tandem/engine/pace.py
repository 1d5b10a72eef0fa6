"""How many tokens of prompts a step may compute while others wait for their next token."""

from __future__ import annotations

SLOWDOWN = 1.0  # a prompt may add so much of the time that a step takes without it
FEWEST = 4  # tokens: a prompt always gets on
SHARE = 0.2  # of a new measurement in the average
UNKNOWN = 16  # tokens, until there are measurements
TYPICAL_COST = 0.25  # of another token, in steps, until it has been measured


class Pace:
    """Learns from the steps' times what a token of a prompt costs."""

    def __init__(self) -> None:
        self._step = 0.0  # seconds of a step without prompts
        self._token = 0.0  # seconds that a token of a prompt adds to it

    def observe(self, prompt_tokens: int, others: int, seconds: float) -> None:
        """`others`: sequences that had one token in the step."""
        if not prompt_tokens:
            self._step = _average(self._step, seconds)
        else:
            extra = seconds - self._step if others else seconds
            self._token = _average(self._token, max(extra, 0.0) / prompt_tokens)

    @property
    def cost(self) -> float:
        """What one more token adds to a step, in steps."""
        return self._token / self._step if self._step and self._token else TYPICAL_COST

    def in_steps(self, seconds: float) -> float:
        """A time as a part of a step's."""
        return seconds / self._step if self._step else 0.0

    def budget(self, prompts: int) -> int:
        """Tokens of all prompts together. Each may add its part, so that many at once are not kept waiting for long."""
        if not self._step or not self._token:
            return UNKNOWN * prompts
        return prompts * max(FEWEST, int(SLOWDOWN * self._step / self._token))


def _average(old: float, new: float) -> float:
    """One odd step, with others on this machine's cores, does not throw it off."""
    if not old:
        return new
    return old + SHARE * ((new if new < 4 * old else 4 * old) - old)
