"""Whether speculation pays: the cost of drafting and of verifying, and an account of the time it has saved or lost.

A try is a draft that is not known to be good: a request's first, for which a draft model has to read its text, or
another after bad ones. It is paid for in advance, out of a small share of the time, which becomes smaller while tries
are in vain. Only what is likely to pay for itself may run up a debt: a small share of the time to come. Drafts that
have been good go on where they save time.
So trying costs no more than these shares, whatever the texts and the machine are.
"""

from __future__ import annotations

from collections import deque

SHARE = 0.2  # of a new measurement in an average
ALLOWANCE, LEAST_ALLOWANCE = 0.02, 0.0025  # of the time may go to tries
DEBT = 0.04  # of the time to come may be lost before it has come
CREDIT = 4  # steps: what has been saved beyond that counts no more, so that bad times are noticed soon
CLEARLY = 1.1  # so much faster
LAST = (
    16  # steps without drafts, of which the middle half counts: others on this machine's cores hold some up
)
SURELY = 0.9  # no noise: so much faster with drafts than without means that it has become so for both
RECHECK = 32  # steps with drafts, after which one without shows again what it would take
TYPICAL_COST = 0.05  # of a step, for a draft token in it, until it has been measured
FEW = 16  # tokens of prompts, from which on what each takes can be told


