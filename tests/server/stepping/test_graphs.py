"""Captured decode steps: the same tokens as without capture, whatever joins, leaves or fills a batch up."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from server.arch import families
from server.backends import cpu
from server.backends.cpu import Kernels
from server.backends.cpu.graph import CaptureError, CpuGraph, CpuGraphCapture
from server.backends.cpu.layers import KernelNorm, PanelFormat
from server.backends.cpu.memory import Arena, Pool
from server.backends.protocol import Computation
from server.pb import generate_pb2 as pb
from server.stepping.batch import Tables
from server.stepping.engine import Engine
from server.stepping.graphs import DecodeGraph
from server.stepping.sequences import StepError, StepRuns
from tests.combinations import by_turns
from tests.running import ROOT
from tests.server.checkpoints import CASES, Checkpoints
from tests.server.conftest import DEMO
from tests.server.driver import GREEDY, Prompt, Repeating, generate, load_engine, sampled
from tests.server.model.test_families import PROMPT


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


@pytest.mark.parametrize(("case", "dtype"), by_turns(CASES, (torch.float32, torch.bfloat16)))
def test_every_family_gives_the_same_captured(
    checkpoints: Checkpoints, kernels: Kernels, case: str, dtype: torch.dtype
) -> None:
    folder, _ = checkpoints(case)
    engines = [load_engine(folder, kernels=kernels, captured=captured, dtype=dtype) for captured in (False, True)]
    plain, first, *again = (
        results(generate(engine, [Prompt(PROMPT, max_new_tokens=16), Prompt(PROMPT[:3], max_new_tokens=8, joins_at=2)]))
        for engine in (*engines, *engines[1:] * 2)
    )
    # Prompts are captured when their size comes again, and then replayed.
    assert [plain, plain] == again and first == plain
    assert [False, True] == [bool(engine.graphs and engine.graphs.decodes._graphs) for engine in engines]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_joins_and_leaves_changes_nothing(kernels: Kernels, dtype: torch.dtype) -> None:
    engines = [load_engine(DEMO, kernels=kernels, captured=captured, dtype=dtype) for captured in (False, True)]
    plain, captured = (results(generate(engine, prompts(40))) for engine in engines)
    assert plain == captured


def test_batches_are_filled_up(kernels: Kernels) -> None:
    engine, plain = load_engine(DEMO, kernels=kernels), load_engine(DEMO, kernels=kernels, captured=False)
    capture = Repeating()
    engine.backend.graph_capture = lambda sizes: capture
    allocate_and_capture(engine, sequences=8)
    # All forms of each size, and mixed steps, before the first request; nothing while requests are served.
    expected = 3 * len(Repeating.sizes) + len(Repeating.prompt_tokens)
    assert expected == capture.captured
    assert results(generate(engine, prompts(14))) == results(generate(plain, prompts(14)))
    assert expected == capture.captured
    assert {9, 10} < capture.replayed.keys()  # the mixed ones


def test_mixed_steps_of_every_size_give_the_same(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts join in ones and many, whole and in chunks, beside up to 40 decodes."""
    engine, plain = load_engine(DEMO, kernels=kernels), load_engine(DEMO, kernels=kernels, captured=False)
    capture = Repeating()
    capture.sizes = (8, 64)
    engine.backend.graph_capture = lambda sizes: capture
    allocate_and_capture(engine, sequences=64)
    laid_out = []
    lay_out = Tables.lay_out
    monkeypatch.setattr(Tables, "lay_out", lambda *args, **kw: laid_out.append(args[1]) or lay_out(*args, **kw))
    captured = results(generate(engine, prompts(60)))
    monkeypatch.undo()
    assert captured == results(generate(plain, prompts(60)))
    assert all(len(plan.chunks) > 8 or prompt_tokens(plan) > 48 for plan in laid_out)  # what was not captured
    assert 3 * 2 + 3 * 2 == capture.captured and len(capture.replayed.keys() & set(range(6, 12))) > 4


