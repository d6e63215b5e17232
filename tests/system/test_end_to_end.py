"""A whole server on CPU, used as its users use it: text, limits, load, disconnects, signals, and wrong input."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.ports import free_port
from tests.running import (
    PATIENCE_S,
    Server,
    body,
    children_of,
    events_of,
    generate_all,
    is_alive,
    kill_group,
    start_launcher,
    tokens_of,
)
from tests.server.conftest import DEMO, save_tiny_bloom

ADMITTED = "tgi_request_input_length_count"  # counts every request that passed validation and was queued
GREEDY = body("Once upon a time", max_new_tokens=24, details=True)
SEEDED = body("Question: What does --num-shard do?\nAnswer:", max_new_tokens=24, do_sample=True, seed=7, details=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--dtype", "float32") as running:
        yield running


def generate(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    answer = httpx2.post(f"{server.url}/generate", json=request, timeout=120)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def mixed_requests(count: int, most_tokens: int = 60) -> list[dict[str, Any]]:
    """Requests of mixed lengths, greedy and seeded."""
    rng = random.Random(3)
    words = "the little fox went to the river and found a red ball under an old tree".split()
    return [
        body(
            " ".join(rng.choices(words, k=rng.randint(1, 150))),
            max_new_tokens=rng.randint(1, most_tokens),
            details=True,
            **({"do_sample": True, "seed": i} if i % 2 else {}),
        )
        for i in range(count)
    ]


def eventually(condition: Any, within: float = PATIENCE_S) -> bool:
    """Whether the condition becomes true in time."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


# ------------------------------------------------------------------------------------------------------------- text


def test_a_person_sees_readable_text(server: Server) -> None:
    text = generate(server, body("Once upon a time", max_new_tokens=40))["generated_text"]
    assert len(text.split()) > 15
    assert text.isascii() and "." in text


def test_the_port_is_closed_until_the_model_can_answer() -> None:
    port = free_port()
    launcher = start_launcher("--hostname", "127.0.0.1", "--port", str(port), "--device", "cpu")
    try:
        statuses = []
        while not statuses:
            try:
                statuses.append(httpx2.post(f"http://127.0.0.1:{port}/generate", json=GREEDY, timeout=60).status_code)
            except httpx2.ConnectError:
                assert launcher.poll() is None
                time.sleep(0.05)
        assert [200] == statuses
    finally:
        kill_group(launcher)


def test_a_stream_says_what_the_whole_answer_says(server: Server) -> None:
    whole = generate(server, GREEDY)
    with httpx2.stream("POST", f"{server.url}/generate_stream", json=GREEDY, timeout=60) as answer:
        events = events_of(list(answer.iter_lines()))
    assert tokens_of(whole) == [event["token"]["id"] for event in events]
    assert whole["generated_text"] == events[-1]["generated_text"]


def test_prompt_details_and_candidates_come_with_the_answer(server: Server) -> None:
    request = body("Once upon", max_new_tokens=3, decoder_input_details=True, top_n_tokens=2)
    details = generate(server, request)["details"]
    assert None is details["prefill"][0]["logprob"]
    assert all(token["logprob"] < 0 for token in details["prefill"][1:])
    assert [2, 2, 2] == [len(top) for top in details["top_tokens"]]
    assert [top[0]["id"] for top in details["top_tokens"]] == [token["id"] for token in details["tokens"]]


def test_a_long_beginning_is_computed_once(server: Server) -> None:
    story = " ".join(["The little fox went to the river and found a red ball under an old tree."] * 60)
    answers = []
    for ending in (" The fox said", " The ball was", " Then the bird"):
        answers.append(tokens_of(generate(server, body(f"{story}{ending}", max_new_tokens=8, details=True))))
    assert server.metrics()["tgi_request_prefix_hit_tokens"] > 2 * 850
    with Server("--dtype", "float32", "--disable-prefix-caching") as plain:
        for ending, tokens in zip((" The fox said", " The ball was", " Then the bird"), answers, strict=True):
            assert tokens_of(generate(plain, body(f"{story}{ending}", max_new_tokens=8, details=True))) == tokens
        assert 0 == plain.metrics()["tgi_request_prefix_hit_tokens"]


def test_a_chat_is_the_prompt_that_the_template_writes(server: Server) -> None:
    """The embedded model's own template, through the process that renders it."""
    question = "What does --num-shard do?"
    messages = [{"role": "user", "content": question}]
    asked = {"messages": messages, "temperature": 0, "max_tokens": 24}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=asked, timeout=120).json()
    text = answer["choices"][0]["message"]["content"]
    tokenizer = AutoTokenizer.from_pretrained(str(DEMO))
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = generate(server, body(prompt, max_new_tokens=24))
    assert text and text == expected["generated_text"]
    lines = httpx2.post(f"{server.url}/v1/chat/completions", json={**asked, "stream": True}, timeout=120).text
    chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    assert text == "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)


