"""How a command's result reaches people: printed, kept on the disk while it grows, and at its end drawn and on a page.

What was measured is never lost, whatever fails afterwards: tables are printed before anything is written, and pictures
and the page come last, because everything in them can be made again from the result's JSON. The page is one HTML file
that can be sent to somebody and opened without a network: the report's own Markdown, rendered by markdown-it-py, an
optional dependency. Nothing is loaded from anywhere: pictures are in the page, and its content policy forbids the rest,
scripts too. What a server calls its model ends up here, so no HTML of the Markdown is let through.
"""

from __future__ import annotations

import asyncio
import html
import importlib
import json
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.report import pictures
from benchmark.report.pictures import Picture
from benchmark.result import BenchError, Result, save, show, write_atomically

Draw = Callable[[Result, Path], Sequence[Picture]]


def publish(result: Result, markdown: str, output_dir: Path | None) -> None:
    """Print the tables, then the result as one JSON object on the last line, and write both to the folder.

    Everything is printed before anything is written, so that a full disk cannot cost a measurement; it is written even
    if whoever reads the tables has left. Raises BenchError.
    """
    show(markdown, json.dumps(result.to_json(), allow_nan=False), output_dir and output_dir / "result.json")
    save(result, markdown, output_dir)


@contextmanager
def published(
    result: Result, render: Callable[[Result], str], output_dir: Path | None, draw: Draw | None = None
) -> Iterator[Callable[[], None]]:
    """Publish the result when the block ends, and what there is of it when the block fails or is interrupted.

    Yields a function to call after each row: it saves the rows so far, for whoever is killed. A disk that is full then
    is no reason to stop measuring: it is reported at the end. draw: makes the result's pictures in a folder.
    """
    draws = draw is not None and pictures.wanted(output_dir)

    def keep() -> None:
        try:
            save(result, render(result), output_dir)
        except BenchError as error:
            print(f"warning: {error}", file=sys.stderr)

    def end() -> None:
        publish(result, text := render(result), output_dir)
        if output_dir is not None:
            pictures = draw(result, output_dir) if draw is not None and draws else ()
            write_page(page_of(result, text, pictures), output_dir)

    try:
        yield keep
    except (BenchError, KeyboardInterrupt, asyncio.CancelledError) as error:  # Ctrl-C cancels what asyncio runs
        result.failure = str(error) or "interrupted"
        if result.rows:
            end()
        raise
    end()


# ----------------------------------------------------------------------------------------------------------------- page


PAGE_NAME = "report.html"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light; font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #ffffff; }
body { margin: 0 auto; padding: 1.5rem 2rem 4rem; max-width: 1216px; }
h1, h2, h3, h4 { line-height: 1.25; margin: 2rem 0 0.75rem; }
h1 { margin-top: 0; }
header p { color: #4a4a4a; margin: 0.25rem 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.8rem; font-variant-numeric: tabular-nums; margin: 0.75rem 0; }
th, td { border: 1px solid #c8c8c8; padding: 0.25rem 0.5rem; text-align: left; overflow-wrap: break-word; }
th { background: #f0f0f0; vertical-align: bottom; }
tbody tr:nth-child(even) { background: #f8f8f8; }
figure { margin: 1.5rem 0; }
figure img { max-width: 100%; height: auto; display: block; }
figcaption { color: #4a4a4a; font-size: 0.85rem; }
li { overflow-wrap: anywhere; }
details { margin: 1rem 0; }
summary { cursor: pointer; }
"""


@dataclass(frozen=True)
class Page:
    """What a page says, from top to bottom. arguments: of the command, to measure the same again."""

    title: str
    about: Sequence[str]
    pictures: Sequence[Picture]
    markdown: str
    arguments: Sequence[tuple[str, str]] = ()


def page_of(result: Result, markdown: str, pictures: Sequence[Picture]) -> Page:
    """The page of a measurement. markdown: its report."""
    context = result.context
    about = [*([f"Incomplete: {result.failure}"] if result.failure else []), *context.lines()]
    given = [(name, str(value)) for name, value in context.arguments.items() if value not in (None, [], "")]
    return Page(f"{context.command}: {context.model} on {context.machine}", about, pictures, markdown, given)


def write_page(page: Page, folder: Path) -> None:
    """Write `report.html`, whole or not at all. Without markdown-it-py there is a warning and no page.

    Raises BenchError where the folder cannot be written.
    """
    try:
        importlib.import_module("markdown_it")
    except ImportError:
        print("warning: report.html needs markdown-it-py: pip install 'lockstep[bench]'", file=sys.stderr)
        return
    try:
        write_atomically(folder / PAGE_NAME, rendered_page(page))
    except OSError as error:
        raise BenchError(f"cannot write {folder / PAGE_NAME}: {error.strerror}; give another --output") from None


def rendered_page(page: Page) -> str:
    """The page's HTML. Pictures are read from their files. Raises OSError."""
    title = html.escape(page.title)
    about = "".join(f"<p>{html.escape(line)}</p>" for line in page.about)
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in page.arguments
    )
    arguments = f"<details><summary>Arguments of the command</summary><table>{rows}</table></details>" if rows else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{title}</h1>{about}</header>\n<main>\n"
        + "".join(map(_figure, page.pictures))
        + _body(page.markdown)
        + f"{arguments}\n</main>\n</body>\n</html>\n"
    )


def _figure(picture: Picture) -> str:
    data, caption = b64encode(picture.path.read_bytes()).decode(), html.escape(picture.caption)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{caption}">'
        f"<figcaption>{html.escape(picture.path.name)}: {caption}</figcaption></figure>\n"
    )


def _body(markdown: str) -> str:
    """The report below the pictures: its headings one level lower, each table in a box that scrolls by itself."""
    parser = importlib.import_module("markdown_it").MarkdownIt("commonmark", {"html": False, "breaks": True})
    parser.enable("table").disable("image")
    tokens: list[Any] = parser.parse(markdown)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1:]) + 1, 6)}"
    text: str = parser.renderer.render(tokens, parser.options, {})
    return text.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
