"""The playground in a real browser: everything that a person does there, and what goes wrong meanwhile.

It needs Debian's Chromium. Pictures of every state are left in `.venv-clients/screenshots`, to be looked at. The
servers are its own: it stops one, locks another and fills a third.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from tests.running import ROOT, Server

SCREENSHOTS = ROOT / ".venv-clients" / "screenshots"
LAUNCHER = (str(ROOT / ".venv" / "bin" / "python"), "launcher.py")
KEY = "Sésame-4711"
WIDTHS = {"wide": (1280, 900), "narrow": (390, 844)}
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\u202e\x1b[31m&lt;b&gt;"
# Lines of Chromium's console: for every answer that is an error, which the page shows, and for what one test tries.
EXPECTED = ("Failed to load resource", "This document requires 'TrustedHTML'")
TOP = [{"token": token, "logprob": -1.0} for token in ("Hi", "other")]
QUICK = 10_000  # milliseconds; a liveness bound, as is the next
SLOW = 60_000

expect.set_options(timeout=QUICK)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path, "there is no Chromium: `apt-get install chromium`"
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The embedded model, with room for two requests."""
    with Server("--max-concurrent-requests", "2", command=LAUNCHER) as running:
        yield running


@contextmanager
def opened(browser: Browser, url: str, *, width: str = "wide", scheme: Any = "light") -> Iterator[Page]:
    """The page in a tab of its own, which asks nobody but its server and whose scripts do not fail."""
    size = WIDTHS[width]
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, has_touch=width == "narrow"
    )
    page = context.new_page()
    asked: list[str] = []
    failures: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on("console", lambda message: failures.append(message.text) if message.type == "error" else None)
    page.goto(url)
    yield page
    assert {urlsplit(url).netloc} == {urlsplit(one).netloc for one in asked if not one.startswith("data:")}
    assert [] == [line for line in failures if not line.startswith(EXPECTED)]
    context.close()


def look(page: Page, name: str) -> None:
    """Leave a picture, and check that nothing sticks out at the side."""
    page.wait_for_timeout(150)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name


def generate(page: Page, **parameters: str) -> None:
    """Start a completion with these parameters."""
    if page.locator("#parameters").get_attribute("open") is None:
        page.locator("#parameters > summary").click()
    for name, value in parameters.items():
        field = page.locator(f"#parameter-{name}")
        if field.get_attribute("type") == "checkbox":
            field.set_checked(bool(value))
        else:
            field.fill(value)
    page.locator("#generate").click()


def done(page: Page) -> None:
    """Wait for the end of what was asked."""
    expect(page.locator("#stop")).to_be_hidden(timeout=SLOW)


def chat(page: Page, text: str) -> None:
    page.locator("input[value=chat]").check()
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Control+Enter")


