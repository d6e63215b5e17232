"""What each way to quantise weights, or keys and values, costs the embedded model in perplexity on its held-out text.

    python -m tests.server.quantisation.quantised_perplexity [--check] [FORMAT …]
    python -m tests.server.quantisation.quantised_perplexity --backend cpu --kv-caches

Every document is a prompt of an engine, as a server would run it, whose log-probabilities are asked for; a document is
read alone, its end mark included. Left out: texts that the model did not learn to write, whose perplexity says little.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from server.quantisation.kv import KV_FORMATS
from server.stepping.engine import Engine
from tests import cpu_kernels
from tests.embedded_model import train
from tests.running import ROOT
from tests.server.driver import Prompt, generate, load_engine

MODEL = ROOT / "server" / "demo"
EVALUATION = ROOT / "tests" / "embedded_model" / "EVALUATION.json"
TOGETHER = 8  # documents in a step
# What a format may add to the perplexity in float32, as a share of it.
MOST = {"int8": 0.0005, "int4": 0.0025, "fp8": 0.0015}
HEADS = ("int8", "none")


def held_out(count: int | None = None) -> list[list[int]]:
    """The token ids of the first `count` held-out documents, all 400 by default, short ones first."""
    evaluation = json.loads(EVALUATION.read_text())
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    documents = train.held_out(evaluation["seed"], count or evaluation["held_out_documents"])
    return sorted(([*tokenizer.encode(document.text).ids, train.EOS_ID] for document in documents), key=len)


def perplexity(engine: Engine, documents: Sequence[list[int]]) -> float:
    """Of every token but the first of each document."""
    surprise, count = 0.0, 0
    for first in range(0, len(documents), TOGETHER):
        some = documents[first : first + TOGETHER]
        prompts = [Prompt(token_ids, max_new_tokens=1, prompt_logprobs=True) for token_ids in some]
        for prompt in generate(engine, prompts):
            known = prompt.prompt_values[1 - len(prompt.token_ids) :]
            assert len(prompt.token_ids) - 1 == len(known), "one for each token that another one precedes"
            surprise, count = surprise - math.fsum(known), count + len(known)
    return math.exp(surprise / count)


def load(
    format: str | None, head: str, backend: str, dtype: torch.dtype = torch.float32, kv_cache: str = "auto"
) -> Engine:
    """The embedded model, its weights in a format, its keys and values in another."""
    kernels = cpu_kernels.load() if backend == "cpu" else None
    given = {"quantise": format, "quantise_head": head, "kv_cache": kv_cache}
    return load_engine(MODEL, dtype=dtype, kernels=kernels, tokens=16384, warms_up=False, **given)


def main() -> int:
    """Print a row for each format and each head; 1 where `--check` finds one that costs too much."""
    parser = argparse.ArgumentParser()
    parser.add_argument("formats", nargs="*", metavar="FORMAT")
    parser.add_argument("--documents", type=int, metavar="N", help="(all)")
    parser.add_argument("--backend", choices=("reference", "cpu"), default="reference")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a format costs more than is promised")
    parser.add_argument(
        "--kv-caches", action="store_true", help="every --kv-cache-dtype in place of formats of weights"
    )
    args = parser.parse_args()
    too_much, dtype = [], getattr(torch, args.dtype)
    documents = held_out(args.documents)
    exact = perplexity(load(None, "none", args.backend, dtype), documents)
    print(f"{len(documents)} documents, {sum(map(len, documents))} tokens, {args.backend}, {args.dtype}: {exact:.6f}")
    for name in KV_FORMATS if args.kv_caches else ():
        found = perplexity(load(None, "none", args.backend, dtype, name), documents)
        print(f"keys and values in {name}: {found:.6f}, {100 * (found / exact - 1):+.4f} %", flush=True)
    for format in () if args.kv_caches else args.formats or MOST:
        for head in HEADS if format in ("int8", "int4") else ("none",):
            started = time.monotonic()
            engine = load(format, head, args.backend, dtype)
            found = perplexity(engine, documents)
            print(
                f"{format}, head {head}: {found:.6f}, {100 * (found / exact - 1):+.4f} %, "
                f"{engine.model.nbytes / 1e6:.2f} MB of weights, {time.monotonic() - started:.0f} s",
                flush=True,
            )
            too_much += [(format, head)] if found / exact - 1 > MOST.get(format, math.inf) else []
    for format, head in too_much:
        print(f"{format} with head {head} adds more than {100 * MOST[format]:g} %")
    return 1 if too_much and args.check else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
