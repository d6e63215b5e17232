"""`lockstep check` says of a config.json what a shard says of it: that it is served, or the same sentence why not."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from launch import models
from launch.config import DEMO
from launch.flags import read_command_line
from launch.settings import read_settings
from router.config import RouterConfig
from router.scheduling.limits import derive_lengths, useful_tokens
from server import loading
from server.arch.families import FAMILIES
from server.config import ShardConfig
from tests.launch.test_check import LLAMA, check, row
from tests.server.arch.test_odd_configs import PUBLISHED, config_of
from tests.server.quantisation.test_refusals import BY_CONFIG, GPTQ
from tests.server.tiny import CASES

CASE_OF = {kind: case for case, (kind, _) in CASES.items()} | {name: name for name in PUBLISHED}
CASE_OF["kimi_k2"] = "deepseek_v3"
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "num_global_key_value_heads")
IMAGES = {"vision_config": {}, "text_config": LLAMA}
# What transformers knows, or does not, and which settings are given.
ELSEWHERE: list[tuple[dict[str, Any], list[str]]] = [
    ({"model_type": "gptj", "n_positions": 512}, []),
    ({"model_type": "gptj"}, ["--num-shard", "2", "--quantize", "int8", "--weights-on-device", "100%"]),
    ({"model_type": "gptj"}, ["--kv-cache-dtype", "int8", "--rope-factor", "2"]),
    ({"model_type": "gptj"}, ["--pipeline-parallel", "2"]),
    ({"model_type": "gptj", "n_embd": "wide"}, []),
    ({"model_type": "gptj", "n_embd": -64}, []),
    ({"model_type": "bart"}, []),
    ({"model_type": "mamba"}, []),
    ({"model_type": "bert"}, []),
    ({"model_type": "bert", "is_decoder": True}, []),
    ({"model_type": "foo"}, []),
    ({}, []),
    *(({"model_type": kind, **IMAGES}, []) for kind in ("qwen2_vl", "llava_next", "idefics3", "paligemma")),
    *(({"model_type": kind, "vision_config": {}}, []) for kind in ("mllama", "llama4", "gemma3")),
]


def folder_with(config: Mapping[str, Any], folder: Path) -> Path:
    """A model without weights."""
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(DEMO / "tokenizer.json", folder)
    return folder


def said_by_the_start(folder: Path, words: Sequence[str]) -> str:
    """What a shard refuses; empty where it loads the model."""
    settings, problems = read_settings(read_command_line(words)[0], {"DEVICE": "cpu"})
    assert not problems
    stages = settings.values["pipeline_parallel"]
    config = ShardConfig(
        *(str(folder), str(folder), 0, (settings.values["num_shard"] or 1) * stages, "", ""),
        stage_sockets=("",) * stages,
        **settings.pick(ShardConfig) | {"threads": 1},
    )
    try:
        loading.load(config)
    except ValueError as error:
        return str(error)
    return ""


def agree(folder: Path, *words: str) -> str:
    """Hold what check says of random weights to what a shard says, and return that."""
    found = check(["--model-id", str(folder), "--random-weights", *words])
    expected = said_by_the_start(folder, ["--random-weights", *words])
    of_the_router = "config.json is not JSON: "  # which reads numbers more strictly
    assert ([expected] if expected else []) == [problem for problem in found.problems if of_the_router not in problem]
    return expected


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_served_or_refused_as_by_the_start(kind: str, tmp_path: Path) -> None:
    config = config_of(CASE_OF[kind]) | {"model_type": kind}
    folder_with(config, tmp_path)
    assert "" == agree(tmp_path)
    agree(tmp_path, "--rope-scaling", "linear", "--rope-factor", "2")
    assert "and each stage needs one" in agree(tmp_path, "--pipeline-parallel", "8")
    heads = next(name for name in ("num_attention_heads", "n_head", "n_heads", "num_heads") if name in config)
    nine = {key: 9 for key in (heads, *KV_HEADS) if config.get(key)}
    folder_with(config | nine | {"head_dim": 8, "d_model": 72, "n_embd": 72, "hidden_size": 72}, tmp_path)
    refused = agree(tmp_path, "--num-shard", "2")
    of_itself = "config.json says 9 (Mamba|attention) heads (in|for) 2 .*: download it again"
    assert re.search(f"the model has 9 .*heads.*, which --num-shard 2 does not divide|{of_itself}", refused)
    folder_with(config | {heads: "nine"}, tmp_path)
    assert "'nine', which must be a whole number" in agree(tmp_path)


@pytest.mark.parametrize("config", [config for config, _ in BY_CONFIG])
def test_every_format_is_refused_as_by_the_start(config: Any, tmp_path: Path) -> None:
    assert agree(folder_with(LLAMA | {"quantization_config": config}, tmp_path))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["--quantize", "awq"]),
        ({"quantization_config": GPTQ}, ["--quantize", "awq"]),
        ({"quantization_config": GPTQ}, ["--quantize", "gptq"]),
        ({}, ["--quantize", "bitsandbytes-nf4"]),
    ],
)
def test_formats_that_are_asked_for_are_those_of_the_start(
    config: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    agree(folder_with(LLAMA | config, tmp_path), *words)


@pytest.mark.parametrize(("config", "words"), ELSEWHERE)
def test_what_transformers_runs_or_does_not_is_told_as_by_the_start(
    config: dict[str, Any], words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = {
        "hidden_size": 64,
        "n_embd": 64,
        "n_layer": 2,
        "rotary_dim": 4,
        "d_model": 64,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    }
    folder_with(small | config, tmp_path)
    if config.get("model_type") in ("mllama", "llama4", "gemma3"):  # which are large without all of their sizes
        found = check(["--model-id", str(tmp_path), "--random-weights"])
        assert [] == found.problems and any("It serves text alone" in note for note in found.notes)
    elif not agree(tmp_path, *words):
        found = check(["--model-id", str(tmp_path), "--random-weights"])
        assert [record.message for record in caplog.records if "architectures" in record.message] == [
            note for note in found.notes if "architectures" in note
        ]
        assert "memory: transformers has its own KV cache" in found.unchecked


def test_limits_of_what_transformers_runs_are_those_of_its_config(tmp_path: Path) -> None:
    folder_with({"model_type": "gptj", "n_positions": 512}, tmp_path)
    words = ["--model-id", str(tmp_path), "--random-weights"]
    assert ("512", "the model's longest sequence") == row(check(words), "max_total_tokens")
    (problem,) = check([*words, "--max-total-tokens", "513"]).problems
    assert problem.startswith("--max-total-tokens is 513 but the model's longest sequence is 512 tokens")


def test_an_encoder_has_blocks_of_its_own(tmp_path: Path) -> None:
    """As in the warm-up of a server, whose prompts an encoder reads in one step."""
    config = RouterConfig(model_path="", model_id="", shard_sockets=())
    lengths = derive_lengths(config, 0, has_encoder=True)
    wanted = useful_tokens(config, lengths, block_size=16, has_encoder=True)
    found = check(["--model-id", str(folder_with(config_of("t5"), tmp_path)), "--random-weights"])
    assert (str(wanted), "the largest load") == row(found, "max_batch_total_tokens")
    assert not [name for name, _, reason in found.rows if "about a second" in reason]


# ----------------------------------------------------------------------------------------------------------------- hub


class Dripping(BaseHTTPRequestHandler):
    """Sends a byte now and then, and never all."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        stopped: threading.Event = self.server.stopped  # type: ignore[attr-defined]
        try:
            while not stopped.wait(0.05):
                self.wfile.write(b" ")
        except OSError:
            pass

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def dripping_hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Dripping)
    server.daemon_threads, server.stopped = True, threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.stopped.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hub_that_drips_is_given_up(dripping_hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drips until the test ends: who does not give it up waits for ever."""
    monkeypatch.setattr(models, "ANSWER_SECONDS", 1.0)
    cache = {"HUGGINGFACE_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": dripping_hub, "HF_HUB_OFFLINE": "0"}
    found = check(["--model-id", "someone/model"], cache)
    assert ["the hub has not sent the description after 1 seconds: check the network, or HF_ENDPOINT"] == found.problems
    assert ["the model: its shards, memory and longest sequence"] == found.unchecked
