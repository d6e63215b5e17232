"""Writes `docs/settings.md`, the page of all settings, from the same fields that the flags are made from."""

from __future__ import annotations

from collections.abc import Iterable

from router.launch.config import GROUPS
from router.launch.flags import option_strings
from router.launch.settings import Setting, public_settings


def render_settings() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Written by `.venv/bin/python launcher.py --print-settings` from the code; do not edit.",
        "",
        "Every setting is a flag (`--max_batch_size` is read as `--max-batch-size`) and an environment variable. A",
        "flag wins over the environment; an empty variable counts as not set. A switch alone means true. `HOSTNAME`",
        "is not read, because shells and containers set it to the machine's name. `HF_TOKEN` and `HF_HUB_OFFLINE`",
        "have their usual meaning. `--version` and `--print-settings` print and leave.",
    ]
    settings = public_settings()
    for title, names in GROUPS.items():
        lines += ["", f"## {title}", "", "| flag | environment | unit | default | what it does | when to change it |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [_settings_row(settings[name]) for name in names.split()]
    return "\n".join(lines) + "\n"


def _settings_row(setting: Setting) -> str:
    flags = [option for name in setting.names for option in option_strings(setting, name)]
    variables = [v for name in setting.names if (v := setting.variable(name))]
    unit = setting.metadata.get("unit") or ("true or false" if setting.kind is bool else "")
    if words := setting.metadata.get("words"):
        unit = " or ".join((unit, *words))
    if "choices" in setting.metadata:
        unit = f"{unit}: ".lstrip(": ") + ", ".join(str(choice) for choice in setting.metadata["choices"])
    cells = (_code(flags), _code(variables) or "–", unit, setting.default_text)
    return "| " + " | ".join((*cells, setting.metadata["help"], setting.metadata["when"])) + " |"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
