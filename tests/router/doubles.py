"""What several router tests build: small tokenizers, limits, and a running batcher over fake shards."""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import threading
import time
import zlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.batching.adapter_mover import AdapterMover
from router.batching.batcher import Batcher
from router.errors import GenerationError
from router.sandbox import TaskError
from router.sandbox.pool import Sandbox
from router.scheduling.adapters import Adapter, AdapterRows
from router.scheduling.grammar import CompiledGrammar, Continuation, Grammar, GrammarKind, Mask, Match, OnAnswer
from router.scheduling.limits import Limits
from router.scheduling.request import Entry, Event, Failed, Finished, Sampling, Token, ValidRequest
from router.shards.wire import token_mask
from router.telemetry.metrics import Metrics, StepTrace
from router.text.tokenizer import ModelTokenizer
from tests.router.fake_shards import FakeShardedClient, adapter_seed, allowed_ids, fake_next_token
from tests.running import ROOT

DEMO = ROOT / "server" / "demo"

EOS = 256  # in byte_tokenizer
# Of a model with states: blocks from one place where they are kept to the next, and blocks that they take. Of one with
# rings also the blocks of tokens that the next one sees, and tokens of a sequence in a step. Or of none.
STATES = (
    st.just((0, 0, 0, 0))
    | st.tuples(st.integers(1, 3), st.integers(1, 4), st.just(0), st.just(0))
    | st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40))
)
NextToken = Callable[[Sequence[int], int, int], int]


