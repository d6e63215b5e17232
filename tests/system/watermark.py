"""How well the watermark is found: z of generated texts with it and without, as `lockstep watermark` computes it.

`python -m tests.system.watermark` serves a model of BLOOM-560m's shape with random weights and generates texts of 200
tokens at temperature 1 with `ignore_eos`, half of them with `watermark`. `--model DIR` serves another model, and any
further flags go to the launcher. It prints one JSON object and ends with 1 unless the mean z is above 6 with the
watermark and below 2 without: 10.7 is expected where all tokens are equally likely, and gamma is 0.5 and delta 2.
Figures are in docs/results/router.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.cost.shapes import find, make_model_folder
from router.text.watermark import detect
from tests.running import Server, body, generate_all, tokens_of

LEAST, MOST = 6.0, 2.0  # mean z with the watermark, and without


def requests(
    count: int, tokens: int, prompt: str, *, watermark: bool, temperature: float = 1.0
) -> list[dict[str, Any]]:
    """The requests of texts that differ by their seeds."""
    wanted = {"max_new_tokens": tokens, "do_sample": True, "ignore_eos": True, "details": True}
    wanted |= {"temperature": temperature, "watermark": watermark}
    return [body(prompt, seed=seed, **wanted) for seed in range(count)]


def measured(server: Server, gamma: float, *given: Any, **wanted: Any) -> dict[str, list[float]]:
    """z of each text, with the watermark and without. given and wanted: as for `requests`."""
    found = {}
    for name, watermark in (("watermarked", True), ("plain", False)):
        answers = asyncio.run(generate_all(server, requests(*given, watermark=watermark, **wanted)))
        assert all(answer.status_code == 200 for answer in answers), answers[0].text
        found[name] = [detect(tokens_of(answer.json()), gamma).z for answer in answers]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=16, help="of each kind")
    parser.add_argument("--tokens", type=int, default=200, help="of each text")
    parser.add_argument("--gamma", type=float, default=0.5)
    parser.add_argument("--delta", type=float, default=2.0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompt", default="t5 t7")
    parser.add_argument("--model", help="folder; default: BLOOM-560m's shape with random weights")
    args, flags = parser.parse_known_args(argv)
    mark = ("--watermark-gamma", str(args.gamma), "--watermark-delta", str(args.delta))
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make_model_folder(find("bloom-560m"), Path(folder))
            flags = ["--random-weights", *flags]
        with Server("--model-id", args.model or folder, *mark, *flags) as server:
            wanted = (args.texts, args.tokens, args.prompt)
            found = measured(server, args.gamma, *wanted, temperature=args.temperature)
    means = {name: round(statistics.mean(values), 2) for name, values in found.items()}
    rounded = {name: [round(z, 1) for z in values] for name, values in found.items()}
    print(json.dumps({"mean_z": means, "tokens": args.tokens, "gamma": args.gamma, "delta": args.delta, "z": rounded}))
    return 0 if means["watermarked"] > LEAST and means["plain"] < MOST else 1


if __name__ == "__main__":
    sys.exit(main())
