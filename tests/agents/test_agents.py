"""Agents against a server whose model is scripted: what they send is understood, and what it answers is done.

The chat template is as strict as Qwen3.5's: one system message, at the beginning. The model writes its calls between
tags, as Qwen3.5 does. What the tool is asked to write is not in the question, so an agent that shows it has run it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.doubles import EOS
from tests.router.served import END_OF_PROMPT, Served, served
from tests.running import ROOT

BIN = ROOT / ".venv-agents" / "node_modules" / ".bin"
BEGIN, END = "<|im_start|>", "<|im_end|>\n"
TEMPLATE = (
    "{% if tools %}" + BEGIN + "system\n{{ tools | tojson }}" + END + "{% endif %}"
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must be at the beginning') }}{% endif %}"
    "{{ '" + BEGIN + "' + message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    + END.replace("\n", "{{ '\\n' }}")
    + "{% endfor %}{% if add_generation_prompt %}"
    + BEGIN
    + "assistant{{ '\\n' }}{% endif %}"
    + END_OF_PROMPT
)  # fmt: skip
RUN = "echo DONE-$((4000 + 711))"
# Tools that run a command, by the names that agents give them, and how they are called.
SHELLS = {
    "Bash": {"command": RUN, "description": "Say it"},
    "bash": {"command": RUN, "description": "Say it"},
    "run_shell_command": {"command": RUN, "description": "Say it", "is_background": False},
    "exec_command": {"cmd": RUN},
}
ROOM = 300_000  # tokens, which are bytes here: an agent's first prompt has 40,000 to 80,000
LIMITS = {"max_input_length": ROOM, "max_total_tokens": ROOM + 40_000, "max_batch_total_tokens": 2 * ROOM}


def call(name: str, **arguments: object) -> str:
    """A call as the model writes it."""
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    each = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{each}</function>\n</tool_call>"


def reply(prompt: str) -> str:
    if "DONE-4711" in prompt:
        return "<think>It has run.</think>All done: 4711."
    if (name := shell_in(prompt)) is None:
        return "A title"  # of a conversation, for which some agents ask beside it
    return f"<think>A tool will do.</think>I look.\n{call(name, **SHELLS[name])}"


def shell_in(prompt: str) -> str | None:
    """The tool that runs commands, of those that a prompt offers."""
    return next((name for name in SHELLS if f'"name": "{name}"' in prompt), None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    parsers = {"tool_call_parser": "qwen3_coder", "reasoning_parser": "think"}
    limits = {**LIMITS, "max_batch_prefill_tokens": ROOM}
    with served(tmp_path_factory.mktemp("agents"), reply, TEMPLATE, limits=limits, **parsers) as it:
        yield it


def claude(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    told = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "x", **dict.fromkeys(names, "lockstep")}
    told["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    return ["claude", "-p", "use the shell", "--allowedTools", "Bash"], told


def codex(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    provider = f'name = "Lockstep"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "lockstep"\nmodel_provider = "lockstep"\n[model_providers.lockstep]\n{provider}'
    )
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return ["codex", "exec", *flags, "use the shell"], {}


def opencode(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "x"},
        "models": {"lockstep": {}},
    }
    config = {"provider": {"lockstep": provider}, "model": "lockstep/lockstep", "autoupdate": False}
    (home / "work" / "opencode.json").write_text(json.dumps(config))
    return ["opencode", "run", "use the shell"], {}


def qwen(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    told = {"OPENAI_API_KEY": "x", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": "lockstep"}
    return ["qwen", "--auth-type", "openai", "-y", "-p", "use the shell"], told


@pytest.mark.agents
@pytest.mark.parametrize("agent", [claude, codex, opencode, qwen], ids=lambda agent: agent.__name__)
def test_an_agent_runs_what_the_model_calls(server: Served, tmp_path: Path, agent: type) -> None:
    (tmp_path / "work").mkdir()
    command, told = agent(server.url, tmp_path)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **told}
    num_before = len(server.site.shards.requests)
    done = subprocess.run(
        [BIN / command[0], *command[1:]], env=environment, cwd=tmp_path / "work", stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert 0 == done.returncode and "All done: 4711." in done.stdout, done.stdout + done.stderr
    steps = server.site.shards.requests[num_before:]
    prompts = [bytes(id for id in new.token_ids if id < EOS).decode() for step in steps for new in step.add]
    first, second = (prompt for prompt in prompts if shell_in(prompt))
    asked = first.removesuffix(f"{BEGIN}assistant\n{END_OF_PROMPT}")
    assert asked != first and second.startswith(asked), "the prefix cache would not find the turn before"
    assert "DONE-4711" in second and "x-anthropic-billing" not in first
