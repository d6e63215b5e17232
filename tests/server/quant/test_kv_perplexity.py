"""What a KV cache in fewer bytes costs the embedded model: perplexity of its held-out text, else in float32.

Every token's keys and values are read back from the cache, its own included. Measured in full in
docs/results/quantised.md: `python -m tests.server.quant.test_kv_perplexity`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer

from server.backends.cpu import Kernels
from server.quant.kv import KV_FORMATS
from tests import cpu_kernels
from tests.embedded_model import train
from tests.running import ROOT
from tests.server.driver import all_logits, load_engine

DEMO = ROOT / "server" / "demo"
SEED = json.loads((ROOT / "tests" / "embedded_model" / "EVALUATION.json").read_text())["seed"]
SAMPLE_DOCUMENTS = 60


def held_out_tokens(documents: int) -> list[list[int]]:
    """The tokens of so many held-out documents, end marks included."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return [[*tokenizer.encode(d.text).ids, train.EOS_ID] for d in train.held_out(SEED, documents)]


def perplexity(documents: Sequence[list[int]], kv_cache: str, kernels: Kernels | None) -> float:
    """Of documents that are each read alone. kernels: the reference without."""
    engine = load_engine(DEMO, kernels=kernels, kv_cache=kv_cache, captured=False)
    total = count = 0.0
    for token_ids in documents:
        logits = all_logits(engine, token_ids[:-1]).double()
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(token_ids[1:]), reduction="sum"))
        count += len(token_ids) - 1
    return math.exp(total / count)


@pytest.mark.parametrize(("kv_cache", "most"), [("int8", 3e-4), ("fp8_e4m3", 1e-3), ("fp8_e5m2", 4e-3)])
def test_perplexity_hardly_grows(kv_cache: str, most: float) -> None:
    documents, kernels = held_out_tokens(SAMPLE_DOCUMENTS), cpu_kernels.load_or_skip()
    expected, found = (perplexity(documents, kind, kernels) for kind in ("auto", kv_cache))
    assert 0 < abs(found / expected - 1) <= most


def main() -> None:
    """Print the perplexity of all held-out text with every kind of cache."""
    documents, kernels = held_out_tokens(train.HELD_OUT_DOCUMENTS), cpu_kernels.load()
    print(f"{len(documents)} documents, {sum(map(len, documents)) - len(documents)} tokens")
    expected = perplexity(documents, "auto", kernels)
    for name in KV_FORMATS:
        found = perplexity(documents, name, kernels)
        print(f"{name}: {found:.6f}, {100 * (found / expected - 1):+.4f} %")


if __name__ == "__main__":
    main()
