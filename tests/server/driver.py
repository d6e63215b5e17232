"""Drives an engine the way the router does, without a router: requests in, tokens out."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from server.adapters.adapters import Adapters
from server.adapters.identity import content_key
from server.adapters.sites import Sites
from server.arch import families
from server.arch.stages import carried_width, stages_of
from server.backends import Backend
from server.backends.cpu import CpuBackend, Kernels
from server.backends.cpu.device import CpuDevice
from server.backends.cpu.layers import onednn_packs
from server.backends.protocol import Computation
from server.backends.reference import ReferenceBackend
from server.blocks import BLOCK_SIZE, num_blocks
from server.checkpoint import formats
from server.checkpoint.formats import Quantisation
from server.checkpoint.weights import Checkpoint, Weights
from server.config import ShardConfig
from server.drafting import load as drafting
from server.drafting.served import Served
from server.layers.embedding import with_own_head
from server.model.load import ON_DEVICE, changed_elsewhere
from server.model.load import load as load_model
from server.model.streamed import Placement, Streaming
from server.pb import generate_pb2 as pb
from server.quantisation.kv import KV_FORMATS
from server.ranks.collectives import Shard
from server.stepping.cache import KvPlacement
from server.stepping.engine import Engine, Model, StepResult
from server.stepping.pipeline import StageConnections, StageNeighbours
from server.stepping.proposals import Proposal
from server.stepping.sampling import Watermark
from server.stepping.warmup import warm_up

CPU = torch.device("cpu")
# What packs weights in bfloat16 for oneDNN.
PACKED = pytest.mark.skipif(
    not onednn_packs(torch.bfloat16),
    reason="oneDNN has no bfloat16 with what this processor has, or may use, such as AVX2",
)
GREEDY = pb.SamplingParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1)


def greedy(**changes: Any) -> pb.SamplingParameters:
    """The most likely token, but for `changes`."""
    changed = pb.SamplingParameters()
    changed.CopyFrom(GREEDY)
    changed.MergeFrom(pb.SamplingParameters(**changes))
    return changed


def sampled(seed: int, **changes: Any) -> pb.SamplingParameters:
    """Neutral sampling with `seed`, changed by `changes`."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
    return pb.SamplingParameters(do_sample=True, seed=seed, **(neutral | changes))


def load_engine(
    folder: Path,
    *,
    shard: Shard | None = None,
    dtype: torch.dtype = torch.float32,
    backend: Backend | None = None,
    kernels: Kernels | None = None,
    quantise: str | None = None,
    quantise_head: str = "int8",
    kv_cache: str = "auto",
    captured: bool = True,
    placement: Placement = ON_DEVICE,
    kv_placement: KvPlacement | None = None,
    tokens: int = 4096,
    total_tokens: int | None = None,
    warms_up: bool = True,
    rings: bool = False,
    stage: tuple[int, int] = (0, 1),
    ring: StageConnections | None = None,
    speculative: dict[str, Any] | None = None,
    adapters: int = 0,
) -> Engine:
    """The checkpoint in `folder` as one rank's engine, with a KV cache of `tokens`.

    backend: by default the reference on a CPU, or the one of `kernels`; quantise, quantise_head: as `--quantize`
    and `--quantize-head`;
    kv_cache: as `--kv-cache-dtype`; placement, kv_placement: where the layers' weights and KV blocks are kept;
    total_tokens: of the longest sequence, by default all; warms_up: else there is a KV cache and no more; rings:
    whether windowed layers keep them, where they save memory, so that prefixes go on from copies alone; stage: which of
    how many pipeline stages; ring: to the others; speculative: settings of a speculative model beside it; adapters:
    rows for them.
    """
    shard = shard or Shard()
    if backend is None:
        backend = ReferenceBackend(CpuDevice()) if kernels is None else CpuBackend(kernels, dtype)
    hf_config = json.loads((folder / "config.json").read_text())
    stored = formats.choose(quantise, folder, hf_config, quantise_head)
    if not families.has(hf_config):
        engine = Engine(
            _fallback(folder, shard, dtype, backend, stored, kv_cache),
            *(shard, backend, dtype, Watermark(gamma=0.5, delta=2.0), "transformers runs the model"),
        )
        engine.allocate(tokens, total_tokens=total_tokens or tokens)
        return engine
    family, spec = families.find(hf_config)
    weights = Weights.open(
        Checkpoint(folder),
        family.names,
        shard,
        dtype,
        backend.device.torch_device,
        stored.format,
        stored.quantise,
        stored.quantise_head,
    )
    spec = with_own_head(weights, spec)
    part = stages_of(spec, stage[1])[stage[0]]
    sites = None
    if adapters:
        sites = Sites(backend, adapters, dtype, changed_elsewhere(weights, part, spec.num_layers))
    model = load_model(
        *(replace(weights, adapting=sites), spec, backend, KV_FORMATS[kv_cache], placement, kv_placement),
        stage=part,
        adapters=None if sites is None else sites.tokens,
    )
    neighbours = (
        StageNeighbours(part, shard, ring, backend.device, dtype, carried_width(spec, part)) if stage[1] > 1 else None
    )
    why_not = backend.why_not_captured(spec, stored.name, shard.world_size) if captured else "not wanted"
    if isinstance(placement, Streaming):
        why_not = "weights stream"
    proposer = None
    if speculative is not None:
        config = ShardConfig(**_places(folder, shard), quantize_head=quantise_head, **speculative)
        served = Served(model, weights, backend, dtype, KV_FORMATS[kv_cache])
        model, proposer = drafting.beside(config, served)
    watermark = Watermark(gamma=0.5, delta=2.0)
    kept = None if sites is None else Adapters(adapters, 1 << 30, sites.read, sites.nothing)
    engine = Engine(
        *(model, shard, backend, dtype, watermark, why_not), neighbours=neighbours, proposer=proposer, adapters=kept
    )
    if not rings:
        engine.kv_shape = replace(engine.kv_shape, window=0)
    if not warms_up:
        engine.allocate(tokens, total_tokens=total_tokens or tokens)
        return engine
    warm_up(
        engine,
        prefill_tokens=64,
        total_tokens=total_tokens or tokens,
        wanted_tokens=tokens,
        useful_tokens=tokens,
        top_n_tokens=5,
        sequences=0,
        fraction=1.0,
    )
    return engine


