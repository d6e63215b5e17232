"""`python -m tests.server.offload.policies`: the policy that `auto` chooses against random ones, on two small shapes.

Each policy is a whole run of `lockstep-bench offline` with weights on a disk: a schedule, a number of batches in a
block, and a share of the layers on the device, drawn from all that fit into the memory that `auto` may use. The best
three are measured again, and so is what `auto` chose, because a disk drifts. Exit code 0 where `auto` is within 10 % of
the best on every shape, else 1.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.cost import shapes
from benchmark.cost.roofline import ServedModel
from benchmark.cost.shapes import BLOCK_SIZE
from benchmark.engine.jobs import percent, shares_of, sizes_of
from benchmark.engine.schedules import SCHEDULES
from tests.running import ROOT

WITHIN = 0.9  # of the best policy's rate
OPT = {
    "model_type": "opt", "torch_dtype": "bfloat16", "activation_function": "relu", "do_layer_norm_before": True,
    "enable_bias": True, "ffn_dim": 3072, "hidden_size": 768, "max_position_embeddings": 2048,
    "num_attention_heads": 12, "num_hidden_layers": 8, "pad_token_id": 1, "tie_word_embeddings": True,
    "vocab_size": 8192, "word_embed_proj_dim": 768,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048, "vocab_size": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """What is generated, and the memory for it."""

    name: str
    config: Mapping[str, Any]
    prompts: int
    input_length: int
    shortest: int
    longest: int
    batch: int
    memory_mb: int

    @property
    def flags(self) -> list[str]:
        """Of every run."""
        return [
            "--num-prompts", str(self.prompts), "--input-length", str(self.input_length),
            "--shortest-output-length", str(self.shortest), "--output-length", str(self.longest),
            "--gpu-batch-size", str(self.batch), "--device", "cpu", "--dtype", "bfloat16",
        ]  # fmt: skip


WORKLOADS = (Workload("opt-8x768", OPT, 16, 32, 4, 16, 2, 90), Workload("llama-8x1024", LLAMA, 16, 32, 4, 16, 2, 130))
Drawn = tuple[str, int, float]  # schedule, batches of a block, share


def fitting(work: Workload) -> list[Drawn]:
    """Every policy that fits into the memory."""
    sizes = sizes_of(ServedModel(shapes.from_config(work.config), "bfloat16"))
    tokens = -(-(work.input_length + work.longest) // BLOCK_SIZE) * BLOCK_SIZE
    found = []
    for name in SCHEDULES:
        for count in [1] if name == "row" else [1, 2, 4, 8]:
            for share in shares_of(sizes.num_layers):
                kv = count * work.batch * tokens * sizes.kv_per_token
                if share * sizes.layers + sizes.slots * (share < 1) + kv <= work.memory_mb * 1e6:
                    found.append((name, count, share))
    return found


def measured(
    work: Workload, shape: Path, folder: str, flags: Sequence[str]
) -> tuple[dict[tuple[str, int], float], str]:
    """Tokens a second of each schedule and number of batches of one run, and what it said on standard error."""
    command = [sys.executable, "-m", "benchmark", "offline", "--random-weights", str(shape), *work.flags]
    done = subprocess.run(
        [*command, "--offload-dir", folder, *flags], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(flags)} failed: {done.stderr.strip()}")
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    rates = {(row["schedule"], row["num_gpu_batches"]): float(row["total_tokens_per_second"]) for row in rows}
    return rates, done.stderr.strip()


def of_share(work: Workload, shape: Path, folder: str, share: float, wanted: Sequence[Drawn]) -> dict[Drawn, float]:
    """The rates of policies of one share on one server: those that are wanted, and what their flags say besides."""
    flags = ["--schedule", *dict.fromkeys(name for name, _, _ in wanted)]
    flags += ["--num-gpu-batches", *dict.fromkeys(str(count) for _, count, _ in wanted)]
    rates, _ = measured(work, shape, folder, [*flags, "--weights-on-device", percent(share)])
    return {(name, count, share): rate for (name, count), rate in rates.items()}


def compare(work: Workload, folder: str, count: int, seconds: float, seed: int) -> bool:
    """Print every rate; whether `auto` is near enough to the best."""
    shape = Path(folder) / f"{work.name}.json"
    shape.write_text(json.dumps(work.config))
    stop = time.monotonic() + seconds
    auto_flags = ["--schedule", "auto", "--offload-memory", f"{work.memory_mb}MB"]
    chosen, why = measured(work, shape, folder, auto_flags)
    print(f"## {work.name}\n\n{why}\n\nauto: {max(chosen.values()):.1f} tokens/s", flush=True)
    every = fitting(work)
    drawn = random.Random(seed).sample(every, min(count, len(every)))
    rates: dict[Drawn, float] = {}
    for share in dict.fromkeys(share for _, _, share in drawn):
        if time.monotonic() > stop:
            print(f"out of time after {len(rates)} policies")
            break
        rates |= of_share(work, shape, folder, share, [policy for policy in drawn if policy[2] == share])
    ordered = sorted(rates, key=lambda policy: -rates[policy])
    for name, batches, share in ordered:
        print(f"{name}, n = {batches}, {100 * share:g} % on the device: {rates[name, batches, share]:.1f}", flush=True)
    best = 0.0
    for policy in ordered[:3]:
        again = of_share(work, shape, folder, policy[2], [policy])[policy]
        best = max(best, again)
        print(f"again {policy[0]}, n = {policy[1]}, {100 * policy[2]:g} %: {again:.1f}", flush=True)
    rate = max(measured(work, shape, folder, auto_flags)[0].values())
    print(f"again auto: {rate:.1f}, {100 * rate / best:.0f} % of the best of {len(rates)} of {len(every)} policies\n")
    return rate >= WITHIN * best


def main() -> int:
    """Compare on every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", type=int, default=30, help="random ones on each shape (30)")
    parser.add_argument("--minutes", type=float, default=20.0, help="for all of them (20)")
    parser.add_argument("--offload-dir", help="folder on a disk (default: one of its own)")
    parser.add_argument("--only", choices=[work.name for work in WORKLOADS], help="one of the shapes (both)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.offload_dir) as folder:
        chosen = [work for work in WORKLOADS if args.only in (None, work.name)]
        seconds = 60 * args.minutes / len(chosen)
        good = [compare(work, folder, args.policies, seconds, args.seed) for work in chosen]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
