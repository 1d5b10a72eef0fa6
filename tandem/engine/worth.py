"""Whether guesses pay: what steps take with and without them, and an account of the time they have saved or lost.

With an account in the red nothing is tried: a request's first guess, for which a draft model has to read its prompt, or
another after bad ones. A small share of the time pays it back. Guesses that have been good go on where they save time.
So trying costs no more than that share, whatever the texts and the machine are.
"""

from __future__ import annotations

SHARE = 0.2  # of a new measurement in an average
ALLOWANCE = 0.02  # of the time may go to guesses that turn out wrong
CREDIT = 4  # steps: what has been saved beyond that counts no more, so that bad times are noticed soon
RECHECK = 32  # steps with guesses, after which one without shows again what it would take
TYPICAL_COST = 0.25  # of a step, for a guessed token, until it has been measured


class Worth:
    def __init__(self) -> None:
        self.saved = 0.0  # seconds, in all
        self.account = 0.0  # seconds that may be lost
        self._plain: dict[int, float] = {}  # sequences: seconds of a step without guesses
        self._extra: dict[int, dict[int, float]] = {}  # sequences: guessed tokens: seconds that they add
        self._guessing = 0  # steps since one without
        self._token = 0.0  # seconds that a token of the step measured last would have taken without guesses

    @property
    def may_try(self) -> bool:
        """Whether guesses may be made without knowing that they are good."""
        return self.account >= 0

    def knows(self, sequences: int) -> bool:
        """What a step of so many takes without guesses, as of lately."""
        return sequences in self._plain and self._guessing < RECHECK

    def seconds(self, sequences: int, guessed: int) -> float:
        """What a step of so many takes with so many guessed tokens, by what was measured of the next smaller and
        larger number; beyond them, each token adds as much as those before."""
        plain, known = self._plain[sequences], self._extra.get(sequences, {})
        if guessed in known:
            return plain + known[guessed]
        below = max((n for n in known if n < guessed), default=0)
        above = min((n for n in known if n > guessed), default=0)
        base = known[below] if below else 0.0
        if above:
            return plain + base + (known[above] - base) * (guessed - below) / (above - below)
        each = base / below if below else plain * TYPICAL_COST
        return plain + base + each * (guessed - below)

    def observe(self, sequences: int, guessed: int, seconds: float | None, usual: bool = True) -> None:
        """What a step took, with the making of its guesses; `usual` if that was no more than it will be. None: what it
        took cannot be told; the guesses are taken to have cost what they do."""
        plain = self._plain.get(sequences)
        if not guessed and seconds is not None:
            self._plain[sequences] = plain = _average(plain, seconds)
            self._guessing = 0
        elif guessed and plain is not None:
            self._guessing += 1
            self._token = plain / sequences
            taken = self.seconds(sequences, guessed) if seconds is None else seconds
            self._add(plain - taken)
            if seconds is not None and usual:
                extra = self._extra.setdefault(sequences, {})
                extra[guessed] = _average(extra.get(guessed), max(0.0, taken - plain))
        if plain is not None:
            self.account = min(self.account + ALLOWANCE * (seconds or plain), CREDIT * plain)

    def credit(self, right: int) -> None:
        """Of the step observed last, so many guessed tokens were right."""
        self._add(right * self._token)

    def _add(self, seconds: float) -> None:
        self.saved += seconds
        self.account += seconds


def _average(old: float | None, new: float) -> float:
    """One odd step, with others on this machine's cores, does not throw it off."""
    if not old:
        return new
    return old + SHARE * (min(new, 4 * old) - old)