def place_adapters(engine: Engine, folders: Sequence[Path]) -> None:
    """Put adapters into rows 1, 2 and so on."""
    assert engine.adapters is not None
    for row, folder in enumerate(folders, start=1):
        key = content_key(folder)
        engine.adapters.prepare(key, folder)
        engine.adapters.place([(row, key)])


def _places(folder: Path, shard: Shard) -> dict[str, Any]:
    places = {"model_path": str(folder), "weights_path": str(folder), "socket_path": "", "rendezvous": ""}
    return places | {"rank": shard.rank, "world_size": shard.world_size}


def _fallback(
    folder: Path, shard: Shard, dtype: torch.dtype, backend: Backend, stored: Quantisation, kv_cache: str
) -> Model:
    """A model without a family."""
    from server.fallback.load import Loader  # takes seconds

    config = ShardConfig(**_places(folder, shard), quantize=stored.name, kv_cache_dtype=kv_cache)
    return Loader(config, backend, shard, dtype, stored).load()


class Repeating:
    """Captures by running the computation itself again: a device that fills batches up to a few sizes."""

    sizes: tuple[int, ...] = (2, 5, 8)
    prompt_tokens = (16, 48)
    computes = False

    def __init__(self) -> None:
        self.captured = 0
        self.replayed: Counter[int] = Counter()

    def __call__(self, function: Computation) -> Computation:
        number, self.captured = self.captured, self.captured + 1
        function()

        def replay() -> tuple[Tensor, ...]:
            self.replayed[number] += 1
            return function()

        return replay


# The tokens so far → those that come next in any case, and then those one of which may come.
Rule = Callable[[Sequence[int]], tuple[list[int], list[int]]]


