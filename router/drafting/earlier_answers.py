"""Earlier answers, in which what a text goes on with may be found. They are shared among texts of one owner alone.

An owner is an API key and a cache salt: what came quickly would otherwise tell one client what another was answered.
The answers that were not used for longest leave, of whichever owner, when all together have too many tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.drafting.token_index import TokenIndex

Owner = tuple[str, str]  # the name of an API key, and a cache salt

MOST_TOKENS = 1 << 17  # of all answers; with those that have left but are still indexed, 5 MiB
LARGEST_SHARE = 8  # no answer takes more than one in so many of them
SHORTEST = 16  # tokens of an answer on average: shorter ones are kept in no greater number, each may have an owner
USED = 8  # tokens of an answer that must be found again for it to count as used
END = -1  # behind each answer: no token


@dataclass(slots=True, eq=False)
class _Answer:
    owner: Owner
    start: int
    length: int
    is_here: bool = True


@dataclass(slots=True)
class _Shelf:
    """The answers of one owner, in the order in which they stand in its index."""

    index: TokenIndex = field(default_factory=TokenIndex)
    answers: list[_Answer] = field(default_factory=list)
    num_tokens: int = 0  # of those that are here; others have left and are still indexed

    def clear_up(self) -> None:
        """Index only what is here."""
        tokens, self.answers = array("i"), [answer for answer in self.answers if answer.is_here]
        for answer in self.answers:
            part = self.index.token_ids[answer.start : answer.start + answer.length]
            answer.start = len(tokens)
            tokens.extend(part)
        self.index = TokenIndex(tokens)


class EarlierAnswers:
    """Those that were used last."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self.num_tokens = 0
        self._most_tokens = most_tokens
        self._shelves: dict[Owner, _Shelf] = {}
        # The one used last at the end. Of a plain dict, finding the first takes as long as how many have left.
        self._used: OrderedDict[_Answer, None] = OrderedDict()

    def add(self, owner: Owner, token_ids: Sequence[int]) -> None:
        """Remember an answer, with what was said just before it."""
        said = [*token_ids[: self._most_tokens // LARGEST_SHARE], END]
        shelf = self._shelves.setdefault(owner, _Shelf())
        answer = _Answer(owner, len(shelf.index.token_ids), len(said))
        shelf.index.extend(said)
        shelf.answers.append(answer)
        shelf.num_tokens += answer.length
        self._used[answer] = None
        self.num_tokens += answer.length
        while self.num_tokens > self._most_tokens or len(self._used) > self._most_tokens // SHORTEST:
            self._drop(next(iter(self._used)))

    def _drop(self, answer: _Answer) -> None:
        shelf = self._shelves[answer.owner]
        del self._used[answer]
        answer.is_here = False
        shelf.num_tokens -= answer.length
        self.num_tokens -= answer.length
        if not shelf.num_tokens:
            del self._shelves[answer.owner]
        elif len(shelf.index.token_ids) > 2 * shelf.num_tokens:
            shelf.clear_up()

    def guess(self, owner: Owner, text: array[int], most: int, least_match: int) -> tuple[int, tuple[int, ...], float]:
        """How much of the text's end was found, what went on most often behind it, and in what share of the places.

        At most so many tokens; none if less than `least_match` was found.
        """
        shelf = self._shelves.get(owner)
        if shelf is None:
            return 0, (), 0.0
        match, places = shelf.index.matches(text, least_match)
        if not match:
            return 0, (), 0.0
        token_ids, share = most_frequent(shelf.index.token_ids, places, most)
        if match >= USED:
            self._use(shelf, places[0])
        return match, token_ids, share

    def _use(self, shelf: _Shelf, place: int) -> None:
        answer = shelf.answers[bisect_right(shelf.answers, place - 1, key=lambda answer: answer.start) - 1]
        if answer.is_here:
            self._used.move_to_end(answer)


def most_frequent(tokens: array[int], places: list[int], most: int) -> tuple[tuple[int, ...], float]:
    """What most often goes on behind these places, token by token up to an END; of equally many, behind the first.

    And the share of the places that go on with its first token.
    """
    found: list[int] = []
    num_places, num_first = len(places), 0
    while len(found) < most:
        if len(places) == 1:
            rest = tokens[places[0] : places[0] + most - len(found)].tolist()
            found += rest[: rest.index(END)] if END in rest else rest
            num_first = num_first or 1
            break
        behind = [tokens[place] for place in places]
        token = max(behind, key=behind.count)
        if token == END:
            break
        places = [place + 1 for place, other in zip(places, behind, strict=True) if other == token]
        num_first = num_first or len(places)
        found.append(token)
    return tuple(found), num_first / num_places