def batch(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = httpx2.get(f"{server.url}/playground/batch", timeout=30).json()
    return found


@contextmanager
def occupied(server: Server, count: int) -> Iterator[None]:
    """So many requests of others run meanwhile."""
    asked = {"inputs": "The little fox", "parameters": {"max_new_tokens": 2000, "ignore_eos": True}}

    def hold(number: int) -> None:
        headers = {"x-request-id": f"other-{number}"}
        try:
            with httpx2.stream(
                "POST", f"{server.url}/generate_stream", json=asked, headers=headers, timeout=60
            ) as told:
                begun.release()
                for _ in told.iter_bytes():
                    if is_over.is_set():
                        return
        finally:
            begun.release()

    begun, is_over = threading.Semaphore(0), threading.Event()
    threads = [threading.Thread(target=hold, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
        begun.acquire(timeout=60)
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


# ------------------------------------------------------------------------------------------------ what people do


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", list(WIDTHS))
def test_a_completion_a_chat_and_a_look_at_the_batch(browser: Browser, server: Server, width: str, scheme: str) -> None:
    name = f"{width}-{scheme}"
    with opened(browser, server.url, width=width, scheme=scheme) as page, occupied(server, 1):
        expect(page.locator("#model")).to_have_text("server/demo")
        expect(page.locator("#requests")).to_contain_text("other-0")
        look(page, f"{name}-1-first")
        generate(page, max_new_tokens="1500", ignore_eos="yes")
        expect(page.locator("#requests .ours")).to_contain_text("this page")
        expect(page.locator("#running")).to_have_text("2 / 2")
        expect(page.locator("#decode-bars")).to_have_attribute("d", re.compile("M"))
        look(page, f"{name}-2-running")
        page.locator("#stop").click()
        done(page)
        page.locator("#tint").check()
        token = page.locator("#answer .token").nth(4)
        token.click() if width == "narrow" else token.hover()
        expect(page.locator("#card li")).to_have_count(5)
        expect(page.locator("#card .chosen").first).to_be_visible()
        look(page, f"{name}-3-probabilities")
        page.locator("#program").scroll_into_view_if_needed()
        look(page, f"{name}-4-code")
        page.locator("#reset").click()
        page.locator("#parameter-seed").fill("1")
        chat(page, "What is this server?")
        done(page)
        expect(page.locator(".message.assistant .said")).to_contain_text("server")
        look(page, f"{name}-5-chat")
        assert page.locator("#error").is_hidden()


def test_stop_keeps_what_came_and_frees_the_place(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as page:
        generate(page, max_new_tokens="2000", ignore_eos="yes")
        expect(page.locator("#answer .token").nth(5)).to_be_visible()
        assert 1 == batch(server)["running"]["count"]
        page.keyboard.press("Escape")
        done(page)
        expect(page.locator("#summary")).to_contain_text("stopped here")
        expect(page.locator("#running")).to_have_text("0 / 2")
        assert 0 == batch(server)["running"]["count"]
        num_tokens = page.locator("#answer .token").count()
        assert 5 < num_tokens < 2000
        page.wait_for_timeout(500)
        assert num_tokens == page.locator("#answer .token").count()


def test_probabilities_are_the_servers(browser: Browser, server: Server) -> None:
    """Of each token and of its alternatives, in words as on the wire; the keyboard alone reaches them."""
    with opened(browser, server.url) as page:
        with page.expect_response("**/generate_stream") as told:
            generate(page, max_new_tokens="8", temperature="0.8", seed="18446744073709551615")
        done(page)
        expect(page.locator("#summary")).to_contain_text("seed 18446744073709551615")
        events = [json.loads(line[5:]) for line in told.value.text().splitlines() if line.startswith("data:")]
        assert 8 == len(events)
        page.locator("#answer").focus()
        for event in events:
            page.keyboard.press("ArrowRight")
            log = f"log {event['token']['logprob']:.3f}"
            expect(page.locator("#card .facts")).to_have_text(f"token {event['token']['id']} · {log}")
            shown = page.locator("#card li span:nth-child(2)").all_inner_texts()
            assert [one["text"].replace(" ", "␣") for one in event["top_tokens"]] == shown
        page.keyboard.press("Escape")
        expect(page.locator("#card")).to_be_hidden()
        assert "".join(event["token"]["text"] for event in events) == page.locator("#answer").evaluate(
            "it => it.textContent"
        )


def test_probabilities_are_those_after_sampling_has_ruled_tokens_out(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as page:
        generate(page, max_new_tokens="2", top_k="2", seed="1")
        done(page)
        page.locator("#answer .token").first.hover()
        shares = page.locator("#card li span:nth-child(3)").all_inner_texts()
        assert 2 == len(shares)
        assert 100 == pytest.approx(sum(float(share.removesuffix(" %")) for share in shares), abs=0.2)


def test_a_grammar_is_asked_for_in_the_words_of_each_api(browser: Browser, server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with opened(browser, server.url) as page:
        page.locator("#parameter-grammar").select_option("JSON")
        text = page.locator("#parameter-grammar-text")
        generate(page)
        expect(page.locator("#error")).to_contain_text("Write the grammar first")
        expect(text).to_be_focused()
        text.fill("{")
        generate(page)
        expect(page.locator("#error")).to_contain_text("The schema is no JSON")
        text.fill(json.dumps(schema))
        asked = asked_by(page, "**/generate_stream")
        assert {"type": "json", "value": schema} == asked["parameters"]["grammar"]
        page.locator("input[value=chat]").check()
        page.locator("#prompt").fill("Hello")
        asked = asked_by(page, "**/v1/chat/completions")
        assert {"name": "answer", "schema": schema} == asked["response_format"]["json_schema"]
        page.locator("input[value=completion]").check()
        page.locator("#parameter-grammar").select_option("a regex match")
        text.fill(r"\d+")
        assert {"type": "regex", "value": r"\d+"} == asked_by(page, "**/generate_stream")["parameters"]["grammar"]


def asked_by(page: Page, address: str) -> dict[str, Any]:
    """What the page asks the server for, if asked to generate."""
    with page.expect_request(address) as request:
        page.locator("#generate").click()
    done(page)
    found: dict[str, Any] = json.loads(request.value.post_data or "")
    return found


def test_an_adapter_may_be_chosen_where_there_are_some(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as page:
        expect(page.locator("#model")).to_have_text("server/demo")
        expect(page.locator("#parameter-adapter_id")).to_be_hidden()
        info = httpx2.get(f"{server.url}/info", timeout=30).json() | {"adapters": 1}
        models = {"data": [{"id": "server/demo"}, {"id": "alice", "parent": "server/demo"}]}
        page.route("**/info", lambda route: route.fulfill(json=info))
        page.route("**/v1/models", lambda route: route.fulfill(json=models))
        page.reload()
        expect(page.locator("#parameter-adapter_id")).to_be_visible()
        assert ["alice"] == page.locator("#parameter-adapter_id-names option").evaluate_all(
            "all => all.map(it => it.value)"
        )
        page.locator("#parameter-adapter_id").fill("alice")
        with page.expect_request("**/generate_stream") as asked:
            page.locator("#generate").click()
        assert "alice" == json.loads(asked.value.post_data or "")["parameters"]["adapter_id"]
        expect(page.locator("#error")).to_contain_text("this server has no adapters")


def test_everything_can_be_done_by_keyboard(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as page:
        expect(page.locator("#model")).to_have_text("server/demo")
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        stops = []
        for _ in range(60):
            page.keyboard.press("Tab")
            stops.append(page.evaluate("document.activeElement.id || document.activeElement.name || 'body'"))
        for id in ("key", "theme", "mode", "prompt", "generate", "stream", "tint", "answer", "parameter-seed", "reset"):
            assert id in stops, (id, stops)
        page.locator("#prompt").focus()
        page.keyboard.press("Control+Enter")
        done(page)
        expect(page.locator("#summary")).to_contain_text("tokens")
        page.locator("input[value=completion]").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#prompt-label")).to_have_text("Message")
        page.locator("#parameter-top_k").focus()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowUp")
        expect(page.locator("#parameter-top_k")).to_have_value("2")


def test_every_control_has_a_name(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as page:
        nameless = page.evaluate(
            """[...document.querySelectorAll("button, input, textarea, a, [role=group], [role=img], dialog, section")]
               .filter((it) => !it.labels?.length && !it.textContent.trim() && !it.ariaLabel)
               .map((it) => it.outerHTML)"""
        )
        assert [] == nameless


def test_the_theme_is_kept(browser: Browser, server: Server) -> None:
    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    with opened(browser, server.url, scheme="light") as page:
        light = background()
        page.locator("#theme").click()
        assert light == background()
        page.locator("#theme").click()
        assert light != (dark := background())
        page.reload()
        assert dark == background()


def test_without_streaming_there_are_samples_and_the_prompts_probabilities(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as page:
        page.locator("#stream").uncheck()
        generate(page, max_new_tokens="12", temperature="1.5", best_of="2", decoder_input_details="yes")
        done(page)
        assert page.locator("#error").is_hidden(), page.locator("#error").inner_text()
        expect(page.locator(".other .text")).to_have_count(1)
        expect(page.locator("#answer .prompt").first).to_be_visible()
        assert page.locator("#answer").evaluate("it => it.textContent").startswith("Once upon a time")
        look(page, "wide-light-6-samples")


def test_a_conversation_goes_on_and_begins_anew(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as page:
        chat(page, "What is this server?")
        done(page)
        with page.expect_request("**/v1/chat/completions") as asked:
            chat(page, "Thank <b>you</b>")
        done(page)
        roles = [message["role"] for message in json.loads(asked.value.post_data or "")["messages"]]
        assert ["user", "assistant", "user"] == roles
        expect(page.locator(".message.user .said").nth(1)).to_have_text("Thank <b>you</b>")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_probabilities_of_a_chat_are_shown_where_a_server_gives_them(
    browser: Browser, server: Server, is_streamed: bool
) -> None:
    """In OpenAI's shape; among them, two tokens that are parts of one character."""
    pieces = [("Hi", [b"Hi"]), (" 🙂", [b" ", b"\xf0\x9f", b"\x99\x82"]), ("!", [b"!"])]
    content = [
        {"token": token.decode(errors="replace"), "bytes": list(token), "logprob": -0.5, "top_logprobs": TOP}
        for _, tokens in pieces
        for token in tokens
    ]

    def answer(route: Route) -> None:
        assert (True, 5) == tuple(
            json.loads(route.request.post_data or "")[name] for name in ("logprobs", "top_logprobs")
        )
        if not is_streamed:
            message = {"role": "assistant", "content": "".join(text for text, _ in pieces)}
            choice = {"index": 0, "message": message, "logprobs": {"content": content}, "finish_reason": "stop"}
            return route.fulfill(json={"choices": [choice]})
        left = list(content)
        frames = []
        for text, tokens in pieces:
            told, left = left[: len(tokens)], left[len(tokens) :]
            choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": told}, "finish_reason": None}
            frames.append({"choices": [choice]})
        frames.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        body = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + "data: [DONE]\n\n"
        return route.fulfill(content_type="text/event-stream", body=body)

    with opened(browser, server.url) as page:
        page.locator("#stream").set_checked(is_streamed)
        page.route("**/v1/chat/completions", answer)
        chat(page, "Hello")
        done(page)
        expect(page.locator(".message.assistant .said")).to_have_text("Hi 🙂!")
        page.locator(".message.assistant .token").first.hover()
        assert "60.7 %" in page.locator("#card").inner_text()
        assert 4 == page.locator(".message.assistant .token").count()
        assert ["Hi", "other"] == page.locator("#card li span:nth-child(2)").all_inner_texts()
        page.locator(".message.assistant .token").nth(2).hover()
        assert 2 == page.locator("#card > div").count()


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_the_code_that_is_shown_does_what_was_done(
    browser: Browser, server: Server, tmp_path: Path, mode: str, is_streamed: bool
) -> None:
    prompt = 'It\'s "what"? $HOME `ls` \\n 漢 🙂\nWhat is this server?'
    with opened(browser, server.url) as page:
        page.locator("#stream").set_checked(is_streamed)
        page.locator(f"input[value={mode}]").check()
        page.locator("#prompt").fill(prompt)
        generate(page, max_new_tokens="16", temperature="0.9", seed="18446744073709551615", top_k="40")
        done(page)
        assert page.locator("#error").is_hidden(), page.locator("#error").inner_text()
        shown = "#answer" if mode == "completion" else ".message.assistant .said"
        text = page.locator(shown).evaluate(
            """it => [...it.childNodes].filter((one) => !one.classList?.contains("special"))
               .map((one) => one.textContent).join("")"""
        )
        curl = page.locator("#program").inner_text()
        page.locator("input[value=python]").check()
        python = page.locator("#program").inner_text()
    assert text.strip()
    by_curl = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, cwd=tmp_path).stdout
    assert text == spoken(by_curl, is_streamed), by_curl
    by_python = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=60)
    assert text == by_python.stdout.removesuffix("\n"), by_python.stderr


def spoken(answer: str, is_streamed: bool) -> str:
    """The text of an answer of either API."""

    def piece(event: dict[str, Any]) -> str:
        if "token" in event:
            return "" if event["token"]["special"] else str(event["token"]["text"])
        if "generated_text" in event:
            return str(event["generated_text"])
        return "".join(
            (one.get("delta") or one["message"])["content"] or "" for one in event["choices"] if one.get("delta") != {}
        )

    if not is_streamed:
        return piece(json.loads(answer))
    data = [line[5:].strip() for line in answer.splitlines() if line.startswith("data:")]
    return "".join(piece(json.loads(one)) for one in data if one != "[DONE]")


def test_the_page_works_below_a_path_of_a_proxy(browser: Browser, server: Server) -> None:
    def forward(route: Route) -> None:
        route.fulfill(response=route.fetch(url=route.request.url.replace("/below/a/path/", "/")))

    with opened(browser, server.url) as page:
        page.route("**/*", lambda route: forward(route) if "/below/a/path/" in route.request.url else route.abort())
        page.goto(f"{server.url}/below/a/path/")
        expect(page.locator("#state")).to_have_text("Serving")
        generate(page, max_new_tokens="3")
        done(page)
        assert page.locator("#error").is_hidden(), page.locator("#error").inner_text()
        expect(page.locator("#program")).to_contain_text("/below/a/path/generate_stream")


def test_the_code_can_be_copied(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
        generate(page, max_new_tokens="2")
        done(page)
        page.get_by_role("button", name="Copy").click()
        expect(page.locator("#copy")).to_have_text("Copied")
        assert page.locator("#program").inner_text() == page.evaluate("navigator.clipboard.readText()")


# ---------------------------------------------------------------------------------------------- what goes wrong


def test_errors_are_one_sentence_each(browser: Browser, server: Server) -> None:
    error = "#error"
    with opened(browser, server.url) as page:
        generate(page, top_p="7")
        expect(page.locator(error)).to_have_text("`top_p` must be > 0.0 and < 1.0, or 1.0 for off. Given: 7.0.")
        look(page, "wide-light-7-refused")
        page.locator("#reset").click()
        generate(page, temperature="warm")
        expect(page.locator(error)).to_have_text('Temperature is a number, not "warm".')
        expect(page.locator("#parameter-temperature")).to_be_focused()
        page.locator("#reset").click()
        with occupied(server, 2):
            generate(page)
            expect(page.locator(error)).to_have_text(re.compile(r"^Model is overloaded: try again in \d+ s\.$"))
            chat(page, "Are you there?")
            expect(page.locator(error)).to_have_text(re.compile(r"^Model is overloaded: try again in \d+ s\.$"))
            expect(page.locator("#prompt")).to_have_value("Are you there?")
            expect(page.locator(".message")).to_have_count(0)


def test_a_server_that_goes_away_is_told_and_comes_back(browser: Browser) -> None:
    with Server(command=LAUNCHER) as mortal, opened(browser, mortal.url) as page:
        expect(page.locator("#state")).to_have_text("Serving")
        generate(page, max_new_tokens="2000", ignore_eos="yes")
        expect(page.locator("#answer .token").nth(5)).to_be_visible()
        os.kill(mortal.router(), signal.SIGKILL)
        lost = re.compile(r"^The connection to the server was lost\. The \d+ tokens that came are kept\.$")
        expect(page.locator("#error")).to_have_text(lost)
        page.route("**/generate_stream", lambda route: route.abort("connectionrefused"))
        generate(page)
        expect(page.locator("#error")).to_have_text("The server cannot be reached: check that it still runs.")
        wait_until_healthy(mortal.url)
        expect(page.locator("#state")).to_have_text("Serving")
        page.unroute("**/generate_stream")
        generate(page, max_new_tokens="5")
        done(page)
        assert page.locator("#error").is_hidden(), page.locator("#error").inner_text()


def wait_until_healthy(url: str) -> None:
    deadline = time.monotonic() + SLOW / 1000
    while time.monotonic() < deadline:
        with suppress(httpx2.TransportError):
            if httpx2.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError("the server did not come back")


def test_a_server_that_does_not_say_what_it_is_is_asked_again_in_peace(browser: Browser, server: Server) -> None:
    asked: list[float] = []

    def fail(route: Route) -> None:
        asked.append(time.monotonic())
        route.fulfill(status=500, body="no")

    with opened(browser, server.url) as page:
        page.route("**/info", fail)
        page.reload()
        page.wait_for_timeout(3500)
        assert 2 <= len(asked) <= 6
        page.unroute("**/info")
        expect(page.locator("#model")).to_have_text("server/demo")


def test_a_stream_that_ends_early_is_told(browser: Browser, server: Server) -> None:
    token = {"index": 1, "token": {"id": 5, "text": " half", "logprob": -0.5, "special": False}, "generated_text": None}
    body = f"data: {json.dumps(token)}\n\n"
    with opened(browser, server.url) as page:
        page.route("**/generate_stream", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        generate(page)
        expect(page.locator("#error")).to_contain_text("lost before the answer was complete. The one token that")
        page.unroute("**/generate_stream")
        told = body + 'data: {"error":"Request failed during generation: out of memory","error_type":"generation"}\n\n'
        page.route("**/generate_stream", lambda route: route.fulfill(content_type="text/event-stream", body=told))
        generate(page)
        expect(page.locator("#error")).to_contain_text("Request failed during generation: out of memory.")
        page.unroute("**/generate_stream")
        page.route("**/generate_stream", lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"))
        generate(page)
        expect(page.locator("#error")).to_have_text("The server answered 502 Bad Gateway.")


def test_what_the_server_says_stays_text(browser: Browser, server: Server) -> None:
    """Tokens, candidates, errors, names: whatever a model, a proxy or another client writes."""
    top = [{"id": n, "text": HOSTILE, "logprob": -1.0 * n, "special": False} for n in range(3)]
    event = {"index": 1, "token": top[0], "top_tokens": top, "generated_text": HOSTILE, "details": None}

    def tell(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(event)}\n\n")

    def refuse(route: Route) -> None:
        route.fulfill(status=422, content_type="application/json", body=json.dumps({"error": HOSTILE}))

    def name(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=json.dumps({**answer.json(), "model_id": HOSTILE}))

    with opened(browser, server.url) as page:
        page.route("**/info", name)
        page.reload()
        expect(page.locator("#model")).to_have_text(HOSTILE)
        page.route("**/generate_stream", tell)
        generate(page)
        expect(page.locator("#answer")).to_have_text(HOSTILE)
        page.locator("#answer .token").hover()
        expect(page.locator("#card li")).to_have_count(3)
        page.unroute("**/generate_stream")
        page.route("**/generate_stream", refuse)
        generate(page)
        expect(page.locator("#error")).to_contain_text("<script>")
        assert 0 == page.locator("body img, body script, main b, #card b").count()
        assert "Lockstep playground" == page.title()
        made = "try { document.body.innerHTML = '<b>x</b>'; 'made' } catch (error) { error.name }"
        assert "TypeError" == page.evaluate(made), "trusted types let no script make markup"


# ---------------------------------------------------------------------------------------------------------- keys


@pytest.fixture(scope="session")
def locked() -> Iterator[Server]:
    with Server(env={"API_KEY": KEY}, command=LAUNCHER) as running:
        yield running


@pytest.mark.parametrize("width", list(WIDTHS))
def test_a_key_is_asked_for_and_kept_for_the_tab_alone(browser: Browser, locked: Server, width: str) -> None:
    with opened(browser, locked.url, width=width) as page:
        dialog, error = page.locator("#key-dialog"), page.locator("#key-error")
        expect(dialog).to_be_visible()
        expect(page.locator("#key-why")).to_contain_text("This server asks for an API key.")
        expect(page.locator("#key-text")).to_be_focused()
        expect(page.locator("#state")).to_have_text("Key needed")
        look(page, f"{width}-light-8-key")
        for wrong, sentence in (
            ("", "Enter a key."),
            ("漢字", "The server does not accept this API key: check it and enter it again."),
            ("sésame-4711", "The server does not accept this API key: check it and enter it again."),
        ):
            page.locator("#key-text").fill(wrong)
            page.keyboard.press("Enter")
            expect(error).to_have_text(sentence)
        assert {} == page.evaluate("({ ...sessionStorage })")
        page.locator("#key-text").fill(KEY)
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#state")).to_have_text("Serving")
        generate(page, max_new_tokens="4")
        done(page)
        assert page.locator("#error").is_hidden()
        expect(page.locator("#program")).to_contain_text("Bearer $API_KEY")
        assert KEY not in page.content() and KEY not in page.url
        assert {"lockstep-api-key": KEY} == page.evaluate("({ ...sessionStorage })")
        assert KEY not in page.evaluate("JSON.stringify({ ...localStorage }) + document.cookie")
        page.reload()
        expect(page.locator("#state")).to_have_text("Serving")
        assert_needs_key_again(page.context, locked.url)
        page.locator("#key").click()
        page.get_by_role("button", name="Forget it").click()
        expect(page.locator("#key-why")).to_contain_text("This server asks for an API key.")
        expect(page.locator("#state")).to_have_text("Key needed")
        assert {} == page.evaluate("({ ...sessionStorage })")


def assert_needs_key_again(context: BrowserContext, url: str) -> None:
    """Another tab of the same browser knows nothing of the key."""
    other = context.new_page()
    other.goto(url)
    expect(other.locator("#key-dialog")).to_be_visible()
    other.close()