@dataclass
class Prompt:
    """One sequence to generate, and what became of it. An encoder-decoder reads the prompt with its encoder."""

    token_ids: list[int]
    max_new_tokens: int = 8
    sampling: pb.SamplingParameters = field(default_factory=lambda: GREEDY)
    top_n_tokens: int = 0
    prompt_logprobs: bool = False
    joins_at: int = 0  # step at which it is added
    chunk: int = 10**9  # prompt tokens per step
    generated: int = 0  # of token_ids, how many at the end were generated before
    rule: Rule | None = None  # of `is_constrained` sampling
    grows: bool = False  # whether it gets each block in the step that first writes to it
    holds: bool = False  # whether it sits every third step out
    adapter: int = 0  # the row of its adapter
    cached: tuple[int, int] = (0, 0)  # a prompt whose blocks hold the first tokens of this one already, and how many
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    prompt_values: list[float] = field(default_factory=list)
    prompt_top: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class Drafter:
    """Gives sequences drafts at random, right ones and wrong ones, in turn with plain decoding and with waiting.

    answers: the tokens that each sequence will get; right: how likely each guess is what comes; most: guesses at once.
    """

    answers: Sequence[Sequence[int]]
    right: float = 0.7
    most: int = 6
    seed: int = 0
    accepted: int = 0  # guesses that were right
    refused: int = 0  # drafts with one that was not

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._open: dict[int, pb.Extension] = {}  # of each sequence its last draft, unless it decodes plainly again

    def draft(self, request: pb.StepRequest, id: int, prompt: Prompt, first: int) -> pb.Extension | None:
        """Have the sequence get a draft in this step, or wait, or decode. first: tokens before those it generates."""
        before, so_far = self._open.get(id), len(prompt.tokens)
        way = self._random.random()
        if way < 0.15:
            request.held.append(id)
            return None
        is_forced = prompt.rule is not None and bool(prompt.rule(prompt.tokens)[0])
        if is_forced or (before is None and way < 0.4):
            return None
        count = min(self._random.randint(0, self.most), prompt.max_new_tokens - so_far - 1)
        guesses = self.guesses(id, so_far, count)
        if prompt.rule is not None:
            guesses = list(_as_far_as_allowed(prompt.rule, prompt.tokens, guesses))
        position = first + so_far - 1
        came = self.came(id, prompt, first)
        draft = request.drafts.add(id=id, position=position, token_ids=[prompt.tokens[-1], *guesses], came=came)
        if guesses:
            self._open[id] = draft
        return draft

    def guesses(self, id: int, so_far: int, count: int) -> list[int]:
        """At most so many guesses of what comes behind the first tokens of an answer."""
        return [self._guess(token) for token in self.answers[id][so_far : so_far + count]]

    def came(self, id: int, prompt: Prompt, first: int) -> list[int]:
        """What came of its last draft, whose outcome the engine is told with this."""
        before = self._open.pop(id, None)
        return [] if before is None else prompt.tokens[before.position + 1 - first :]

    def judge(self, draft: pb.Extension, came: int) -> None:
        """Count what became of a draft."""
        self.accepted += came - 1
        self.refused += came < len(draft.token_ids)

    def ask(self, request: pb.StepRequest) -> None:
        """Have the step propose tokens."""

    def read(self, result: StepResult) -> None:
        """See what it proposed."""

    def _guess(self, token: int) -> int:
        return token if self._random.random() < self.right else self._random.randrange(103)


@dataclass
class Asking(Drafter):
    """Drafts what the engine's speculative model proposed, which some steps are asked for."""

    asked: float = 0.7  # how likely a step is

    def __post_init__(self) -> None:
        super().__post_init__()
        self.proposed: dict[int, list[int]] = {}

    def ask(self, request: pb.StepRequest) -> None:
        self.proposed.clear()
        if self._random.random() < self.asked:
            request.proposals = self._random.randint(1, self.most)
            request.proposed_ids.extend(range(len(self.answers)))

    def read(self, result: StepResult) -> None:
        for id, token_ids, logprobs in result.proposals:
            assert len(token_ids) == len(logprobs) > 0
            self.proposed[id] = list(token_ids)

    def guesses(self, id: int, so_far: int, count: int) -> list[int]:
        return self.proposed.pop(id, [])[:count]


@dataclass
class Noting(Drafter):
    """Gives drafts as a drafter does, and notes what is proposed behind which tokens.

    asked: how likely a step is asked for proposals.
    """

    asked: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.known: dict[int, list[int]] = {id: [] for id in range(len(self.answers))}
        self.noted: list[tuple[int, list[int], Proposal]] = []

    def ask(self, request: pb.StepRequest) -> None:
        if self._random.random() < self.asked:
            request.proposals = self._random.randint(1, self.most)
            request.proposed_ids.extend(self.known)

    def read(self, result: StepResult) -> None:
        for id, token in zip(result.ids, result.token_ids, strict=True):
            self.known[id].append(token)
        self.noted += [(proposal.id, [*self.known[proposal.id]], proposal) for proposal in result.proposals]


