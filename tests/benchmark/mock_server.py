"""A server that speaks TGI's and OpenAI's streams and whose every time is known, with failures on demand.

Token i of a request is sent `ttft_ms + i * gap_ms` after the request came, whatever else happens: deadlines do not
drift. It is a process of its own, so that it does not share an interpreter with the client that is tested. One word of
a prompt is one token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.running import ROOT

STREAM_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

INFO = {"model_id": "mock", "model_dtype": "torch.float32", "model_device_type": "cpu", "num_shard": 1}


@contextmanager
def mock_server(**options: object) -> Iterator[str]:
    """The URL of a mock with these options: `ttft_ms=40` is `--ttft-ms 40`."""
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "tests.benchmark.mock_server", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


MODELS = ("mock", "race")  # names of its model; it lists the first
ADAPTERS = ("a", "b", "c", "d")  # that it lists


class Mock:
    """Counts its generations from 1, so that failures hit known ones."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._num_generations = 0
        self._slots = asyncio.Semaphore(options.slots)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0]) if lengths else 0)
        route = head.split()[1]
        if (
            route in ("/generate_stream", "/v1/completions", "/v1/chat/completions")
            and route != f"/{self._options.without}"
        ):
            async with self._slots:
                await self._generate(route, json.loads(body), writer)
        else:
            status, answer = self._plain(route, json.loads(body or b"null"))
            if route == "/metrics" and self._options.without != "metrics":
                running = self._options.slots - self._slots._value
                status, answer = 200, None
                page = f"tgi_batch_current_size {running}.0\ntgi_queue_size 0.0\n".encode()
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(page)}\r\n\r\n".encode() + page)
            else:
                self._write_json(writer, status, answer)
        writer.close()

    def _plain(self, route: str, body: Any) -> tuple[int, Any]:
        answers = {
            "/info": {**INFO, "max_input_length": self._options.max_input_length},
            "/v1/models": {"data": [{"id": "mock"}, *({"id": name, "parent": "mock"} for name in ADAPTERS)]},
            "/health": None,
        }
        if route == "/tokenize" and self._options.without != "tokenize":
            return 200, [{"stop": stop} for stop in word_ends(body["inputs"])]
        return (200, answers[route]) if route in answers else (404, {"error": "no such route"})

    def _write_json(self, writer: asyncio.StreamWriter, status: int, answer: Any) -> None:
        body = json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status} Status\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    async def _generate(self, route: str, body: Any, writer: asyncio.StreamWriter) -> None:
        named = body.get("model") or body.get("parameters", {}).get("adapter_id")
        if named not in (None, *MODELS, *ADAPTERS):
            return self._write_json(writer, 404, {"error": f"the model {named} is not served here"})
        self._num_generations += 1
        number, options, came_at = self._num_generations, self._options, asyncio.get_running_loop().time()
        if hits(number, options.refuse_every):
            return self._write_json(writer, 429, {"error": "too many", "error_type": "overloaded"})
        wanted = body["parameters"]["max_new_tokens"] if route == "/generate_stream" else body["max_tokens"]
        num_tokens = min(wanted, options.longest)
        writer.write(STREAM_HEAD.encode())
        for index in range(num_tokens):
            deadline = came_at + (options.ttft_ms + index * options.gap_ms) / 1000
            await asyncio.sleep(deadline - asyncio.get_running_loop().time())
            if index == 2 and options.die_at == number:
                os._exit(1)
            if index == 2 and hits(number, options.disconnect_every):
                return writer.transport.abort()
            if index == 2 and hits(number, options.break_every):
                return write_chunk(writer, {"error": "broken", "error_type": "generation"})
            for event in events(route, body, index, num_tokens):
                write_chunk(writer, event)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def hits(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def word_ends(text: str) -> list[int]:
    """Where each word ends; the spaces belong to nothing."""
    ends, end = [], 0
    for word in text.split():
        end = text.index(word, end) + len(word)
        ends.append(end)
    return ends


def events(route: str, body: Any, index: int, num_tokens: int) -> list[Any]:
    """What is sent with token `index`."""
    is_last = index == num_tokens - 1
    if route == "/generate_stream":
        counts = {"generated_tokens": num_tokens, "input_length": len(body["inputs"].split())}
        token = {"id": index, "text": " word", "logprob": -0.5, "special": False}
        return [{"token": token, "generated_text": "word" if is_last else None, "details": counts if is_last else None}]
    chunk: dict[str, Any] = {"choices": [{"index": 0, "text": " word", "finish_reason": "length" if is_last else None}]}
    prompt = body["prompt"] if "prompt" in body else " ".join(message["content"] for message in body["messages"])
    usage = {"completion_tokens": num_tokens, "prompt_tokens": len(prompt.split())}
    if route == "/v1/chat/completions":
        chunk["choices"][0] |= {"delta": {"content": " word"}}
        first = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}]
        return (first * (index == 0)) + ([chunk, {"choices": [], "usage": usage}, "[DONE]"] if is_last else [chunk])
    return [chunk, {"choices": [], "usage": usage}, "[DONE]"] if is_last else [chunk]


def write_chunk(writer: asyncio.StreamWriter, event: Any) -> None:
    """One event, cut into two chunks at an awkward place."""
    text = event if isinstance(event, str) else json.dumps(event)
    data = f": ping\n\ndata: {text}\n\n".encode()
    for part in (data[:12], data[12:]):
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


async def serve(options: argparse.Namespace) -> None:
    server = await asyncio.start_server(Mock(options).answer, "127.0.0.1", options.port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--ttft-ms", type=float, default=5)
    parser.add_argument("--gap-ms", type=float, default=1)
    parser.add_argument("--longest", type=int, default=10**6, help="tokens after which the model ends by itself")
    parser.add_argument("--refuse-every", type=int, default=0)
    parser.add_argument("--disconnect-every", type=int, default=0)
    parser.add_argument("--break-every", type=int, default=0)
    parser.add_argument("--die-at", type=int, default=0, help="the generation in whose middle the process ends")
    parser.add_argument("--max-input-length", type=int, default=4096, help="what it says that it takes")
    parser.add_argument("--slots", type=int, default=10**6, help="generations at once; others wait")
    parser.add_argument("--without", default="", help="a route that is not there")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
