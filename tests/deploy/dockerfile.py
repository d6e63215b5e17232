"""A Dockerfile as data: the part of the language that ours is written in. Whatever else there is, is refused.

What each stage leaves for a container (`Image`) is worked out without running anything; `chroot.py` runs the rest.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from string import Template

# The flags of each instruction. Left out: the others of Docker's.
FLAGS: dict[str, frozenset[str]] = {
    "COPY": frozenset({"from"}),
    "HEALTHCHECK": frozenset({"interval", "timeout", "start-period", "start-interval", "retries"}),
} | dict.fromkeys(
    ("FROM", "ARG", "ENV", "RUN", "USER", "WORKDIR", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD", "STOPSIGNAL"), frozenset()
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Instruction:
    """One instruction. flags: those before its arguments; line: where it begins."""

    name: str
    arguments: str
    flags: Mapping[str, str]
    line: int

    def refuse(self, why: str) -> ValueError:
        """An error about this instruction."""
        return ValueError(f"line {self.line}: {self.name} {self.arguments}: {why}")

    def words(self, least: int = 1, most: int | None = None) -> list[str]:
        """The arguments apart, without quotes. Raises ValueError if there are too few or too many."""
        words = shlex.split(self.arguments)
        if not least <= len(words) <= (most or len(words)):
            raise self.refuse(f"{len(words)} arguments are not what it takes")
        return words

    def exec_form(self) -> tuple[str, ...]:
        """The arguments as the JSON list that they must be."""
        try:
            found = json.loads(self.arguments)
        except json.JSONDecodeError:
            raise self.refuse("only the exec form, a JSON list, is read") from None
        if not (isinstance(found, list) and all(isinstance(word, str) for word in found)):
            raise self.refuse("its list holds other things than strings")
        return tuple(found)

    def pairs(self) -> dict[str, str]:
        """The arguments `NAME=VALUE` of ENV and ARG."""
        pairs = [word.partition("=") for word in self.words()]
        if not all(sign for _, sign, _ in pairs):
            raise self.refuse("a value is missing: write NAME=VALUE")
        return {name: value for name, _, value in pairs}


@dataclass(frozen=True)
class Stage:
    """A FROM and what follows it. base: an image's name, or that of a stage before."""

    base: str
    name: str
    instructions: tuple[Instruction, ...]

    def of(self, name: str) -> list[Instruction]:
        """Its instructions of that name."""
        return [instruction for instruction in self.instructions if instruction.name == name]


def parse(text: str) -> tuple[Stage, ...]:
    """The stages of a Dockerfile, in order. Raises ValueError for what is not of the subset."""
    stages: list[Stage] = []
    for instruction in _instructions(text):
        if instruction.name == "FROM":
            words = instruction.words(3, 3)
            if words[1].upper() != "AS" or words[2] in (stage.name for stage in stages):
                raise instruction.refuse("each stage is FROM image AS a-name-of-its-own")
            stages.append(Stage(words[0], words[2], ()))
        elif not stages:
            raise instruction.refuse("nothing stands before the first FROM")
        else:
            stages[-1] = replace(stages[-1], instructions=(*stages[-1].instructions, instruction))
    return tuple(stages)


def _instructions(text: str) -> Iterator[Instruction]:
    """Each instruction, its lines joined; comments are left out, those amid it too."""
    begun, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or joined):
            continue
        begun = begun if joined else number
        joined += line.strip().removesuffix("\\")
        if not line.endswith("\\"):
            yield _instruction(joined, begun)
            joined = ""
    if joined:
        raise ValueError(f"line {begun}: the last line goes on")


def _instruction(text: str, line: int) -> Instruction:
    name, _, rest = text.partition(" ")
    flags: dict[str, str] = {}
    while match := re.match(r"\s*--([a-z-]+)=(\S+)\s+", rest):
        flags[match[1]] = match[2]
        rest = rest[match.end() :]
    made = Instruction(name, " ".join(rest.split()) if name != "RUN" else rest.strip(), flags, line)
    if name not in FLAGS:
        raise made.refuse(f"only {', '.join(FLAGS)} are read")
    if unknown := set(flags) - FLAGS[name]:
        raise made.refuse(f"the flag --{min(unknown)} is not read")
    if not made.arguments or made.arguments.startswith("--"):
        raise made.refuse("its arguments are missing, or a flag has no value")
    return made


# --------------------------------------------------------------------------------------------------------------- images


