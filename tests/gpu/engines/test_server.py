"""A whole server on a GPU: what comes after it is ready makes nobody wait for a compiler."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from benchmark.cost import shapes
from tests.combinations import by_turns
from tests.gpu.selection import NEEDS_GPU, first
from tests.ports import free_port
from tests.running import PATIENCE_S, Server, body, events_of, kill_group, start_launcher
from tests.server.model.test_real_shapes import EXPECTED, Published

pytestmark = NEEDS_GPU
ON_GPU = ("--device", "cuda", "--dtype", "bfloat16", "--cuda-memory-fraction", "0.3")
CAPTURED, *OTHERS = ("", "--cuda-graphs 0", "--quantize int8 --cuda-graphs 0", "--speculate 3 --kv-cache-dtype int8")
SETTINGS = (
    "",
    "--quantize int8",
    "--kv-cache-dtype fp8_e4m3",
    "--quantize int4 --speculate 3",
    "--cuda-graphs 0",
    "--quantize fp8",
    "--quantize bitsandbytes-nf4 --kv-cache-dtype int8",
    "--prefix-cache-host-gb 1",
    "--quantize eetq --cuda-graphs 0",
)
NUMS_EXPERTS, MOST_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts"), 16  # in configs
WORDS = ("once", "upon", "a", "time", "there", "was")


def requests() -> Iterator[dict[str, Any]]:
    """Short and long prompts, and what clients may ask beside tokens."""
    parameters: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "watermark": True},
        {"details": True, "decoder_input_details": True, "top_n_tokens": 3},
        {"grammar": {"type": "regex", "value": "[a-z ]*"}},
        {"typical_p": 0.9, "do_sample": True},
    ]
    for number, more in enumerate(parameters):
        for length in (3, 60, 700):
            text = " ".join(WORDS[(number + place) % len(WORDS)] for place in range(length))
            yield {"inputs": text, "parameters": {"max_new_tokens": 4 + number} | more}


@pytest.mark.parametrize("flags", first([CAPTURED, *OTHERS], [CAPTURED]))
def test_no_kernel_is_compiled_while_requests_wait(flags: str) -> None:
    check(*flags.split())


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "flags"), by_turns(sorted(EXPECTED), SETTINGS))
def test_every_real_shape_is_served(name: str, flags: str, tmp_path: Path) -> None:
    """The first layers of published models, with random weights and few experts."""
    config = Published.read(name, most_tensors=0).config
    decoder = config.get("text_config", config)
    decoder |= {key: min(decoder[key], MOST_EXPERTS) for key in NUMS_EXPERTS if decoder.get(key)}
    shapes.make_model_folder(shapes.NamedShape(name, config, shapes.from_config(config)), tmp_path)
    if any(decoder.get(key) for key in NUMS_EXPERTS) and "--quantize" in flags:
        flags = CAPTURED  # whether experts are stored alike is a question for values
    check("--model-id", str(tmp_path), "--random-weights", *flags.split())


@pytest.mark.parametrize(("gpus", "flags"), [(2, "--num-shard 2"), (4, "--num-shard 2 --pipeline-parallel 2")])
def test_a_stream_outlives_a_shard_on_a_gpu_of_its_own(gpus: int, flags: str) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    with Server(*ON_GPU, *flags.split(), ready_within=2 * PATIENCE_S) as server:
        expected = stream(server)
        found = stream(server, lambda: os.kill(server.shards()[-1], signal.SIGKILL))
        server.stop()
        _, log = server.wait()
    assert found == expected
    assert "recovered in" in log


@pytest.mark.parametrize("cut", ["--num-shard", "--pipeline-parallel"])
def test_two_nodes_answer_and_outlive_a_shard(cut: str) -> None:
    """Of this machine, with a GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    nodes = (
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        cut,
        "2",
        "--trust-network",
    )
    other = start_launcher(*ON_GPU, *nodes, "--node-rank", "1", env={"CUDA_VISIBLE_DEVICES": "1"})
    try:
        with Server(*ON_GPU, *nodes, "--node-rank", "0", env={"CUDA_VISIBLE_DEVICES": "0"}) as server:
            expected = stream(server)
            found = stream(server, lambda: os.kill(server.running_shards()[0], signal.SIGKILL))
            server.stop()
            _, log = server.wait()
    finally:
        kill_group(other)
    assert found == expected
    assert "recovered in" in log


def stream(server: Server, disturb: Callable[[], None] = lambda: None) -> list[int]:
    """The tokens of a stream that is disturbed behind its tenth, and long enough for that."""
    request = body(" ".join(WORDS), max_new_tokens=1500, ignore_eos=True)
    ids: list[int] = []
    with httpx2.stream("POST", f"{server.url}/generate_stream", json=request, timeout=PATIENCE_S) as answer:
        for line in filter(None, answer.iter_lines()):
            (event,) = events_of([line])
            ids.append(event["token"]["id"])
            if len(ids) == 10:
                disturb()
    return ids


def check(*flags: str) -> None:
    """Start a server, which compiles kernels, and send it requests, for which it does not."""
    with (
        Server(*ON_GPU, "--log-level", "debug", *flags, ready_within=2 * PATIENCE_S) as server,
        ThreadPoolExecutor(18) as threads,
    ):
        assert any("compiled the kernel" in line for line in server.lines)
        alone, together = list(requests()), list(requests())
        ask = partial(httpx2.post, f"{server.url}/generate", timeout=PATIENCE_S)
        answers = [ask(json=request) for request in alone]
        answers += threads.map(lambda request: ask(json=request), together)
        server.stop()
        _, later = server.wait()
    if compiled := [line for line in later.splitlines() if "compiled the kernel" in line]:
        pytest.fail(f"{len(compiled)} kernels were compiled while requests waited: {compiled}")
    for request, answer in zip([*alone, *together], answers, strict=True):
        assert 200 == answer.status_code or "grammar" in request["parameters"], answer.text
