"""The cost model of speculation: the time of steps with draft tokens, and a budget for exploration.

The cost table holds the seconds of a step by batch size and number of draft tokens. A draft model also has the seconds
of a draft step (divided by the seconds of a step: the cost coefficient c of Leviathan et al.) and of a prefilled token.

Exploration is speculation that is not known to pay, such as a retry after rejected drafts. Its budget is a small
fraction of all time, plus the time that speculation has saved, minus the time that it has lost. The fraction halves
after each step in which speculation loses time, and doubles after each in which it saves time. So exploration takes at
most this fraction of the time, for any text and machine.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

WINDOW = 16  # number of last samples in an average, of times and of acceptance
PRIOR_TOKEN_COST = 0.05  # fraction of a step's time that a draft token adds, until it is measured
MIN_PREFILL = 16  # tokens; longer prefills are timed on their own, shorter ones as a part of the step
MIN_BATCH_SPEEDUP = 1.1  # expected speedup that drafts must have if several sequences are in the batch
MAX_EXPLORATION, MIN_EXPLORATION = 0.02, 0.0025  # fraction of all time added to the exploration budget
MAX_REGRET = 0.04  # time that a request may lose by speculation, as a fraction of its expected time without
EXPECTED_TOKENS = 128  # minimum number of tokens that a request is expected to generate still
REMEASURE_STEPS = 32  # steps with drafts after which a step without is measured again
RETRY_TOKENS = 32  # tokens without a draft after which a draft is tried again


class Average:
    """The interquartile mean of the last samples, which ignores steps that other processes delay."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0
        self._last = deque[float](maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)
        self.count = len(self._last)
        middle = sorted(self._last)[self.count // 4 : self.count - self.count // 4]
        self.value = sum(middle) / len(middle)


class SpeculationCostModel:
    def __init__(self, cost_coefficient: float = 0.0) -> None:
        """`cost_coefficient`: c until it is measured; 0: drafting takes no time."""
        self.saved = 0.0  # seconds saved minus seconds lost
        self.budget = 0.0  # seconds available for exploration
        self._fraction = MAX_EXPLORATION
        self._wanted = 0.0  # seconds of exploration that the budget was too small for
        self._cost_coefficient = cost_coefficient
        self._measured: dict[int, dict[int, Average]] = {}  # batch size -> draft tokens -> seconds of a step
        # Batch size -> seconds of a step with 0, 1, ... draft tokens.
        self._table: dict[int, list[float]] = {}
        self._draft_steps: dict[int, Average] = {}  # sequences -> seconds of a draft step
        self._draft_prefill, self._prefill = Average(), Average()  # seconds per token
        self._drafting = 0.0  # seconds of drafting for the next step
        self._steps_with_drafts = 0  # since the last step without drafts
        self._token_seconds = 0.0  # seconds per token that the last step would have needed without drafts
        self._gain = 0.0  # seconds saved by the drafts of the last step

    def is_measured(self, batch_size: int) -> bool:
        """Whether there is a recent sample of a step without drafts. The first samples are taken more often."""
        plain = self._measured.get(batch_size, {}).get(0)
        return plain is not None and self._steps_with_drafts < min(REMEASURE_STEPS, 2 * plain.count)

    def max_estimated(self, batch_size: int) -> int:
        """Returns the largest number of draft tokens in the cost table."""
        return len(self._row(batch_size)) - 1

    def min_speedup(self, batch_size: int) -> float:
        """Returns the minimum expected speedup. In a batch it has a margin: a rejected draft delays all sequences."""
        return 1.0 if batch_size == 1 else MIN_BATCH_SPEEDUP

    def seconds(self, batch_size: int, lengths: list[int]) -> float:
        """Returns the expected seconds of a step with drafts of these lengths: drafting and verifying."""
        verifying, longest = self._verifying(batch_size, sum(lengths)), max(lengths, default=0)
        if not longest or not self._cost_coefficient:
            return verifying
        count = len(lengths) - lengths.count(0)
        return verifying + longest * self._draft_step(count, self._row(batch_size)[0])

    def prefill_seconds(self, batch_size: int, tokens: int) -> float:
        """Returns the expected seconds of a prefill by the draft model; until it is measured, c times the model's."""
        prefill = self._prefill.value or self._row(batch_size)[0]
        return tokens * (self._draft_prefill.value or self._cost_coefficient * prefill)

    def can_explore(self, seconds: float, request_seconds: float) -> bool:
        """Whether exploration may take `seconds` in requests of `request_seconds`. If only the budget is too small, it
        may grow to this amount."""
        allowed = seconds <= MAX_REGRET * request_seconds
        self._wanted = seconds if allowed and seconds > self.budget else 0.0
        return allowed and not self._wanted

    def max_cost(self, request_seconds: float) -> float:
        """Returns the maximum seconds of a prefill that is expected to pay off in requests of `request_seconds`."""
        return self.budget + MAX_REGRET * request_seconds

    def observe_drafting(self, lengths: list[int], prefilled: int, seconds: float) -> None:
        """Records the time of drafting for the next step, with a prefill of `prefilled` tokens before it."""
        if not self._cost_coefficient:
            return
        count, longest = len(lengths) - lengths.count(0), max(lengths)
        self._drafting = seconds
        if longest and not prefilled:
            self._draft_steps.setdefault(count, Average()).add(seconds / longest)
        elif longest:
            self._draft_prefill.add(max(0.0, seconds - longest * self._draft_step(count, 0.0)) / prefilled)

    def observe(self, batch_size: int, drafted: int, seconds: float, prompts: int = 0) -> None:
        """Records the time of a step, including its drafting. With prompt tokens in the step, the time of verifying is
        unknown, and the expected time is used."""
        drafting, self._drafting = self._drafting, 0.0
        if drafting >= seconds:
            drafting = 0.0  # it was for a step that failed to start
        self._update_fraction()
        known = batch_size in self._measured
        if prompts > MIN_PREFILL and not drafted and not drafting:
            self._prefill.add(max(0.0, seconds - (self._row(batch_size)[0] if known else 0.0)) / prompts)
        if not prompts and (known if drafted else not drafting):
            self._add_sample(batch_size, drafted, seconds - drafting)
            known = True
            if not drafted:
                self._steps_with_drafts = 0
        if known and drafted:
            self._steps_with_drafts += 1
            verifying = self._verifying(batch_size, drafted) if prompts else seconds - drafting
            plain = min(self._measured[batch_size][0].value, verifying)
            self._token_seconds = plain / batch_size
            self._add_gain(plain - verifying)
        self._add_gain(-drafting)
        if known:
            limit = max(MAX_REGRET * EXPECTED_TOKENS * self._measured[batch_size][0].value, self._wanted)
            self.budget = min(self.budget + self._fraction * seconds, limit)

    def credit(self, accepted: int) -> None:
        """Records accepted draft tokens of the step observed last."""
        self._add_gain(accepted * self._token_seconds)

    def _add_gain(self, seconds: float) -> None:
        self.saved += seconds
        self.budget += seconds
        self._gain += seconds

    def _update_fraction(self) -> None:
        """Exploration becomes rarer while speculation loses time."""
        if self._gain:
            fraction = self._fraction * (2 if self._gain > 0 else 0.5)
            self._fraction = min(max(fraction, MIN_EXPLORATION), MAX_EXPLORATION)
        self._gain = 0.0

    def _add_sample(self, batch_size: int, drafted: int, seconds: float) -> None:
        measured = self._measured.setdefault(batch_size, {})
        average = measured.get(drafted) or Average()
        # The first sample may be an outlier, so the estimate counts as a sample, too.
        if drafted and not average.count:
            average.add(self._verifying(batch_size, drafted))
        average.add(seconds)
        measured[drafted] = average
        self._table.pop(batch_size, None)

    def _verifying(self, batch_size: int, drafted: int) -> float:
        """Returns the expected seconds of a step without its drafting."""
        row = self._row(batch_size)
        beyond = drafted - len(row) + 1
        return row[drafted] if beyond <= 0 else row[-1] + beyond * (row[-1] - row[-2])

    def _row(self, batch_size: int) -> list[float]:
        """Returns a row of the cost table: interpolated between measured numbers of draft tokens, and extrapolated to
        twice the largest. Steps with more draft tokens do not take less time, so an average is at most the next one."""
        if (row := self._table.get(batch_size)) is not None:
            return row
        points = sorted((n, average.value) for n, average in self._measured[batch_size].items())
        for i in range(len(points) - 2, -1, -1):
            points[i] = points[i][0], min(points[i][1], points[i + 1][1])
        (last, end), plain, row = points[-1], points[0][1], list[float]()
        for (n, low), (above, high) in pairwise(points):
            row += [low + (high - low) * i / (above - n) for i in range(above - n)]
        each = (end - plain) / last if last else plain * PRIOR_TOKEN_COST
        row += [end + each * i for i in range((last or 2 * batch_size) + 1)]
        self._table[batch_size] = row
        return row

    def _draft_step(self, count: int, plain: float) -> float:
        """Returns the expected seconds of a draft step of `count` sequences. `plain`: a step without drafts."""
        measured = self._draft_steps.get(count)
        return measured.value if measured else self._cost_coefficient * plain
