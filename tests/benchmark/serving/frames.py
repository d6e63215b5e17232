"""A server of ready-made frames: it sends tokens as fast as they are read, or one to every stream each `step_ms`.

It shows what a client costs: nothing is computed for a token, a frame is written as it lies in memory. It speaks
`/generate_stream`, `/v1/completions` and `/v1/chat/completions`; a word of a prompt is a token. A process of its own:
`python -m tests.benchmark.serving.frames` prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import orjson
import uvloop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WORD = " word"


def frame(*events: Any) -> bytes:
    """The events as one chunk of a chunked body."""
    texts = [event if isinstance(event, str) else json.dumps(event, separators=(",", ":")) for event in events]
    data = "".join(f"data:{text}\n\n" for text in texts).encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def tgi(num_tokens: int, num_prompt: int) -> tuple[bytes, bytes]:
    """The frames of a token and of the last token."""
    token = {"id": 5, "text": WORD, "logprob": -0.5, "special": False}
    details = {"finish_reason": "length", "generated_tokens": num_tokens, "input_length": num_prompt, "seed": None}
    middle = {"index": 1, "token": token, "generated_text": None, "details": None}
    return frame(middle), frame(middle | {"generated_text": WORD * num_tokens, "details": details})


def openai(num_tokens: int, num_prompt: int, *, chat: bool) -> tuple[bytes, bytes]:
    """The frames of a token and of the last token, with what follows it."""
    about = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "frames"}
    said: dict[str, Any] = {"delta": {"content": WORD}} if chat else {"text": WORD}
    middle = about | {"choices": [{"index": 0, **said, "logprobs": None, "finish_reason": None}]}
    last = about | {"choices": [{"index": 0, **said, "logprobs": None, "finish_reason": "length"}]}
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
    return frame(middle), frame(last, about | {"choices": [], "usage": usage}, "[DONE]")


class Stream(asyncio.Protocol):
    """One connection, with one request."""

    def __init__(self, running: set[Stream]) -> None:
        self._running = running
        self._received = b""
        self._is_paused = False
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._running.discard(self)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if b"\r\n\r\n" in self._received and len(body) >= int(lengths[0] if lengths else 0):
            self._received = b""
            self._answer(head.split()[1].decode(), orjson.loads(body) if body else {})

    def _answer(self, route: str, body: Any) -> None:
        if route == "/generate_stream":
            self._begin(*tgi(n := body["parameters"]["max_new_tokens"], len(body["inputs"].split())), n)
        elif route == "/v1/completions":
            self._begin(*openai(n := body["max_tokens"], len(body["prompt"].split()), chat=False), n)
        elif route == "/v1/chat/completions":
            words = sum(len(message["content"].split()) for message in body["messages"])
            self._begin(*openai(n := body["max_tokens"], words, chat=True), n)
        else:
            self._plain(route, body)

    def _begin(self, middle: bytes, last: bytes, num_tokens: int) -> None:
        self._transport.write(HEAD)
        self._middle, self._last, self._left = middle, last, num_tokens
        self._running.add(self)

    def _plain(self, route: str, body: Any) -> None:
        answers: dict[str, Callable[[], Any]] = {
            "/tokenize": lambda: [{"stop": i} for i, c in enumerate(body["inputs"] + " ") if c == " "],
            "/info": lambda: {"model_id": "frames", "max_input_length": 2**20, "max_total_tokens": 2**21},
            "/v1/models": lambda: {"data": [{"id": "frames"}]},
            "/health": lambda: None,
        }
        status, answer = (200, answers[route]()) if route in answers else (404, {"error": "no such route"})
        text = orjson.dumps(answer)
        self._transport.write(b"HTTP/1.1 %d Status\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text))
        self._transport.close()

    def step(self) -> None:
        """Send the next token, unless the client has not read what was sent before."""
        if self._is_paused:
            return
        self._left -= 1
        if self._left > 0:
            self._transport.write(self._middle)
            return
        self._running.discard(self)
        self._transport.write(self._last + b"0\r\n\r\n")
        self._transport.close()


async def serve(step_ms: float) -> None:
    """Serve until the process ends."""
    loop = asyncio.get_running_loop()
    running: set[Stream] = set()
    server = await loop.create_server(lambda: Stream(running), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    next_at = loop.time()
    while True:
        for stream in [*running]:
            stream.step()
        next_at = max(loop.time(), next_at + step_ms / 1000)
        await asyncio.sleep(next_at - loop.time() if running and step_ms else 0 if running else 0.001)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=0.0)
    uvloop.run(serve(parser.parse_args().step_ms))
