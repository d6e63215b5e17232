"""docs/docker.md: each of its commands is known here, and names what exists; what it shows is what a server prints."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence

from router.launch.settings import public_settings
from tests.deploy.dockerfile import parse
from tests.running import ROOT, Server

PAGE = (ROOT / "docs/docker.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
[SEEN] = [block for block in BLOCKS if block.startswith("…")]
READY = "Lockstep is ready at http://"
COMMANDS = [
    re.sub(r"\s+#.*", "", line)
    for block in BLOCKS
    if block is not SEEN and "─" not in block
    for line in re.sub(r"\\\n\s*", "", block).splitlines()
]
# Those amid the text that somebody may type.
INLINE = {
    "docker stop",
    "docker logs",
    "docker inspect --format '{{json .State.Health}}' NAME",
    "chown 10001:10001 DIR",
    "make serve",
}


class Strict(argparse.ArgumentParser):
    """Refuses with an error in place of the end of the tests."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise AssertionError(message)


def build_parser() -> Strict:
    """What the page may say behind `docker build`."""
    parser = Strict("docker build", allow_abbrev=False)
    parser.add_argument("--file", required=True)
    parser.add_argument("--target", required=True, choices=[stage.name for stage in parse(dockerfile())])
    parser.add_argument("--tag", required=True)
    parser.add_argument("--build-arg", action="append", default=[])
    parser.add_argument("context", choices=["."])
    return parser


def run_parser() -> Strict:
    """What the page may say behind `docker run`."""
    parser = Strict("docker run", allow_abbrev=False)
    parser.add_argument("--rm", action="store_true", required=True)
    parser.add_argument("--read-only", action="store_true", required=True)
    parser.add_argument("--publish", required=True)
    parser.add_argument("--stop-timeout", type=int)
    for option in ("--volume", "--tmpfs", "--env"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("--gpus", choices=["all"])
    parser.add_argument("--shm-size", choices=["1g"])
    parser.add_argument("image")
    parser.add_argument("flags", nargs=argparse.REMAINDER)  # `test_docker` reads these
    return parser


def dockerfile() -> str:
    """The text of the one that the page builds from."""
    return (ROOT / "deploy/docker/Dockerfile").read_text()


def follow(commands: Sequence[str]) -> int:
    """Check the commands in their order. Returns how many there were; raises AssertionError for one not known."""
    tags: set[str] = set()
    volumes: set[str] = set()
    for command in commands:
        match shlex.split(command):
            case ["docker", "build", *words]:
                built = build_parser().parse_args(words)
                assert (ROOT / built.file).is_file(), built.file
                assert built.tag == f"lockstep:{built.target}"
                tags.add(built.tag)
            case ["docker", "volume", "create", name]:
                volumes.add(name)
            case ["docker", "run", *words]:
                started = run_parser().parse_args(words)
                assert started.image in tags, f"nothing above has built {started.image}"
                assert {volume.partition(":")[0] for volume in started.volume} <= volumes
                assert ("cuda" in started.image) == (started.gpus is not None)
            case ["docker", "ps"] | ["make", "test-docker"]:
                pass
            case ["curl", "127.0.0.1:3000/generate", "-X", "POST", *_]:
                pass  # `test_docker` compares it with the README's
            case _:
                raise AssertionError(f"no test knows {command!r}")
    return len(commands)


def test_every_command_is_known_and_names_what_exists() -> None:
    assert len(COMMANDS) == follow(COMMANDS)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {name for kind, name in map(str.split, [line for line in COMMANDS if line.startswith("make ")])} <= targets


def test_every_command_amid_the_text_is_known() -> None:
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert INLINE == set(re.findall(r"`((?:docker|chown|make) [^`]+)`", prose))


def test_docker_waits_for_longer_than_the_server() -> None:
    settings = public_settings()
    longest = settings["graceful_termination_timeout"].default + settings["shutdown_delay"].default
    assert f"`--graceful-termination-timeout` ({longest:g} s)" in PAGE
    patience = [int(seconds) for seconds in re.findall(r"--stop-timeout (\d+)", PAGE)]
    assert patience and min(patience) > longest


def test_what_one_sees_is_what_is_printed() -> None:
    """Each line of the page, but for times, the port, the host and the CPU."""
    warning, starts, backend, ready = [line for line in SEEN.splitlines() if line != "…"]
    source = (ROOT / "launcher.py").read_text()  # other machines could reach a server that prints the warning
    for part in ("other machines can reach ", " and there is no API key: ", "set API_KEY, or use --hostname 127.0.0.1"):
        assert part in warning and part in source, part
    with Server() as server:
        shown = "".join(server.lines)
    assert starts.partition("launcher: ")[2] in shown, shown
    assert re.search("^" + r" +".join(backend.split()[:2]) + " ", shown, re.MULTILINE), shown
    assert f"INFO launcher: {READY}" in ready.replace("0.0.0.0:3000", "") and READY in shown, shown
    assert re.search(r" after \d+\.\d s$", ready) and re.search(READY + r"\S+ after \d+\.\d s$", shown, re.MULTILINE)
