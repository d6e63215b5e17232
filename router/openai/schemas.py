"""Bodies of OpenAI's chat and text completions.

As strict and as lenient as TGI's bodies (`router/schemas.py`): no value is taken for another, null means absent, and
unknown fields are ignored. Fields with a meaning that is not served are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from router.openai import constraints
from router.schemas import Integer, Lenient, NotServed

ModelName = Annotated[str, Field(max_length=256)]  # each chunk of a stream has it
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**32 - 1)]], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
NO_FUNCTIONS: Sequence[Any] = (None, [], "auto", "none")


class StreamOptions(Lenient):
    """What a stream has besides its chunks."""

    include_usage: bool | None = Field(default=None, description="A last chunk with the counts of tokens.")
    continuous_usage_stats: bool | None = Field(
        default=None, description="Not OpenAI's: the counts so far in every chunk, where `include_usage` is true."
    )


class Generation(Lenient):
    """What both kinds of completions have in common."""

    not_served: ClassVar[Mapping[str, NotServed]] = {
        "functions": NotServed(NO_FUNCTIONS, "is not served: send its successor, `tools`"),
        "function_call": NotServed(NO_FUNCTIONS, "is not served: send its successor, `tool_choice`"),
        "prompt_embeds": NotServed(),
        "suffix": NotServed((None, "")),
        "modalities": NotServed((None, ["text"])),
        "audio": NotServed(),
        "prediction": NotServed(),
        "web_search_options": NotServed(),
        "moderation": NotServed(),
        "verbosity": NotServed((None, "medium")),
        # Of vLLM, SGLang and llama.cpp: what changes the answer.
        "return_token_ids": NotServed((None, False)),
        "return_tokens_as_token_ids": NotServed((None, False)),
        "include_stop_str_in_output": NotServed((None, False)),
        "use_beam_search": NotServed((None, False)),
        "allowed_token_ids": NotServed(),
        "prompt_logprobs": NotServed(sentence="is not served: `echo` with `logprobs` of a completion tells them"),
        "truncate_prompt_tokens": NotServed((None, -1)),
        "logits_processors": NotServed((None, [])),
        "lora_path": NotServed(),
    }
    known = frozenset({*constraints.NAMES, constraints.NESTED})

    model: ModelName | None = Field(default=None, description="Any name; repeated in the answer.")
    n: Integer | None = Field(default=None, description="Answers to the same prompt.")
    stop: str | Texts | None = Field(default=None, description="End before the first of these.")
    stream: bool | None = Field(default=None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = Field(default=None, description="Absent: as many as `max_total_tokens` leaves.")
    max_completion_tokens: Integer | None = Field(default=None, description="The newer name of `max_tokens`.")
    temperature: float | None = Field(default=None, description="0: the most likely tokens. Absent: 1.")
    top_p: float | None = None
    top_k: Integer | None = Field(default=None, description="Not OpenAI's: keep the k likeliest; -1 or 0: all.")
    seed: Integer | None = None
    min_p: float | None = Field(default=None, description="Not OpenAI's.")
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, description="Token id -> -100 to 100.")
    repetition_penalty: float | None = Field(default=None, description="Not OpenAI's. 1.0 means no penalty.")
    ignore_eos: bool | None = Field(default=None, description="Not OpenAI's: do not end at the model's end tokens.")
    min_tokens: Integer | None = Field(default=None, description="Not OpenAI's: least number of generated tokens.")
    stop_token_ids: TokenIds | None = Field(default=None, description="Not OpenAI's: end after these tokens too.")
    typical_p: float | None = Field(default=None, description="Not OpenAI's, as on TGI's routes.")
    bad_words: Texts | None = Field(default=None, description="Not OpenAI's, as on TGI's routes.")
    skip_special_tokens: bool | None = Field(
        default=None, description="Not OpenAI's: false shows special tokens in the text."
    )
    response_format: dict[str, Any] | None = Field(
        default=None, description="text, json_object or json_schema; TGI's {type, value} too."
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        default=None, description="Not OpenAI's: lower leaves the queue earlier, within one API key. Absent: 0."
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="Not OpenAI's: prefixes are shared only between requests with the same salt."
    )
    user: str | None = Field(default=None, description="Ignored.")


class Message(Lenient):
    """One message of a chat."""

    role: str
    content: str | Objects | None = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(default=None, description="The reasoning before this answer.")
    reasoning: str | None = Field(default=None, description="Another name of it.")


class ChatRequest(Generation):
    """The body of `/v1/chat/completions`."""

    not_served: ClassVar[Mapping[str, NotServed]] = {
        **Generation.not_served,
        "best_of": NotServed((None, 1), "is not served in chats: ask for `n` answers"),
        "echo": NotServed((None, False)),
        "chat_template": NotServed(sentence="is not served: the server has its own, `--chat-template`"),
        "documents": NotServed((None, [])),
    }

    messages: Annotated[list[Message], Field(fail_fast=True)]
    logprobs: bool | None = Field(default=None, description="Report the log-probability of each token of the text.")
    top_logprobs: Integer | None = Field(default=None, description="Likeliest alternatives reported with each token.")
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="`none`, or what the chat template knows of it."
    )
    include_reasoning: bool | None = Field(default=None, description="Not OpenAI's: false leaves reasoning out.")
    store: bool | None = Field(default=None, description="Nothing is stored, whatever is asked for.")
    tools: Objects | None = Field(default=None, description="Functions that the model may call. At most 128.")
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description='"auto", "none", "required", or a function that must be called.'
    )
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call in an answer.")
    tool_prompt: str | None = Field(default=None, description="TGI's: the instruction for calling tools.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        default=None, description="Continue the last message, of the assistant."
    )

    def ignored(self) -> list[str]:
        """See `Lenient`; `store` among them where it asks for what is not done."""
        return super().ignored() + (["store"] if self.store else [])


class CompletionRequest(Generation):
    """The body of `/v1/completions`."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    echo: bool | None = Field(default=None, description="Begin the text with the prompt.")
    logprobs: Integer | None = Field(
        default=None,
        description="Report the log-probability of each token of the text, with this many of the likeliest tokens.",
    )
    best_of: Integer | None = Field(
        default=None, description="Generate this many answers and return the `n` likeliest, by mean log-probability."
    )
