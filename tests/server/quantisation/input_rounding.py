"""What rounding inputs to 8 bits costs and gains on a CPU in bfloat16: `--cpu-inputs` rounded and exact side by side.

    python -m tests.server.quantisation.input_rounding [--documents N] [--check]

Error is how far log-probabilities of the embedded model's held-out text are from those of the same weights in float32,
on average: of the arithmetic alone, and not of what rounding the weights costs. A second model computes the same with
outliers: some features of every norm are 30 times as large, and the weights that read them as much smaller, as
trained models of billions of weights have it. Speed is of one layer of Mistral-7B, for one token and for 256.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from server.backends.cpu import CpuBackend
from server.quantisation import rounding
from server.quantisation.rounding import int8_weights
from tests import cpu_kernels
from tests.server.driver import Prompt, generate, load_engine
from tests.server.quantisation.quantised_perplexity import MODEL, TOGETHER, held_out

FORMATS = (None, "int4", "eetq")
LAYER = (4096, 14336)  # of Mistral-7B: [outputs, inputs] of its down projection
TOKENS = (1, 256)
OUTLIERS, LARGER = 6, 30.0  # features of each norm
MOST = 1.2  # times dense bfloat16's error: what exact inputs may have
RUNS = 9


def with_outliers(folder: Path) -> Path:
    """A model that computes what the embedded one does, with outliers in what its layers read."""
    tensors = load_file(MODEL / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for norm, reader in (
        ("input_layernorm", "self_attention.query_key_value"),
        ("post_attention_layernorm", "mlp.dense_h_to_4h"),
    ):
        for name in [name for name in tensors if name.endswith(f"{norm}.weight")]:
            stem = name.removesuffix(f"{norm}.weight")
            features = torch.randperm(len(tensors[name]), generator=generator)[:OUTLIERS]
            for part in ("weight", "bias"):
                tensors[f"{stem}{norm}.{part}"] = tensors[f"{stem}{norm}.{part}"].float()
                tensors[f"{stem}{norm}.{part}"][features] *= LARGER
            tensors[f"{stem}{reader}.weight"] = tensors[f"{stem}{reader}.weight"].float()
            tensors[f"{stem}{reader}.weight"][:, features] /= LARGER
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((MODEL / "config.json").read_text())
    return folder


def log_probabilities(
    folder: Path, documents: Sequence[list[int]], format: str | None, dtype: torch.dtype, *, rounds_inputs: bool
) -> torch.Tensor:
    """Of every token but the first of each document."""
    backend = CpuBackend(cpu_kernels.load(), dtype, rounds_inputs=rounds_inputs)
    engine = load_engine(
        folder, dtype=dtype, backend=backend, quantise=format, quantise_head="none", tokens=16384, warms_up=False
    )
    found: list[float] = []
    for first in range(0, len(documents), TOGETHER):
        some = documents[first : first + TOGETHER]
        for prompt in generate(engine, [Prompt(ids, max_new_tokens=1, prompt_logprobs=True) for ids in some]):
            found += prompt.prompt_values[1 - len(prompt.token_ids) :]
    return torch.tensor(found, dtype=torch.float64)


def milliseconds(format: str | None, count: int, *, rounds_inputs: bool) -> float:
    """The median of a product of the layer with so many tokens."""
    backend = CpuBackend(cpu_kernels.load(), torch.bfloat16, rounds_inputs=rounds_inputs)
    weight = torch.randn(LAYER, generator=torch.Generator().manual_seed(1)) / 64
    make = {None: lambda dense: dense.bfloat16(), "int4": rounding.int4_groups, "eetq": int8_weights}[format]
    layer = backend.linear(make(weight))
    x = torch.randn(count, LAYER[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    taken = []
    for _ in range(RUNS):
        started = time.perf_counter()
        layer(x, None)
        taken.append(time.perf_counter() - started)
    return 1e3 * statistics.median(taken)


def main() -> int:
    """Print a row for each model, format and kind of inputs; 1 where `--check` finds exact ones that are not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=100, metavar="N")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if exact inputs err more than {MOST} times")
    args = parser.parse_args()
    documents, wrong = held_out(args.documents), False
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"embedded": MODEL, "with outliers": with_outliers(Path(scratch))}
        print(
            "| Model | Weights | Inputs | Error | of dense bfloat16's | "
            + " | ".join(f"{n} tokens, ms" for n in TOKENS)
            + " |"
        )
        for model, folder in folders.items():
            usual = 0.0
            for format in FORMATS:
                true = log_probabilities(folder, documents, format, torch.float32, rounds_inputs=False)
                for rounds_inputs in (True, False) if format else (False,):
                    found = log_probabilities(folder, documents, format, torch.bfloat16, rounds_inputs=rounds_inputs)
                    error = float((found - true).abs().mean())
                    usual = usual or error
                    times = [milliseconds(format, count, rounds_inputs=rounds_inputs) for count in TOKENS]
                    inputs = "rounded" if rounds_inputs else "exact"
                    row = (model, format or "bfloat16", inputs, f"{error:.5f}", f"{error / usual:.2f}")
                    print(f"| {' | '.join((*row, *(f'{one:.2f}' for one in times)))} |", flush=True)
                    wrong |= not rounds_inputs and error > MOST * usual
    return 1 if wrong and args.check else 0


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit(main())
