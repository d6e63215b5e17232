"""Reads answers as the model writes them: reasoning, text, and calls of tools in one of the formats of `formats.py`.

Arguments in tags are read by `tags.py`, Gemma's by `quoted_values.py`, headers by `channels.py`. What begins like a
call and turns out to be none is text, with its marks. A call whose name is known is one, however it goes on: its
arguments are given out as the model writes them. Blanks around reasoning and calls are dropped. The marks of a format
may be special tokens, which are no part of a text: they are made part of it (`PromptRequest.shown_marks`), and the
reader takes them out again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from router.chat.arguments import Arguments
from router.chat.channels import Header, HeaderReader
from router.chat.formats import ReasoningFormat, ToolFormat
from router.chat.pieces import CallArguments, CallBegun, Piece, Reasoning, Text
from router.chat.quoted_values import QuotedReader
from router.chat.streamed_values import Ended, JsonReader, Marks, NotThis, PythonReader, Sink, Source, Steps, decoded
from router.chat.tags import TaggedReader
from router.chat.tools import MOST_NAME

MOST_CHARACTERS_BEFORE_ARGUMENTS = MOST_NAME + 136  # a name, and what some formats write beside it
NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
BESIDE = ("type", "id", "tool_call_id")  # keys of a call that may come before its name
NOTHING = "{}"
FENCE = "```"  # of a block of code
BETWEEN_MESSAGES = "\n\n"  # of one kind
BEHIND_NAMES = re.compile(r"[\[:]")  # an id in a mark of its own, or a number
Visible = type[Text] | type[Reasoning]


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """How to read an answer.

    functions: that it may call, by their names. is_parallel: whether it may have more than one call; later ones are
    dropped. is_held: whether a grammar holds calls to the format.
    """

    tool_format: ToolFormat | None = None
    functions: Mapping[str, Arguments] = field(default_factory=dict)
    is_parallel: bool = True
    is_held: bool = False
    reasoning: ReasoningFormat | None = None


class Reader:
    """An AnswerReader. make_id: of calls.

    is_reasoning: whether the prompt ends within reasoning; is_wrapped: behind the mark that an answer in words begins
    with.
    """

    def __init__(
        self, rules: ReadingRules, make_id: Callable[[], str], *, is_reasoning: bool = False, is_wrapped: bool = False
    ) -> None:
        self._rules = rules
        self._is_reasoning = is_reasoning
        self._is_wrapped = is_wrapped
        self._make_id = make_id
        self.is_in_call = False
        self._stretch: tuple[Visible, Marks] | None = None  # what there is until one of these marks
        self._source = Source()
        self._pieces = _Pieces(rules.is_parallel)
        self._calls_format = rules.tool_format or ToolFormat("")
        self._json = JsonReader(self._source, self._calls_format.end)
        self._steps = self._answer()
        next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        """What is known with this text."""
        if self._stretch is not None and self._goes_on(text, *self._stretch):
            return [self._stretch[0](text)]
        self._source.add(text)
        next(self._steps)
        return self._pieces.take()

    def end(self) -> list[Piece]:
        """What is left."""
        self._source.close()
        with suppress(StopIteration):
            next(self._steps)
        return self._pieces.take()

    def _goes_on(self, text: str, kind: Visible, marks: Marks) -> bool:
        """Whether this is nothing but more of the same, as most texts are: they take a short way."""
        return (
            text != ""
            and not marks.may_begin_in(text)
            and self._source.is_read
            and not text[-1].isspace()
            and self._pieces.ends_in(kind)
        )

    def _answer(self) -> Steps[None]:
        yield
        with suppress(Ended):
            if channels := self._channels:
                yield from self._messages(channels)
            yield from self._reasoning()
            yield from self._opening()
            yield from self._text_and_calls(self._calls_format)
        self._pieces.text(self._source.recorded())
        self._pieces.end()

    def _reasoning(self) -> Steps[None]:
        """What the answer begins with, if that is reasoning."""
        its = self._rules.reasoning
        if its is None:
            return
        if not self._is_reasoning:
            self._source.record()
            yield from self._source.skip_blanks()
            if not (yield from self._source.accept(its.begin)):
                self._pieces.text(self._source.recorded())
                return
            self._source.recorded()
        yield from self._source.skip_blanks()
        if its.label:
            yield from self._source.accept(its.label.strip())
            yield from self._source.skip_blanks()
        marks, mark = Marks((its.end, *self._begins)), ""
        self._stretch = (Reasoning, marks)
        while mark != its.end:
            text, mark = yield from self._source.until(marks)
            self._pieces.reasoning(text)
            if mark and mark != its.end:
                self._stretch = None
                yield from self._unclosed(mark, Marks((its.end,)))
                mark = its.end
        self._stretch = None
        self._pieces.drop_blanks()
        yield from self._source.skip_blanks()

    def _unclosed(self, mark: str, end: Marks) -> Steps[None]:
        """What begins as a call within reasoning: more of it if it comes to its end, and if not, perhaps a call.

        Models draft calls as they think, and some leave their thinking by calling.
        """
        held, ending = [mark], ""
        try:
            while not ending:
                text, ending = yield from self._source.until(end)
                held.append(text)
        except Ended:
            inner = Reader(replace(self._rules, reasoning=None), self._make_id)
            pieces = [*inner.feed("".join(held)), *inner.end()]
            if any(isinstance(piece, CallBegun) for piece in pieces):
                self._pieces.drop_blanks()
                self._pieces.adopt(pieces)
                self.is_in_call = inner.is_in_call
            else:
                self._pieces.reasoning("".join(held))
            raise
        self._pieces.reasoning("".join(held))

    @property
    def _begins(self) -> tuple[str, ...]:
        """The marks that calls begin with."""
        if (its := self._rules.tool_format) is None:
            return ()
        # Some models leave out the mark in front of a name with a mark of its own.
        name = its.tags.name if its.tags is not None and its.begins_with_names else ""
        return tuple(mark for mark in (its.begin, name) if mark)

    @property
    def _wrappers(self) -> tuple[str, ...]:
        """Marks around an answer in words, which say nothing."""
        return self._rules.reasoning.wrappers if self._rules.reasoning is not None else ()

    def _opening(self) -> Steps[None]:
        """The mark that an answer in words begins with. The same within a text is a part of it."""
        if self._is_wrapped or not self._wrappers:
            return
        self._source.record()
        yield from self._source.skip_blanks()
        if (yield from self._source.accept(self._wrappers[0])):
            self._is_wrapped = True
            self._source.recorded()
            self._pieces.drop_blanks()
            yield from self._source.skip_blanks()
        self._pieces.text(self._source.recorded())

    def _closing(self, mark: str, begins: tuple[str, ...]) -> Steps[None]:
        """The mark that an answer in words ends with, if only calls are behind it, or nothing. Otherwise it is text."""
        self._source.record(self._pieces.drop_blanks(), mark)
        try:
            yield from self._source.skip_blanks()
            is_end = bool(begins) and (yield from self._source.ahead(begins))
        except Ended:
            if (rest := self._source.recorded()).strip() != mark:
                self._pieces.text(rest)
            raise
        rest = self._source.recorded()
        if not is_end:
            self._pieces.text(rest)

    def _text_and_calls(self, its: ToolFormat) -> Steps[None]:
        if its.is_bare:
            yield from self._bare_calls(its)
        begins, closings = self._begins, self._wrappers[1:] if self._is_wrapped else ()
        marks = Marks([*begins, *its.around, *closings])
        while True:
            self._stretch = (Text, marks)
            mark = yield from self._source.pass_on(marks, self._pieces.text)
            self._stretch = None
            if mark in begins:
                self._source.record(self._pieces.drop_blanks(), mark)
                yield from self._calls(its, is_bare=False, is_named=mark != its.begin)
            elif mark in closings:
                yield from self._closing(mark, begins)
            else:
                self._pieces.drop_blanks()

    def _bare_calls(self, its: ToolFormat) -> Steps[None]:
        """Calls that the answer begins with."""
        self._source.record()
        following = yield from self._source.skip_blanks()
        if its.may_be_fenced and following == FENCE[0] and (yield from self._source.accept(FENCE)):
            yield from self._source.accept("json")
            following = yield from self._source.skip_blanks()
            its = replace(its, end=FENCE)
        if following in "{[":
            yield from self._calls(its, is_bare=True)
        else:
            self._pieces.text(self._source.recorded())

    def _calls(self, its: ToolFormat, *, is_bare: bool, is_named: bool = False) -> Steps[None]:
        """The calls behind a mark. What was recorded and is none, is text. is_named: a name comes, whatever it is."""
        with suppress(NotThis):
            first = yield from self._source.skip_blanks()
            if is_named:
                yield from self._tagged_calls(its, is_named=True)
            elif first == "[":
                yield from self._list_of_calls(its, is_bare)
            elif first == "{":
                yield from self._objects(its, is_bare)
            elif its.before_arguments:
                yield from self._named_call(its)
            elif its.tags:
                yield from self._tagged_calls(its)
            elif its.quote:
                yield from self._quoted_call(its)
            elif its.is_python:
                yield from self._python_calls()
            else:
                raise NotThis
            if its.end:
                yield from self._end(its.end, its.behind_arguments)
        self._pieces.text(self._source.recorded())

    def _end(self, mark: str, others: str) -> Steps[None]:
        """The mark behind a call, also behind brackets too many, which are among the `others`."""
        if (yield from self._behind_blanks(mark, others))[0]:
            self._source.recorded()

    def _behind_blanks(self, mark: str, others: str = "") -> Steps[tuple[bool, str]]:
        """(whether this mark comes next, which is read then, the blanks before it). They stay recorded."""
        self._source.record()
        try:
            yield from self._source.skip_blanks(others=others)
            blanks = self._source.recorded()
            self._source.record(blanks)
            return (yield from self._source.accept(mark)), blanks
        except Ended:
            self._source.recorded()
            raise

    def _list_of_calls(self, its: ToolFormat, is_bare: bool) -> Steps[None]:
        self._source.take(1)
        while (following := (yield from self._source.skip_blanks(others=","))) != "]":
            if not self._source.is_recording:
                self._source.record()
            if following == "{":
                yield from self._object(is_bare)
            elif its.is_python:
                yield from self._python_call()
            else:
                raise NotThis
        self._source.take(1)

    def _python_call(self) -> Steps[None]:
        name, _ = yield from self._source.text_up_to(Marks((), "("), most=MOST_NAME)
        self._begin(name.strip())
        yield from PythonReader(self._source).arguments(self._pieces.arguments)
        self.is_in_call = False

    def _python_calls(self) -> Steps[None]:
        """Calls without brackets around them, one below the other."""
        following = ""
        while following != "<":
            yield from self._python_call()
            following = yield from self._source.skip_blanks(others=",;")
            self._source.record()

    def _objects(self, its: ToolFormat, is_bare: bool) -> Steps[None]:
        while True:
            yield from self._object(is_bare)
            if not its.separators or (yield from self._source.skip_blanks(others=its.separators)) != "{":
                return
            self._source.record()

    def _named_call(self, its: ToolFormat) -> Steps[None]:
        """A name, a mark, and arguments."""
        marks = Marks((its.before_arguments, its.begin), "{")
        written, mark = yield from self._source.text_up_to(marks, (its.begin, "{"), MOST_CHARACTERS_BEFORE_ARGUMENTS)
        if mark == its.begin:
            raise NotThis
        name = written.strip().removeprefix(its.before_name)
        self._begin(BEHIND_NAMES.split(name, 1)[0].strip())
        yield from self._arguments((its.end,))

    def _tagged_calls(self, its: ToolFormat, *, is_named: bool = False) -> Steps[None]:
        """Calls one after the other. is_named: what comes first is a name, and its mark is read."""
        tags = its.tags
        assert tags is not None, "they are read where a format has tags"
        values = TaggedReader(self._source, tags, its.end, is_held=self._rules.is_held)
        while True:
            if not is_named and tags.name and not (yield from self._source.accept(tags.name)):
                raise NotThis
            written = yield from values.name()
            self._begin(written)
            yield from values.arguments(self._rules.functions[written], self._pieces.arguments)
            self.is_in_call = False
            if not tags.name or not (yield from self._another(tags.name)):
                return
            is_named = True

    def _quoted_call(self, its: ToolFormat) -> Steps[None]:
        most = MOST_NAME + len(its.before_name) + 2
        written, _ = yield from self._source.text_up_to(Marks((), "{"), "{", most)
        self._begin(written.strip().removeprefix(its.before_name).strip())
        yield from QuotedReader(self._source, its.quote, its.end).arguments(self._pieces.arguments)
        self.is_in_call = False

    def _another(self, mark: str) -> Steps[bool]:
        """Whether a call follows at once, whose mark is read then."""
        is_there, blanks = yield from self._behind_blanks(mark)
        self._source.recorded()
        if is_there:
            self._source.record(blanks)
        return is_there

    @property
    def _channels(self) -> tuple[str, ...]:
        its = (self._rules.reasoning, self._rules.tool_format)
        return next((one.channels for one in its if one is not None and one.channels), ())

    def _messages(self, channels: tuple[str, ...]) -> Steps[None]:
        """Messages with headers, until the answer is over."""
        header, ends = HeaderReader(self._source), Marks([mark for mark in channels if mark in HeaderReader.ends])
        before: Visible | None = None  # what the message before was
        its = Header(is_reasoning=True) if self._is_reasoning else (yield from header.read(is_first=True))
        while True:
            self._pieces.drop_blanks()
            if its.recipient in self._rules.functions:
                self._begin(its.recipient)
                yield from self._arguments(HeaderReader.ends)
                yield from self._message(ends, _nowhere)
                before = None
            else:
                kind: Visible = Reasoning if its.is_reasoning else Text
                show = self._pieces.reasoning if its.is_reasoning else self._pieces.text
                show((BETWEEN_MESSAGES if before is kind else "") + its.text)
                self._stretch = (kind, ends)
                yield from self._message(ends, show)
                self._stretch, before = None, kind
            its = yield from header.read(is_first=False)

    def _message(self, ends: Marks, show: Sink) -> Steps[None]:
        """Up to the mark that ends it, which is read unless a header begins with it."""
        yield from self._source.pass_on(ends, show, keeps=HeaderReader.begins)

    def _object(self, is_bare: bool) -> Steps[None]:
        """A call as an object of JSON. Without a mark in front of it, it has a name and arguments."""
        yield from self._source.expect("{")
        name: str | None = None
        early: list[str] = []  # arguments in front of the name
        has_arguments = False
        while (following := (yield from self._source.skip_blanks(others=","))) == '"':
            key = yield from self._json.short_string(MOST_NAME)
            yield from self._source.expect(":")
            if key in NAMES and name is None:
                yield from self._source.skip_blanks()
                name = self._known((yield from self._json.short_string(MOST_NAME)))
                if has_arguments or not is_bare:
                    self._begin(name)
                    self._pieces.arguments("".join(early))
                    self.is_in_call = not has_arguments
            elif key in ARGUMENTS and not has_arguments:
                has_arguments = True
                if name is None:
                    yield from self._value(early.append)
                    continue
                if is_bare:
                    self._begin(name)
                yield from self._arguments()
            elif name is None:
                if key not in BESIDE:
                    raise NotThis
                yield from self._json.short_string(MOST_NAME)
            else:
                yield from self._json.value(_nowhere)
        self._close_object(following, name, has_arguments, is_bare)

    def _close_object(self, following: str, name: str | None, has_arguments: bool, is_bare: bool) -> None:
        """What an object of a call ends with, and the arguments of a call that has none."""
        if following == "}":
            self._source.take(1)
        if name is None or (is_bare and not has_arguments):
            raise NotThis
        if not has_arguments:
            self._pieces.arguments(NOTHING)
        self.is_in_call = False

    def _arguments(self, ends: tuple[str, ...] = ()) -> Steps[None]:
        """ends: marks that end a call. One in the arguments' place stands for none."""
        marks = tuple(mark for mark in ends if mark)
        if marks:
            yield from self._source.skip_blanks()
        if marks and (yield from self._source.ahead(marks)):
            self._pieces.arguments(NOTHING)
        else:
            yield from self._value(self._pieces.arguments)
        self.is_in_call = False

    def _value(self, sink: Sink) -> Steps[None]:
        """Arguments, as a value of JSON or as a text that has one; an absent one is no arguments."""
        first = yield from self._source.skip_blanks()
        if first in "{[":
            yield from self._json.value(sink)
            return
        written: list[str] = []
        yield from self._json.value(written.append)
        text = "".join(written)
        with suppress(NotThis):
            text = decoded(text)
        sink(NOTHING if text in ("null", "") else text)

    def _known(self, name: str) -> str:
        """The name of a tool. Raises NotThis for another: a client gets no calls of what it does not have."""
        if name not in self._rules.functions:
            raise NotThis
        return name

    def _begin(self, name: str) -> None:
        """From here on it is a call."""
        self._pieces.begin(self._make_id(), self._known(name))
        self._source.recorded()
        self.is_in_call = True


