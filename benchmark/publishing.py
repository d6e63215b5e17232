"""How a command's result reaches people: printed, kept on the disk while it grows, and at its end drawn and on a page.

What was measured is never lost, whatever fails afterwards: tables are printed before anything is written, and pictures
and the page (`page.py`) come last, because everything in them can be made again from the result's JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmark import page, plots
from benchmark.plots import Picture
from benchmark.report import BenchError, Result, save, show

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
    draws = draw is not None and plots.wanted(output_dir)

    def keep() -> None:
        try:
            save(result, render(result), output_dir)
        except BenchError as error:
            print(f"warning: {error}", file=sys.stderr)

    def end() -> None:
        publish(result, text := render(result), output_dir)
        if output_dir is not None:
            pictures = draw(result, output_dir) if draw is not None and draws else ()
            page.write(page.of_result(result, text, pictures), output_dir)

    try:
        yield keep
    except (BenchError, KeyboardInterrupt, asyncio.CancelledError) as error:  # Ctrl-C cancels what asyncio runs
        result.failure = str(error) or "interrupted"
        if result.rows:
            end()
        raise
    end()
