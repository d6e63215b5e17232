"""Which adapter a request means: from names to adapters, each known by its content.

Names come from the command line, from the folder that `--adapter-dir` names, and from requests to load one. A name that
is none of them is refused, and never stands for the model without an adapter. Where no adapters are served, any name of
a model stands for the one there is.

An adapter is what its files hold now: whether they look as before is asked at most once a second, when a request wants
them, and what looks different is read again and is then another adapter, with another key. Requests that run go on with
the one that they have. Names that lead to nothing leave nothing behind.

Left out: what lies on the disk (`adapter_files.py`), where adapters are in memory (`router/scheduling/adapters.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from router.config import ADAPTER_NAME_RULE, is_adapter_name
from router.errors import AdapterRefused, Unavailable, UnknownModel, ValidationError
from router.requests.adapter_files import Away, Changing, Content, Missing, Unfit, appearance, read_content
from router.scheduling.adapters import Adapter
from router.telemetry.request_log import harmless

LOOK_S = 1.0  # how long what was seen of files is believed
TELL_S = 1.0  # between two lines of the log about what is not served
READS_AT_ONCE = 2  # threads that read whole adapters
MOST_FOUND = 10_000  # that are kept of the folder's; others are found again when they are asked for
MOST_NAMED = 10_000  # where loading comes to an end
MOST_UNLOADED = 10_000
SHOWN_NAMES = 10  # in a refusal
BASE = ""  # what stands for the model without an adapter, among the names that a key may use
GB = 10**9
NO_LIMIT = 1 << 62

logger = logging.getLogger(__name__)

Allowed = Collection[str] | None  # names that a key may use; None: all


class Shelf(Protocol):
    """Where adapters are at hand: the shards, as far as names have to do with them."""

    async def prepare(self, adapter: Adapter) -> str:
        """Have one read; returns why it cannot be served, or nothing. Raises RouterError."""

    def refuses(self, adapter: Adapter) -> bool:
        """Whether it is known that it can never be served."""

    def discard(self, key: bytes) -> None:
        """No request will name one any more."""


class NoShelf:
    """What requests may name is read when one does."""

    async def prepare(self, adapter: Adapter) -> str:
        """Nothing is known against it."""
        return ""

    def refuses(self, adapter: Adapter) -> bool:
        """Nothing is known against it."""
        return False

    def discard(self, key: bytes) -> None:
        """It is nowhere."""


@dataclass(slots=True)
class Source:
    """A name, and where its files are. within: the folder that they must lie in."""

    name: str
    path: str
    within: str | None = None
    content: Content | None = None
    looked_at: float = 0.0
    looking: asyncio.Task[Adapter] | None = None


class Adapters:
    """All adapters that requests may name. Raises ValueError for names of the settings that cannot be.

    own_names: of the model, the first of which is shown. is_on: whether there may be any. most_bytes: of one's files.
    shelf: where those that are loaded are read; None: the first request for one finds out.
    """

    def __init__(
        self,
        own_names: Sequence[str],
        listed: Iterable[tuple[str, str]] = (),
        folder: str | None = None,
        *,
        is_on: bool = True,
        most_bytes: int = NO_LIMIT,
        shelf: Shelf | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base = own_names[0]
        self.is_on = is_on
        self.folder = None if folder is None else str(Path(folder).expanduser())
        self._own = frozenset(own_names)
        self._most_bytes = most_bytes
        self._shelf = shelf if shelf is not None else NoShelf()
        self._clock = clock
        self._named = {name: Source(name, path) for name, path in listed}
        self._found: OrderedDict[str, Source] = OrderedDict()  # in the folder, the latest used last
        self._arriving: dict[str, Source] = {}  # that are looked at for the first time
        self._unloaded: OrderedDict[str, None] = OrderedDict()  # names that the folder does not bring back
        self._reading = asyncio.Semaphore(READS_AT_ONCE)
        self._tells_again = -math.inf

    # ------------------------------------------------------------------------------------------------------- asking

    def __len__(self) -> int:
        return len(self._named) + len(self._found)

    def names(self, allowed: Allowed = None) -> Iterator[str]:
        """Those that are known, of those that a key may use."""
        every = (name for names in (self._named, self._found) for name in names)
        return (name for name in every if allowed is None or name in allowed)

    def served(self, allowed: Allowed = None) -> Iterator[str]:
        """Those of these names that no shard has refused."""
        for name in self.names(allowed):
            content = (self._named.get(name) or self._found[name]).content
            if content is None or not self._shelf.refuses(_adapter_of(name, content)):
                yield name

    def serves_base(self, allowed: Allowed = None) -> bool:
        """Whether a key may use the model without an adapter."""
        return allowed is None or BASE in allowed or not self._own.isdisjoint(allowed)

    async def chosen(self, model: str | None, adapter_id: str | None, allowed: Allowed = None) -> Adapter | None:
        """The adapter that a request means by what it names; None: the model without one.

        Raises UnknownModel, and ValidationError and Unavailable for one whose files cannot be served.
        """
        name = model if adapter_id is None else adapter_id
        if not self.is_on:
            if adapter_id is not None:
                raise ValidationError(
                    "this server has no adapters: leave `adapter_id` out, or start it with --lora-adapters"
                )
            return None
        if not name or name in self._own:
            if not self.serves_base(allowed):
                raise self._unknown(name or self.base, allowed)
            return None
        return await self.find(name, allowed)

    async def find(self, name: str, allowed: Allowed = None) -> Adapter:
        """The adapter of a name as it is now. Raises as `chosen` does."""
        if allowed is not None and name not in allowed:
            raise self._unknown(name, allowed)
        source = self._source(name)
        if source is None:
            raise self._unknown(name, allowed)
        try:
            return await self._adapter(source)
        except Missing as error:
            self._found.pop(name, None)
            self._tell(source, error)
            if name in self._named:
                raise Unavailable(f"the files of the adapter {name} are not there: put them back") from None
            raise self._unknown(name, allowed) from None

    def _tell(self, source: Source, error: Missing) -> None:
        """Say in the log why what lies in the folder is not served; not of all, since anybody may ask for anything."""
        if source.within is not None and os.path.lexists(source.path) and self._may_tell():
            logger.warning("%s in the folder for adapters is not served: it %s", harmless(source.name), error)

    def _may_tell(self) -> bool:
        if self._clock() < self._tells_again:
            return False
        self._tells_again = self._clock() + TELL_S
        return True

    async def listed(self) -> tuple[list[Adapter], list[str]]:
        """Those that the settings name, and why others of these cannot be read."""
        found, problems = [], []
        for source in list(self._named.values()):
            try:
                found.append(await self._adapter(source))
            except Missing as error:
                problems.append(f"the adapter {source.name} {error}")
            except ValidationError as error:
                problems.append(error.detail)
            except Unavailable as error:
                problems.append(str(error))
        return found, problems

    def _source(self, name: str) -> Source | None:
        """Where the files of a name would be; the model's own names are no adapter's."""
        if name in self._own:
            return None
        if (known := self._named.get(name) or self._arriving.get(name)) is not None:
            return known
        if (found := self._found.get(name)) is not None:
            self._found.move_to_end(name)
            return found
        if self.folder is None or name in self._unloaded or "/" in name or not is_adapter_name(name):
            return None
        return Source(name, f"{self.folder}/{name}", self.folder)

    async def _adapter(self, source: Source) -> Adapter:
        """What its files hold, which are looked at once for all who ask meanwhile. Raises Missing too."""
        if source.content is not None and self._clock() - source.looked_at < LOOK_S:
            return _adapter_of(source.name, source.content)
        if source.looking is None:
            is_new = source.name not in self._named and source.name not in self._found
            if is_new:
                self._arriving[source.name] = source
            source.looking = asyncio.ensure_future(self._look(source, is_new=is_new))
            source.looking.add_done_callback(_forget_failure)  # where those who asked have gone
        return await asyncio.shield(source.looking)

    async def _look(self, source: Source, *, is_new: bool) -> Adapter:
        try:
            source.content = await self._content(source)
            source.looked_at = self._clock()
        finally:
            source.looking = None
            if is_new:
                self._arriving.pop(source.name, None)
        if is_new and source.name not in self._unloaded and source.name not in self._named:
            self._found[source.name] = source
            if len(self._found) > MOST_FOUND:
                self._found.popitem(last=False)
        return _adapter_of(source.name, source.content)

    async def _content(self, source: Source) -> Content:
        where = (source.path, source.within, self._most_bytes)
        try:
            looks = await asyncio.to_thread(appearance, *where)
            if source.content is not None and source.content.looks == looks:
                return source.content
            async with self._reading:
                return await asyncio.to_thread(read_content, *where)
        except Unfit as error:
            raise ValidationError(f"the adapter {source.name} {error}") from None
        except Changing as error:
            raise Unavailable(f"the adapter {source.name} {error}: ask again") from None
        except Away as error:
            if self._may_tell():
                logger.warning("%s: mount or make %s again", error, source.within)
            raise Unavailable(f"{error}: ask again later") from None

    def _unknown(self, name: str, allowed: Allowed) -> UnknownModel:
        """The refusal of a name, with the beginning of those that there are."""
        names = self.served(allowed)
        shown = [*([self.base] if self.serves_base(allowed) else []), *islice(names, SHOWN_NAMES)]
        more = "" if next(names, None) is None else " and more"  # whose number would take a look at each
        there = f"{', '.join(shown) or 'nothing that this API key may use'}{more}"
        return UnknownModel(f"the model {harmless(name)} is not served here: there is {there}")

    # ----------------------------------------------------------------------------------------------------- changing

    async def load(self, name: str, path: str, *, in_place: bool) -> Adapter:
        """Have a name stand for the adapter at `path`, below the folder, from now on, once it is at hand.

        in_place: whether it may stand for another one already. Raises ValidationError and Unavailable; the name then
        stays as it was.
        """
        if not self.is_on or self.folder is None:
            raise ValidationError("no adapters are loaded here: start the server with a folder for them, --adapter-dir")
        if name in self._own or not is_adapter_name(name):
            own = "it is the model's own" if name in self._own else ADAPTER_NAME_RULE
            raise ValidationError(f"`lora_name` {harmless(name)} cannot be an adapter's: {own}")
        if len(self._named) >= MOST_NAMED and name not in self._named:
            raise ValidationError(f"{MOST_NAMED} adapters are loaded, which is the most: unload some")
        self._refuse_taken(name, in_place=in_place)
        source = Source(name, f"{self.folder}/{path}" if not path.startswith("/") else path, self.folder)
        try:
            source.content = await self._content(source)
        except Missing as error:
            raise ValidationError(
                f"`lora_path` {harmless(path)} {error}: give the path of an adapter's folder in that of --adapter-dir"
            ) from None
        adapter = _adapter_of(name, source.content)
        if problem := await self._shelf.prepare(adapter):
            raise AdapterRefused(name, problem, adapter.folder)
        self._refuse_taken(name, in_place=in_place)  # by another request meanwhile
        source.looked_at = self._clock()
        self._found.pop(name, None)
        self._unloaded.pop(name, None)
        self._named[name] = source
        return adapter

    def _refuse_taken(self, name: str, *, in_place: bool) -> None:
        if not in_place and (name in self._named or name in self._found):
            raise ValidationError(
                f"the adapter {name} is loaded already: set `load_inplace` to true to have another in its place"
            )

    async def unload(self, name: str) -> None:
        """Have a name stand for nothing; what runs goes on. Raises UnknownModel."""
        source = self._named.pop(name, None) or self._found.pop(name, None)
        if source is None:
            await self.find(name)  # one that lies in the folder, and that nobody has asked for
            source = self._found.pop(name, None)
        if source is None:
            raise self._unknown(name, None)
        self._unloaded[name] = None
        if len(self._unloaded) > MOST_UNLOADED:
            self._unloaded.popitem(last=False)
        if source.content is not None and source.content.key not in self._keys():
            self._shelf.discard(source.content.key)

    def _keys(self) -> set[bytes]:
        """Of all contents that names stand for."""
        every = (*self._named.values(), *self._found.values())
        return {source.content.key for source in every if source.content is not None}


def _forget_failure(looking: asyncio.Task[Adapter]) -> None:
    if not looking.cancelled():
        looking.exception()


def _adapter_of(name: str, content: Content) -> Adapter:
    return Adapter(name, content.key, content.looks.folder)
