"""Settings of what clients ask in the words of chats and of OpenAI's API."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    max_n: int = field(
        default=16,
        metadata={
            "help": "Largest `n` and `best_of` on `/v1`: answers that are generated to one prompt.",
            "unit": "answers",
            "min": 1,
            "when": "Each answer costs a whole generation and one place of `max_concurrent_requests`.",
        },
    )
