"""Builds an image without Docker: a Dockerfile's steps in trees of files, on what debootstrap makes of Debian.

A stage is a folder, which begins as a copy of its base. RUN runs in it as root, in a mount namespace of its own; COPY
takes files of the context that .dockerignore leaves, or of another stage. Left out: layers, caches, other bases.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.deploy.container import Start
from tests.deploy.dockerfile import Image, Instruction, Stage, context_files, expanded, image_of, needed_for

RELEASES = {"11": "bullseye", "12": "bookworm", "13": "trixie"}
MIRROR = "http://deb.debian.org/debian"
# As in the image: apt keeps no package that it has installed, and dpkg installs no documentation.
NO_CACHE = 'APT::Keep-Downloaded-Packages "false";\nDir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n'
LEFT_OUT = ("/usr/share/doc", "/usr/share/info", "/usr/share/locale", "/usr/share/man")
OF_THE_HOST = ("/etc/resolv.conf", "/etc/hosts")  # Docker puts its own there while it builds


@dataclass(frozen=True)
class Builder:
    """Makes the trees of stages below `folder`.

    files: those of the context `root`; arguments: build arguments; environment and binds: what RUN has besides.
    """

    folder: Path
    root: Path
    files: Sequence[PurePosixPath]
    arguments: Mapping[str, str]
    environment: Mapping[str, str]
    binds: Mapping[str, str]

    def build(self, stages: Sequence[Stage], target: str, begin: Callable[[str, Path], None]) -> tuple[Path, Image]:
        """The tree of a target and what its container is told. begin: makes the tree of an image that is no stage.

        Raises CalledProcessError, ValueError.
        """
        for stage in needed_for(stages, target):
            tree, is_ours = self.folder / stage.name, stage.base in (other.name for other in stages)
            started = time.monotonic()
            (copy_tree(self.folder / stage.base, tree) if is_ours else begin(stage.base, tree))
            _say(stage, f"FROM {stage.base}", started)
            self._follow(stage, tree, image_of(stages, stage.base) if is_ours else Image())
        return self.folder / target, image_of(stages, target)

    def _follow(self, stage: Stage, tree: Path, image: Image) -> None:
        given: dict[str, str] = {}
        for step in stage.instructions:
            started = time.monotonic()
            if step.name == "ARG":
                values = expanded(step, {**image.env, **given})
                given |= {name: self.arguments.get(name, value) for name, value in values.items()}
            elif step.name == "RUN":
                self.run(step, tree, image, given)
            elif step.name == "COPY":
                self.copy(step, tree, image)
            image = image.after(step)
            place(tree, image.folder).mkdir(parents=True, exist_ok=True)
            _say(stage, f"{step.name} {step.arguments}", started)

    def run(self, step: Instruction, tree: Path, image: Image, given: Mapping[str, str]) -> None:
        """A RUN: its command in the tree, by a shell. Raises ValueError with the end of what it printed if it fails."""
        binds = {name: name for name in OF_THE_HOST} | dict(self.binds)
        env = {**self.environment, **given, **image.env, "DEBIAN_FRONTEND": "noninteractive", "HOME": "/root"}
        start = Start(str(tree), ("/bin/sh", "-c", step.arguments), env, image.folder, image.user, binds)
        argv = start.argv(self.folder / "start.json")
        log = self.folder / "log"
        with log.open("w") as output:
            code = subprocess.run(argv, stdout=output, stderr=subprocess.STDOUT).returncode
        if code:
            raise step.refuse(f"ended with code {code}:\n{log.read_text()[-3000:]}")

    def copy(self, step: Instruction, tree: Path, image: Image) -> None:
        """A COPY: files of the context or of another stage. Raises ValueError if there are none of that name."""
        *sources, wanted = step.words(2)
        is_folder = wanted.endswith("/") or len(sources) > 1
        target = place(tree, str(PurePosixPath(image.folder, wanted)))
        for source in sources:
            if stage := step.flags.get("from"):
                copy_tree(place(self.folder / stage, source), target)
                continue
            copies = self._of_context(PurePosixPath(source), target, is_folder)
            if not copies:
                raise step.refuse(f"the context, less what .dockerignore leaves out, has no {source}")
            for copy, original in copies.items():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(original, copy)

    def _of_context(self, source: PurePosixPath, target: Path, is_folder: bool) -> dict[Path, Path]:
        """Where each file goes: those of a folder into the target, a single one to it, or into it if it is a folder."""
        if source in self.files:
            return {(target / source.name if is_folder else target): self.root / source}
        inside = [path for path in self.files if path.is_relative_to(source)]
        return {target / path.relative_to(source): self.root / path for path in inside}


def place(tree: Path, path: str) -> Path:
    """A place of a tree on the host. Raises ValueError if links would lead out of it."""
    found = (tree / path.lstrip("/")).resolve()
    if not found.is_relative_to(tree.resolve()):
        raise ValueError(f"{path} leads out of {tree}")
    return found


def copy_tree(source: Path, target: Path) -> None:
    """A copy with owners, modes, links and devices; into the target if it is there. Raises CalledProcessError."""
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "--archive", "--reflink=auto", f"{source}/.", str(target)], check=True)


def bootstrap(image: str, tree: Path) -> None:
    """What debootstrap makes for an image `debian:12…`, with updates. Raises ValueError for others."""
    match = re.fullmatch(r"debian:(\d+)\.\d+-slim", image)
    if match is None or match[1] not in RELEASES:
        raise ValueError(f"{image}: only debian:N.M-slim is made here, with N of {', '.join(RELEASES)}")
    mirror, release = mirror_of_host(), RELEASES[match[1]]
    command = ["debootstrap", "--variant=minbase", release, str(tree), mirror]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise ValueError(f"{' '.join(command)} ended with code {result.returncode}:\n{result.stdout[-3000:]}")
    archives = (f"{mirror} {release}", f"{mirror} {release}-updates", f"{mirror}-security {release}-security")
    (tree / "etc/apt/sources.list").write_text("".join(f"deb {archive} main\n" for archive in archives))
    (tree / "etc/apt/apt.conf.d/no-cache").write_text(NO_CACHE)
    (tree / "etc/dpkg/dpkg.cfg.d/no-documentation").write_text("".join(f"path-exclude {path}/*\n" for path in LEFT_OUT))
    for path in (*LEFT_OUT, "/var/cache/apt", "/var/lib/apt/lists"):
        shutil.rmtree(tree / path[1:], ignore_errors=True)


def mirror_of_host(folder: Path = Path("/etc/apt")) -> str:
    """The mirror of Debian that this machine takes its packages from, else Debian's own."""
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    text = "\n".join(path.read_text() for path in files if path.is_file() and path.suffix in (".list", ".sources"))
    found = re.search(r"^(?:URIs:|deb(?: \[.*\])?)\s+(\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
    return found[1] if found else MIRROR


def pip_of_host(settings: str) -> tuple[dict[str, str], dict[str, str]]:
    """This machine's configuration of pip, as environment and binds for a tree; what it names is found below /mnt.

    settings: what `pip config list` prints.
    """
    environment, binds = {}, {}
    for name, value in re.findall(r"^(?::env:|[a-z]+)\.([a-z-]+)='(.*)'$", settings, re.MULTILINE):
        words = value.split()
        for position, word in enumerate(words):
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                top = Path(*path.parts[:3]) if path.is_dir() else path  # its pages name files beside them
                binds[f"/mnt{top}"] = str(top)
                words[position] = word.replace(str(path), f"/mnt{path}")
        environment[f"PIP_{name.upper().replace('-', '_')}"] = " ".join(words)
    return environment, binds


def remove(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """Remove the trees, unless something is mounted below them: then nothing is, and a RuntimeError says so."""
    mounted = [line.split()[4] for line in mounts.read_text().splitlines()]
    if held := [place for place in mounted if Path(place).is_relative_to(folder.resolve())]:
        raise RuntimeError(f"{held[0]} is still mounted: unmount it, then remove {folder}")
    shutil.rmtree(folder)


def context_of(root: Path) -> list[PurePosixPath]:
    """The files that a build of this checkout gets."""
    return context_files(root, (root / ".dockerignore").read_text())


def _say(stage: Stage, what: str, started: float) -> None:
    shown = what if len(what) < 80 else f"{what[:79]}…"
    if (seconds := time.monotonic() - started) >= 0.05:
        print(f"{seconds:6.1f} s  {stage.name}: {shown}", flush=True)
