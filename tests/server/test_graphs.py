"""Captured decode steps: the same tokens as without capture, whatever joins, leaves or fills a batch up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from server import native
from server.batch import Tables
from server.capture import Computation, HostOnly, NotCapturable
from server.graphs import Graph
from server.layers.native import NativeFormat, NativeNorm
from server.native import Kernels
from server.native.memory import Arena
from server.native.recording import NativeCapture, Pool, Recording
from tests.server.checkpoints import CASES, Checkpoints
from tests.server.conftest import DEMO
from tests.server.driver import CPU, GREEDY, Prompt, generate, load_engine, sampled
from tests.server.test_families import PROMPT

# Which experts a token goes to is decided by values, and so is how many tokens an expert gets.
REFUSED = {"mixtral", "qwen3_moe"}


class Repeating:
    """Captures by running the computation itself again: a device that fills batches up to a few sizes."""

    sizes = (2, 5, 8)
    computes = False

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, function: Computation) -> Computation:
        self.captured += 1
        function()
        return function


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found, reason = native.load()
    assert found is not None, reason
    return found


def prompts(count: int) -> list[Prompt]:
    """Greedy and sampled sequences of many lengths, that join and leave at different steps."""
    rng = random.Random(7)
    samplings = [GREEDY, GREEDY, sampled(3, temperature=0.8, top_k=20), sampled(4, repetition_penalty=1.3)]
    return [
        Prompt(
            [rng.randrange(2, 90) for _ in range(rng.randint(1, 40))],
            max_new_tokens=rng.randint(1, 25),
            sampling=samplings[i % 4],
            top_n_tokens=2 if i % 5 == 4 else 0,
            joins_at=rng.randint(0, 20),
            chunk=rng.choice([5, 1000]),
        )
        for i in range(count)
    ]


def results(done: Sequence[Prompt]) -> list[tuple[list[int], list[float], list[list[int]]]]:
    return [(p.tokens, p.logprobs, p.top_ids) for p in done]


@pytest.mark.parametrize("case", CASES)
def test_every_family_gives_the_same_captured(checkpoints: Checkpoints, kernels: Kernels, case: str) -> None:
    folder, _ = checkpoints(case)
    prompt = Prompt(PROMPT, max_new_tokens=16)
    engines = [load_engine(folder, kernels=kernels, captured=captured) for captured in (False, True)]
    plain, captured = (generate(engine, [replace(prompt, tokens=[], logprobs=[], top_ids=[])]) for engine in engines)
    assert results(plain) == results(captured)
    assert (engines[1]._graphs is None) == (case in REFUSED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_joins_and_leaves_changes_nothing(kernels: Kernels, dtype: torch.dtype) -> None:
    engines = [load_engine(DEMO, kernels=kernels, captured=captured, dtype=dtype) for captured in (False, True)]
    plain, captured = (results(generate(engine, prompts(40))) for engine in engines)
    assert plain == captured


def test_batches_are_filled_up_with_nobody(kernels: Kernels) -> None:
    engine, plain = load_engine(DEMO, kernels=kernels), load_engine(DEMO, kernels=kernels, captured=False)
    capture = Repeating()
    engine._capture = lambda: capture
    engine.warm_up(prefill_tokens=64, total_tokens=64, wanted_tokens=4096, useful_tokens=4096, fraction=1.0)
    before = capture.captured
    assert results(generate(engine, prompts(14))) == results(generate(plain, prompts(14)))
    assert 0 < capture.captured - before <= 2 * len(Repeating.sizes)  # batches of more than 8 were not captured


def test_longer_and_more_sequences_than_the_tables_hold(kernels: Kernels) -> None:
    engine = load_engine(DEMO, kernels=kernels, tokens=8192)
    plain = load_engine(DEMO, kernels=kernels, tokens=8192, captured=False)
    crowd = [Prompt([i + 2], max_new_tokens=4) for i in range(80)]
    long = [Prompt([5, 6], max_new_tokens=6), Prompt([8] * 1300, max_new_tokens=4, joins_at=3)]
    for batch in (long, crowd):
        fresh = [replace(p, tokens=[], logprobs=[], top_ids=[]) for p in batch]
        assert results(generate(engine, batch)) == results(generate(plain, fresh))


def test_a_step_that_does_the_same_uploads_nothing(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = []
    fill = Graph.fill
    monkeypatch.setattr(Graph, "fill", lambda graph, places: uploads.append(places) or fill(graph, places))
    generate(load_engine(DEMO, kernels=kernels), [Prompt([token], max_new_tokens=20) for token in (5, 8)])
    assert len(uploads) == 1


# ------------------------------------------------------------------------------------------------------ recordings


def test_a_recording_repeats_kernels_and_operators(kernels: Kernels) -> None:
    x = torch.randn(3, 64)
    form, norm = NativeFormat(kernels, Arena(), torch.randn(64, 64)), norm_of(kernels)

    def compute() -> tuple[Tensor, ...]:
        y = norm(x)
        for _ in range(4):
            y = form(norm(y), None, None, y)
        return y, y[torch.tensor([1, 2])] * 2.5, x.add_(1.0).clone()

    with torch.inference_mode():
        repeat = NativeCapture(kernels)(compute)
        repeat()
        for _ in range(2):
            x.copy_(start := torch.randn(3, 64))
            repeated = [t.clone() for t in repeat()]
            x.copy_(start)
            assert all(torch.equal(a, b) for a, b in zip(repeated, compute(), strict=True))


def norm_of(kernels: Kernels) -> NativeNorm:
    return NativeNorm(kernels, torch.randn(64), None, 1e-5, is_centred=False)


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x * x.sum().item(), "item"),
        (lambda x: x.sort(), "sort"),
    ],
)
def test_what_depends_on_values_is_refused(kernels: Kernels, compute: Computation, name: str) -> None:
    capture = NativeCapture(kernels)
    with pytest.raises(NotCapturable, match=name), torch.inference_mode():
        capture(lambda: compute(torch.ones(3)))  # type: ignore[call-arg]
    assert kernels.recorder is None


def test_lengths_on_the_host_are_refused() -> None:
    tables = Tables.empty(4, 4, CPU)
    lengths = tables.decodes(torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), has_encoder=False)
    for use in (len, iter, lambda values: values[0], max):
        with pytest.raises(NotCapturable, match="lengths on the host"):
            use(lengths.meta.context_lengths)
    assert isinstance(lengths.work, HostOnly)


def test_recordings_share_memory_that_is_free(kernels: Kernels) -> None:
    pool, norm = Pool(), norm_of(kernels)

    def chain(x: Tensor) -> None:
        for _ in range(50):
            x = norm(x)

    with torch.inference_mode():
        x = torch.randn(1000, 64)
        for _ in range(3):
            with Recording(kernels, pool):
                chain(x)
    (only,) = pool._free
    assert only[1] == len(pool._slabs[0])
    assert pool.empty(torch.Size([5]), torch.float32).data_ptr() == only[0]