def test_sampling_that_is_captured_chooses_the_same(kernels: Kernels) -> None:
    engine, plain = load_engine(DEMO, kernels=kernels), load_engine(DEMO, kernels=kernels, captured=False)
    capture = Repeating()
    engine.backend.graph_capture = lambda sizes: capture
    allocate_and_capture(engine, sequences=8)
    samplings = [
        GREEDY,
        sampled(1),
        sampled(2, temperature=0.6, top_k=7),
        sampled(2**63 + 3, top_p=0.7),
        sampled(4, temperature=1.7, top_k=50, top_p=0.9),
        sampled(5, temperature=1e-9),
        pb.SamplingParameters(temperature=1, top_p=1, typical_p=0.4, repetition_penalty=1),  # of no meaning: greedy
    ]
    batch = [Prompt([i + 2], max_new_tokens=9 + i, sampling=each, joins_at=i) for i, each in enumerate(samplings)]
    fresh = [replace(p, tokens=[], logprobs=[], top_ids=[]) for p in batch]
    ours, theirs = results(generate(engine, batch)), results(generate(plain, fresh))
    assert [tokens for tokens, _, _ in theirs] == [tokens for tokens, _, _ in ours]
    for (_, expected, _), (_, found, _) in zip(theirs, ours, strict=True):
        assert expected == pytest.approx(found, abs=1e-4)
    assert {1, 4} < capture.replayed.keys() and not {2, 5, 8} & capture.replayed.keys()


def prompt_tokens(plan: StepRuns) -> int:
    return sum(run.length for run in plan.chunks)


def allocate_and_capture(engine: Engine, sequences: int) -> None:
    engine.allocate(4096, 128, sequences)
    assert engine.graphs is not None
    for capture in chain(*engine.graphs.kinds):
        capture()


def test_no_larger_batch_is_captured_than_there_can_be(kernels: Kernels) -> None:
    engine = load_engine(DEMO, kernels=kernels)
    engine.backend.graph_capture = lambda sizes: Repeating()
    engine.allocate(4096, 64, sequences=3)
    assert engine.graphs is not None
    assert 5 == engine.graphs.decodes.largest
    assert engine.graphs.mixed is not None and (8, 48) == engine.graphs.mixed.largest


def test_longer_and_more_sequences_than_were_announced_are_refused(kernels: Kernels) -> None:
    engine = load_engine(DEMO, kernels=kernels)
    engine.allocate(8192, total_tokens=64, sequences=300)
    with pytest.raises(StepError, match="has 5 blocks, but there is room for 4 of 16 tokens: raise --max-total-tokens"):
        generate(engine, [Prompt([5] * 60, max_new_tokens=10)])
    with pytest.raises(StepError, match="one too many: there is room for 300, so raise --max-concurrent-requests"):
        generate(engine, [Prompt([5], max_new_tokens=2) for _ in range(301)])
    assert [8] * 2 == [len(p.tokens) for p in generate(engine, [Prompt([5]), Prompt([6])])]


