"""A backend of one's own is one class: this one replaces a single operator, and a shard serves through it."""

from __future__ import annotations

import asyncio
import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from host import cpu_kinds
from router.shards.client import ShardedClient
from server import loading
from server.backends.cpu.device import CpuDevice
from server.backends.device import Device
from server.backends.protocol import Backend, Norm
from server.backends.reference import ReferenceBackend
from server.loading import load
from server.pb import generate_pb2 as pb
from server.service import ShardService, serve
from tests.server.conftest import DEMO
from tests.server.driver import GREEDY, Prompt, generate, load_engine
from tests.server.test_service import config_of

PROMPT, COUNT = [5, 6, 7, 8], 12


class DummyBackend(ReferenceBackend):
    name = "dummy"

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm:
        return super().norm(-weight, bias, eps, is_centred=is_centred)  # a sign that a test sees


def choose_dummy(
    device: Device,
    dtype: torch.dtype,
    *,
    disable_custom_kernels: bool = False,
    cpu_kernels: str = "auto",
    cpu_inputs: str = "rounded",
) -> Backend:
    return DummyBackend(device)


def tokens_of(backend: Backend) -> list[int]:
    (done,) = generate(load_engine(DEMO, backend=backend), [Prompt(PROMPT, max_new_tokens=COUNT)])
    return done.tokens


async def served(socket: Path) -> tuple[str, list[int]]:
    """The backend that a shard of the embedded model names, and the tokens that it gives over gRPC."""
    service = ShardService(*load(config_of(DEMO, socket), choose_dummy), cuda_memory_fraction=1.0)
    server, client = await serve(service, str(socket)), ShardedClient([str(socket)])
    try:
        await client.wait_ready(timeout=60)
        await client.warmup(max_batch_prefill_tokens=64, max_total_tokens=64, useful_tokens=1024, max_top_n_tokens=5)
        first = pb.StepRequest(step=1, chunk_ids=[1], chunk_tokens=[len(PROMPT)])
        first.add.add(id=1, token_ids=PROMPT, blocks=[0], sampling=GREEDY)
        tokens = []
        for step in range(1, COUNT + 1):
            client.send(first if step == 1 else pb.StepRequest(step=step, decode=True))
            tokens += (await client.receive()).token_ids
        return (await client.info()).backend, tokens
    finally:
        await client.close()
        await server.stop(grace=0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({}, "bfloat16"), ({"disable_custom_kernels": True}, "float32"), ({"cpu_kernels": "none"}, "float32")],
    ids=str,
)
def test_16_bits_are_computed_where_compiled_kernels_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], expected: str
) -> None:
    """On a processor without instructions for them."""
    monkeypatch.setattr(cpu_kinds, "cpu_flags", lambda: [*cpu_kinds.kinds_of(platform.machine())[-1].wanted])
    monkeypatch.setattr(loading.cpu, "usable", lambda kernels: kernels)
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    threads = torch.get_num_threads()
    try:
        settings = {"cpu_kernels": "auto", "random_weights": True, **flags}
        _, info = load(config_of(tmp_path, tmp_path / "shard.sock", **settings), choose_dummy)
    finally:
        torch.set_num_threads(threads)
    assert expected == info.dtype


def test_a_shard_serves_through_a_backend_of_ones_own(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        name, tokens = asyncio.run(served(tmp_path / "shard.sock"))
    finally:
        torch.set_num_threads(threads)
    assert "dummy" == name
    assert tokens_of(DummyBackend(CpuDevice())) == tokens != tokens_of(ReferenceBackend(CpuDevice()))
