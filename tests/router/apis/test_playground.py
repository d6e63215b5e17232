"""The playground: who gets the page, what holds it in, and what of the running batch whom is shown."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx2
import pytest

from router.apis.playground import routes as files
from router.batching import batch_view
from router.shards.client import ShardError
from tests.router.apis.test_overload import AS_ALICE, AS_BOB, keyed
from tests.router.doubles import fake_shards, make_limits, request_of, stalling, standing
from tests.router.site import Site, site
from tests.router.test_accounts import ALICE, BOB

FOLDER = files.FOLDER
CHROMIUM = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
FIREFOX = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
# What makes markup or code of a text, by name; trusted types would stop most of it, and none of it is there.
MAKES_MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML|srcdoc"
    r"|\beval\b|new Function|javascript:|setAttribute\(\s*[\"'](on|style|src|href)"
)
ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//[a-z0-9]", re.IGNORECASE)


async def get(it: Site, path: str = "/", accept: str | None = None, **headers: str) -> httpx2.Response:
    given = {**headers, "accept": accept} if accept is not None else headers
    return await it.http.get(path, headers=given)


# ------------------------------------------------------------------------------------------------------ the page


@pytest.mark.parametrize("accept", [CHROMIUM, FIREFOX, "text/html", "TEXT/HTML;q=0.5", "a/b, text/html ; level=1"])
async def test_a_browser_gets_the_page(accept: str) -> None:
    async with site() as it:
        answer = await get(it, accept=accept)
        assert (200, "text/html; charset=utf-8") == (answer.status_code, answer.headers["content-type"])
        assert answer.content == (FOLDER / "page.html").read_bytes()
        assert "accept" == answer.headers["vary"].lower()


@pytest.mark.parametrize(
    "accept",
    ["*/*", "", "application/json", "text/*", "text/html;q=0", "text/html; q=0.00, */*", "text/htmlx", "," * 9999],
)
async def test_everyone_else_gets_the_empty_200_of_tgi(accept: str) -> None:
    async with site() as it:
        answer = await get(it, accept=accept)
        assert (200, b"") == (answer.status_code, answer.content)
        assert "content-type" not in answer.headers


async def test_head_is_a_probe_whatever_it_accepts() -> None:
    async with site() as it:
        answer = await it.http.head("/", headers={"accept": CHROMIUM})
        assert (200, "0") == (answer.status_code, answer.headers["content-length"])


async def test_the_page_is_there_while_probes_are_told_that_the_server_is_not_well() -> None:
    async with site() as it:
        it.batcher.outage = ShardError(0, "a shard is gone")
        assert 503 == (await get(it, accept="*/*")).status_code
        assert 200 == (await get(it, accept=CHROMIUM)).status_code
        assert "restarting" == (await get(it, "/playground/batch")).json()["state"]
        it.batcher.outage = None
        it.batcher.is_leaving = True
        assert "stopping" == (await get(it, "/playground/batch")).json()["state"]


async def test_every_file_is_held_in() -> None:
    """Nothing from elsewhere, nothing that stands in the page itself, no other page around it, no markup of a text."""

    async with site() as it:
        for path in ("/", *sorted(files.OPEN_PATHS)):
            answer = await get(it, path, accept=CHROMIUM)
            assert 200 == answer.status_code
            policy = dict(
                rule.strip().partition(" ")[::2] for rule in answer.headers["content-security-policy"].split(";")
            )
            assert "'none'" == policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"]
            assert {"'self'"} == {policy[name] for name in ("script-src", "style-src", "connect-src")}
            assert ("'script'", "'none'") == (policy["require-trusted-types-for"], policy["trusted-types"])
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert ("nosniff", "no-referrer") == tuple(
                answer.headers[name] for name in ("x-content-type-options", "referrer-policy")
            )


class Markup(HTMLParser):
    """All that a page names, and all that it holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.attributes: set[str] = set()
        self.inside = ""
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attrs}
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "poster")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        assert tag not in ("style", "base", "iframe", "object", "embed")
        assert tag != "script" or "src" in dict(attrs)


