"""What a `docker run` command line gives the program in its container, so that it can be read without a container."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

ENGINES = ("docker", "podman", "nerdctl")
# Options of `docker run` that take no value; short ones may be written together.
SWITCHES = frozenset(
    "--detach --init --interactive --no-healthcheck --oom-kill-disable --privileged --publish-all --quiet --read-only "
    "--rm --sig-proxy --tty".split()
)
SHORT_SWITCHES = "ditPq"
# Options with a value that changes nothing of what can be told before a start.
HARMLESS = frozenset(
    "--add-host --cap-add --device --group-add --hostname -h --ipc --label -l --log-driver --log-opt --name --net "
    "--network --pid --platform --pull --restart --runtime --security-opt --shm-size --stop-signal --stop-timeout "
    "--ulimit".split()
)
GPUS = {"--gpus", "--device", "--runtime", "--privileged"}


@dataclass
class Container:
    """The image, what follows its name, and what the options before it say."""

    image: str = ""
    arguments: Sequence[str] = ()
    variables: dict[str, str] = field(default_factory=dict)
    ports: dict[str, str] = field(default_factory=dict)  # of the host, by that of the container
    mounts: dict[str, str] = field(default_factory=dict)  # the host's path of each folder
    shares_network: bool = False  # with the host, so that ports are the same
    wants_gpus: bool = False
    unread: list[str] = field(default_factory=list)  # what was given and is not looked at

    def on_host(self, text: str) -> str:
        """A path in the container as the host's, where it lies in a mounted folder; other text as it is."""
        if text.startswith("--"):
            option, equals, value = text.partition("=")
            return f"{option}{equals}{self.on_host(value)}" if equals else text
        for inside, outside in self.mounts.items():
            if text == inside or text.startswith(f"{inside}/"):
                return outside + text[len(inside) :]
        return text


def read_run(words: Sequence[str], environ: Mapping[str, str]) -> Container | None:
    """The container that a command line such as `docker run … IMAGE …` asks for; None where it is none.

    environ: of the shell, for `-e NAME` without a value. Raises ValueError for a line that cannot be read.
    """
    rest = list(words)
    if rest[:1] == ["sudo"]:
        rest = list(dropwhile(lambda word: word.startswith("-"), rest[1:]))
    if not rest or Path(rest[0]).name not in ENGINES:
        return None
    engine = rest.pop(0)
    if rest[:1] == ["container"]:
        rest.pop(0)
    if rest[:1] != ["run"]:
        raise ValueError(f"of {engine}, only `{engine} run` can be read: give that command line")
    rest.pop(0)
    found, from_files, options = Container(), dict[str, str](), set[str]()
    for option, value in _options(rest):
        options.add(option)
        if option == "--env-file":
            from_files |= _variables(_lines(value), environ)
        else:
            _read_option(option, value, environ, found)
    if not rest:
        raise ValueError("the command line names no image: give it as you start it, with its variables set")
    if not options & GPUS:
        found.unread.append("whether the container has GPUs: there is no --gpus")
    found.image, found.arguments, found.variables = rest[0], rest[1:], from_files | found.variables
    return found


def _options(rest: list[str]) -> Iterator[tuple[str, str]]:
    """Take the options from the front of a command line: each with its value, which is empty for a switch."""
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word.startswith("--"):
            option, is_joined, value = word.partition("=")
            is_switch = option in SWITCHES
        else:  # short ones: switches, and then one that may have its value behind it
            last = word[1:].lstrip(SHORT_SWITCHES)
            option, value, is_switch = f"-{last[:1]}", last[1:].removeprefix("="), not last
            is_joined = value
        if not is_switch and not is_joined:
            value = rest.pop(0) if rest else ""
        yield option, value


def _read_option(option: str, value: str, environ: Mapping[str, str], found: Container) -> None:
    is_read = True
    if option in ("-e", "--env"):
        found.variables |= _variables([value], environ)
    elif option in ("-p", "--publish"):
        host, _, inside = value.rpartition(":")
        inside, host = inside.removesuffix("/tcp"), host.rpartition(":")[2]
        is_read = inside.isdecimal() and host.isdecimal()
        found.ports |= {inside: host} if is_read else {}
    elif option in ("-v", "--volume"):
        is_read = _mount(*value.split(":")[:2], found=found)
    elif option == "--mount":
        parts = dict(part.partition("=")[::2] for part in value.split(","))
        source, target = parts.get("source", parts.get("src", "")), parts.get("target", parts.get("dst", ""))
        is_read = _mount(source, target or parts.get("destination", ""), found=found)
    elif option in ("--net", "--network") and value == "host":
        found.shares_network = True
    elif option == "--gpus":
        found.wants_gpus, is_read = True, value == "all"
    else:
        is_read = option in SWITCHES or option in HARMLESS or option == "-"
    if not is_read:
        found.unread.append(f"docker's {option} {value}".rstrip())


def _mount(source: str, target: str = "", *, found: Container) -> bool:
    """Add a folder of the host; False for a volume, of whose files nothing is known here."""
    if not target or not source.startswith(("/", "~", ".")):
        return False
    found.mounts[target.rstrip("/")] = str(Path(source).expanduser().absolute())
    return True


def _lines(path: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"--env-file {path} cannot be read: {error.strerror}; check the path") from None
    return [line.lstrip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _variables(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """NAME=VALUE, or NAME for the shell's value."""
    pairs = (text.partition("=") for text in given)
    return {name: value if has_value else environ.get(name, "") for name, has_value, value in pairs}
