"""One run of `lockstep quantize` in a process of its own: what is told of it, and a sentence for each way to fail.

Left out: signals (`__main__.py`).
"""

from __future__ import annotations

import errno
import math
import os
import re
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError

from server import backends
from server.backends.cpu.heap import freed_at_once
from server.quantising.folder import partial_of
from server.quantising.job import Outcome, run
from server.quantising.progress import Bar
from server.quantising.recipe import Job

FULL = (errno.ENOSPC, errno.EDQUOT)


def main(path: str) -> int:
    """Do the job of a file. Returns the exit code."""
    job = Job.from_json(Path(path).read_text())
    samples, length = len(job.calibration), len(job.calibration[0])
    print(f"{samples} samples of {length} tokens, and {len(job.held_out)} more held out", file=sys.stderr)
    bar = Bar(sys.stderr, is_terminal=os.isatty(2))
    try:
        device = backends.open_device(job.device, 0, 1)
        with freed_at_once():
            outcome = run(job, device, bar)
    except ValueError as error:
        problem = str(error)
    except torch.OutOfMemoryError:
        problem = "the device has too little memory: give fewer --num-samples, or --device cpu"
    except (OSError, SafetensorError) as error:
        problem = failure(error, job.output)
    else:
        bar.end()
        sys.stdout.write(told(job, outcome))
        return 0
    bar.end()
    print(f"error: {problem}", file=sys.stderr)
    return 1


def failure(error: OSError | SafetensorError, output: str) -> str:
    """A sentence for what the system says of a file, with the remedy that fits."""
    if isinstance(error, OSError):
        number, reason, file = error.errno, error.strerror or str(error), error.filename
    else:  # safetensors reports the system's errors as its own, with their numbers in the text
        found = re.search(r"os error (\d+)", str(error))
        number, reason, file = int(found[1]) if found else None, str(error), None
    if file is not None and not _is_of(Path(os.fsdecode(file)), Path(output)):
        return f"{os.fsdecode(file)} cannot be read ({reason}): fetch the model again, or give another one"
    remedy = "make room on its disk" if number in FULL else "give another --output"
    return f"cannot write {output} ({reason}): {remedy}"


def _is_of(file: Path, output: Path) -> bool:
    """Whether a file is in what is made, or a folder above it."""
    return file.is_relative_to(output) or file.is_relative_to(partial_of(output)) or output.is_relative_to(file)


def told(job: Job, outcome: Outcome) -> str:
    """What came of a run, for people."""
    before, after = outcome.perplexity.before, outcome.perplexity.after
    tokens = len(job.held_out) * (len(job.held_out[0]) - 1)
    change = f" ({after / before - 1:+.2%})" if math.isfinite(before) else ""
    return (
        f"perplexity of {tokens} held-out tokens: {_figure(before)} before, {_figure(after)} after{change}\n"
        f"weights: {outcome.bytes_before / 1e6:.1f} MB before, {outcome.bytes_after / 1e6:.1f} MB after\n"
        f"{job.output}: {job.recipe.method} with {job.recipe.bits} bits, as {outcome.format}\n"
    )


def _figure(perplexity: float) -> str:
    """With the decimals that say something: a model that is hardly better than chance has none."""
    return f"{perplexity:.4f}" if perplexity < 1000 else f"{perplexity:.0f}"