def test_the_page_names_its_own_files_alone_by_relative_addresses() -> None:
    page = Markup()
    page.feed((FOLDER / "page.html").read_text())
    loaded = {address for address in page.addresses if not address.startswith(("data:image/svg+xml,", "#"))}
    assert {"docs", "playground/app.css", "playground/app.js", "playground/theme.js"} == loaded
    assert not [name for name in page.attributes if name.startswith("on") or name == "style"]
    assert len(page.ids) == len(set(page.ids))


@pytest.mark.parametrize("name", files.NAMES)
def test_no_file_makes_markup_of_a_text_or_names_another_server(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert not MAKES_MARKUP.search(text)
    code = re.sub(r"(?m)(^|\s)//.*$|/\*.*?\*/", "", text)
    assert not [found for found in re.findall(r"[\"'`]([^\"'`\n]*)[\"'`]", code) if ADDRESS.search(found)]
    assert not re.search(r"@import|\burl\(", text)
    asked = re.findall(r"(?:ask|send|fetch)\(\s*[\"'`]([^\"'`]*)", code)
    assert not [path for path in asked if path.startswith(("/", "."))], "addresses are relative to the page"
    imported = re.findall(r"from \"\./([^\"]*)\"", code)
    assert set(imported) <= set(files.NAMES)


def test_the_folder_holds_what_is_served_and_every_id_that_scripts_look_for() -> None:
    served = {"page.html", *files.NAMES}
    assert served == {path.name for path in FOLDER.iterdir() if path.suffix in files.MEDIA_TYPES}
    page = Markup()
    page.feed((FOLDER / "page.html").read_text())
    scripts = "".join((FOLDER / name).read_text() for name in files.NAMES if name.endswith(".js"))
    looked_for = set(re.findall(r"(?:byId|getElementById)\(\"([^\"]+)\"\)", scripts))
    assert looked_for <= set(page.ids)


# ---------------------------------------------------------------------------------------------------------- keys


async def test_the_page_comes_without_a_key_and_its_data_with_one_alone() -> None:
    async with site(config={"api_key": "Sesame"}) as it:
        for path in ("/", *files.OPEN_PATHS):
            assert 200 == (await get(it, path, accept=CHROMIUM)).status_code
        for headers in ({}, {"authorization": "Bearer sesame"}):
            answer = await get(it, "/playground/batch", accept=CHROMIUM, **headers)
            assert (401, "unauthorized") == (answer.status_code, answer.json()["error_type"])
            assert not it.batcher.view.is_recording
        answer = await get(it, "/playground/batch", authorization="Bearer Sesame")
        assert (200, "no-store") == (answer.status_code, answer.headers["cache-control"])


# --------------------------------------------------------------------------------------------- the running batch


@asynccontextmanager
async def held(*bodies: dict[str, Any], config: dict[str, Any] | None = None, **limits: Any) -> AsyncIterator[Site]:
    """A site with these requests in it while the block runs, in order; its shards answer the first step afterwards."""
    gate = asyncio.Event()
    shards = fake_shards(make_limits(**limits), sleep=stalling(gate))
    async with site(shards, config=config, **limits) as it, asyncio.timeout(30):
        tasks = []
        for number, one in enumerate(bodies, 1):
            tasks.append(asyncio.create_task(it.http.post("/generate", timeout=30, **one)))
            while len(it.batcher._live) < number:
                await asyncio.sleep(0.001)
        try:
            yield it
        finally:
            gate.set()
            answers = await asyncio.gather(*tasks)
        assert not [answer for answer in answers if answer.status_code != 200]


def body(inputs: str, id: str, key: str = "", **parameters: Any) -> dict[str, Any]:
    headers = {"x-request-id": id} | ({"authorization": f"Bearer {key}"} if key else {})
    return {"json": {"inputs": inputs, "parameters": {"max_new_tokens": 4, **parameters}}, "headers": headers}


async def test_the_batch_shows_who_runs_and_who_waits_and_no_text() -> None:
    one, two = body("SECRET prompt", "first"), body("SECRET", "second", max_new_tokens=9)
    async with held(one, two, max_batch_size=1, prefix_caching=True) as it:
        answer = await get(it, "/playground/batch")
        assert "SECRET" not in answer.text
        batch = answer.json()
        [running], [waiting] = batch["running"]["requests"], batch["waiting"]["requests"]
        assert {"id": "first", "prompt_tokens": 13, "prompt_left": 0, "max_new_tokens": 4} == {
            name: running[name] for name in ("id", "prompt_tokens", "prompt_left", "max_new_tokens")
        }
        assert ("second", 6, 9, 0) == tuple(
            waiting[name] for name in ("id", "prompt_tokens", "max_new_tokens", "generated_tokens")
        )
        assert (1, 1, 1) == (batch["running"]["count"], batch["waiting"]["count"], batch["max_running"])
        assert 15 == batch["waiting_tokens"]
        assert {"total": 64, "free": 62, "size": 16} == batch["kv_blocks"]
        assert {"is_on": True, "hit_tokens": 0, "computed_tokens": 13} == batch["prefix_cache"]


async def test_the_batch_counts_hits_of_the_prefix_cache_and_shows_them_with_the_request() -> None:
    async with site(prefix_caching=True) as it:
        assert 200 == (await it.post("/generate", "a" * 40, max_new_tokens=1)).status_code
        await it.all_free()
        assert 200 == (await it.post("/generate", "a" * 40, max_new_tokens=1)).status_code
        prefix = (await get(it, "/playground/batch")).json()["prefix_cache"]
        assert {"is_on": True, "hit_tokens": 32, "computed_tokens": 48} == prefix


async def test_tokens_that_a_grammar_forces_are_no_part_of_the_prompt() -> None:
    async with site() as it:
        entry = it.batcher.submit(request_of(13))
        entry.num_prompt_scheduled, entry.num_known = 13, 26
        assert (13, 0) == tuple(batch_view._request(entry, "")[name] for name in ("prompt_tokens", "prompt_left"))
        await it.all_free()


async def test_the_batch_lists_a_bounded_number_and_counts_them_all() -> None:
    most = batch_view.MOST_REQUESTS

    places, num_entries = most + 10, 3 * most
    async with held(max_batch_size=places, max_batch_total_tokens=8192, max_batch_prefill_tokens=512) as it:
        for entry in [it.batcher.submit(request_of(1)) for _ in range(num_entries)]:
            entry.request_id = "x" * 64
        while not it.shards.requests:
            await asyncio.sleep(0.001)
        answer = await get(it, "/playground/batch")
        batch = answer.json()
        assert (places, num_entries - places) == (batch["running"]["count"], batch["waiting"]["count"])
        assert (most, most) == tuple(len(batch[name]["requests"]) for name in ("running", "waiting"))
        assert len(answer.content) < 300 * 2 * most


async def test_a_key_sees_of_others_requests_that_they_are_there(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps({"keys": [{"name": name, "key": f"{name}-key"} for name in ("ann", "bob")]}))

    bodies = [body("SECRET of ann", "order-of-ann", "ann-key"), body("SECRET of bob", "order-of-bob", "bob-key")]
    async with held(*bodies, config={"api_keys_file": str(path)}, prefix_caching=True) as it:
        answer = await get(it, "/playground/batch", authorization="Bearer bob-key")
        assert not {"SECRET", "order-of-ann", "ann"} & set(re.findall(r"[\w-]+", answer.text))
        batch = answer.json()
        shown = [
            (one["id"], one["cached_tokens"]) for name in ("running", "waiting") for one in batch[name]["requests"]
        ]
        assert {("order-of-bob", 0), (None, None)} == set(shown)


async def test_a_key_sees_what_the_prefix_cache_held_of_its_own_prompts_alone(tmp_path: Path) -> None:
    async with site(config=keyed(tmp_path, ALICE, BOB), prefix_caching=True) as it:
        for key in (AS_ALICE, AS_ALICE, AS_BOB):
            one = {"inputs": "a" * 40, "parameters": {"max_new_tokens": 1}}
            assert 200 == (await it.http.post("/generate", json=one, headers=key)).status_code
            await it.all_free()
        shown = [(await get(it, "/playground/batch", **key)).json()["prefix_cache"] for key in (AS_ALICE, AS_BOB)]
        assert [(32, 48), (32, 8)] == [(one["hit_tokens"], one["computed_tokens"]) for one in shown]


async def test_steps_are_recorded_while_somebody_looks_and_for_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_view, "UNSEEN_S", 60.0)
    async with site() as it:
        assert 200 == (await it.post("/generate", max_new_tokens=3)).status_code
        assert it.metrics.on_step is None
        assert [] == (await get(it, "/playground/batch")).json()["steps"]
        assert 200 == (await it.post("/generate", "hello", max_new_tokens=3)).status_code
        monkeypatch.setattr(batch_view, "UNSEEN_S", 0.2)
        steps = (await get(it, "/playground/batch")).json()["steps"]
        assert [(0, 5), (1, 0), (1, 0)] == [(decoding, prefill) for _, decoding, prefill in steps if decoding + prefill]
        async with asyncio.timeout(10):
            while it.batcher.view.is_recording:
                await asyncio.sleep(0.01)
        assert it.metrics.on_step is None
        assert 200 == (await it.post("/generate", max_new_tokens=3)).status_code
        assert [] == (await get(it, "/playground/batch")).json()["steps"]


