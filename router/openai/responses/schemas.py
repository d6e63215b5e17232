"""Bodies of OpenAI's `/v1/responses` and `/v1/responses/input_tokens`.

As strict and as lenient as those of chats (`router/openai/schemas.py`). Items of `input` with a meaning that is not
served are refused in `asked.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from router.openai.schemas import ModelName, Objects, Texts
from router.schemas import Integer, Lenient, NotServed

Word = Annotated[str, Field(max_length=64)]
STORED = (
    "needs responses that are stored, and none are stored here: leave it out, and send all items of the conversation "
    "as `input`"
)


class Reasoning(Lenient):
    """How the model thinks before it answers, where its chat template lets one choose."""

    effort: Word | None = Field(default=None, description="`none`, or what the template knows of `reasoning_effort`.")
    summary: Word | None = Field(default=None, description="Ignored: reasoning is shown whole.")


class TextConfig(Lenient):
    """How the text of the answer looks."""

    format: dict[str, Any] | None = Field(default=None, description="`text`, `json_object` or a `json_schema`.")


class InputRequest(Lenient):
    """The body of `/v1/responses/input_tokens`."""

    not_served: ClassVar[Mapping[str, NotServed]] = {
        "previous_response_id": NotServed(sentence=STORED),
        "conversation": NotServed(sentence=STORED),
        "background": NotServed((None, False), STORED),
        "prompt": NotServed(),
        "context_management": NotServed((None, [])),
        "moderation": NotServed(),
        "image": NotServed(),
        "access_programs": NotServed((None, [])),
        "background_options": NotServed(),
    }

    input: str | Objects | None = Field(default=None, description="A text of the user, or items of a conversation.")
    instructions: str | None = Field(default=None, description="The system prompt.")
    model: ModelName | None = Field(default=None, description="Any name; repeated in the answer.")
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tools: Objects | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Word | None = Field(default=None, description="An input that is too long is refused, also with `auto`.")


class ResponsesRequest(InputRequest):
    """The body of `/v1/responses`."""

    include: Texts | None = Field(
        default=None, description="`message.output_text.logprobs`: the log-probability of each token. Else ignored."
    )
    max_output_tokens: Integer | None = Field(default=None, description="Absent: as many as `max_total_tokens` leaves.")
    metadata: dict[str, str] | None = Field(default=None, description="The answer has it.")
    store: bool | None = Field(default=None, description="Nothing is stored, and the answer says so.")
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    max_tool_calls: Integer | None = Field(
        default=None, description="Repeated in the answer: the server calls no tools."
    )
    safety_identifier: str | None = Field(default=None, description="The answer has it.")
    prompt_cache_key: str | None = Field(default=None, description="The answer has it.")
    stream: bool | None = Field(default=None, description="Answer with server-sent events.")
    temperature: float | None = Field(default=None, description="0: the most likely tokens. Absent: 1.")
    top_logprobs: Integer | None = Field(default=None, description="Likeliest alternatives reported with each token.")
    top_p: float | None = None

    def ignored(self) -> list[str]:
        """See `Lenient`; `store` among them where it asks for what is not done."""
        return super().ignored() + (["store"] if self.store else [])