# ------------------------------------------------------------------------------------------------- shards and load


@pytest.mark.parametrize("shards", [2, pytest.param(8, marks=pytest.mark.rest)])
def test_shards_and_neighbours_do_not_change_the_tokens(server: Server, shards: int) -> None:
    expected = [tokens_of(generate(server, r)) for r in (GREEDY, SEEDED)]
    neighbours = mixed_requests(12, most_tokens=24)
    with Server("--dtype", "float32", "--num-shard", str(shards)) as sharded:
        alone = [tokens_of(generate(sharded, r)) for r in (GREEDY, SEEDED)]
        crowd = asyncio.run(generate_all(sharded, [*neighbours[:6], GREEDY, SEEDED, *neighbours[6:]]))
    assert expected == alone
    assert expected == [tokens_of(answer.json()) for answer in crowd[6:8]]


def test_no_limit_is_exceeded_under_load_and_tokens_stay_the_same(server: Server) -> None:
    requests = mixed_requests(40)
    expected = [tokens_of(generate(server, r)) for r in requests]
    limits = {"max_batch_total_tokens": 2000, "max_batch_prefill_tokens": 256, "max_batch_size": 16}
    flags = [text for name, value in limits.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    with Server("--dtype", "float32", *flags) as limited:
        answers = asyncio.run(generate_all(limited, requests))
        metrics = limited.metrics()
    assert expected == [tokens_of(answer.json()) for answer in answers]
    assert 0 < metrics["tgi_batch_peak_reserved_tokens"] <= 2000
    assert 0 < metrics["tgi_batch_peak_prefill_tokens"] <= 256
    assert 1 < metrics["tgi_batch_peak_batch_size"] <= 16
    assert metrics["tgi_kv_blocks_free"] == metrics["tgi_kv_blocks_total"]


def test_the_129th_request_is_refused_at_once_and_the_others_go_on(server: Server) -> None:
    async def crowd() -> tuple[httpx2.Response, int, list[httpx2.Response]]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(timeout=300, limits=limits) as client:
            before = server.metrics().get(ADMITTED, 0)
            long = body("Once upon a time", max_new_tokens=400, ignore_eos=True)
            running = [asyncio.create_task(client.post(f"{server.url}/generate", json=long)) for _ in range(128)]
            while (await asyncio.to_thread(server.metrics))[ADMITTED] < before + 128:
                await asyncio.sleep(0.05)
            refused = await client.post(f"{server.url}/generate", json=GREEDY)
            still_running = sum(not request.done() for request in running)
            return refused, still_running, list(await asyncio.gather(*running))

    refused, still_running, others = asyncio.run(crowd())
    assert (429, "overloaded") == (refused.status_code, refused.json()["error_type"])
    assert still_running > 0  # it did not wait for a place
    assert {200} == {answer.status_code for answer in others}


@pytest.mark.parametrize("route", ["/generate_stream", "/generate"])
def test_a_client_that_leaves_frees_its_blocks(server: Server, route: str) -> None:
    assert eventually(lambda: server.metrics()["tgi_batch_current_size"] == 0)
    before = server.metrics()
    dropped = 'tgi_request_failure{err="dropped"}'
    # With this seed no end token comes before the last of them.
    endless = body("Once upon a time", max_new_tokens=1000, do_sample=True, temperature=3.0, seed=36)
    payload = json.dumps(endless).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(payload)}".encode() + b"\r\n\r\n" + payload)
        assert eventually(lambda: server.metrics()["tgi_kv_blocks_free"] < before["tgi_kv_blocks_free"])
    assert eventually(lambda: server.metrics()["tgi_kv_blocks_free"] == before["tgi_kv_blocks_free"])
    assert before.get(dropped, 0) + 1 == server.metrics()[dropped]


# ---------------------------------------------------------------------------------------------------------- signals


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    flags = ("--dtype", "float32", "--graceful-termination-timeout", str(PATIENCE_S))
    with Server("--num-shard", "2", *flags) as server:
        children = server.children()
        answers: list[httpx2.Response] = []
        long = body("Once upon a time", max_new_tokens=600, do_sample=True, temperature=2.0, ignore_eos=True)
        clients = [
            threading.Thread(
                target=lambda: answers.append(httpx2.post(f"{server.url}/generate", json=long, timeout=PATIENCE_S))
            )
            for _ in range(8)
        ]
        for client in clients:
            client.start()
        assert eventually(lambda: server.metrics().get(ADMITTED) == 8)
        with httpx2.Client(base_url=server.url, timeout=60) as kept_alive:
            assert kept_alive.get("/health").status_code == 200
            server.stop()
            assert eventually(lambda: kept_alive.get("/health").status_code == 503)
            refused = kept_alive.post("/generate", json=GREEDY)
        for client in clients:
            client.join()
        code, log = server.wait()
    assert log.endswith("launcher: stopped\n")
    assert (503, True) == (refused.status_code, "retry-after" in refused.headers)
    assert [200] * 8 == [answer.status_code for answer in answers]
    assert 0 == code
    assert not [pid for pid in children if is_alive(pid)]