def test_a_step_that_does_the_same_uploads_nothing(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = []
    fill = DecodeGraph.fill
    monkeypatch.setattr(DecodeGraph, "fill", lambda graph, inputs: uploads.append(inputs) or fill(graph, inputs))
    engine = load_engine(DEMO, kernels=kernels)
    uploads.clear()  # those of the warm-up
    generate(engine, [Prompt([token], max_new_tokens=20) for token in (5, 8)])
    assert len(uploads) == 1


# ------------------------------------------------------------------------------------------------------ on a CPU


def test_a_graph_repeats_kernels_and_operators(kernels: Kernels) -> None:
    x = torch.randn(3, 64)
    form, norm = PanelFormat(kernels, Arena(), torch.randn(64, 64)), norm_of(kernels)

    def compute() -> tuple[Tensor, ...]:
        y = norm(x)
        for _ in range(4):
            y = form(norm(y), None, None, y)
        values, order = y.sort(dim=1)
        return y, y[torch.tensor([1, 2])] * 2.5, values * order, x.add_(1.0).clone()

    with torch.inference_mode():
        replay = CpuGraphCapture(kernels)(compute)
        replay()
        for _ in range(2):
            x.copy_(start := torch.randn(3, 64))
            repeated = [t.clone() for t in replay()]
            x.copy_(start)
            assert all(torch.equal(a, b) for a, b in zip(repeated, compute(), strict=True))


def test_what_is_called_a_view_is_repeated_where_it_copies(kernels: Kernels) -> None:
    x = torch.randn(3, 64)

    def compute() -> tuple[Tensor, ...]:
        return x.t().contiguous(), x.t().reshape(-1), x.to(torch.bfloat16), x.view(64, 3), x[1:]

    with torch.inference_mode():
        replay = CpuGraphCapture(kernels)(compute)
        replay()
        x.copy_(torch.randn(3, 64))
        assert all(torch.equal(a, b) for a, b in zip(replay(), compute(), strict=True))


# What torch does once in a step: where tokens stand, the rotations there, embeddings, and what is remembered.
ONCE = {"index_select", "embedding", "maximum", "mul", "cos", "sin", "index_copy_", "detach_"} | {
    *("__rshift__", "gather", "__and__", "add", "gt", "where"),  # slots
    *("div", "tanh"),  # logits with a cap
}


@pytest.mark.parametrize(
    "case",
    ["llama", "qwen3", "qwen3_moe", "qwen3_5_moe", "gemma3_text", "gemma4", "gemma4-e", "glm4_moe_lite", "gpt_oss"],
)
def test_no_layer_has_operators_of_torch(
    checkpoints: Checkpoints, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    names: list[str] = []
    add = CpuGraph._add_operator

    def note(graph: CpuGraph, func: Any, *rest: Any) -> None:
        names.append(func.overloadpacket.__name__)
        add(graph, func, *rest)

    monkeypatch.setattr(CpuGraph, "_add_operator", note)
    folder, _ = checkpoints(case)
    engine = load_engine(folder, kernels=kernels, dtype=torch.bfloat16)
    names.clear()
    generate(engine, [Prompt(PROMPT, max_new_tokens=3), Prompt(PROMPT, max_new_tokens=3)])
    kinds_of_rotations = 2 if case.startswith("gemma") else 1
    assert set(names) <= ONCE and all(names.count(name) <= kinds_of_rotations * 2 for name in set(names))


def norm_of(kernels: Kernels) -> KernelNorm:
    return KernelNorm(kernels, torch.randn(64), None, 1e-5, is_centred=False)


@pytest.mark.parametrize(
    ("compute", "name"),
    [(lambda x: x.nonzero(), "nonzero"), (lambda x: x[x > 0], "index"), (lambda x: x * x.sum().item(), "item")],
)
def test_what_depends_on_values_is_refused(kernels: Kernels, compute: Computation, name: str) -> None:
    capture = CpuGraphCapture(kernels)
    with pytest.raises(CaptureError, match=name), torch.inference_mode():
        capture(lambda: compute(torch.ones(3)))  # type: ignore[call-arg]
    assert kernels.recorder is None


@pytest.mark.parametrize(
    ("case", "quantised", "world_size", "why"),
    [
        ("llama", None, 1, None),
        ("mixtral", None, 1, None),
        ("llama", "int8", 1, None),
        ("mixtral", "int8", 1, None),
        ("llama", None, 2, "ranks on CPUs"),
    ],
)
def test_what_cannot_be_captured_is_known_from_the_spec(
    checkpoints: Checkpoints, kernels: Kernels, case: str, quantised: str | None, world_size: int, why: str | None
) -> None:
    folder, _ = checkpoints(case)
    _, spec = families.find(json.loads((folder / "config.json").read_text()))
    said = cpu.CpuBackend(kernels, torch.float32).why_not_captured(spec, quantised, world_size)
    assert said is None if why is None else said is not None and said.startswith(why)


@pytest.mark.parametrize("case", ["mixtral", "bloom"])
def test_models_that_are_not_captured_generate_all_the_same(
    checkpoints: Checkpoints, kernels: Kernels, case: str
) -> None:
    folder, _ = checkpoints(case)
    engine = load_engine(folder, kernels=kernels, quantise="int8")
    (done,) = generate(engine, [Prompt(PROMPT, max_new_tokens=4)])
    assert 4 == len(done.tokens)


def test_capturing_does_not_import_dynamo(kernels: Kernels) -> None:
    code = (
        "import sys, torch; from tests.cpu_kernels import load; from server.backends.cpu.graph import CpuGraphCapture; "
        "CpuGraphCapture(load())(lambda: (torch.ones(2) + 1,)); print('torch._dynamo' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "False" == result.stdout.strip()


def test_graphs_share_memory_that_is_free(kernels: Kernels) -> None:
    pool, norm = Pool(), norm_of(kernels)

    def chain(x: Tensor) -> None:
        for _ in range(50):
            x = norm(x)

    with torch.inference_mode():
        x = torch.randn(1000, 64)
        for _ in range(3):
            with CpuGraph(kernels, pool):
                chain(x)
    (only,) = pool._free
    assert only[1] == len(pool._slabs[0])
    assert pool.empty(torch.Size([5]), torch.float32).data_ptr() == only[0]
