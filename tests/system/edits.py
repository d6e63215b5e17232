"""How much sooner edited files come with guesses, on an idle machine: `python -m tests.system.edits --batch 8`.

Prompts are pieces of this repository's files before a commit, and answers what the commit made of them: what a model
that edits would write, were it as good. The model has the shape of BLOOM-560m and random weights; its shards compute
what they always do and then tell these answers (`tests/faults/sitecustomize.py`), so that guesses are right as often as
they are for such a text, and cost what they do.

`--random` answers with random tokens instead, in which there is nothing to guess, and whatever is guessed is wrong.

In each round the same edits are asked for without guesses, with as many as the server thinks right, and with each of
`--fixed`, by another server that has to try so many. Rates are those while all of a batch run. It prints a JSON object
for each round and one of the medians, with the geometric mean of the ratios and its 95 % interval. `--model FOLDER`
keeps the model's files, of which a tokenizer takes longest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
from tokenizers import Tokenizer

from tests.running import ROOT, Server, body
from tests.system.grammar_cost import write_model

UP_TO = "dc228985"  # the last commit that is looked at
COMMITS, MORE_COMMITS = 60, 300  # how many, where answers are edits and where they are not
LINES = 15  # that are shown around a change
PIECE = range(400, 1500)  # characters
PROMPT_TOKENS, ANSWER_TOKENS = range(120, 280), 128
WARMUP_TOKENS = 48  # of a first answer, which is not timed: costs are measured
FIXED = (1, 2, 3, 4, 6, 8)
RANDOM_IDS = range(1000, 20000)

Edit = tuple[str, list[int], list[int]]  # the prompt's text and tokens, and the answer's


def edits(tokenizer: Tokenizer, commits: int = COMMITS) -> Iterator[Edit]:
    """Of the repository's history, those of a length that suits."""
    command = ["git", "log", "-p", f"-U{LINES}", "--no-merges", f"-n{commits}", UP_TO, "--", "*.py"]
    log, seen = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout, set[str]()
    for part in re.split(r"^(?:@@ .* @@.*|diff --git .*|commit [0-9a-f]{40})\n", log, flags=re.MULTILINE):
        lines = [line for line in part.splitlines(keepends=True) if line[:1] in (" ", "-", "+")]
        before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        if before == after or len(before) not in PIECE or before in seen:
            continue
        seen.add(before)
        prompt, answer = (tokenizer.encode(text).ids for text in (before, after))
        if len(prompt) in PROMPT_TOKENS and len(answer) >= ANSWER_TOKENS:
            yield before, prompt, answer[:ANSWER_TOKENS]


async def stream(client: httpx2.AsyncClient, edit: Edit, **parameters: Any) -> list[float]:
    """When each token came. The answer must be the edit's."""
    request = body(edit[0], ignore_eos=True, **{"max_new_tokens": ANSWER_TOKENS} | parameters)
    times, tokens = [], []
    async with client.stream("POST", "/generate_stream", json=request) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                times.append(time.perf_counter())
                tokens.append(json.loads(line[5:])["token"]["id"])
    assert tokens == edit[2][: len(tokens)] and tokens, "the answer is another one"
    return times


async def rate(client: httpx2.AsyncClient, batch: Sequence[Edit], **parameters: Any) -> float:
    """Tokens a second while all of these run."""
    times = await asyncio.gather(*(stream(client, edit, **parameters) for edit in batch))
    begun, end = max(own[0] for own in times), min(own[-1] for own in times)
    return sum(begun < at <= end for own in times for at in own) / (end - begun)


async def one_round(
    own: httpx2.AsyncClient, told: httpx2.AsyncClient, batch: Sequence[Edit], fixed: Sequence[int], number: Path
) -> dict[str, float]:
    """The rate of each kind. The first two are asked for twice, in this order and back: a machine's speed drifts."""
    order = random.sample([("plain", {"speculate": 0}), ("auto", {})], 2)
    found: dict[str, list[float]] = {name: [] for name, _ in order}
    for name, parameters in order + order[::-1]:
        found[name].append(await rate(own, batch, **parameters))
    rates = {name: statistics.harmonic_mean(own) for name, own in found.items()}
    for num in fixed:
        number.write_text(str(num))
        rates[str(num)] = await rate(told, batch)
    return rates


def interval(ratios: Sequence[float]) -> list[float]:
    """Their geometric mean, and between what numbers it is with 95 % certainty (bootstrap)."""
    chance, logs = random.Random(1), [math.log(ratio) for ratio in ratios]
    means = sorted(statistics.mean(chance.choices(logs, k=len(logs))) for _ in range(2000))
    return [round(math.exp(mean), 3) for mean in (statistics.mean(logs), means[50], means[-51])]


async def measure(args: argparse.Namespace, found: Sequence[Edit], urls: Sequence[str], number: Path) -> dict[str, Any]:
    """The medians of all rounds."""
    chance, rounds = random.Random(args.seed), list[dict[str, float]]()
    async with (
        httpx2.AsyncClient(timeout=900, base_url=urls[0]) as own,
        httpx2.AsyncClient(timeout=900, base_url=urls[-1]) as told,
    ):
        warm = chance.sample(found, args.batch)
        for client in (own, told):
            for speculate in (0, 8):
                await rate(client, warm, max_new_tokens=WARMUP_TOKENS, speculate=speculate)
        for _ in range(args.rounds):
            rounds.append(await one_round(own, told, chance.sample(found, args.batch), args.fixed, number))
            print(json.dumps({kind: round(value, 2) for kind, value in rounds[-1].items()}), flush=True)
    medians = {kind: statistics.median(rates[kind] for rates in rounds) for kind in rounds[0]}
    best = max(medians[str(num)] for num in args.fixed) if args.fixed else medians["auto"]
    return {
        "batch": args.batch,
        "tokens/s": {kind: round(value, 2) for kind, value in medians.items()},
        "auto / plain": interval([rates["auto"] / rates["plain"] for rates in rounds]),
        "auto / the best fixed": round(medians["auto"] / best, 3),
    }


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fixed", type=int, nargs="*", default=FIXED)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--random", action="store_true")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.model or Path(name)
        if not (folder / "tokenizer.json").exists():
            folder.mkdir(exist_ok=True)
            write_model("bloom-560m", folder)
        commits = MORE_COMMITS if args.random else COMMITS
        found = list(edits(Tokenizer.from_file(str(folder / "tokenizer.json")), commits))
        if args.random:
            chance = random.Random(args.seed)
            found = [(text, prompt, chance.choices(RANDOM_IDS, k=ANSWER_TOKENS)) for text, prompt, _ in found]
        answers, number = Path(name) / "answers", Path(name) / "number"
        answers.write_text(json.dumps([edit[1:] for edit in found]))
        number.write_text("auto")
        env = {"PYTHONPATH": f"{ROOT / 'tests' / 'faults'}:{ROOT}", "LOCKSTEP_TEST_ANSWERS": str(answers)}
        own = ("--model-id", str(folder), "--random-weights", "--dtype", "bfloat16", "--max-total-tokens", "512")
        guessing = ("--speculate", "8", "--speculative-method", "ngram")
        with ExitStack() as stack:
            urls = [stack.enter_context(Server(*own, *guessing, *flags, env=env)).url]
            if args.fixed:
                env["LOCKSTEP_TEST_GUESSES"] = str(number)
                urls.append(stack.enter_context(Server(*own, *guessing, *flags, env=env)).url)
            result = asyncio.run(measure(args, found, urls, number))
    print(json.dumps(result))
    return int(result["auto / the best fixed"] < 0.9)


if __name__ == "__main__":
    sys.exit(main())