@cache
def byte_tokenizer() -> ModelTokenizer:
    """One token for each byte, 0 … 255 in byte order, then `</s>`."""
    vocab = {character: byte for byte, character in bytes_to_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return ModelTokenizer.of(tokenizer, frozenset({EOS}))


def bytes_to_characters() -> dict[int, str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def word_tokenizer(*words: str) -> ModelTokenizer:
    """One token for each word, in order, whose `▁` is a space that vanishes at the start of a text; then `</s>`."""
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return ModelTokenizer.of(tokenizer, frozenset({len(words)}))


def without_mark(token: str, folder: Path, *, is_added: bool) -> Path:
    """The embedded model's tokenizer.json in a folder, where a special token is an ordinary one, or only a word."""
    document = json.loads((DEMO / "tokenizer.json").read_text())
    marked = next(one for one in document["added_tokens"] if one["content"] == token)
    if is_added:
        marked["special"] = False
    else:
        document["added_tokens"].remove(marked)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(document))
    return path


def make_limits(**overrides: Any) -> Limits:
    values: dict[str, Any] = {
        "max_input_length": 64,
        "max_total_tokens": 128,
        "max_batch_total_tokens": 1024,
        "max_batch_prefill_tokens": 64,
        "block_size": 16,
        "max_concurrent_requests": 128,
        "max_batch_size": None,
        "waiting_served_ratio": 0.3,
        "max_waiting_tokens": 20,
        "max_best_of": 2,
        "max_stop_sequences": 4,
        "max_top_n_tokens": 5,
        "vocab_size": 257,
    }
    values |= overrides
    values.setdefault("num_blocks", -(-values["max_batch_total_tokens"] // values["block_size"]))
    return Limits(**values)


def with_states(states: tuple[int, int, int, int], block_size: int) -> dict[str, int]:
    """The limits of a model with what STATES gives."""
    distance, size, window_blocks, most_at_once = states
    return {
        "checkpoint_tokens": distance * block_size,
        "checkpoint_blocks": size,
        "window_blocks": window_blocks,
        "most_at_once": most_at_once,
    }


def fake_shards(limits: Limits, **overrides: Any) -> FakeShardedClient:
    """Shards that check exactly these limits."""
    return FakeShardedClient(
        **{
            "vocab_size": 256,
            "block_size": limits.block_size,
            "max_batch_total_tokens": limits.max_batch_total_tokens,
            "max_batch_prefill_tokens": limits.max_batch_prefill_tokens,
            "max_batch_size": limits.max_batch_size,
            "num_lanes": limits.num_lanes,
            "checkpoint_blocks": limits.checkpoint_blocks,
            "window_blocks": limits.window_blocks,
            "most_at_once": limits.most_at_once,
            "adapter_rows": limits.adapter_rows,
            "adapter_bytes": limits.adapter_bytes,
            **overrides,
        }
    )


def request_of(prompt: Sequence[int] | int, max_new_tokens: int = 4, seed: int = 0, **fields: Any) -> ValidRequest:
    token_ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    return ValidRequest(token_ids, max_new_tokens, Sampling(do_sample=seed != 0, seed=seed), **fields)


def adapter_of(number: int, content: str = "") -> Adapter:
    """One of many, whose folder is `/number`."""
    key = blake2b(f"{number} {content}".encode(), digest_size=16).digest()
    return Adapter(f"adapter-{number}", key, f"/{number}")


def tokens_alone(request: ValidRequest, vocab_size: int = 256, next_token: NextToken = fake_next_token) -> list[int]:
    """What fake shards generate for the request when nothing else runs and no EOS comes."""
    prompt = [*request.encoder_ids, *request.token_ids]
    seed = adapter_seed(request.sampling.seed, b"" if request.adapter is None else request.adapter.key)
    token_ids: list[int] = []
    while len(token_ids) < request.max_new_tokens:
        if request.grammar is None:
            token_ids.append(next_token([*prompt, *token_ids], seed, vocab_size))
        else:
            found = fake_rule(token_ids)
            token_ids += found.forced
            allowed = allowed_ids(token_mask(found.mask, []), vocab_size)
            given = next_token([*prompt, *token_ids], seed, vocab_size)
            token_ids.append(allowed[given % len(allowed)])
    return token_ids[: request.max_new_tokens]


def fake_rule(token_ids: Sequence[int]) -> Continuation:
    """What the only grammar of FakeMatching allows behind these tokens: a mask of any form, and often forced tokens."""
    digest = zlib.crc32(array("I", token_ids).tobytes())
    forced = tuple((digest >> place) % 250 for place in range(digest % 7)) if digest % 3 == 0 else ()
    allowed = tuple(range(digest % 5, 250, 5))
    match digest % 4:
        case 0:
            return Continuation(forced, Mask(allowed=allowed))
        case 1:
            return Continuation(forced, Mask(forbidden=allowed))
        case 2:
            return Continuation(forced, Mask(allowed=allowed[:1]))
    return Continuation(forced, Mask(bits=sum(1 << id for id in allowed).to_bytes(32, "little")))


def constrained(request: ValidRequest) -> ValidRequest:
    """The same, held to the grammar of FakeMatching."""
    grammar = CompiledGrammar(Grammar(GrammarKind.REGEX, "what fake_rule says"), fake_rule([]))
    return replace(request, grammar=grammar)


@dataclass
class FakeMatching:
    """Follows texts by `fake_rule`; an answer comes after so many turns of the event loop, in turn of `delays`.

    Without any delay, none comes.
    """

    delays: Sequence[int] = (0,)
    failing_at: int | None = None  # tokens of a text that cannot go on
    rule: Callable[[Sequence[int]], Continuation] = fake_rule
    num_followed: int = 0  # texts
    num_answers: int = 0

    def start(self) -> None: ...

    def begin(self, grammar: CompiledGrammar, on_answer: OnAnswer, known: Sequence[int] = ()) -> Match:
        self.num_followed += 1
        match = _FakeMatch(self, list(known[:-1] or grammar.first.forced), on_answer)
        if known:
            match.advance(known[-1:])
        return match


@dataclass
class _FakeMatch:
    matching: FakeMatching
    token_ids: list[int]
    on_answer: OnAnswer
    is_asked: bool = False
    has_ended: bool = False

    def advance(self, token_ids: Sequence[int], draft: Sequence[int] = ()) -> None:
        assert token_ids and not self.has_ended and not self.is_asked
        for token_id in token_ids[:-1]:
            self.token_ids.append(token_id)
            assert not self.matching.rule(self.token_ids).forced, "these come behind it, and are no part of a draft"
        self.token_ids.append(token_ids[-1])
        self.is_asked = True
        if not (delays := self.matching.delays):
            return
        self._after(delays[self.matching.num_answers % len(delays)], draft)
        self.matching.num_answers += 1

    def _after(self, turns: int, draft: Sequence[int]) -> None:
        do = partial(self._answer, draft) if turns <= 0 else partial(self._after, turns - 1, draft)
        asyncio.get_running_loop().call_soon(do)

    def _answer(self, draft: Sequence[int]) -> None:
        if self.has_ended:
            return
        self.is_asked = False
        if (failing_at := self.matching.failing_at) is not None and len(self.token_ids) >= failing_at:
            self.on_answer(GenerationError("the grammar cannot be followed"))
            return
        found = self.matching.rule(self.token_ids)
        self.token_ids += found.forced
        self.on_answer(found if found.forced else replace(found, drafted=tuple(self._drafted(found.mask, draft))))

    def _drafted(self, mask: Mask, draft: Sequence[int]) -> Iterator[Mask]:
        """It ends before guesses that force tokens, whatever the next ones."""
        for place, guess in enumerate(draft):
            if guess == EOS or guess not in allowed_ids(token_mask(mask, []), EOS + 1):
                return
            found = self.matching.rule([*self.token_ids, *draft[: place + 1]])
            if found.forced or found.mask.allowed == (EOS,):
                return
            mask = found.mask
            yield mask

    def end(self) -> None:
        assert not self.has_ended
        self.has_ended = True
        self.matching.num_followed -= 1


def stalling(gate: asyncio.Event, num_steps: int = 0) -> Callable[[float], Awaitable[None]]:
    """The `sleep` of fake shards that answer so many steps at once, and others when the gate is open."""
    left = num_steps

    async def sleep(_: float) -> None:
        nonlocal left
        left -= 1
        await (asyncio.sleep(0) if left >= 0 else gate.wait())

    return sleep


def standing() -> float:
    """A batcher's clock by which steps take what fake shards say, whatever the machine does. 0.0 would mean never."""
    return 1.0


@dataclass
class Running:
    """A batcher at work."""

    batcher: Batcher
    shards: FakeShardedClient
    limits: Limits
    traces: list[StepTrace] = field(default_factory=list)
    adapters: AdapterMover = field(default_factory=AdapterMover)


@asynccontextmanager
async def running(
    shards: FakeShardedClient | None = None,
    matching: FakeMatching | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **overrides: Any,
) -> AsyncIterator[Running]:
    """Drained at the end, so that every invariant of a clean end can be checked after the block."""
    limits = make_limits(**overrides)
    shards = shards or fake_shards(limits)
    traces: list[StepTrace] = []
    matching = matching or FakeMatching()
    sizes = (limits.adapter_rows, limits.adapter_bytes, limits.adapter_host_bytes)
    adapters = AdapterMover(shards, AdapterRows(*sizes))
    batcher = Batcher(
        *(shards, byte_tokenizer(), limits, Metrics(limits)),
        matching=matching,
        adapters=adapters,
        clock=clock,
        trace=traces.append,
    )
    task = asyncio.create_task(batcher.run())
    try:
        yield Running(batcher, shards, limits, traces, adapters)
        await batcher.drain(5)
        assert batcher._ended.is_set(), "the loop did not end by itself"
        assert not matching.num_followed, "texts that nobody wants are followed"
    finally:
        task.cancel()
        await asyncio.wait({task})
        await adapters.close()
        if not task.cancelled():
            task.result()


async def events_of(entry: Entry) -> list[Event]:
    """All events up to the last."""
    events = [await entry.events.get()]
    while not isinstance(events[-1], Finished | Failed):
        events.append(await entry.events.get())
    return events


async def token_ids_of(entry: Entry) -> list[int]:
    return [event.id for event in await events_of(entry) if isinstance(event, Token)]


class TasksInProcess:
    """Does tasks aside as a process for them does, but in this one."""

    def __init__(self, module: str, argument: str) -> None:
        self._tasks = importlib.import_module(module).tasks(argument)

    async def ask(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer, through JSON like that of a process."""
        from router.sandbox.__main__ import _answer  # what does the work is large

        with ended_after(seconds):
            answer = _answer(self._tasks, json.loads(json.dumps(order)))
        told: dict[str, Any] = json.loads(json.dumps(answer))
        return told

    def end(self) -> None:
        """There is nothing to end."""


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """A block in the main thread that takes longer, waiting aside, ends with a TaskError; others have no bound."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise TaskError(f"it takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def tasks_in_process() -> Iterator[None]:
    """Servers in this block start no process for tasks aside, which takes longer than most tests."""

    async def new_child(pool: Sandbox) -> TasksInProcess:
        return TasksInProcess(*pool._arguments[2:])

    with patch.object(Sandbox, "_new_child", new_child):
        yield
