"""Bodies of OpenAI's chat and text completions, and what they ask for in the words of the rest of the router.

As strict and as lenient as TGI's bodies (`router/requests/schemas.py`): no value is taken for another, null means
absent, and unknown fields are ignored. Fields with a meaning that is not served are refused. An absent temperature is
1, as OpenAI has it, so that answers differ unless there is a `seed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from router.chat import prompting
from router.chat.prompting import effort
from router.chat.tools import MOST_DEPTH, Offer, Tool, ToolChoice, allowed_of, is_deeper, offer, tool_in
from router.chat.transcript import arguments_in, result_text_of, text_of
from router.errors import ValidationError
from router.requests import grammars
from router.requests.schemas import (
    MOST_VALUES,
    GenerateParameters,
    Integer,
    Lenient,
    NotServed,
    PromptRequest,
    Rendering,
    drawn,
    refuse_excess_within,
)

ModelName = Annotated[  # each chunk of a stream has it
    str,
    Field(
        max_length=256,
        description="An adapter's name, or the model's; any, where there are no adapters. The answer repeats it.",
    ),
]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**32 - 1)]], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
# Parameters that are what TGI's of the same name are.
AS_TGI = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "bad_words"),
    *("ignore_eos", "min_tokens", "stop_token_ids", "speculate"),
)
AS_MODEL = "is not served: an adapter is named as `model`"
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
        "lora_path": NotServed(sentence=AS_MODEL),
        "lora": NotServed((None, []), AS_MODEL),
        "adapter_id": NotServed(sentence=AS_MODEL),
    }
    known = frozenset({*grammars.NAMES, grammars.NESTED})

    model: ModelName | None = None
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
    speculate: Integer | None = Field(default=None, description="Not OpenAI's, as on TGI's routes.")
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


class Prediction(Lenient):
    """What much of the answer may be."""

    type: Literal["content"]
    content: str | Objects


class ChatRequest(Generation):
    """The body of `/v1/chat/completions`."""

    not_served: ClassVar[Mapping[str, NotServed]] = {
        **Generation.not_served,
        "best_of": NotServed((None, 1), "is not served in chats: ask for `n` answers"),
        "echo": NotServed((None, False)),
        "chat_template": NotServed(sentence="is not served: the server has its own, `--chat-template`"),
        "documents": NotServed((None, [])),
        "add_special_tokens": NotServed((None, False), "is not served in chats: the template writes special tokens"),
    }

    messages: Annotated[list[Message], Field(fail_fast=True)]
    logprobs: bool | None = Field(default=None, description="Report the log-probability of each token of the text.")
    top_logprobs: Integer | None = Field(default=None, description="Likeliest alternatives reported with each token.")
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="`none`, or what the chat template knows of it."
    )
    prediction: Prediction | None = Field(
        default=None, description="Tokens are guessed from it where the server has `--speculate`."
    )
    include_reasoning: bool | None = Field(default=None, description="Not OpenAI's: false leaves reasoning out.")
    store: bool | None = Field(default=None, description="Nothing is stored, whatever is asked for.")
    tools: Objects | None = Field(default=None, description="Functions that the model may call. At most 512.")
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
    add_special_tokens: bool | None = Field(
        default=None, description="Not OpenAI's: false adds none to a prompt that has them, as of a chat template."
    )
    logprobs: Integer | None = Field(
        default=None,
        description="Report the log-probability of each token of the text, with this many of the likeliest tokens.",
    )
    best_of: Integer | None = Field(
        default=None, description="Generate this many answers and return the `n` likeliest, by mean log-probability."
    )


ROLES = {"developer": "system"}  # a newer name, which templates do not know


def of_chat(body: ChatRequest, render: Rendering, max_n: int, candidates: int | None = None) -> list[PromptRequest]:
    """What a chat asks for, of the prompt that `render` makes of its messages. Raises ValidationError.

    candidates: wanted with the log-probability of each token; None: no log-probabilities.
    """
    asked = _asked(body, render, most_of(body), max_n, has_special_tokens=True)
    if body.prediction is not None:
        asked = replace(asked, prediction=text_of("prediction.content", body.prediction.content, ("text",), between=""))
    return [scored(asked, candidates, of_prompt=False)]


def most_of(body: Generation) -> int | None:
    """How many tokens are wanted, by the newer name or the older one."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def scored(asked: PromptRequest, candidates: int | None, *, of_prompt: bool) -> PromptRequest:
    """The same with log-probabilities, and with those of its prompt."""
    if candidates is None:
        return asked
    given = asked.given.model_copy(update={"top_n_tokens": candidates})
    return replace(asked, given=given, raw_logprobs=True, prompt_logprobs=of_prompt)


