"""The page of a report: everything is in it, nothing is loaded, and nothing that a server says becomes HTML."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmark.report import pictures, publishing
from benchmark.report.publishing import published
from benchmark.result import BenchError, Result, table
from tests.benchmark.report.test_pictures import latency_rows
from tests.benchmark.report.test_result import context

EVIL = '<script>alert(1)</script><img src="http://127.0.0.1/x">'


class Seen(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def picture(folder: Path) -> pictures.Picture:
    pytest.importorskip("matplotlib")
    return pictures.plot_latency(latency_rows(5.0), folder / "latency.png", "a model on a machine")


def test_tables_pictures_and_arguments_are_in_one_file(tmp_path: Path) -> None:
    drawn = picture(tmp_path)
    markdown = f"# A model\n\n{table(('In', 'Out'), [[1, 2], [3, 4]])}\n\n- a remark\n- **another**"
    found = publishing.Page("latency: a model", ["about it"], [drawn], markdown, [("batch_size", "[1, 2]")])
    publishing.write_page(found, tmp_path)
    seen = Seen((tmp_path / publishing.PAGE_NAME).read_text())
    assert (seen.count("table"), seen.count("img"), seen.count("li"), seen.count("h1")) == (2, 1, 2, 1)
    assert seen.count("h2") == 1  # the report's own heading
    assert "batch_size" in seen.text
    [image] = [attributes for tag, attributes in seen.tags if tag == "img"]
    assert (image["src"] or "").startswith("data:image/png;base64,")
    assert image["alt"] == drawn.caption
    assert "a model on a machine" in drawn.caption


def test_nothing_is_loaded_from_anywhere_and_nothing_runs(tmp_path: Path) -> None:
    cell = table(("Model",), [[EVIL]])
    markdown = f"# {EVIL}\n\n{cell}\n\n- {EVIL} ![x](http://127.0.0.1/y.png) [x](javascript:alert(1))"
    text = publishing.rendered_page(publishing.Page(EVIL, [EVIL], [], markdown, [(EVIL, EVIL)]))
    seen = Seen(text)
    assert seen.count("script") == seen.count("img") == seen.count("link") == seen.count("iframe") == 0
    assert not [href for _, attributes in seen.tags if (href := attributes.get("href") or "").startswith("javascript")]
    [policy] = [
        a["content"] for tag, a in seen.tags if tag == "meta" and "Content-Security" in (a.get("http-equiv") or "")
    ]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_a_run_leaves_its_page_and_its_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Result(context())

    def draw(_: Result, folder: Path) -> list[pictures.Picture]:
        return [picture(folder)]

    with published(result, lambda _: "| a |\n|---|\n| 1 |", tmp_path, draw) as keep:
        result.rows.append({"step": "prefill"})
        keep()
        assert not (tmp_path / publishing.PAGE_NAME).exists()
    seen = Seen((tmp_path / publishing.PAGE_NAME).read_text())
    assert (seen.count("img"), seen.count("td")) == (1, 1 + sum(bool(v) for v in result.context.arguments.values()))


def test_an_interrupted_run_has_a_page_that_says_so(tmp_path: Path) -> None:
    result = Result(context())
    with pytest.raises(BenchError), published(result, lambda _: "text", tmp_path):
        result.rows.append({"step": "prefill"})
        raise BenchError("the server was lost")
    assert "Incomplete: the server was lost" in (tmp_path / publishing.PAGE_NAME).read_text()


def test_without_the_library_there_is_a_warning_and_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    publishing.write_page(publishing.Page("title", [], [], "text"), tmp_path)
    assert not (tmp_path / publishing.PAGE_NAME).exists()
    assert "pip install 'lockstep[bench]'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot write .*report.html: .*; give another --output"):
        publishing.write_page(publishing.Page("title", [], [], "text"), tmp_path / "missing")
