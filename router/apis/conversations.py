"""A conversation on its way to the model and back, the same for all APIs that tell it as a transcript."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.apis.serving import Services
from router.chat.pieces import AnswerReader, PlainReader
from router.chat.prompting import rendering
from router.chat.reader import Reading
from router.chat.tools import Offer
from router.chat.transcript import Transcript
from router.requests.prompt import PromptRequest, Rendering
from router.requests.schemas import GenerateParameters
from router.scheduling.request import Entry


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer that a conversation waits for. render: makes its prompt. begun: what is said of it already."""

    render: Rendering
    reading: Reading | None
    begun: str

    def prompt_request(self, given: GenerateParameters) -> PromptRequest:
        """What the router is asked for. Raises ValidationError."""
        one = PromptRequest(self.render, given, has_special_tokens=True, shows_stop=False, num_answers=1)
        return one if self.reading is None else self.reading.applied_to(one, self.begun)

    def reader(self, services: Services, entry: Entry) -> AnswerReader:
        """What takes the answer apart."""
        if self.reading is None:
            return PlainReader()
        return self.reading.reader(services.tokenizer.end_of(entry.request.prompt_ids), self.begun)


def turn_of(
    services: Services,
    transcript: Transcript,
    offered: Offer,
    variables: Mapping[str, Any],
    *,
    continues: bool = False,
) -> Turn:
    """What comes next in a conversation. Raises ValidationError.

    variables: of the chat template. continues: whether a last message of the assistant is the beginning of the answer.
    """
    formats = services.answer_formats
    reading = formats.reading(offered)
    begun = transcript.begun if continues else None
    render = rendering(
        services.chat_template,
        services.aside,
        transcript.messages(),
        offered,
        formats.tools,
        variables=variables,
        continue_final_message=begun is not None,
    )
    return Turn(render, reading, begun or "")
