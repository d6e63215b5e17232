"""How often and how soon a router or a group of shards is started again, and which process caused its end.

A death counts unless a token was delivered since the start before it: what works between its deaths is restarted
without limit. The first restart is immediate, later ones back off, and after `most` deaths within WINDOW_S the server
gives up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.logs import printable
from launch.processes import Child, ChildCommand

WINDOW_S = 600.0
MOST_DOUBLINGS = 4  # of a delay of a second


@dataclass(frozen=True)
class RestartCommands:
    """The commands of a restart. Both functions may raise Refusal and OSError.

    group: number -> the commands and the sockets of that group of shards. router: number of the group, its sockets,
    whether it has served a router before -> the router's command. problems: for which a router could not start now.
    """

    group: Callable[[int], tuple[Sequence[ChildCommand], Sequence[str]]]
    router: Callable[[int, Sequence[str], bool], ChildCommand]
    most_deaths: int
    problems: Callable[[], Sequence[str]] = list


class RestartPolicy:
    """Counts the deaths of the router, or of groups of shards. most: with which it is given up; 0: with the first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counted: deque[float] = deque()
        self._in_a_row = 0
        self._has_advanced = False

    def advanced(self) -> None:
        """A token was delivered: the next death does not count."""
        self._has_advanced = True

    def delay(self, now: float) -> float | None:
        """Count a death. Seconds until the restart, or None: give up."""
        if self._most == 0:
            return None
        if self._has_advanced:
            self._has_advanced, self._in_a_row = False, 0
            return 0.0
        while self._counted and self._counted[0] <= now - WINDOW_S:
            self._counted.popleft()
        if not self._counted:  # it has worked for a while
            self._in_a_row = 0
        self._counted.append(now)
        self._in_a_row += 1
        if len(self._counted) >= self._most:
            return None
        return 0.0 if self._in_a_row == 1 else 2.0 ** min(self._in_a_row - 2, MOST_DOUBLINGS)


def culprit(ended: Sequence[Child]) -> Child | None:
    """The process that caused the others' ends: one with a known cause of its own, else the first that is no
    consequence of another's end, else the first. ended: in the order of their ends."""
    independent = [child for child in ended if not child.is_consequence]
    return next((child for child in ended if child.has_cause), next(iter([*independent, *ended]), None))


def cause_of_loss(ended: Sequence[Child], report: Mapping[str, Any] | None, verb: str = "stopped") -> str:
    """Why a group of shards is lost, in one sentence. report: of the router."""
    guilty = culprit(ended)
    is_known = report is not None and report.get("is_known")
    if guilty is not None and (guilty.has_cause or not is_known):
        return f"{guilty.title} {verb}: {printable(guilty.cause)}"
    if report is None:
        return "the shards were not ready in time"
    return f"shard {report['rank']} {verb}: {printable(str(report['cause']))}"