@dataclass(frozen=True)
class Image:
    """What a stage tells whoever starts a container of it."""

    env: Mapping[str, str] = field(default_factory=lambda: {"PATH": PATH})
    user: str = "0:0"
    folder: str = "/"
    volumes: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    stop_signal: str = "SIGTERM"
    health: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def after(self, instruction: Instruction) -> Image:
        """The image with what an instruction sets; RUN, COPY and ARG set nothing of it."""
        match instruction.name:
            case "ENV":
                known = self.env  # as before the instruction, for all of its values
                return replace(self, env={**known, **expanded(instruction, known)})
            case "USER":
                return replace(self, user=instruction.words(1, 1)[0])
            case "WORKDIR":
                return replace(self, folder=str(PurePosixPath(self.folder, instruction.words(1, 1)[0])))
            case "VOLUME":
                return replace(self, volumes=(*self.volumes, *instruction.exec_form()))
            case "EXPOSE":
                return replace(self, ports=(*self.ports, *map(int, instruction.words())))
            case "STOPSIGNAL":
                return replace(self, stop_signal=instruction.words(1, 1)[0])
            case "HEALTHCHECK":
                kind, _, rest = instruction.arguments.partition(" ")
                if kind != "CMD":
                    raise instruction.refuse("its command begins with CMD")
                return replace(self, health=replace(instruction, arguments=rest).exec_form())
            case "ENTRYPOINT":
                return replace(self, entrypoint=instruction.exec_form())
            case "CMD":
                return replace(self, command=instruction.exec_form())
        return self


def expanded(instruction: Instruction, known: Mapping[str, str]) -> dict[str, str]:
    """The pairs of an ENV or ARG, with `$NAME` replaced. Raises ValueError for a name that nothing has set."""
    try:
        return {name: Template(value).substitute(known) for name, value in instruction.pairs().items()}
    except (KeyError, ValueError) as error:
        raise instruction.refuse(f"{error} is not known here") from None


def image_of(stages: Sequence[Stage], name: str) -> Image:
    """What a container of that stage is told. Raises KeyError if there is no such stage."""
    named = {stage.name: stage for stage in stages}
    stage = named[name]
    image = image_of(stages, stage.base) if stage.base in named else Image()
    for instruction in stage.instructions:
        image = image.after(instruction)
    return image


def needed_for(stages: Sequence[Stage], target: str) -> list[Stage]:
    """The stages that a target is made of, in the order of the file."""
    named = {stage.name: stage for stage in stages}
    wanted, found = [target], set()
    while wanted:
        if (name := wanted.pop()) in named and name not in found:
            found.add(name)
            wanted += [named[name].base, *(copy.flags.get("from", "") for copy in named[name].of("COPY"))]
    return [stage for stage in stages if stage.name in found]


# -------------------------------------------------------------------------------------------------------------- context


def context_files(root: Path, ignore: str) -> list[PurePosixPath]:
    """The files of a build's context, relative to `root`. ignore: its .dockerignore, whose last line that fits says."""
    rules = [line.strip() for line in ignore.splitlines() if line.strip() and not line.startswith("#")]
    return sorted(_kept(root, PurePosixPath(), rules))


def _kept(root: Path, folder: PurePosixPath, rules: Sequence[str]) -> Iterator[PurePosixPath]:
    for path in (root / folder).iterdir():
        relative = folder / path.name
        if path.is_dir() and not path.is_symlink():
            if _is_kept(relative, rules) or any(_is_inside(relative, rule) for rule in rules):
                yield from _kept(root, relative, rules)
        elif _is_kept(relative, rules):
            yield relative


def _is_inside(folder: PurePosixPath, rule: str) -> bool:
    """Whether an exception names something in that folder."""
    return rule.startswith("!") and rule[1:].startswith(f"{folder}/")


def _is_kept(path: PurePosixPath, rules: Sequence[str]) -> bool:
    names = [str(path), *map(str, path.parents)]
    verdict = True
    for rule in rules:
        pattern = rule.removeprefix("!")
        anywhere = pattern.removeprefix("**/")
        if any(
            fnmatch.fnmatchcase(PurePosixPath(name).name, anywhere) if anywhere != pattern else _fits(name, pattern)
            for name in names
        ):
            verdict = rule.startswith("!")
    return verdict


def _fits(name: str, pattern: str) -> bool:
    """Docker's `*` stays within a folder."""
    if "**" in pattern:
        raise ValueError(f".dockerignore: {pattern}: ** is read at the beginning alone")
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)