async def test_only_the_last_steps_are_kept() -> None:
    async with site() as it:
        await get(it, "/playground/batch")
        for _ in range(3):
            assert 200 == (await it.post("/generate", max_new_tokens=60)).status_code
        batch = (await get(it, "/playground/batch")).json()
        assert batch_view.NUM_STEPS == len(batch["steps"])
        assert 3 * 59 == batch["decoded_tokens"]


async def test_tokens_that_were_guessed_count_as_decoded() -> None:
    shards = fake_shards(make_limits(speculate=6), next_token=lambda *_: 65, step_delay_s=0.005)
    async with site(shards, clock=standing, speculate=6) as it:
        await get(it, "/playground/batch")
        assert 200 == (await it.post("/generate", "A" * 40, max_new_tokens=60)).status_code
        assert any(request.drafts for request in shards.requests)
        assert 59 == (await get(it, "/playground/batch")).json()["decoded_tokens"]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_tokens_that_were_guessed_are_marked(path: str) -> None:
    """All that a step brought a sequence but the last."""
    shards = fake_shards(make_limits(speculate=6), next_token=lambda *_: 65, step_delay_s=0.005)
    async with site(shards, clock=standing, speculate=6) as it:
        answer = await it.post(path, "A" * 40, max_new_tokens=60, details=True)
        metrics = (await it.http.get("/metrics")).text
        plain = await it.post("/generate", "A" * 40, max_new_tokens=60, details=True, speculate=0)
    if path == "/generate":
        tokens = answer.json()["details"]["tokens"]
    else:
        frames = [line.removeprefix("data:") for line in answer.text.splitlines() if line.startswith("data:")]
        tokens = [json.loads(frame)["token"] for frame in frames]
    guessed = [token for token in tokens if token.get("guessed")]
    right = next(line for line in metrics.splitlines() if line.startswith("tgi_request_right_guesses"))
    assert 60 == len(tokens) and 10 < len(guessed) <= float(right.split()[-1])
    assert {True} == {token["guessed"] for token in guessed} and not tokens[0].get("guessed")
    assert not any("guessed" in token for token in plain.json()["details"]["tokens"])
