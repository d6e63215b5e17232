"""The chart in deploy/helm rendered without Helm: the small part of its language that the chart keeps to.

    {{ .Values.a.b }}  {{ .Release.Name }}      a value
    {{ add .Values.a .Values.b 15 }}            a sum of whole numbers
    {{ toYaml .Values.a | nindent 4 }}          a value as YAML, on lines of its own, so far to the right
    {{ if .Values.a }} … {{ end }}              the text between, unless the value is false, 0 or empty
    {{- … }}  {{ … -}}                          no white space before, behind

Anything else is a ValueError, and so is a value that `values.yaml` lacks, which Helm would write as `<no value>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from textwrap import indent
from typing import Any

import yaml

from tests.running import ROOT

CHART = ROOT / "deploy" / "helm" / "lockstep"


def defaults() -> dict[str, Any]:
    """What values.yaml says."""
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


def merged(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `values` over it, tables within tables, as Helm does it. Raises ValueError for a name that is new."""
    result = dict(base)
    for name, value in values.items():
        if name not in base:
            raise ValueError(f"{name} is no value of the chart")
        result[name] = merged(base[name], value) if isinstance(base[name], dict) and name != "resources" else value
    return result


def rendered(values: Mapping[str, Any] | None = None, release: str = "lockstep") -> list[dict[str, Any]]:
    """The documents that `helm template RELEASE deploy/helm/lockstep` would print with these values."""
    context = {"Values": merged(defaults(), values or {}), "Release": {"Name": release}}
    texts = [render(path.read_text(), context) for path in sorted((CHART / "templates").iterdir())]
    return [document for text in texts for document in yaml.safe_load_all(text) if document is not None]


def render(template: str, context: Mapping[str, Any]) -> str:
    """The text of one template."""
    trimmed = re.sub(r" -\}\}\s*", " }}", re.sub(r"\s*\{\{- ", "{{ ", template))
    shown, out = [True], []
    for is_action, piece in ((n % 2, piece) for n, piece in enumerate(re.split(r"\{\{(.*?)\}\}", trimmed))):
        words = piece.split()
        if not is_action:
            out += [piece] if all(shown) else []
        elif words[:1] == ["if"] and len(words) == 2:
            shown.append(bool(_value(words[1], context)))
        elif words == ["end"] and len(shown) > 1:
            shown.pop()
        elif all(shown):
            out.append(_text(words, context))
    if len(shown) > 1:
        raise ValueError("an if has no end")
    return "".join(out)


def _text(words: list[str], context: Mapping[str, Any]) -> str:
    """What an action puts in its place."""
    match words:
        case [path]:
            value = _value(path, context)
            if isinstance(value, dict | list | bool) or value is None:
                raise ValueError(f"{path} is {value!r}, which is no text: use toYaml or if")
            return str(value)
        case ["add", *terms]:
            return str(sum(int(term if term.isdigit() else _value(term, context)) for term in terms))
        case ["toYaml", path, "|", "nindent", width]:
            return "\n" + indent(yaml.safe_dump(_value(path, context)).rstrip("\n"), " " * int(width))
    raise ValueError(f"{{{{ {' '.join(words)} }}}} is not of the part that is rendered here")


def _value(path: str, context: Any) -> Any:
    """What a path such as .Values.a.b leads to."""
    if not re.fullmatch(r"(\.\w+)+", path):
        raise ValueError(f"{path} is no path")
    for name in path[1:].split("."):
        if not isinstance(context, Mapping) or name not in context:
            raise ValueError(f"there is no value {path}")
        context = context[name]
    return context
