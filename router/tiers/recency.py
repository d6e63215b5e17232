"""Which of many keys goes first: the least recently used, and of what was used together the end before the beginning.

The blocks of one sequence are a group. The end of a prefix is of use to fewer than its beginning, and without its
beginning it is of use to nobody, so that a group that is too large for its tier keeps what comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Recency:
    """Keys in groups, the group that was used last at the end. Within a group they are in the order of their use."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[bytes, None]] = {}
        self._group_of: dict[bytes, int] = {}

    def use(self, keys: Iterable[bytes], group: int) -> None:
        """These belong to `group` now, in this order, which is the one used last."""
        members = self._groups.pop(group, {})
        self._groups[group] = members
        for key in keys:
            if self._group_of.get(key) != group:
                self.remove(key)
                self._group_of[key] = group
                members[key] = None

    def touch(self, group: int) -> None:
        """What is known of this group was used last."""
        if (members := self._groups.pop(group, None)) is not None:
            self._groups[group] = members

    def remove(self, key: bytes) -> None:
        """Forget a key, if it is known."""
        if (group := self._group_of.pop(key, None)) is not None:
            members = self._groups[group]
            del members[key]
            if not members:
                del self._groups[group]

    def victims(self) -> Iterator[tuple[bytes, int]]:
        """Keys with their groups, those first that should go first. Nothing may change meanwhile."""
        for group, members in self._groups.items():
            for key in reversed(members):
                yield key, group