def of_completion(body: CompletionRequest, max_n: int, max_prompts: int, candidates: int | None) -> list[PromptRequest]:
    """What a completion asks for: one for each prompt. Raises ValidationError. candidates: as in `of_chat`."""
    num_answers = _num_answers(body, max_n)
    most = most_of(body)
    generates = most != 0
    if not generates and not body.echo:
        raise ValidationError(
            "`max_tokens` is 0, so that nothing would be answered: ask for 1 or more, or set `echo` to be given the "
            "prompt, with its log-probabilities if `logprobs` is set"
        )
    found = prompts(body)
    if not 0 < len(found) <= max_prompts:
        raise ValidationError(f"`prompt` has {len(found)} prompts: give 1 to {max_prompts} (max_client_batch_size)")
    has_them = body.add_special_tokens is False
    asked = (_asked(body, prompt, most if generates else 1, max_n, has_special_tokens=has_them) for prompt in found)
    asked = (replace(one, num_answers=num_answers, generates=generates) for one in asked)
    # Samples are compared by what the model thinks of them, whatever they were drawn by.
    asked = (replace(one, raw_logprobs=num_answers > (body.n or 1)) for one in asked)
    return [scored(one, candidates, of_prompt=bool(body.echo)) for one in asked]


def _num_answers(body: CompletionRequest, max_n: int) -> int:
    """How many answers are generated to each prompt, of which `n` are given. Raises ValidationError."""
    wanted = 1 if body.n is None else body.n
    if body.best_of is None:
        return wanted
    if body.best_of < wanted:
        raise ValidationError(
            f"`best_of` must be >= `n`, here {wanted}. Given: {body.best_of}: raise it or leave it out"
        )
    if body.best_of > max_n:
        raise ValidationError(f"`best_of` must be <= {max_n} (max_n). Given: {body.best_of}")
    if body.best_of > wanted and body.stream:
        raise ValidationError(
            f"`best_of` is {body.best_of} and `n` is {wanted}: which answers are the likeliest is known only at their "
            "end, so they cannot be streamed: leave `best_of` or `stream` out"
        )
    return body.best_of


def prompts(body: CompletionRequest) -> Sequence[str | Sequence[int]]:
    """The prompts of a body: one text, several, the token ids of one, or of several."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(one, int) for one in given):
        return [[int(one) for one in given if isinstance(one, int)]]
    return [one for one in given if not isinstance(one, int)]


def _asked(
    body: Generation,
    prompt: str | Sequence[int] | Rendering,
    most: int | None,
    max_n: int,
    *,
    has_special_tokens: bool = False,
) -> PromptRequest:
    body.refuse_what_is_not_served()
    if body.stream_options is not None and not body.stream:
        raise ValidationError("`stream_options` needs `stream` to be true: set it, or leave them out")
    count = 1 if body.n is None else body.n
    if not 0 < count <= max_n:
        raise ValidationError(f"`n` must be > 0 and <= {max_n}. Given: {count}")
    asked = PromptRequest(prompt, _parameters(body, most), has_special_tokens, shows_stop=False, num_answers=count)
    return replace(asked, priority=body.priority or 0, cache_salt=body.cache_salt or "", model=body.model)


def _parameters(body: Generation, most: int | None) -> GenerateParameters:
    return GenerateParameters(
        **drawn(
            body.temperature,
            top_p=body.top_p,
            min_p=body.min_p,
            typical_p=body.typical_p,
            top_k=None if body.top_k in (-1, 0) else body.top_k,
        ),
        seed=body.seed if body.seed is None else body.seed % 2**64,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        max_new_tokens=most,
        grammar=grammars.grammar_of_chat(body.response_format, body.model_extra or {}),
        **{name: getattr(body, name) for name in AS_TGI},
    )


def messages_of(body: ChatRequest) -> list[dict[str, Any]]:
    """The messages as templates take them, with texts for contents. Raises ValidationError."""
    if not body.messages:
        raise ValidationError("`messages` is empty: give at least one")
    refuse_excess_of_calls(call for message in body.messages for call in message.tool_calls or ())
    found = [_message(number, message) for number, message in enumerate(body.messages)]
    if body.continue_final_message:
        _check_continued(body, [message["role"] for message in found])
    return found


def _check_continued(body: ChatRequest, roles: Sequence[str]) -> None:
    if roles[-1] != "assistant":
        raise ValidationError("`continue_final_message` needs a last message of the role assistant")
    if list(roles[-2:]) == ["assistant", "assistant"]:
        raise ValidationError("`continue_final_message` is given two messages of the assistant at the end: join them")
    if body.add_generation_prompt:
        raise ValidationError(
            "`add_generation_prompt` and `continue_final_message` exclude each other: a message is begun or continued"
        )


def offered(body: ChatRequest) -> Offer:
    """The tools that a body offers. Raises ValidationError."""
    return tools_of(body.tools or (), body.tool_choice, is_parallel=body.parallel_tool_calls is not False)


def variables_of(body: ChatRequest) -> Mapping[str, Any]:
    """The variables of the chat template. What a client sets by name counts more than `reasoning_effort`."""
    return {**effort(body.reasoning_effort), **(body.chat_template_kwargs or {})}


def begun(body: ChatRequest) -> str:
    """What a final message that is continued has of the answer already."""
    return _text(len(body.messages) - 1, body.messages[-1]) if body.continue_final_message else ""


def _message(number: int, message: Message) -> dict[str, Any]:
    told: dict[str, Any] = {
        "role": ROLES.get(message.role, message.role),
        "content": _text(number, message),
    }
    optional = {
        "name": message.name,
        "tool_calls": calls_of(f"messages.{number}.tool_calls", message.tool_calls or ()) or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    return told | {name: value for name, value in optional.items() if value is not None}


def _text(number: int, message: Message) -> str:
    """The texts of a message without anything between them, as in TGI. Raises ValidationError."""
    read = result_text_of if message.role == "tool" else text_of
    return read(f"messages.{number}.content", message.content, ("text",), between="")


Json = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------- tools


def tools_of(given: Sequence[Mapping[str, Any]], choice: str | Json | None, *, is_parallel: bool) -> Offer:
    """What `tools` offer, and `tool_choice` lets the model choose. Raises ValidationError."""
    tools = [_tool(f"tools.{number}", one) for number, one in enumerate(given)]
    return offer(*_chosen(tools, choice, is_parallel))


def _tool(where: str, given: Mapping[str, Any]) -> Tool:
    if given.get("type", "function") != "function":
        raise ValidationError(f"`{where}` is of type {str(given['type'])[:64]}: functions alone are served")
    function = given.get("function")
    if not isinstance(function, dict):
        raise ValidationError(f"`{where}.function` is missing: give an object with a `name`")
    schema = "parameters" if "parameters" in function else "arguments"  # TGI takes both names
    return tool_in(f"{where}.function", function, schema)


def _chosen(tools: list[Tool], given: str | Json | None, is_parallel: bool) -> tuple[list[Tool], ToolChoice]:
    """The tools and the choice of a `tool_choice`: a mode, a name, or one of OpenAI's objects."""
    if given is None or given == "auto":
        return tools, ToolChoice("auto", is_parallel=is_parallel)
    if given == "none":
        return tools, ToolChoice("none")
    if given == "required":
        return tools, ToolChoice("required", is_parallel=is_parallel)
    if isinstance(given, str):
        return tools, ToolChoice("required", given, is_parallel=False)
    if given.get("type") == "allowed_tools":
        return _allowed(tools, given.get("allowed_tools"), is_parallel)
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if given.get("type", "function") != "function" or not isinstance(name, str):
        raise ValidationError(
            '`tool_choice` must be "auto", "none", "required", or {"type": "function", "function": {"name": a name}}'
        )
    return tools, ToolChoice("required", name, is_parallel=False)


