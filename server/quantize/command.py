"""One run of `lockstep quantize`, from a model's folder to a folder of its quantised weights, in a process of its own.

It reports how far it is, what came of it, and in a sentence why it failed. Left out: signals (`__main__.py`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from safetensors import SafetensorError

from host.progress import StatusLine, duration
from server import backends
from server.arch import families
from server.backends.cpu.memory import freed_at_once
from server.backends.device import Device
from server.backends.reference import ReferenceBackend
from server.checkpoint import formats
from server.checkpoint.weights import STORED_FLOATS, Weights
from server.layers.embedding import with_own_head
from server.quantize.calibration import Texts
from server.quantize.edited_checkpoint import EditedCheckpoint, FinishedFormat
from server.quantize.layerwise import Perplexity, Progress, Quantiser, Report
from server.quantize.output_folder import OutputFolder, config_of, output_folder, partial_of, scale_dtype, tensors_of
from server.quantize.plan import MatrixSet, Plan, make_plan, pieces_of
from server.quantize.recipe import Job, Recipe
from server.ranks.collectives import Shard

WIDTH = 24  # of the bar, in characters
FULL = (errno.ENOSPC, errno.EDQUOT)


def main(path: str) -> int:
    """Do the job of a file. Returns the exit code."""
    job = Job.from_json(Path(path).read_text())
    samples, length = len(job.calibration), len(job.calibration[0])
    print(f"{samples} samples of {length} tokens, and {len(job.held_out)} more held out", file=sys.stderr)
    bar = Bar(sys.stderr, is_live=os.isatty(2))
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
        sys.stdout.write(summary(job, outcome))
        return 0
    bar.end()
    print(f"error: {problem}", file=sys.stderr)
    return 1


def run(job: Job, device: Device, report: Report) -> Outcome:
    """Raises ValueError for a model that cannot be quantised so."""
    hf_config = json.loads((Path(job.model_path) / "config.json").read_text())
    family, spec = families.find(hf_config)
    if (stored := formats.choose(None, Path(job.model_path), hf_config)).name is not None:
        raise ValueError(f"the checkpoint is quantised already, as {stored.name}: give the one that it was made from")
    checkpoint = EditedCheckpoint(job.weights_path)
    dtype = next((d for d in map(checkpoint.dtype_of, checkpoint.names()) if d in STORED_FLOATS), torch.float32)
    scales = scale_dtype(job.recipe, dtype)
    finished = FinishedFormat(scales)
    weights = Weights.open(checkpoint, family.names, Shard(), torch.float32, device.torch_device, finished)
    spec = with_own_head(weights, spec)
    checkpoint.split(pieces_of(weights, spec))
    plan = make_plan(weights, spec, job.recipe)
    if (largest := max(map(max, (*job.calibration, *job.held_out)))) >= spec.vocab_size:
        raise ValueError(
            f"the tokenizer makes token {largest} of the text, and the model knows 0 to {spec.vocab_size - 1}: they do "
            "not belong together, fetch both again"
        )
    with output_folder(Path(job.output)) as folder:
        folder.refuse_full(_expected_bytes(checkpoint, plan, job.recipe))

        def finish(matrix_sets: Sequence[MatrixSet]) -> None:
            for name in (name for matrices in matrix_sets for name in matrices.names.values()):
                folder.add(tensors_of(name, finished.weights[name], job.recipe, scales))

        backend = ReferenceBackend(device)
        quantiser = Quantiser(weights, checkpoint, finished, spec, plan, backend, job.recipe, report, finish)
        perplexity = quantiser.run(Texts.of(job.calibration), Texts.of(job.held_out))
        before = _copy_dense(checkpoint, plan, folder)
        quantised = config_of(job.recipe, plan.ignore)
        files: dict[str, Path | str] = {Path(path).name: Path(path) for path in job.files}
        if job.recipe.layout == "gptq":
            files["quantize_config.json"] = json.dumps(quantised, indent=2) + "\n"  # where older readers look
        after = folder.complete(hf_config | {"quantization_config": quantised}, files)
    return Outcome(perplexity, before, after, f"{quantised['quant_method']}, {job.recipe.layout}")


@dataclass(frozen=True)
class Outcome:
    """What came of a run. bytes: of all tensors."""

    perplexity: Perplexity
    bytes_before: int
    bytes_after: int
    format: str


def _expected_bytes(checkpoint: EditedCheckpoint, plan: Plan, recipe: Recipe) -> int:
    """Of what will be made, without the scales of groups."""
    quantised = {f"{name}.weight" for name in plan.sizes}
    dense = sum(checkpoint.bytes_of(name) for name in checkpoint.names() if name not in quantised)
    return dense + sum(outputs * inputs for outputs, inputs in plan.sizes.values()) * recipe.bits // 8


def _copy_dense(checkpoint: EditedCheckpoint, plan: Plan, folder: OutputFolder) -> int:
    """Add every tensor that is not quantised, changed or not. Returns the bytes of all tensors of the checkpoint."""
    total = 0
    quantised = {f"{name}.weight" for name in plan.sizes}
    for name in checkpoint.names():
        total += checkpoint.bytes_of(name)
        if name not in quantised:
            folder.add({name: checkpoint.whole(name)})
    return total


def summary(job: Job, outcome: Outcome) -> str:
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


class Bar(StatusLine):
    """How far a run is: a bar with a line of text on a terminal, and a line for each layer elsewhere."""

    def __init__(self, stream: TextIO, *, is_live: bool) -> None:
        super().__init__(stream, is_live=is_live)
        self._started = time.monotonic()
        self._errors: dict[str, float] = {}
        self._rounded = 0

    def __call__(self, progress: Progress) -> None:
        """Show it."""
        if not progress.place:
            line = f"measuring the model as it is: layer {progress.layer + 1} of {progress.num_layers}"
            self._draw(line, (progress.layer + 1) / progress.num_layers, is_last=True)
            self._started = time.monotonic()  # what is left is told of what comes now
            return
        self._errors[progress.place] = progress.error
        self._rounded += progress.rounded
        done, is_last = progress.layer + progress.share, progress.share == 1.0
        self._draw(self._line(progress, done), done / progress.num_layers, is_last=is_last)
        if is_last:
            self._errors = {}
            self._rounded = 0

    def _draw(self, line: str, share: float, *, is_last: bool) -> None:
        """share: of the bar; is_last: whether nothing more is told of this layer."""
        if self.is_live:
            full = int(WIDTH * share)
            self.show(f"{'█' * full}{'░' * (WIDTH - full)} {line}")
        elif is_last:
            self.show(line)

    def _line(self, progress: Progress, done: float) -> str:
        passed = time.monotonic() - self._started
        left = f", {duration(passed * (progress.num_layers / done - 1))} left"
        if progress.share == 1.0 and not self.is_live:
            left = f" done after {duration(passed)}"  # a line that stays
        errors = ", ".join(f"{place} {error:.2%}" for place, error in self._errors.items())
        few = f"; {self._rounded} matrices saw few tokens and are only rounded" if self._rounded else ""
        return f"layer {progress.layer + 1} of {progress.num_layers}{left}; square error of outputs: {errors}{few}"
