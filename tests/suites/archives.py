"""Source archives of packages, from the index that pip uses: they stay below `.suites`, and are fetched once."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.running import ROOT

FOLDER = ROOT / ".suites"
PUBLIC_INDEX = "https://pypi.org/simple"
LLAMA_CPP = ("llama-cpp-python", "0.3.36")


def index() -> str:
    """The package index that pip uses."""
    command = (sys.executable, "-m", "pip", "config", "get", "global.index-url")
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or PUBLIC_INDEX


def archive(name: str, version: str) -> Path:
    """The source archive of a package, whose digest is the index's."""
    wanted = f"{name.replace('-', '_')}-{version}.tar.gz"
    path = FOLDER / wanted
    if not path.exists():
        request = urllib.request.Request(
            f"{index().rstrip('/')}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            files = json.load(answer)["files"]
        [file] = [one for one in files if one["filename"] == wanted]
        with urllib.request.urlopen(file["url"], timeout=300) as answer:
            content = answer.read()
        assert hashlib.sha256(content).hexdigest() == file["hashes"]["sha256"]
        FOLDER.mkdir(exist_ok=True)
        path.write_bytes(content)
    return path


def members(path: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """The names and texts of an archive's files whose names match."""
    with tarfile.open(path) as files:
        for member in files:
            if member.isfile() and re.search(pattern, member.name) and (file := files.extractfile(member)):
                yield member.name, file.read().decode()
