"""A whole server whose adapters come, change and go: each name gives what its files hold, and never the model's own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.adapters.identity import content_key
from tests.running import ROOT, Server
from tests.server.adapters.made import make

DEMO = ROOT / "server" / "demo"
NAMES = ("alice", "bob", "other")
KEYS = {"keys": [{"name": "user", "key": "user", "adapters": ["alice", "bob", "late", ""]}]}
KEYS["keys"].append({"name": "boss", "key": "boss", "admin": True})


class Site:
    """A server, and the folder that adapters come from."""

    def __init__(self, url: str, home: Path) -> None:
        self.home = home
        self._url = url

    def ask(self, path: str, body: Any, key: str = "user") -> httpx2.Response:
        return httpx2.post(f"{self._url}{path}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120)

    def text(self, name: str | None) -> str:
        """What is generated under a name; None: under none."""
        named = {} if name is None else {"model": name}
        answer = self.ask("/v1/completions", {"prompt": "Once", "temperature": 0, "max_tokens": 12, **named}, "boss")
        assert 200 == answer.status_code, answer.text
        return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("adapters")
    home = folder / "home"
    home.mkdir()
    for seed, name in enumerate(NAMES):
        make(DEMO, folder / name, rank=4 * (1 + seed), seed=seed, size=0.5)
    (keys := folder / "keys.json").touch(mode=0o600)
    keys.write_text(json.dumps(KEYS))
    (folder / "bob").rename(home / "bob")
    flags = ("--lora-adapters", f"alice={folder / 'alice'}", "--adapter-dir", str(home), "--dtype", "float32")
    with Server(*flags, "--api-keys-file", str(keys), "--max-adapters", "2") as server:
        yield Site(server.url, home)


def test_each_name_has_its_own_text_and_unknown_ones_have_none(site: Site) -> None:
    texts = {name: site.text(name) for name in (None, "alice", "bob")}
    assert 3 == len(set(texts.values())), texts
    assert texts[None] == site.text("tgi") == site.text("server/demo")
    for path, body in (
        ("/generate", {"inputs": "Once", "parameters": {"adapter_id": "carol"}}),
        ("/v1/completions", {"prompt": "Once", "model": "../alice"}),
    ):
        answer = site.ask(path, body)
        assert 404 == answer.status_code and "there is server/demo, alice, bob" in answer.text
    named = {"inputs": "Once", "parameters": {"adapter_id": "bob", "max_new_tokens": 12}}
    answer = site.ask("/generate", named)
    assert texts["bob"] == answer.json()["generated_text"]
    assert f"bob={content_key(site.home / 'bob').hex()}" == answer.headers["x-lockstep-adapter"]


def test_a_folder_that_changes_is_another_adapter(site: Site) -> None:
    before, first = site.text("bob"), content_key(site.home / "bob")
    new = site.home / "new"
    make(DEMO, new, rank=4, seed=77, size=0.5)
    (site.home / "bob").rename(site.home / ".old")
    new.rename(site.home / "bob")
    body = {"inputs": "Once", "parameters": {"adapter_id": "bob", "max_new_tokens": 12}}
    while (answer := site.ask("/generate", body)).headers["x-lockstep-adapter"].endswith(first.hex()):
        assert before == answer.json()["generated_text"]  # which are looked at once a second
    after = str(answer.json()["generated_text"])
    assert before != after == site.text("bob")


def test_adapters_are_loaded_and_unloaded_by_administrators(site: Site) -> None:
    make(DEMO, site.home / "deep", rank=4, seed=5, size=0.5)
    load = {"lora_name": "late", "lora_path": "deep"}
    assert 403 == site.ask("/v1/load_lora_adapter", load).status_code
    assert 404 == site.ask("/v1/completions", {"prompt": "Once", "model": "late"}).status_code
    assert 200 == site.ask("/v1/load_lora_adapter", load, "boss").status_code
    text = site.text("late")
    assert text not in {site.text(name) for name in (None, "alice", "bob")}
    outside = {"lora_name": "stolen", "lora_path": str(site.home.parent / "other")}
    refused = site.ask("/v1/load_lora_adapter", outside, "boss")
    assert 400 == refused.status_code and "in that of --adapter-dir" in refused.text
    broken = site.home / "broken"
    make(DEMO, broken, rank=4, seed=6)
    with (broken / "adapter_model.safetensors").open("r+b") as file:
        os.truncate(file.fileno(), 1000)
    refused = site.ask("/v1/load_lora_adapter", {"lora_name": "broken", "lora_path": "broken"}, "boss")
    assert 400 == refused.status_code and "the adapter broken cannot be served" in refused.text
    assert 200 == site.ask("/v1/unload_lora_adapter", {"lora_name": "late"}, "boss").status_code
    assert 404 == site.ask("/v1/completions", {"prompt": "Once", "model": "late"}).status_code
    assert 3 == len({site.text(name) for name in (None, "alice", "bob")})


def test_a_key_gets_its_own_adapters_alone(site: Site) -> None:
    make(DEMO, site.home / "secret", rank=4, seed=9)
    assert 200 == site.ask("/generate", {"inputs": "a", "parameters": {"adapter_id": "secret"}}, "boss").status_code
    refused = site.ask("/generate", {"inputs": "a", "parameters": {"adapter_id": "secret"}})
    assert 404 == refused.status_code and "there is server/demo, alice" in refused.text
    assert "secret" not in refused.json()["error"].partition("there is")[2]
