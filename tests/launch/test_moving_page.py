"""docs/moving.md says of every setting of TGI and of other servers' options what the code makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from launch.compatibility import peers
from launch.compatibility.tgi import SETTINGS, Fate, TgiSetting
from tests.pages import section
from tests.router.telemetry.test_metrics import LEFT_OUT, OURS, TGI
from tests.running import ROOT

MOST_WORDS = 1300
SETTINGS_SECTION = section("moving.md", "TGI's settings")


def plain(text: str) -> str:
    """Without the marks of code."""
    return text.replace("`", "")


def table(text: str, heading: str) -> dict[str, str]:
    """The rows of the table whose first column has this heading, without the marks of code."""
    rows = re.search(rf"^\| {re.escape(heading)} \|.*\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert rows is not None, heading
    return {
        plain(first): plain(second) for first, second in re.findall(r"^\| (.*?) \| (.*) \|$", rows[1], re.MULTILINE)
    }


def name(setting: TgiSetting) -> str:
    return setting.flag or setting.variable


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names with the same text beside them, as one row each."""
    names: dict[str, list[str]] = {}
    for own, text in pairs:
        names.setdefault(text, []).append(own)
    return {", ".join(own): plain(text) for text, own in names.items()}


def test_the_page_is_short() -> None:
    assert len((ROOT / "docs/moving.md").read_text().split()) <= MOST_WORDS


def test_what_is_taken_is_listed() -> None:
    listed = SETTINGS_SECTION.partition("as variables:")[2].partition("\n\n")[0]
    taken = [name(setting) for setting in SETTINGS.values() if setting.fate is Fate.TAKEN and not setting.default]
    assert taken == re.findall(r"`([^`]+)`", listed)


def test_defaults_of_tgi_are_those_of_the_table() -> None:
    expected = grouped((name(setting), setting.default) for setting in SETTINGS.values() if setting.default)
    assert expected == table(SETTINGS_SECTION, "TGI")


def test_reasons_are_those_of_the_table() -> None:
    for heading, fate in (("Changes nothing", Fate.IDLE), ("Refused", Fate.REFUSED)):
        expected = grouped((name(setting), setting.reason) for setting in SETTINGS.values() if setting.fate is fate)
        assert expected == table(SETTINGS_SECTION, heading)


def test_options_of_other_servers_are_those_of_the_table() -> None:
    rows = table(section("moving.md", "vLLM, SGLang and llama.cpp"), "Theirs")
    assert {", ".join(names.split()): plain(here) for names, here in peers.OPTIONS.items()} == rows


def test_metrics_are_there_or_said_to_be_missing() -> None:
    of_tgi = section("moving.md", "TGI's answers and metrics").partition("`/metrics` has TGI's names")[2]
    assert LEFT_OUT == set(re.findall(r"`(tgi_\w+)`", of_tgi))
    of_vllm = table(section("moving.md", "vLLM, SGLang and llama.cpp"), "`vllm:`")
    named = set(re.findall(r"tgi_\w+", " ".join(of_vllm.values())))
    assert len(named) > 10 and named <= (TGI.keys() | OURS.keys()) - LEFT_OUT