class SpeculationCostModel:
    def __init__(self, cost_coefficient: float = 0.0) -> None:
        """`cost_coefficient`: of a step, for a draft token of each sequence, until it has been measured; 0: so little
        that it does not count."""
        self.saved = 0.0  # seconds, in all
        self.account = 0.0  # seconds that may be lost
        self._allowance = ALLOWANCE
        self._wish = 0.0  # seconds of a try that the account was too small for
        self._cost_coefficient = cost_coefficient
        self._plain: dict[int, float] = {}  # sequences: seconds of a step without drafts
        self._last: dict[int, deque[float]] = {}  # sequences: what these come from
        self._extra: dict[int, dict[int, float]] = {}  # sequences: draft tokens: seconds that they add
        self._draft_steps: dict[int, float] = {}  # sequences: seconds for drafting a token of each
        self._reading = 0.0  # seconds for a token that is read before
        self._prompt = 0.0  # seconds for a token of a prompt in a step
        self._made = 0.0  # seconds for drafting in the last step
        self._drafting = 0  # steps since one without
        self._token = 0.0  # seconds that a token of the step measured last would have taken without drafts
        self._gain = 0.0  # seconds that the last drafts saved

    def knows(self, sequences: int) -> bool:
        """What a step of so many takes without drafts, as of lately."""
        return sequences in self._plain and self._drafting < RECHECK

    def reach(self, sequences: int) -> int:
        """Draft tokens of which something can be said: twice as many as have been measured."""
        return 2 * max(self._extra.get(sequences, {}), default=sequences)

    def bar(self, sequences: int) -> float:
        """How many times as fast as without drafts a step of so many must be. Of several, some have less luck than
        others, and wait for the drafts of all."""
        return 1.0 if sequences == 1 else CLEARLY

    def seconds(self, sequences: int, lengths: list[int]) -> float:
        """What a step of so many takes with drafts of these lengths."""
        draft_step = self._draft_step(sum(length > 0 for length in lengths), self._plain[sequences])
        return self._computing(sequences, sum(lengths)) + draft_step * max(lengths, default=0)

    def reading(self, sequences: int, tokens: int) -> float:
        """What it takes to read so many before there can be a draft, in a step of so many sequences."""
        return tokens * (self._reading or self._cost_coefficient * (self._prompt or self._plain[sequences]))

    def affords(self, seconds: float, whole: float) -> bool:
        """Whether the account has as much for a try, in requests that take `whole` seconds; if not, it is saved for."""
        may = seconds <= DEBT * whole
        self._wish = seconds if may and seconds > self.account else 0.0
        return may and not self._wish

    def purse(self, whole: float) -> float:
        """Seconds for what is likely to pay for itself in requests that take `whole` seconds."""
        return self.account + DEBT * whole

    def observe_drafting(self, lengths: list[int], read: int, seconds: float) -> None:
        """What it took to make drafts of these lengths, after reading so many tokens; there may be none after all."""
        if not self._cost_coefficient:
            return
        count, longest = sum(length > 0 for length in lengths), max(lengths)
        self._made = seconds
        if not longest:
            return
        if not read:
            self._draft_steps[count] = _average(self._draft_steps.get(count), seconds / longest)
        else:
            rest = seconds - self._draft_step(count, 0.0) * longest
            self._reading = _average(self._reading, max(0.0, rest) / read)

    def observe(self, sequences: int, drafted: int, seconds: float, prompts: int = 0) -> None:
        """What a step took, with the making of its drafts. With tokens of prompts, what the drafts took cannot be
        told; it is taken to be what it was."""
        plain, made, self._made = self._plain.get(sequences), self._made, 0.0
        if made >= seconds:
            made = 0.0  # for a step that nobody came to see
        self._judge_last()
        if prompts > FEW and not drafted and not made:
            self._prompt = _average(self._prompt, max(0.0, seconds - (plain or 0.0)) / prompts)
        if not drafted and not prompts and not made:  # nor were drafts made in vain
            plain = self._see_plain(sequences, seconds)
            self._drafting = 0
        elif drafted and plain is not None:
            self._drafting += 1
            computing = self._computing(sequences, drafted) if prompts else seconds - made
            if computing < SURELY * plain:
                self._see_plain(sequences, computing)
            plain = min(plain, computing)  # it takes no longer without
            if not prompts:
                self._see_extra(sequences, drafted, max(0.0, computing - plain))
            self._token = plain / sequences
            self._add(plain - computing)
        self._add(-made)
        if plain is not None:
            most = max(CREDIT * plain, self._wish)
            self.account = min(self.account + self._allowance * seconds, most)

    def credit(self, accepted: int) -> None:
        """Of the step observed last, so many draft tokens were accepted."""
        self._add(accepted * self._token)

    def _add(self, seconds: float) -> None:
        self.saved += seconds
        self.account += seconds
        self._gain += seconds

    def _judge_last(self) -> None:
        """Tries become rarer while drafts are in vain."""
        if self._gain:
            self._allowance *= 2 if self._gain > 0 else 0.5
            self._allowance = min(max(self._allowance, LEAST_ALLOWANCE), ALLOWANCE)
        self._gain = 0.0

    def _see_plain(self, sequences: int, seconds: float) -> float:
        last = self._last.setdefault(sequences, deque(maxlen=LAST))
        last.append(seconds)
        cut = len(last) // 4
        middle = sorted(last)[cut : len(last) - cut]
        self._plain[sequences] = plain = sum(middle) / len(middle)
        return plain

    def _see_extra(self, sequences: int, drafted: int, seconds: float) -> None:
        expected = self._computing(sequences, drafted) - self._plain[sequences]
        known = self._extra.setdefault(sequences, {})
        # What was expected counts, too, the first time: that may have been held up.
        known[drafted] = (
            _average(known[drafted], seconds) if drafted in known else (expected + 2 * seconds) / 3
        )

    def _draft_step(self, count: int, plain: float) -> float:
        return self._draft_steps.get(count) or self._cost_coefficient * plain

    def _computing(self, sequences: int, drafted: int) -> float:
        """What a step takes with so many draft tokens, by what was measured of the next smaller and larger number;
        beyond them, each token adds as much as those before."""
        plain, known = self._plain[sequences], self._extra.get(sequences, {})
        if drafted in known:  # one that was held up took longer than more tokens do
            return plain + min(extra for n, extra in known.items() if n >= drafted)
        below = max((n for n in known if n < drafted), default=0)
        above = min((n for n in known if n > drafted), default=0)
        base = known[below] if below else 0.0
        if above:
            return plain + base + (known[above] - base) * (drafted - below) / (above - below)
        each = base / below if below else plain * TYPICAL_COST
        return plain + base + each * (drafted - below)


def _average(old: float | None, new: float) -> float:
    """One odd step, with others on this machine's cores, does not throw it off."""
    if not old:
        return new
    return old + SHARE * (min(new, 4 * old) - old)
