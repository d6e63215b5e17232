"""Headers of the messages that an answer consists of in the format harmony, which gpt-oss writes.

A header says on which channel a message is, `analysis`, `commentary` or `final`, and perhaps for which function:
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>`. The first one follows the prompt, the others
`<|start|>assistant`. A model that is held to a text writes none.
Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from router.chat.streamed_values import Marks, Source, Steps

MOST_CHARACTERS = 400  # of a header
MESSAGE = Marks(("<|message|>",))
RECIPIENT = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.-]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True)
class Header:
    """Of one message. recipient: the function that it calls; empty: none. text: what was read where there is none."""

    recipient: str = ""
    is_reasoning: bool = False
    text: str = ""


class HeaderReader:
    """Reads headers from a source. ends: marks that end a message; begins: those of them that begin the next header."""

    ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
    begins = ("<|start|>", "<|channel|>")

    def __init__(self, source: Source) -> None:
        self._source = source

    def read(self, *, is_first: bool) -> Steps[Header]:
        """The next header, or none. Raises Ended, also within one: what is cut off behind its mark says nothing."""
        if not is_first:
            yield from self._source.skip_blanks()
            if (yield from self._source.accept("<|start|>")):
                yield from self._source.accept("assistant")
        self._source.record()
        yield from self._source.skip_blanks()
        is_channel = yield from self._source.accept("<|channel|>")
        if not is_channel and not (yield from self._source.accept("to=")):
            return Header(text=self._source.recorded())
        written = self._source.recorded()
        if not is_channel:
            self._source.record(written)  # what is no header after all is text
        mark = ""
        while not mark:
            text, mark = yield from self._source.until(MESSAGE, most=max(1, MOST_CHARACTERS + 1 - len(written)))
            written += text
            if len(written) > MOST_CHARACTERS:
                self._source.recorded()
                return Header(text=written + mark)
        self._source.recorded()
        recipient, channel = RECIPIENT.search(written), CHANNEL.search(written)
        return Header(recipient[1] if recipient else "", channel is not None and channel[1] == "analysis")
