"""An application over fake shards, served from a thread of its own, for clients that block and for many tests at once.

Its chat template shows messages and tools as JSON, so that tests see what a model would read; what the model answers is
a function of that.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2

from tests.router.doubles import EOS, fake_shards, make_limits, tasks_in_process
from tests.router.site import Site, site

END_OF_PROMPT = "\x01"
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages | tojson }}" + END_OF_PROMPT
TOLD = "".join(f"{{{{ {name} | default('') }}}}" for name in ("enable_thinking", "reasoning_effort"))
TELLING = f"{TEMPLATE[:-1]}{TOLD}{{{{ add_generation_prompt }}}}{END_OF_PROMPT}"
LAST_ALONE = "{{ messages[-1]['content'] }}" + END_OF_PROMPT
WITH_TOOLS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}  # settings for what `reply` writes
LIMITS = {"max_input_length": 4000, "max_total_tokens": 4500, "max_batch_total_tokens": 20_000}
LIMITS |= {"max_batch_prefill_tokens": 4000}


def one_two(_: str) -> str:
    """What a model says to everything."""
    return "one two"


def called(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def reply(prompt: str) -> str:
    """Calls as many tools as the question has words; a result ends it."""
    if '"role": "tool"' in prompt:
        return "It rains."
    if "think" in prompt:
        return f"<think>Hm.</think>Well.{called('weather', place='Ulm')}"
    if "weather" not in prompt:
        return "No tools here."
    return f"I look.\n{called('weather', place='Ulm')}\n{called('time')}"


@dataclass
class Served:
    """The site, and a client that blocks."""

    site: Site
    http: httpx2.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.site.port}"

    @property
    def prompt(self) -> str:
        """What the shards got last."""
        last = [new for step in self.site.shards.requests for new in step.add][-1]
        return bytes(id for id in last.token_ids if id < EOS).decode().rstrip(END_OF_PROMPT)


def replying(reply: Callable[[str], str]) -> dict[str, Any]:
    """Shards that answer each prompt of TEMPLATE with what `reply` makes of it, and then EOS."""

    def next_token(token_ids: Sequence[int], *_: Any) -> int:
        given = bytes(id for id in token_ids if id < EOS)
        prompt, end, answer = given.rpartition(END_OF_PROMPT.encode())
        if not end:
            return EOS  # the prompt ends with the beginning of the answer
        ids = [*reply(prompt.decode()).encode(), EOS]
        return ids[min(len(answer), len(ids) - 1)]

    return {"vocab_size": 257, "next_token": next_token}


@contextmanager
def served(
    folder: Path,
    reply: Callable[[str], str],
    template: str = TEMPLATE,
    limits: Mapping[str, int] = MappingProxyType(LIMITS),
    **config: Any,
) -> Iterator[Served]:
    """folder: for the template's file. Tasks aside are done in this process: another takes longer to start."""
    path = folder / "template.jinja"
    path.write_text(template)
    ready: Any = threading.Event()
    found: list[Any] = []

    async def serve() -> None:
        shards = fake_shards(make_limits(**limits), **replying(reply))
        async with site(shards, config={"chat_template": str(path), **config}, **limits) as it:
            found.extend((it, asyncio.get_running_loop(), asyncio.Event()))
            ready.set()
            await found[2].wait()
            await it.all_free()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    with tasks_in_process():
        thread.start()
        assert ready.wait(60)
        it, loop, is_over = found
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{it.port}", timeout=60, verify=False) as http:
                yield Served(it, http)
        finally:
            loop.call_soon_threadsafe(is_over.set)
            thread.join()
