"""What pages for people say: every page is found from the README, and commands can be typed as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.settings import flag, public_settings
from tests.pages import section
from tests.running import ROOT
from tests.test_architecture import ROOMS

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "tests/embedded_model/README.md"]
HELP = "settings.md"  # made of the help texts, in which `lockstep` is the installed command
BARE = re.compile(r"(?:^|`)((?:lockstep(?:-bench)? (?=[a-z-])|python3? (?=launcher\.py|-m )).*)", re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != HELP], ids=lambda page: page.stem)
def test_commands_are_found_after_the_steps_of_the_readme(page: Path) -> None:
    """Nothing is on the PATH after `make serve`: `.venv/bin/` stands before each of them."""
    assert [] == BARE.findall(page.read_text())


def test_every_page_is_linked_from_the_readme() -> None:
    """A page about what Lockstep does; those about the project itself are linked from others."""
    silent = {page.name for page in (ROOT / "docs").glob("*.md") if f"](docs/{page.name}" not in README}
    assert set() == silent


def test_the_readme_says_what_runs_that_does_not_fit_into_memory() -> None:
    found = set(re.findall(r"--(?:weights|kv|offload|prefix)-[a-z-]+", README))
    names = {"weights_on_device", "kv_on_device", "offload_dir", "prefix_cache_disk_gb", "prefix_cache_dir"}
    assert {flag(name) for name in names} <= found <= {flag(name) for name in public_settings()}
    page, heading = "docs/operating.md", "The prefix cache on the host and on disk"
    assert f"]({page}#{heading.lower().replace(' ', '-')})" in README
    assert f"\n## {heading}\n" in (ROOT / page).read_text()


def anchors(page: Path) -> set[str]:
    """What a link may name behind `#`: the headings of a page, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda page: page.stem,
)
def test_links_lead_to_pages_and_headings_that_are_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text())
    found = [((page.parent / path).resolve() if path else page, anchor) for path, anchor in links]
    assert [] == [
        (str(path), anchor) for path, anchor in found if not path.exists() or (anchor and anchor not in anchors(path))
    ]


def test_the_design_lists_the_rooms_in_their_order() -> None:
    """By its tables, of which some are of a house: "Room of `server`"."""
    listed, house = [], ""
    for line in section("design.md", "The rooms").splitlines():
        if heading := re.match(r"\| Room(?: of `(\w+)`)? ", line):
            house = heading[1] or ""
        elif room := re.match(r"\| `(\w+)` ", line):
            listed.append(room[1] if house in ("", room[1]) else f"{house}.{room[1]}")
    assert list(ROOMS) == listed


def test_what_the_design_names_is_there() -> None:
    paths = re.findall(r"`([\w./-]+/[\w.-]*)`", (ROOT / "docs/design.md").read_text())
    assert len(paths) > 40 and [] == [path for path in paths if not (ROOT / path).exists()]


def test_decisions_have_the_numbers_of_their_files() -> None:
    pages = sorted((ROOT / "docs/decisions").glob("0*.md"))
    assert len(pages) >= 30
    assert [] == [page.name for page in pages if not page.read_text().startswith(f"# {page.name[:4]}: ")]
