"""The tasks of chat templates in the sandbox, by name. A task takes and returns JSON, and refuses with TaskError.

Imported by the processes of `__main__.py` alone, because transformers is large.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from router.sandbox import Task, TaskError

COMPILE_S = 2.0  # for the model's templates, each


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    variables: Mapping[str, Any],
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """The prompt that a model's chat template makes of messages, exactly as transformers makes it.

    variables: what else the template may use, such as `bos_token`. Raises TaskError with the template's own words where
    it refuses the messages.
    """
    try:
        rendered: Any = render_jinja_template(  # a pair of lists, whatever its annotation says
            [messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
    except TemplateSyntaxError as error:
        raise TaskError(f"the chat template is not valid: {error.message} in line {error.lineno}") from None
    except SecurityError:
        raise TaskError("the chat template does what a template may not") from None
    except UndefinedError as error:
        raise TaskError(f"the chat template misses a value: {error.message}") from None
    except TemplateError as error:
        raise TaskError(f"the chat template refuses the messages: {error.message}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"the chat template fails with {type(error).__name__}: {str(error)[:200]}") from None
    prompts, _ = rendered
    return str(prompts[0])


def tasks(argument: str) -> Mapping[str, Task]:
    """All tasks by name. argument: the model's templates, a list in JSON, or nothing.

    They are compiled here, which takes up to 50 ms, so that no child has to: transformers keeps what it has compiled.
    What is wrong with one, each request will say.
    """
    for template in json.loads(argument or "[]"):
        with suppress(Exception), _within(COMPILE_S):  # the server has other requests than chats
            render_chat(template, [{"role": "user", "content": ""}], None, {}, True, False)
    return {"render_chat": render_chat}


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block once it has had so much time on the cores."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
