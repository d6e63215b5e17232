"""What guesses have gained for each sequence and cost it, so that none is slower for them, its own or others'.

All sequences of a step wait for the guesses in it, and for what a model proposes behind it, whoever these are of. So
each has an account, and a step takes no longer than all can pay for: with what they gained before, with a small share
of their time, and at their beginning with a loan, since nothing is known before it is tried. All loans together are
bounded too: short requests would else each lose one.
"""

from __future__ import annotations

MOST_DEBT = 0.01  # share of a sequence's time that its own guesses may have lost
FIRST_DEBT = 1.5  # plain steps that they may have lost beyond that: one to sit out, and half of one
MOST_WAIT = 0.02  # share of its time that it may have waited for others' guesses
FIRST_WAIT = 0.25  # plain steps beyond that
LENT = 32.0  # plain steps that all may have lost beyond their shares, since the start …
LENT_SHARE = 0.003  # … and this share of their time …
LENT_GAINS = 0.05  # … and of what guesses gained


class Loans:
    """What sequences may lose together beyond what each may, in seconds."""

    def __init__(self) -> None:
        self.earned = 0.0
        self.lent = 0.0  # what sequences have lost, those that ended too

    def room(self, plain_seconds: float) -> float:
        """What may be lent now."""
        return LENT * plain_seconds + self.earned - self.lent


class Account:
    """Of one sequence, in seconds."""

    def __init__(self, loans: Loans | None = None) -> None:
        self._loans = Loans() if loans is None else loans
        self._own = 0.0  # what its guesses gained, less what steps with them took longer
        self._waits = 0.0  # what it may wait for others' guesses
        self._lent = 0.0

    def decoded(self, num_tokens: int, plain_seconds: float, extra_seconds: float = 0.0, *, drafts: bool) -> None:
        """A step brought so many tokens, each of which would have taken a plain one, and took so much longer.

        drafts: whether it had guesses in the step; else it waited for others'.
        """
        seconds = num_tokens * plain_seconds
        self._own += MOST_DEBT * seconds
        self._waits += MOST_WAIT * seconds
        self._loans.earned += LENT_SHARE * seconds
        if drafts:
            gain = seconds - plain_seconds - extra_seconds
            self._loans.earned += LENT_GAINS * max(0.0, gain)
            self._own += gain
        elif extra_seconds:
            self._own += min(0.0, self._waits - extra_seconds)
            self._waits = max(0.0, self._waits - extra_seconds)
        self._borrow()

    def waited(self, seconds: float) -> None:
        """It took no part in a step of so many seconds, to have a draft in the next one."""
        self._own -= seconds
        self._borrow()

    def _borrow(self) -> None:
        lent = max(0.0, -self._own)
        self._loans.lent += lent - self._lent
        self._lent = lent

    def room(self, plain_seconds: float) -> float:
        """Seconds that it may lose with a draft in the next step."""
        loan = max(0.0, self._loans.room(plain_seconds) + self._lent)
        return self._own + min(FIRST_DEBT * plain_seconds, loan)

    def patience(self, plain_seconds: float) -> float:
        """Seconds that it may wait for others' guesses in the next step."""
        most = max(0.0, FIRST_WAIT * plain_seconds + min(0.0, self._own))
        return self._waits + max(0.0, self._own) + min(most, max(0.0, self._loans.room(plain_seconds)))
