"""Runs every client against a live server: `python -m tests.clients [NAME …]`, which is `make test-clients`.

A client is a file `with_NAME.py` of tests, and `NAME.txt` with what pip installs for it. Each has an environment of its
own in `.venv-clients/NAME`, made anew when the text file changes. The server is the embedded model behind an API key.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.environments import environment
from tests.running import ROOT, Server

HERE = Path(__file__).parent
KEY = "client-key"
PLACES = 8  # so that `n` or `best_of` of more than that are told that there is no room
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def main() -> int:
    """Returns 0 if all tests of all clients pass."""
    known = sorted(path.stem.removeprefix("with_") for path in HERE.glob("with_*.py"))
    parser = argparse.ArgumentParser(prog="tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all if none is given")
    names = parser.parse_args().names or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"there is no client {unknown[0]}: {', '.join(known)}")
    pythons = {name: environment(ROOT / ".venv-clients" / name, HERE / f"{name}.txt") for name in names}
    template = ROOT / ".venv-clients" / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--max-concurrent-requests", str(PLACES), "--max-best-of", "16", "--api-key", KEY)
    with Server(*flags, "--chat-template", str(template)) as server:
        failed = [name for name, python in pythons.items() if not _passes(name, python, server.url)]
    print(f"failed: {', '.join(failed)}" if failed else f"{len(names)} clients work")
    return 1 if failed else 0


def _passes(name: str, python: Path, url: str) -> bool:
    print(f"{name}:", flush=True)
    alone = ("--noconftest", "--config-file", os.devnull, "--rootdir", HERE, "-p", "no:cacheprovider")
    environment = {"PATH": os.environ["PATH"], "SERVER_URL": url, "SERVER_KEY": KEY}
    return not subprocess.run(
        (python, "-m", "pytest", "-q", *alone, HERE / f"with_{name}.py"), env=environment
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
