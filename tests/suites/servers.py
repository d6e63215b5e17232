"""Other servers' tests, and those of OpenAI's and Anthropic's own clients, against a live Lockstep.

The tests come from the packages' source archives and are run as they are; `reach/` changes how a server is reached.
What does not pass must stand in `known/NAME.txt`, each line of which is

    reason | test | what it says | why

with patterns for the test and for what it says. The reasons are `weights` (the embedded model does not say what the
test's own model says, or cannot: images), `in-process` (it calls the other server's Python), `theirs` (a route, a
setting, a parameter or the wording of one server alone) and `published` (OpenAI's or Anthropic's published API says
otherwise). A failure that no line knows, or a line other than of `weights` that knows no failure, is told, and fails.

SGLang's source archive carries none of the tests of its server.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from xml.etree import ElementTree

from tests.environments import environment
from tests.running import ROOT, Server
from tests.suites.archives import FOLDER, LLAMA_CPP, archive, members

HERE = Path(__file__).parent
REASONS = ("weights", "in-process", "theirs", "published")
LIMITS = ("--max-input-tokens", "2000", "--max-total-tokens", "2048", "--max-concurrent-requests", "64")
MODEL = ROOT / "server" / "demo"
PATIENCE_S = 600


@dataclass(frozen=True)
class Suite:
    """The tests of one package that speak with a server."""

    package: tuple[str, str]
    tests: str  # what of the archive belongs to them, as an expression whose first group is the path here
    run: tuple[str, ...]  # what pytest is to read
    asks: str = ""  # of files, only those in which this is found
    flags: tuple[str, ...] = ()


SUITES = {
    "vllm": Suite(
        ("vllm", "0.33.0"),
        r"^[^/]*/(tests/(?:__init__\.py|entrypoints/(?:__init__|conftest)\.py|tool_use/.*"
        r"|entrypoints/(?:openai|anthropic)/.*|entrypoints/serve/(?:__init__\.py|(?:tokenize|instrumentator)/.*)))$",
        ("tests",),
        r"RemoteOpenAIServer|client: (openai\.)?(OpenAI|AsyncOpenAI)",
        ("-p", "reach_vllm", "-c", os.devnull, "--rootdir", "."),
    ),
    "llama_cpp": Suite(
        LLAMA_CPP,
        r"/vendor/llama\.cpp/tools/server/tests/(.*)$",
        ("unit",),
        flags=("-p", "reach_llama_cpp"),
    ),
    "openai": Suite(
        ("openai", "3.57.0"),
        r"^[^/]*/(tests/.*\.py|pyproject\.toml)$",
        (
            "tests/api_resources/chat",
            "tests/api_resources/responses",
            "tests/api_resources/test_completions.py",
            "tests/api_resources/test_models.py",
            "tests/api_resources/test_responses.py",
        ),
    ),
    "anthropic": Suite(
        ("anthropic", "2.14.0"),
        r"^[^/]*/(tests/.*\.py|pyproject\.toml)$",
        (
            "tests/api_resources/messages",
            "tests/api_resources/test_messages.py",
            "tests/api_resources/test_models.py",
        ),
    ),
}


@dataclass(frozen=True)
class Line:
    """A failure that is known: why, and of which tests."""

    reason: str
    test: str
    says: str

    def knows(self, test: str, said: str) -> bool:
        """Is it this failure?"""
        return fnmatchcase(test, self.test) and fnmatchcase(said, f"*{self.says}*")


def known(name: str) -> list[Line]:
    """The lines of a suite's list."""
    found = []
    for text in (HERE / "known" / f"{name}.txt").read_text().splitlines():
        if text and not text.startswith("#"):
            reason, test, says, _ = (part.strip() for part in text.split(" | "))
            assert reason in REASONS, f"{reason} is none of {', '.join(REASONS)}"
            # Tests' names have brackets, which patterns must not read.
            found.append(Line(reason, test.replace("[", "[[]"), says.replace("[", "[[]")))
    return found


def all_are_known(names: Sequence[str]) -> bool:
    """Run the suites of these names, and print what became of their tests."""
    python = environment(FOLDER / "environment", HERE / "requirements.txt")
    with Server(*LIMITS) as server:
        known_ones = [_is_known(name, SUITES[name], python, server.url) for name in names]
    return all(known_ones)


def _is_known(name: str, suite: Suite, python: Path, url: str) -> bool:
    lines = known(name)
    count, used, new = Counter[str](), set[Line](), []
    for test, said in _outcomes(name, suite, python, url):
        line = next((line for line in lines if line.knows(test, said)), None) if said else None
        count["passed" if not said else line.reason if line else "NOT KNOWN"] += 1
        if line:
            used.add(line)
        elif said:
            new.append(f"{test}: {said[:300]}")
    print(f"{name} {suite.package[1]}:", ", ".join(f"{number} {what}" for what, number in count.most_common()))
    idle = [line for line in lines if line not in used and line.reason != "weights"]
    for sentence in new:
        print(f"  fails: {sentence}")
    for line in idle:
        print(f"  no longer fails: {line.test} | {line.says}")
    return bool(count["passed"]) and not new and not idle


def _outcomes(name: str, suite: Suite, python: Path, url: str) -> Iterator[tuple[str, str]]:
    """Each test that ran, and what it said if it failed."""
    folder = FOLDER / name
    _unpack(suite, folder)
    found = folder / "found.xml"
    found.unlink(missing_ok=True)
    usual = ("-q", "--tb=line", "-W", "ignore", "-o", "addopts=", "-o", "junit_family=xunit1", f"--junitxml={found}")
    others = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(HERE / "reach"),
        "SERVER_URL": url,
        "SERVER_MODEL": str(MODEL),
        "TEST_API_BASE_URL": f"{url}/v1" if name == "openai" else url,
    }
    log = folder / "log.txt"
    with log.open("w") as output:
        subprocess.run(
            (python, "-m", "pytest", *usual, "--continue-on-collection-errors", *suite.flags, *_files(suite, folder)),
            cwd=folder,
            env=others,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
        )
    assert found.exists(), f"{name} did not run: {log.read_text()[-2000:]}"
    for case in ElementTree.parse(found).iter("testcase"):
        if case.find("skipped") is None:
            said = [error.get("message") or "it said nothing" for error in (*case.iter("failure"), *case.iter("error"))]
            yield f"{case.get('file') or case.get('classname')}::{case.get('name')}", " ".join(" ".join(said).split())


def _unpack(suite: Suite, folder: Path) -> None:
    for path, text in members(archive(*suite.package), suite.tests):
        match = re.search(suite.tests, path)
        assert match is not None
        target = folder / match.group(1)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def _files(suite: Suite, folder: Path) -> list[str]:
    """What pytest is to read: whole folders, or those files of them that ask a server."""
    if not suite.asks:
        return [*suite.run]
    paths = (path for place in suite.run for path in sorted((folder / place).rglob("test_*.py")))
    return [str(path.relative_to(folder)) for path in paths if re.search(suite.asks, path.read_text())]