@dataclass
class PartlyRight(Asking):
    """Notes all that was proposed, and behind how many tokens of an answer.

    Guesses are proposals or of the right tokens some, so that drafts are right in part.
    """

    right: float = 0.5
    noted: list[tuple[int, Proposal]] = field(default_factory=list)
    got: Counter[int] = field(default_factory=Counter)

    def read(self, result: StepResult) -> None:
        super().read(result)
        self.got.update(result.ids)
        self.noted += [(self.got[proposal.id], proposal) for proposal in result.proposals]

    def guesses(self, id: int, so_far: int, count: int) -> list[int]:
        right = [self._guess(token) for token in self.answers[id][so_far : so_far + count]]
        return right if self._random.random() < 0.5 else super().guesses(id, so_far, count)


def _as_far_as_allowed(rule: Rule, tokens: Sequence[int], guesses: Sequence[int]) -> Iterator[int]:
    """The guesses that its grammar may take, before what it forces."""
    for place, guess in enumerate(guesses):
        allowed = rule([*tokens, *guesses[:place]])[1]
        if guess not in allowed or rule([*tokens, *guesses[: place + 1]])[0]:
            return
        yield guess


def generate(engine: Engine, prompts: Sequence[Prompt], drafter: Drafter | None = None) -> Sequence[Prompt]:
    """Run every prompt to its end, each joining when it says so; blocks are handed out and never reused."""
    left = {id: len(split(engine, p.token_ids)[0]) - p.cached[1] for id, p in enumerate(prompts)}
    tables: dict[int, list[int]] = {}
    given: dict[int, int] = {}  # of these, how many the engine knows
    blocks, step, retire = itertools.count(), 0, []
    done: set[int] = set()
    while len(done) < len(prompts):
        request = pb.StepRequest(step=step + 1, retire=retire, decode=True)
        for id, prompt in enumerate(prompts):
            if prompt.joins_at == step:
                source, computed = prompt.cached
                shared = tables[source][: computed // BLOCK_SIZE] if computed else []
                tables[id] = shared + take(blocks, len(prompt.token_ids) + prompt.max_new_tokens - computed)
                given[id] = num_blocks(len(prompt.token_ids)) if prompt.grows else len(tables[id])
                _add(request, id, prompt, tables[id][: given[id]], split(engine, prompt.token_ids), blocks)
            draft, first = None, len(split(engine, prompt.token_ids)[0])
            if drafter is not None and prompt.tokens and id not in done:
                draft = drafter.draft(request, id, prompt, first)
            more = 0 if prompt.rule is None else len(prompt.rule(prompt.tokens)[0])
            reach = len(prompt.token_ids) + len(prompt.tokens) + (len(draft.token_ids) - 1 if draft else more)
            if id in given and id not in done and given[id] < num_blocks(reach):
                request.grown_ids.append(id)
                request.grown_counts.append(num_blocks(reach) - given[id])
                request.grown_blocks.extend(tables[id][given[id] : num_blocks(reach)])
                given[id] = num_blocks(reach)
            if prompt.joins_at <= step and left[id]:
                request.chunk_ids.append(id)
                request.chunk_tokens.append(min(prompt.chunk, left[id]))
                left[id] -= request.chunk_tokens[-1]
            if prompt.rule is not None and draft is not None:
                _constrain_draft(request, draft, prompt.tokens, prompt.rule)
            elif prompt.rule is not None and prompt.joins_at <= step and id not in done and not left[id]:
                came = [] if drafter is None or id in request.held else drafter.came(id, prompt, first)
                _constrain(request, id, prompt, prompt.rule, first, came)
        if drafter is not None:
            drafter.ask(request)
        retire = _collect(engine, request, prompts, drafter)
        done |= set(retire)
        step += 1
    engine.launch(pb.StepRequest(step=step + 1, retire=retire))
    return prompts


def agreed(expected: Prompt, found: Prompt, near: float) -> int:
    """How many greedy tokens are the same: all, or those before one that was nearly as good as the best.

    near: how much less its log-probability may be, as the candidates of `expected` say; else it is an AssertionError.
    """
    both = enumerate(zip(expected.tokens, found.tokens, strict=True))
    place = next((place for place, (one, other) in both if one != other), len(expected.tokens))
    if place < len(expected.tokens):
        candidates = dict(zip(expected.top_ids[place], expected.top_logprobs[place], strict=True))
        assert candidates[expected.tokens[place]] - candidates.get(found.tokens[place], -math.inf) <= near
    return place


def _constrain(request: pb.StepRequest, id: int, prompt: Prompt, rule: Rule, first: int, came: Sequence[int]) -> None:
    """Hold it, or say what it may get, and what comes before that in any case."""
    is_running = id not in request.chunk_ids
    if id in request.held:
        return
    if is_running and prompt.holds and request.step % 3 == 0:
        request.held.append(id)
        return
    forced, allowed = rule(prompt.tokens)
    if request.step % 2:
        request.masks.add(ids=[id], allowed=pb.TokenIds(ids=allowed))
    else:
        request.masks.add(ids=[id], bits=sum(1 << token for token in allowed).to_bytes(max(allowed) // 8 + 1, "little"))
    if is_running and forced:
        position = first + len(prompt.tokens) - 1
        request.extend.add(id=id, position=position, token_ids=[prompt.tokens[-1], *forced], came=came)
        request.chunk_ids.append(id)
        request.chunk_tokens.append(1 + len(forced))
        prompt.tokens += forced


def _constrain_draft(request: pb.StepRequest, draft: pb.Extension, tokens: Sequence[int], rule: Rule) -> None:
    """Say what may come behind each of its tokens."""
    for row in range(len(draft.token_ids)):
        _, allowed = rule([*tokens, *draft.token_ids[1 : 1 + row]])
        rows = [row] if row or request.step % 2 else []
        request.masks.add(ids=[draft.id], rows=rows, allowed=pb.TokenIds(ids=allowed))


def _add(
    request: pb.StepRequest,
    id: int,
    prompt: Prompt,
    table: list[int],
    token_ids: tuple[list[int], list[int]],
    blocks: Iterator[int],
) -> None:
    decoded, encoded = token_ids
    request.add.add(
        id=id,
        token_ids=decoded,
        computed=prompt.cached[1],
        blocks=table,
        encoder_token_ids=encoded,
        encoder_blocks=take(blocks, len(encoded)),
        sampling=prompt.sampling,
        top_n_tokens=prompt.top_n_tokens,
        prompt_logprobs=prompt.prompt_logprobs,
        generated=prompt.generated,
        adapter=prompt.adapter,
    )


def take(blocks: Iterator[int], tokens: int) -> list[int]:
    """Blocks for so many tokens."""
    return list(itertools.islice(blocks, num_blocks(tokens)))


def split(engine: Engine, token_ids: list[int]) -> tuple[list[int], list[int]]:
    """What the decoder and what the encoder is given of a prompt."""
    start = engine.model.decoder_start
    return (token_ids, []) if start is None else ([start], token_ids)


def _collect(engine: Engine, request: pb.StepRequest, prompts: Sequence[Prompt], drafter: Drafter | None) -> list[int]:
    """Launch the step, hand its tokens out, return the ids that are done."""
    launched = engine.launch(request)
    if launched is None:
        return []
    result = launched.finish()
    if drafter is not None:
        drafter.read(result)
    for id, known in result.prompt.items():
        prompts[id].prompt_values += known.logprobs
        prompts[id].prompt_top += zip(known.top_ids, known.top_logprobs, strict=True)
    for i, id in enumerate(result.ids):
        prompts[id].tokens.append(result.token_ids[i])
        prompts[id].logprobs.append(result.logprobs[i])
        prompts[id].top_ids.append(result.top_ids[i])
        prompts[id].top_logprobs.append(result.top_logprobs[i])
    for draft in request.drafts if drafter is not None else ():
        drafter.judge(draft, result.ids.count(draft.id))
    return [id for id in dict.fromkeys(result.ids) if len(prompts[id].tokens) == prompts[id].max_new_tokens]


@torch.inference_mode()
def all_logits(engine: Engine, token_ids: list[int], generated: Sequence[int] = (), adapter: int = 0) -> Tensor:
    """Logits [T, V] of every position of one sequence, by one forward pass of the decoder.

    adapter: the row of its adapter.
    """
    table, tables = engine._sequences, engine._tables
    assert table is not None and tables is not None
    decoded, encoded = split(engine, token_ids)
    decoded, blocks = [*decoded, *generated], itertools.count()
    request = pb.StepRequest(chunk_ids=[0], chunk_tokens=[len(decoded)])
    _add(request, 0, Prompt([], adapter=adapter), take(blocks, len(decoded)), (decoded, encoded), blocks)
    plan = table.apply(request)
    tables.add(plan.added, engine.device)
    step = tables.lay_out(plan, engine.device, has_encoder=engine.has_encoder)
    logits = engine.model.logits(engine.hidden(step), step.forward.meta.adapters)
    table.apply(pb.StepRequest(retire=[0]))
    return logits
