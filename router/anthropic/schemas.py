"""Bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.

As strict and as lenient as the other APIs' bodies: no value is taken for another, null means absent, and unknown
fields are ignored. Fields with a meaning that is not served are refused, and blocks of that kind in `asked.py`. More
lenient than Anthropic's own API: `max_tokens` may be absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from router.openai.schemas import ModelName
from router.schemas import Integer, Lenient, NotServed

Blocks = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class Message(Lenient):
    """One turn of a conversation."""

    role: str = Field(description="`user`, `assistant` or `system`.")
    content: str | Blocks = Field(description="A text, or blocks: `text`, `tool_use`, `tool_result`, `thinking`.")


class Thinking(Lenient):
    """Whether the model thinks before it answers, where its chat template lets one choose."""

    type: str = Field(description="`enabled`, `adaptive` or `disabled`.")
    budget_tokens: Integer | None = Field(default=None, description="Ignored: `max_tokens` bounds everything.")


class OutputConfig(Lenient):
    """How the answer looks."""

    format: dict[str, Any] | None = Field(default=None, description="A `json_schema` that the answer keeps to.")


class CountRequest(Lenient):
    """The body of `/v1/messages/count_tokens`."""

    not_served: ClassVar[Mapping[str, NotServed]] = {
        "container": NotServed(),
        "context_management": NotServed((None, {})),
        "mcp_servers": NotServed((None, [])),
        "output_format": NotServed(),
        "inference_geo": NotServed(sentence="is not served: one server is where it is; leave it out"),
    }

    messages: Annotated[list[Message], Field(fail_fast=True)]
    model: ModelName | None = Field(default=None, description="Any name; repeated in the answer.")
    system: str | Blocks | None = Field(default=None, description="The system prompt.")
    thinking: Thinking | None = None
    tools: Blocks | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: dict[str, Any] | None = Field(default=None, description="`auto`, `any`, `tool` or `none`.")
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """The body of `/v1/messages`."""

    max_tokens: Integer | None = Field(default=None, description="Absent: as many as `max_total_tokens` leaves.")
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        default=None, description="End before the first of these."
    )
    stream: bool | None = Field(default=None, description="Answer with server-sent events.")
    temperature: float | None = Field(default=None, description="0 to 1; 0: the most likely tokens. Absent: 1.")
    top_p: float | None = None
    top_k: Integer | None = Field(default=None, description="Keep the k likeliest tokens; 0: all.")
    metadata: dict[str, Any] | None = Field(default=None, description="Ignored.")