def _allowed(tools: list[Tool], given: Any, is_parallel: bool) -> tuple[list[Tool], ToolChoice]:
    """Some of the tools, each named as in `tools`."""
    listed = given.get("tools") if isinstance(given, dict) else None
    if not isinstance(listed, list) or given.get("mode") not in ("auto", "required"):
        raise ValidationError('`tool_choice.allowed_tools` needs a `mode`, "auto" or "required", and a list of `tools`')
    functions = [one.get("function") for one in listed if isinstance(one, dict)]
    names = [one.get("name") for one in functions if isinstance(one, dict)]
    return allowed_of(tools, names), ToolChoice(given["mode"], is_parallel=is_parallel)


def refuse_excess_of_calls(given: Iterable[Mapping[str, Any]]) -> None:
    """Raises ValidationError where the texts of arguments have more values together than a body may have."""
    functions = [one.get("function") for one in given]
    texts = [one.get("arguments") for one in functions if isinstance(one, dict)]
    refuse_excess_within((text.encode() for text in texts if isinstance(text, str)), MOST_VALUES)


def calls_of(where: str, given: Sequence[Mapping[str, Any]]) -> list[Json]:
    """The `tool_calls` of a message, as templates take them. Raises ValidationError."""
    return [_call(f"{where}.{number}", one) for number, one in enumerate(given)]


def _call(where: str, given: Mapping[str, Any]) -> Json:
    function, id = given.get("function"), given.get("id")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise ValidationError(f"`{where}.function` must be an object with a `name` and `arguments`")
    if not isinstance(id, str | None):
        raise ValidationError(f"`{where}.id` must be a string")
    return prompting.call(id, name, _arguments(f"{where}.function.arguments", function.get("arguments")))


def _arguments(where: str, given: Any) -> Json:
    """An object, or a text of JSON that has one, as OpenAI's clients send it. Any other text is no arguments."""
    value = arguments_in(given) if isinstance(given, str) else given or {}
    if not isinstance(value, dict):
        raise ValidationError(f"`{where}` must be an object of JSON, as a text")
    if is_deeper(value, MOST_DEPTH):
        raise ValidationError(f"`{where}` is nested deeper than {MOST_DEPTH}: flatten it")
    return value
