"""What `lockstep quantize` is asked for: the method, its numbers, and where everything lies.

The launcher checks it and hands it over as JSON, so that nothing here needs torch. What a model's sizes allow is left
to `plan.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

METHODS: Mapping[str, tuple[int, ...]] = {"gptq": (2, 3, 4, 8), "awq": (2, 3, 4, 8), "w8a8": (8,)}
DEVICES = ("auto", "cuda", "cpu")
PACKED_BITS = (4, 8)  # what readers of compressed-tensors unpack; fewer bits are written as GPTQ's own format
MOST_SAMPLES = 4096
LEAST_TOKENS, MOST_TOKENS = 16, 32768  # of a sample
MOUNTS = Path("/proc/self/mountinfo")
HELD_OUT = 8  # for so many samples of calibration there is one that only the perplexity is measured on


@dataclass(frozen=True)
class Recipe:
    """How weights are rounded. group_size: inputs that share a scale; -1: all of a row do."""

    method: str = "gptq"
    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    activation_order: bool = True  # of GPTQ: inputs that vary most are rounded first
    smooth: float = 0.0  # of W8A8: how much of the inputs' range moves into the weights (SmoothQuant's alpha); 0: none

    @property
    def layout(self) -> str:
        """The format that is written, as its readers call it."""
        if self.method == "w8a8":
            return "int-quantized"
        return "pack-quantized" if self.bits in PACKED_BITS else "gptq"

    def problems(self) -> Iterator[str]:
        """A sentence for each value that cannot be used."""
        if self.method not in METHODS:
            yield f"--method is {self.method}: give one of {', '.join(METHODS)}"
            return
        if self.bits not in (allowed := METHODS[self.method]):
            yield f"--bits is {self.bits}: --method {self.method} takes {' or '.join(map(str, allowed))}"
        if self.group_size != -1 and (self.group_size < 8 or self.group_size % 8):
            yield f"--group-size is {self.group_size}: give a multiple of 8, or -1 for one group in each row"
        if not 0.0 <= self.smooth <= 1.0:
            yield f"--smooth is {self.smooth:g}: give a number from 0, which is none, to 1"
        if self.smooth and self.method != "w8a8":
            yield f"--smooth is of --method w8a8, and --method is {self.method}: leave it out"


@dataclass(frozen=True)
class Job:
    """A whole run of the command.

    calibration, held_out: samples of token ids, all equally long. output: the folder to make; files: paths of what
    goes into it as it is.
    """

    recipe: Recipe
    model_path: str
    weights_path: str
    output: str
    files: tuple[str, ...]
    calibration: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    device: str = "auto"

    def to_json(self) -> str:
        """For `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """What `to_json` wrote."""
        values = json.loads(text)
        values["recipe"] = Recipe(**values["recipe"])
        for name in ("calibration", "held_out"):
            values[name] = tuple(tuple(sample) for sample in values[name])
        return cls(**(values | {"files": tuple(values["files"])}))


def output_problem(output: Path) -> str | None:
    """Why a folder cannot be the one that is made, in a sentence."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        return f"--output {output} is there already and not empty: give another folder, or remove it"
    if output.is_mount() or _is_mounted(output):
        return (
            f"--output {output} is where a disk is mounted, and must be a folder that can be renamed: give a folder "
            f"below it, such as {output / 'model'}"
        )
    return None


def _is_mounted(output: Path) -> bool:
    """Whether a folder of the same disk is mounted there (`mount --bind`), which `is_mount` cannot tell."""
    try:
        lines = MOUNTS.read_bytes().splitlines()
    except OSError:
        return False
    here = os.fsencode(output.resolve())
    return any(_unescaped(line.split()[4]) == here for line in lines if line.count(b" ") > 4)


def _unescaped(path: bytes) -> bytes:
    """A path as Linux lists it: spaces and the like are a backslash and three octal digits."""
    return re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), path)