def _nowhere(text: str) -> None:
    pass


class _Pieces:
    """Gathers what is read, as few pieces as possible. Blanks are held until it is known what follows them."""

    def __init__(self, is_parallel: bool) -> None:
        self._is_parallel = is_parallel
        self._num_calls = 0
        self._found: list[Piece] = []
        self._kind: Visible | type[CallArguments] = Text
        self._parts: list[str] = []
        self._blanks: list[str] = []
        self._shown: set[Visible] = set()
        self._ends_in_text = True  # and in no call

    def take(self) -> list[Piece]:
        """What was gathered since the last time."""
        self._settle()
        found, self._found = self._found, []
        return found

    def text(self, text: str) -> None:
        """More of the answer."""
        self._visible(Text, text)

    def reasoning(self, text: str) -> None:
        """More of what comes before it."""
        self._visible(Reasoning, text)

    def ends_in(self, kind: Visible) -> bool:
        """Whether what was given out last is of this kind, and no blanks are held behind it."""
        is_more = kind is Reasoning or (Text in self._shown and self._ends_in_text)
        return not self._blanks and self._kind is kind and is_more

    def drop_blanks(self) -> str:
        """Take back the blanks at the end."""
        blanks, self._blanks = "".join(self._blanks), []
        return blanks

    def adopt(self, pieces: Iterable[Piece]) -> None:
        """What another reader has read."""
        for piece in pieces:
            match piece:
                case CallBegun(_, id, name):
                    self.begin(id, name)
                case CallArguments(_, text):
                    self.arguments(text)
                case Text(text) | Reasoning(text):
                    self.text(text)

    def end(self) -> None:
        """Nothing more will come: blanks that end a text are part of it."""
        if self._ends_in_text:
            self._add(Text, self.drop_blanks())

    def begin(self, id: str, name: str) -> None:
        """A call begins."""
        self._settle()
        self._ends_in_text = False
        self._num_calls += 1
        if self._is_shown:
            self._found.append(CallBegun(self._num_calls - 1, id, name))

    def arguments(self, text: str) -> None:
        """More of the call's arguments."""
        if self._is_shown:
            self._add(CallArguments, text)

    @property
    def _is_shown(self) -> bool:
        """Whether the last call is one of those that there may be."""
        return self._is_parallel or self._num_calls == 1

    def _visible(self, kind: Visible, text: str) -> None:
        shown = text.rstrip()
        if shown:
            blanks = self.drop_blanks()
            is_first_behind_calls = self._num_calls and kind not in self._shown
            self._shown.add(kind)
            self._ends_in_text = kind is Text
            self._add(kind, shown.lstrip() if is_first_behind_calls else blanks + shown)
        if len(shown) < len(text):
            self._blanks.append(text[len(shown) :])

    def _add(self, kind: Visible | type[CallArguments], text: str) -> None:
        if kind is not self._kind:
            self._settle()
            self._kind = kind
        if text:
            self._parts.append(text)

    def _settle(self) -> None:
        if not self._parts:
            return
        text, self._parts = "".join(self._parts), []
        if self._kind is Text:
            self._found.append(Text(text))
        elif self._kind is Reasoning:
            self._found.append(Reasoning(text))
        else:
            self._found.append(CallArguments(self._num_calls - 1, text))
