"""Settings of what clients ask in the words of chats and of OpenAI's API."""

from __future__ import annotations

from dataclasses import dataclass, field

# The names in the tables of `chat/formats.py`, which a test compares.
TOOL_CALL_PARSERS = ("auto", "none", "hermes", "llama3", "mistral", "deepseek", "pythonic", "json")
REASONING_PARSERS = ("auto", "none", "think", "mistral", "seed", "thought", "granite")


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The part of `RouterConfig` that the routes on `/v1` keep to."""

    tokenizer_config_path: str | None = field(
        default=None,
        metadata={
            "help": "A tokenizer_config.json to use in place of the model's: chat template and special tokens.",
            "default": "the model's",
            "when": "The model comes without one, or with a wrong one.",
        },
    )
    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "File of the template that makes a prompt of a chat's messages: Jinja2, or JSON with a "
            "`chat_template`.",
            "default": "the model's",
            "when": "The model comes without a template, or you want another format.",
        },
    )
    tool_call_parser: str = field(
        default="auto",
        metadata={
            "help": "How the model writes calls of tools (docs/chat.md). auto: as its chat template says.",
            "choices": TOOL_CALL_PARSERS,
            "when": "The template says nothing or the wrong thing. none: tools are refused.",
        },
    )
    reasoning_parser: str = field(
        default="auto",
        metadata={
            "help": "Between which marks the model writes what it thinks; chats get that as `reasoning_content`. "
            "auto: as its chat template says.",
            "choices": REASONING_PARSERS,
            "when": "The template says nothing or the wrong thing. none: it stays in the text.",
        },
    )
    reasoning_field: str = field(
        default="reasoning_content",
        metadata={
            "help": "What that is called in the messages of chats; both names are taken in requests.",
            "choices": ("reasoning_content", "reasoning"),
            "when": "Your clients were written for a server that calls it `reasoning`.",
        },
    )
    max_n: int = field(
        default=16,
        metadata={
            "help": "Largest `n` and `best_of` on `/v1`: answers that are generated to one prompt.",
            "unit": "answers",
            "min": 1,
            "when": "Each answer costs a whole generation and one place of `max_concurrent_requests`.",
        },
    )
