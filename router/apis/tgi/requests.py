"""Bodies of TGI's own routes, and what they ask for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.requests.prompt import PromptRequest
from router.requests.schemas import GenerateParameters, Strict, Unserved


class GenerateRequest(Strict):
    """The body of `/generate`, `/generate_stream`, `/` and `/tokenize`."""

    inputs: str = Field(description="The prompt.")
    parameters: GenerateParameters | None = None
    stream: bool | None = Field(default=None, description="On `/` alone: answer with server-sent events.")
    prompt_embeds: Unserved = None
    input_embeds: Unserved = None

    @property
    def given(self) -> GenerateParameters:
        """The parameters; an absent object means what an empty one does."""
        return self.parameters or GenerateParameters()


class DetokenizeRequest(Strict):
    """The body of `/detokenize`."""

    ids: Annotated[list[Annotated[int, Field(ge=0, le=2**32 - 1)]], Field(fail_fast=True)] = Field(
        description="Token ids, at most `max_total_tokens`."
    )
    skip_special_tokens: bool | None = Field(default=None, description="Leave special tokens out. Absent: true.")


def prompt_request_of(request: GenerateRequest) -> PromptRequest:
    """What a body asks for."""
    return PromptRequest(request.inputs, request.given)
