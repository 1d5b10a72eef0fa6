"""Whether guesses pay: what making and computing them takes, and an account of the time they have saved or lost.

A try is a guess that is not known to be good: a request's first, for which a draft model has to read its text, or
another after bad ones. It is paid for in advance, out of a small share of the time, which becomes smaller while tries
are in vain. Only what is likely to pay for itself may run up a debt: a small share of the time to come. Guesses that
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
    16  # steps without guesses, of which the middle half counts: others on this machine's cores hold some up
)
SURELY = 0.9  # no noise: so much faster with guesses than without means that it has become so for both
RECHECK = 32  # steps with guesses, after which one without shows again what it would take
TYPICAL_COST = 0.05  # of a step, for a guessed token in it, until it has been measured
FEW = 16  # tokens of prompts, from which on what each takes can be told


class Worth:
    def __init__(self, typical_making: float = 0.0) -> None:
        """`typical_making`: of a step, for a guessed token of each sequence, until it has been measured; 0: so little
        that it does not count."""
        self.saved = 0.0  # seconds, in all
        self.account = 0.0  # seconds that may be lost
        self._allowance = ALLOWANCE
        self._wish = 0.0  # seconds of a try that the account was too small for
        self._typical_making = typical_making
        self._plain: dict[int, float] = {}  # sequences: seconds of a step without guesses
        self._last: dict[int, deque[float]] = {}  # sequences: what these come from
        self._extra: dict[int, dict[int, float]] = {}  # sequences: guessed tokens: seconds that they add
        self._making: dict[int, float] = {}  # sequences: seconds for making a guess of a token of each
        self._reading = 0.0  # seconds for a token that is read before
        self._prompt = 0.0  # seconds for a token of a prompt in a step
        self._made = 0.0  # seconds for making the guesses of the last step
        self._guessing = 0  # steps since one without
        self._token = 0.0  # seconds that a token of the step measured last would have taken without guesses
        self._gain = 0.0  # seconds that the last guesses saved

    def knows(self, sequences: int) -> bool:
        """What a step of so many takes without guesses, as of lately."""
        return sequences in self._plain and self._guessing < RECHECK

    def reach(self, sequences: int) -> int:
        """Guessed tokens of which something can be said: twice as many as have been measured."""
        return 2 * max(self._extra.get(sequences, {}), default=sequences)

    def bar(self, sequences: int) -> float:
        """How many times as fast as without guesses a step of so many must be. Of several, some have less luck than
        others, and wait for the guesses of all."""
        return 1.0 if sequences == 1 else CLEARLY

    def seconds(self, sequences: int, lengths: list[int]) -> float:
        """What a step of so many takes if guesses of these lengths are made."""
        making = self._making_of(sum(length > 0 for length in lengths), self._plain[sequences])
        return self._computing(sequences, sum(lengths)) + making * max(lengths, default=0)

    def reading(self, sequences: int, tokens: int) -> float:
        """What it takes to read so many before there can be a guess, in a step of so many sequences."""
        return tokens * (self._reading or self._typical_making * (self._prompt or self._plain[sequences]))

    def affords(self, seconds: float, whole: float) -> bool:
        """Whether the account has as much for a try, in requests that take `whole` seconds; if not, it is saved for."""
        may = seconds <= DEBT * whole
        self._wish = seconds if may and seconds > self.account else 0.0
        return may and not self._wish

    def purse(self, whole: float) -> float:
        """Seconds for what is likely to pay for itself in requests that take `whole` seconds."""
        return self.account + DEBT * whole

    def observe_making(self, lengths: list[int], read: int, seconds: float) -> None:
        """What it took to make guesses of these lengths, after reading so many tokens; there may be none after all."""
        if not self._typical_making:
            return
        count, longest = sum(length > 0 for length in lengths), max(lengths)
        self._made = seconds
        if not longest:
            return
        if not read:
            self._making[count] = _average(self._making.get(count), seconds / longest)
        else:
            rest = seconds - self._making_of(count, 0.0) * longest
            self._reading = _average(self._reading, max(0.0, rest) / read)

    def observe(self, sequences: int, guessed: int, seconds: float, prompts: int = 0) -> None:
        """What a step took, with the making of its guesses. With tokens of prompts, what the guesses took cannot be
        told; it is taken to be what it was."""
        plain, made, self._made = self._plain.get(sequences), self._made, 0.0
        if made >= seconds:
            made = 0.0  # for a step that nobody came to see
        self._judge_last()
        if prompts > FEW and not guessed and not made:
            self._prompt = _average(self._prompt, max(0.0, seconds - (plain or 0.0)) / prompts)
        if not guessed and not prompts and not made:  # nor were guesses made in vain
            plain = self._see_plain(sequences, seconds)
            self._guessing = 0
        elif guessed and plain is not None:
            self._guessing += 1
            computing = self._computing(sequences, guessed) if prompts else seconds - made
            if computing < SURELY * plain:
                self._see_plain(sequences, computing)
            plain = min(plain, computing)  # it takes no longer without
            if not prompts:
                self._see_extra(sequences, guessed, max(0.0, computing - plain))
            self._token = plain / sequences
            self._add(plain - computing)
        self._add(-made)
        if plain is not None:
            most = max(CREDIT * plain, self._wish)
            self.account = min(self.account + self._allowance * seconds, most)

    def credit(self, right: int) -> None:
        """Of the step observed last, so many guessed tokens were right."""
        self._add(right * self._token)

    def _add(self, seconds: float) -> None:
        self.saved += seconds
        self.account += seconds
        self._gain += seconds

    def _judge_last(self) -> None:
        """Tries become rarer while guesses are in vain."""
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

    def _see_extra(self, sequences: int, guessed: int, seconds: float) -> None:
        expected = self._computing(sequences, guessed) - self._plain[sequences]
        known = self._extra.setdefault(sequences, {})
        # What was expected counts, too, the first time: that may have been held up.
        known[guessed] = (
            _average(known[guessed], seconds) if guessed in known else (expected + 2 * seconds) / 3
        )

    def _making_of(self, count: int, plain: float) -> float:
        return self._making.get(count) or self._typical_making * plain

    def _computing(self, sequences: int, guessed: int) -> float:
        """What a step takes with so many guessed tokens, by what was measured of the next smaller and larger number;
        beyond them, each token adds as much as those before."""
        plain, known = self._plain[sequences], self._extra.get(sequences, {})
        if guessed in known:  # one that was held up took longer than more tokens do
            return plain + min(extra for n, extra in known.items() if n >= guessed)
        below = max((n for n in known if n < guessed), default=0)
        above = min((n for n in known if n > guessed), default=0)
        base = known[below] if below else 0.0
        if above:
            return plain + base + (known[above] - base) * (guessed - below) / (above - below)
        each = base / below if below else plain * TYPICAL_COST
        return plain + base + each * (guessed - below)


def _average(old: float | None, new: float) -> float:
    """One odd step, with others on this machine's cores, does not throw it off."""
    if not old:
        return new
    return old + SHARE * (min(new, 4 * old) - old)
