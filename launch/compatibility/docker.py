"""What a `docker run` command line gives the program in its container, so that it can be read without a container."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ENGINES = ("docker", "podman", "nerdctl")
# Options of `docker run` that take no value; short ones may be written together.
SWITCHES = frozenset(
    "--detach --init --interactive --no-healthcheck --oom-kill-disable --privileged --publish-all --quiet --read-only "
    "--rm --sig-proxy --tty".split()
)
SHORT_SWITCHES = re.compile(r"-[ditPq]+")


@dataclass(frozen=True)
class Container:
    """The image, what follows its name, the variables, the host's port, and the host's path of each mounted folder."""

    image: str
    arguments: Sequence[str]
    variables: Mapping[str, str]
    port: str | None = None  # None: no port is published
    mounts: Mapping[str, str] = field(default_factory=dict)

    def on_host(self, text: str) -> str:
        """A path in the container as the host's, where it lies in a mounted folder; other text as it is."""
        for inside, outside in self.mounts.items():
            if text == inside or text.startswith(f"{inside}/"):
                return outside + text[len(inside) :]
        return text


def read_run(words: Sequence[str], environ: Mapping[str, str]) -> Container | None:
    """The container that a command line such as `docker run … IMAGE …` asks for; None where it is none.

    environ: of the shell, for `-e NAME` without a value. Raises ValueError where no image is named.
    """
    if len(words) < 2 or words[0] not in ENGINES or words[1] != "run":
        return None
    rest, given, mounts, port = list(words[2:]), {}, {}, None
    while rest and rest[0].startswith("-"):
        option, is_joined, value = rest.pop(0).partition("=")
        if not is_joined and option not in SWITCHES and not SHORT_SWITCHES.fullmatch(option):
            value = rest.pop(0) if rest else ""
        if option in ("-e", "--env"):
            name, has_value, text = value.partition("=")
            given[name] = text if has_value else environ.get(name, "")
        if option in ("-p", "--publish") and ":" in value and port is None:
            port = value.split(":")[-2]
        if option in ("-v", "--volume") and value.count(":") and value.startswith(("/", "~")):
            outside, inside = value.split(":")[:2]
            mounts[inside.rstrip("/")] = outside.rstrip("/")
    if not rest:
        raise ValueError("the command line names no image: give it as you start it, with its variables set")
    return Container(rest[0], rest[1:], given, port, mounts)
