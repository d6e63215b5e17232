"""A model's chat template: where it is found, and the prompt that it makes of messages.

A template is a program of the model's publisher in Jinja2, fed with what clients send. It runs in a
sandboxed process (`router/sandbox`), and gives what transformers' `apply_chat_template` gives.

Left out: what messages look like in each API, and reading tool calls out of what the model answers.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from router.chat import turns
from router.errors import ValidationError
from router.sandbox import TaskError, TaskTooLarge
from router.sandbox.pool import Sandbox
from router.text.tokenizer import read_json

DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of a template where a model has several
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What a client may not set: it is the router's to say, or would replace the template.
RESERVED = frozenset(
    "messages conversations self tools documents add_generation_prompt continue_final_message tokenize chat_template "
    "conversation return_assistant_tokens_mask return_dict return_tensors padding truncation max_length".split()
) | frozenset(SPECIAL_TOKENS)
MOST_VARIABLES = 16
VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
MOST_VARIABLE_CHARACTERS = 1000
MOST_NUMBER = 2**53
MOST_COMPILED_CHARACTERS = 100_000  # Linux gives a process arguments of 131,072 bytes each

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The templates of a model by name, and the special tokens that they may write."""

    named: Mapping[str, str]
    special_tokens: Mapping[str, str]
    # What each takes of a conversation, by whether tools are offered: found when it is first needed, for all who wait.
    _taken: dict[bool, asyncio.Task[turns.Taken]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(
        cls, folder: Path, tokenizer_config_path: str | None = None, template_path: str | None = None
    ) -> ChatTemplate:
        """Read it from a tokenizer's folder. Without any, `named` is empty. Raises ValueError with the remedy.

        tokenizer_config_path: to use in place of the folder's. template_path: a file of Jinja2, or of JSON with a
        `chat_template`, to use in place of all others.
        """
        config_path = Path(tokenizer_config_path or folder / "tokenizer_config.json")
        config = read_json(config_path)
        if template_path is not None:
            named = _of_file(Path(template_path))
        else:
            named = _of_config(config.get("chat_template"), config_path) | _of_folder(folder)
        return cls(named, _special_tokens({**read_json(folder / "special_tokens_map.json"), **config}))

    @property
    def tasks(self) -> tuple[str, str]:
        """What a `Sandbox` is made with that renders them: they are compiled before anybody asks, unless too long."""
        given = json.dumps(list(self.named.values()))
        return "router.sandbox.tasks", given if len(given) <= MOST_COMPILED_CHARACTERS else ""

    def choose(self, has_tools: bool) -> str:
        """The template for a request. Raises ValidationError where the model has none."""
        if has_tools and WITH_TOOLS in self.named:
            return self.named[WITH_TOOLS]
        if DEFAULT in self.named:
            return self.named[DEFAULT]
        known = f" (it has some named {', '.join(sorted(self.named))})" if self.named else ""
        raise ValidationError(
            f"the model has no chat template{known}: send a prompt to `/generate` or `/v1/completions`, or start the "
            "server with --chat-template FILE"
        )

    async def render(
        self,
        aside: Sandbox,
        messages: Messages,
        owner: str = "",
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        written: Callable[[Sequence[Mapping[str, Any]]], str] = turns.in_json,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt for messages, with all special tokens that it needs. Raises ValidationError.

        owner: whose request it is. variables: `chat_template_kwargs` of the request. written: earlier calls as the
        model writes them, for templates that do not. continue_final_message: the last message is the beginning of the
        answer, and the prompt ends with it.
        """
        check_variables(variables or {})
        told: dict[str, Any] = {
            "template": self.choose(bool(tools)),
            "tools": list(tools) if tools else None,
            "variables": {**self.special_tokens, **(variables or {})},
        }
        if tools or not turns.is_plain(messages):
            taken = await self.taken(aside, has_tools=bool(tools))
            messages = turns.fitted(messages, taken, written)
            if tools and taken.tools not in ("", "tools"):
                told["variables"][taken.tools] = told["tools"]
        ending = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        try:
            return str(await aside.do("render_chat", owner, messages=list(messages), **told, **ending))
        except TaskError as error:
            raise ValidationError(f"the messages cannot be written as a prompt: {error}") from None

    async def refusal(self, aside: Sandbox) -> str | None:
        """A sentence where the template refuses even a plain question, as far as is known. Raises Unavailable."""
        told: dict[str, Any] = {"tools": None, "variables": dict(self.special_tokens), "continue_final_message": False}
        messages = [{"role": "user", "content": "Hello"}]
        try:
            template = self.choose(has_tools=False)
            await aside.do("render_chat", template=template, messages=messages, add_generation_prompt=True, **told)
        except (ValidationError, TaskTooLarge):
            return None
        except TaskError as error:
            return f"a plain chat is refused, as {error}: give another template with --chat-template"
        return None

    async def taken(self, aside: Sandbox, *, has_tools: bool) -> turns.Taken:
        """What the template takes of a conversation. Raises ValidationError where there is none.

        Nobody's keys own the trial: all wait for it.
        """
        if (taken := self._taken.get(has_tools)) is None:
            write = partial(self._tried, aside, self.choose(has_tools), has_tools)
            taken = self._taken[has_tools] = asyncio.create_task(turns.tried(write, has_tools=has_tools))
            taken.add_done_callback(partial(self._forget_failed, has_tools))
        try:
            return await asyncio.shield(taken)
        except TaskTooLarge:
            return turns.Taken()  # the next request finds out

    def _forget_failed(self, has_tools: bool, taken: asyncio.Task[turns.Taken]) -> None:
        if taken.cancelled() or taken.exception() is not None:
            del self._taken[has_tools]

    async def _tried(
        self,
        aside: Sandbox,
        template: str,
        has_tools: bool,
        messages: turns.Messages,
        variable: str = "tools",
    ) -> str | None:
        """What a template makes of a conversation, with a tool in this variable; None where it refuses it.

        Raises Unavailable and TaskTooLarge, of which nothing is learned.
        """
        tools = [turns.TOOL] if has_tools else None
        variables: dict[str, Any] = dict(self.special_tokens)
        if variable not in ("", "tools"):
            variables[variable] = tools
        ending = {"add_generation_prompt": True, "continue_final_message": False}
        told: dict[str, Any] = {"tools": tools if variable else None, "variables": variables, **ending}
        try:
            return str(await aside.do("render_chat", template=template, messages=list(messages), **told))
        except TaskTooLarge:
            raise
        except TaskError:
            return None


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raises ValidationError for `chat_template_kwargs` that no template needs."""
    if len(variables) > MOST_VARIABLES:
        raise ValidationError(f"`chat_template_kwargs` has {len(variables)} entries: give at most {MOST_VARIABLES}")
    for name, value in variables.items():
        if name in RESERVED or not VARIABLE.fullmatch(name):
            raise ValidationError(
                f"`chat_template_kwargs` has `{name[:64]}`, which is not the template's own: leave it out"
            )
        is_number = isinstance(value, int | float) and abs(value) <= MOST_NUMBER
        if not (value is None or is_number or (isinstance(value, str) and len(value) <= MOST_VARIABLE_CHARACTERS)):
            raise ValidationError(
                f"`chat_template_kwargs.{name}` must be true, false, null, a number of at most 2^53, or a string of at "
                f"most {MOST_VARIABLE_CHARACTERS} characters"
            )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--chat-template {path} cannot be read: {cause}") from None


def _of_file(path: Path) -> dict[str, str]:
    text = _read(path)
    if path.suffix != ".json":
        return {DEFAULT: text}
    named = _of_config(read_json(path).get("chat_template"), path)
    if not named:
        raise ValueError(f"--chat-template {path} has no `chat_template`: give a file of Jinja2, or of JSON with one")
    return named


def _of_config(given: object, path: Path) -> dict[str, str]:
    """A template, or a list of some with names, as tokenizer_config.json holds them."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT: given}
    entries = given if isinstance(given, list) else []
    named = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    if not entries or len(named) != len(entries):
        raise ValueError(f"{path}: `chat_template` is neither a text nor a list of texts with names: download it again")
    return named


def _of_folder(folder: Path) -> dict[str, str]:
    """The files that newer models have, which count more than what tokenizer_config.json says."""
    paths = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (main := folder / "chat_template.jinja").is_file():
        paths[DEFAULT] = main
    if paths:
        return {name: _read(path) for name, path in paths.items()}
    return _of_config(read_json(folder / "chat_template.json").get("chat_template"), folder)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    contents = {name: config.get(name) for name in SPECIAL_TOKENS}
    texts = {name: found.get("content") if isinstance(found, dict) else found for name, found in contents.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
