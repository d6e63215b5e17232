"""A real server with two keys: a greedy one and a modest one, whose requests make each other pause and nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx2

from tests.running import Server, body, tokens_of

GREEDY = {"authorization": "Bearer greedy-secret"}
MODEST = {"authorization": "Bearer modest-secret"}


def keys_file(folder: Path, *names: str) -> Path:
    path = folder / "keys.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps({"keys": [{"name": name, "key": f"{name}-secret"} for name in names]}))
    return path


def test_two_keys_share_a_server_and_see_the_tokens_that_they_would_have_alone(tmp_path: Path) -> None:
    """Two places: the greedy key has both, and nine requests more. The modest one's requests come one by one."""
    flags = (
        "--dtype",
        "float32",
        "--max-batch-size",
        "2",
        "--api-keys-file",
        str(keys_file(tmp_path, "greedy", "modest")),
    )
    many = [body("Once upon a time", max_new_tokens=60, details=True, seed=n, do_sample=True) for n in range(11)]
    few = [body("The little fox", max_new_tokens=12, details=True, seed=n, do_sample=True) for n in range(4)]

    async def story(url: str) -> tuple[list[httpx2.Response], list[httpx2.Response], int]:
        async with httpx2.AsyncClient(base_url=url, timeout=300, limits=httpx2.Limits(max_connections=None)) as client:
            crowd = [asyncio.create_task(client.post("/generate", json=one, headers=GREEDY)) for one in many]
            while "tgi_batch_current_size 2.0" not in (await client.get("/metrics", headers=MODEST)).text:
                await asyncio.sleep(0.01)
            modest = [await client.post("/generate", json=one, headers=MODEST) for one in few]
            num_left = sum(not task.done() for task in crowd)
            return list(await asyncio.gather(*crowd)), modest, num_left

    with Server(*flags) as server:
        alone = [
            [
                tokens_of(httpx2.post(f"{server.url}/generate", json=one, headers=headers, timeout=60).json())
                for one in asked
            ]
            for headers, asked in ((GREEDY, many), (MODEST, few))
        ]
        crowd, modest, num_left = asyncio.run(story(server.url))
        metrics = httpx2.get(f"{server.url}/metrics", headers=MODEST, timeout=60).text
        assert 401 == httpx2.get(f"{server.url}/metrics", timeout=60).status_code
    assert alone == [[tokens_of(answer.json()) for answer in answers] for answers in (crowd, modest)]
    assert num_left > 2  # first come, first served would have served all of them before
    assert "tgi_request_preempted 0.0" not in metrics
    assert f'tgi_key_request_count{{key="modest"}} {2.0 * len(few)}' in metrics


def test_keys_change_while_the_server_runs(tmp_path: Path) -> None:
    def status(headers: dict[str, str]) -> int:
        answer = httpx2.post(f"{server.url}/generate", json=body("Once", max_new_tokens=2), headers=headers, timeout=60)
        return answer.status_code

    path = keys_file(tmp_path, "greedy")
    with Server("--model-id", "null", "--api-keys-file", str(path)) as server:
        assert (200, 401) == (status(GREEDY), status(MODEST))
        keys_file(tmp_path, "modest")
        deadline = time.monotonic() + 300  # a bound of liveness
        while status(MODEST) != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert 401 == status(GREEDY)


def test_a_file_of_keys_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"keys": [{"name": "greedy"}]}')
    server = Server("--model-id", "null", "--api-keys-file", str(path))
    code, output = server.wait()
    assert 2 == code
    assert "key 1 (greedy): give either `key` or `sha256`" in output