def test_a_second_signal_aborts() -> None:
    long = body("Once upon a time", max_new_tokens=1500)  # 5 minutes of steps: none is answered before the signals

    async def hold(server: Server) -> list[httpx2.Response | BaseException]:
        async with httpx2.AsyncClient(timeout=None) as client:
            running = [asyncio.create_task(client.post(f"{server.url}/generate", json=long)) for _ in range(16)]
            while not server.metrics()["tgi_batch_current_size"]:
                await asyncio.sleep(0.02)
            async with httpx2.AsyncClient(timeout=60) as kept_alive:
                assert 200 == (await kept_alive.get(f"{server.url}/health")).status_code
                server.stop()
                while (await kept_alive.get(f"{server.url}/health")).status_code != 503:  # until it was noticed
                    await asyncio.sleep(0.02)
            server.stop()
            return list(await asyncio.gather(*running, return_exceptions=True))

    with Server("--model-id", "null", "--null-step-ms", "200") as server:
        children = server.children()
        answers = asyncio.run(hold(server))
        code, _ = server.wait()
    assert all(isinstance(answer, httpx2.HTTPError) for answer in answers)
    assert code != 0
    assert not [pid for pid in children if is_alive(pid)]


def test_nothing_survives_a_launcher_that_was_killed() -> None:
    with Server("--num-shard", "2") as server:
        children = server.children()
        assert 4 == len(children)  # the fork server, two shards and the router
        server.stop(signal.SIGKILL)
        assert eventually(lambda: not [pid for pid in children if is_alive(pid)])
        server.wait()


# ------------------------------------------------------------------------------------------------------ wrong input


def refusal(*flags: str, env: dict[str, str] | None = None) -> str:
    """The last line of a launch that must fail by itself, leaving nothing behind."""
    launcher = start_launcher("--hostname", "127.0.0.1", *flags, env=env)
    children: set[int] = set()

    def has_ended() -> bool:
        children.update(children_of(launcher.pid))
        return launcher.poll() is not None

    try:
        assert eventually(has_ended)
        output, _ = launcher.communicate(timeout=60)
    finally:
        kill_group(launcher)
    assert launcher.returncode != 0, output
    assert not [pid for pid in children if is_alive(pid)]
    last = output.strip().splitlines()[-1]
    assert last.startswith("error: "), output
    assert "Traceback" not in output
    return last


def copy_of(folder: Path, target: Path) -> Path:
    """The embedded model's small files, to be completed by a test."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    last = refusal("--port", "0", "--model-id", str(tmp_path / "nothing"))
    assert str(tmp_path / "nothing") in last


def test_a_model_that_is_not_cached_while_offline(tmp_path: Path) -> None:
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    last = refusal("--port", "0", "--model-id", "bigscience/bloom-560m", env=env)
    assert "bigscience/bloom-560m" in last
    assert "offline" in last.lower()


def test_heads_that_shards_do_not_divide(tmp_path: Path) -> None:
    save_tiny_bloom(copy_of(DEMO, tmp_path), n_head=9, hidden_size=72)
    last = refusal("--port", "0", "--device", "cpu", "--model-id", str(tmp_path), "--num-shard", "2")
    assert "9 attention heads, which --num-shard 2 does not divide" in last
    assert "use --num-shard 1" in last


def test_a_truncated_weights_file(tmp_path: Path) -> None:
    weights = (DEMO / "model.safetensors").read_bytes()
    (copy_of(DEMO, tmp_path) / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors" in refusal("--port", "0", "--device", "cpu", "--model-id", str(tmp_path))


def test_a_checkpoint_with_an_unknown_tensor(tmp_path: Path) -> None:
    tensors = load_file(DEMO / "model.safetensors")
    tensors["transformer.h.0.adapter.weight"] = tensors["transformer.ln_f.weight"].clone()
    save_file(tensors, copy_of(DEMO, tmp_path) / "model.safetensors")
    last = refusal("--port", "0", "--device", "cpu", "--model-id", str(tmp_path))
    assert "transformer.h.0.adapter.weight" in last


def test_a_port_that_is_taken() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert str(port) in refusal("--port", str(port))


def test_more_shards_than_gpus() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0,1"}
    last = refusal("--port", "0", "--device", "cuda", "--num-shard", "4", env=env)
    assert "4" in last and "2" in last


def test_a_kv_cache_that_does_not_fit() -> None:
    last = refusal("--port", "0", "--device", "cpu", "--max-batch-total-tokens", "2000000000")
    assert "--max-batch-total-tokens is 2000000000" in last
    assert "use --max-batch-total-tokens" in last
