"""Times the steps of OpenVINO GenAI or vLLM, run by the Python that has them.

    PYTHON steps.py openvino|vllm FOLDER '{"prompt_tokens": 100, "batch_size": 8, "decode_length": 100, …}'

Prints one JSON line of milliseconds. A prefill is a batch that gets one token each; a decode step is what each further
token of the same batch adds. Both are asked for through the calls that users have, so that the engine divides prompts
into steps as it likes. Only Python's own library and the engine are imported: this runs where Lockstep is not.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Generate = Callable[[Sequence[Sequence[int]], int], None]  # prompts, and how many tokens each of them gets
STEP_TOKENS = 4096  # of prompts that an engine may compute at once
FIRST_ID, LAST_ID = 300, 20_000  # of a prompt's tokens: no special ones


def openvino(folder: str, sizes: Mapping[str, int]) -> Generate:
    """The continuous batching of OpenVINO GenAI on a CPU, as it comes but for a cache that is large enough."""
    engine: Any = importlib.import_module("openvino_genai")
    tensor: Any = importlib.import_module("openvino").Tensor
    numpy: Any = importlib.import_module("numpy")
    scheduler = engine.SchedulerConfig()
    scheduler.cache_size = sizes["cache_gib"]
    scheduler.max_num_seqs = sizes["batch_size"]
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.enable_prefix_caching = False
    pipeline = engine.ContinuousBatchingPipeline(folder, scheduler, "CPU")

    def generate(prompts: Sequence[Sequence[int]], count: int) -> None:
        config = engine.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos, config.do_sample = True, False
        inputs = [tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        check([len(one.m_generation_ids[0]) for one in pipeline.generate(inputs, [config] * len(inputs))], count)

    return generate


def vllm(folder: str, sizes: Mapping[str, int]) -> Generate:
    """vLLM in bfloat16, without its prefix cache."""
    engine: Any = importlib.import_module("vllm")
    longest = sizes["prompt_tokens"] + sizes["decode_length"] + 1
    at_once = min(STEP_TOKENS, sizes["prompt_tokens"] * sizes["batch_size"])  # it computes as many to warm up
    model = engine.LLM(
        model=folder,
        dtype="bfloat16",
        max_model_len=longest,
        max_num_seqs=sizes["batch_size"],
        max_num_batched_tokens=max(at_once, longest),
        enable_prefix_caching=False,
    )

    def generate(prompts: Sequence[Sequence[int]], count: int) -> None:
        wanted = engine.SamplingParams(
            temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        found = model.generate([{"prompt_token_ids": list(one)} for one in prompts], wanted, use_tqdm=False)
        check([len(one.outputs[0].token_ids) for one in found], count)

    return generate


def check(lengths: Sequence[int], count: int) -> None:
    """Raises RuntimeError for answers of another length."""
    if any(length != count for length in lengths):
        raise RuntimeError(f"answers have {min(lengths)} to {max(lengths)} tokens, not {count}")


def measure(generate: Generate, sizes: Mapping[str, int]) -> dict[str, list[float]]:
    """Milliseconds of prefills and of decode steps: a prompt alone to warm up, then so many runs of the batch."""
    draw, decodes = random.Random(0), sizes["decode_length"] - 1
    prompts = [
        [draw.randrange(FIRST_ID, LAST_ID) for _ in range(sizes["prompt_tokens"])] for _ in range(sizes["batch_size"])
    ]
    generate(prompts[:1], 4)
    times: dict[str, list[float]] = {"prefill_ms": [], "decode_ms": []}
    for _ in range(sizes["runs"]):
        prefill, whole = _seconds(generate, prompts, 1), _seconds(generate, prompts, 1 + decodes)
        times["prefill_ms"].append(1000 * prefill)
        times["decode_ms"].append(1000 * (whole - prefill) / decodes)
    return times


def _seconds(generate: Generate, prompts: Sequence[Sequence[int]], count: int) -> float:
    started = time.perf_counter()
    generate(prompts, count)
    return time.perf_counter() - started


def main(arguments: Sequence[str]) -> None:
    """Load the engine that the arguments name, and time it."""
    engine, folder, sizes = arguments[0], arguments[1], json.loads(arguments[2])
    print(json.dumps(measure({"openvino": openvino, "vllm": vllm}[engine](folder, sizes), sizes)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
