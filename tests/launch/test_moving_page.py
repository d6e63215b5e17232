"""docs/moving.md says of every setting of TGI and of other servers' options what the code makes of it."""

from __future__ import annotations

import re

from transformers.models.auto import modeling_auto

from launch.compatibility import peers
from launch.compatibility.tgi import SETTINGS, Fate
from server.arch.families import FAMILIES
from tests.pages import section
from tests.router.telemetry.test_metrics import LEFT_OUT, OURS, TGI, typed
from tests.running import ROOT

PAGE = (ROOT / "docs/moving.md").read_text().replace("`", "")


def rows(of: str) -> dict[str, str]:
    """The second column by each name in the first, of all tables, without the marks of code."""
    found = re.findall(r"^\| (.*?) \| (.*) \|$", of.replace("`", ""), re.MULTILINE)
    return {name: second for first, second in found for name in first.split(", ")}


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) <= 1300


def test_every_setting_and_option_has_its_row() -> None:
    differ = {setting.flag or setting.variable: setting for setting in SETTINGS.values()}
    expected = {name: s.default or s.reason for name, s in differ.items() if s.default or s.fate is not Fate.TAKEN}
    theirs = peers.OPTIONS | peers.VARIABLES
    expected |= {name: here for names, here in theirs.items() for name in names.split()}
    expected = {name: text.replace("`", "") for name, text in expected.items()}
    assert expected == {name: text for name, text in rows(PAGE).items() if name in expected}


def test_families_that_are_missing_are_missing() -> None:
    missing, _, left = section("moving.md", "TGI's models").partition("Left to `transformers`")
    images, elsewhere = ({*re.findall(r"`(\w+)`", text)} for text in (missing.partition(")")[0], left))
    known = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    assert len(images) == 8 and len(elsewhere) == 3
    assert not images & (known | FAMILIES.keys()) and elsewhere <= known - FAMILIES.keys()


def test_metrics_are_there_or_said_to_be_missing() -> None:
    of_tgi = section("moving.md", "TGI's answers and metrics").partition("`/metrics` has TGI's names")[2]
    assert LEFT_OUT == set(re.findall(r"`(tgi_\w+)`", of_tgi))
    of_vllm = rows(section("moving.md", "vLLM, SGLang and llama.cpp").partition("| `vllm:` |")[2])
    named = set(re.findall(r"tgi_\w+", " ".join(of_vllm.values())))
    assert len(named) > 10 and named <= (typed(TGI).keys() | typed(OURS).keys()) - LEFT_OUT
