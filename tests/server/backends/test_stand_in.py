"""No step waits for the device: a server runs on a device that refuses what would make a GPU's host wait.

The device is `stand_in.py`. What a step costs Python between two replays is counted here too, in calls; run
`pytest -s tests/server/backends/test_stand_in.py -k python` to see how long that takes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from server.adapters.identity import content_key
from server.backends import Backend
from server.pb import generate_pb2 as pb
from server.stepping.engine import Engine
from server.stepping.warmup import worst_sampling
from tests.server.adapters import made
from tests.server.backends.stand_in import (
    WHY_NOT,
    Driver,
    FreeBackend,
    Refused,
    StandInBackend,
    StandInCapture,
    StandInDevice,
    open_driver,
)
from tests.server.checkpoints import Checkpoints
from tests.server.conftest import DEMO
from tests.server.driver import GREEDY, Asking, Drafter, Prompt, generate, load_engine, sampled
from tests.server.ranks import tensor_parallel

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

Compute = Callable[[Tensor, Tensor], Tensor]  # a tensor [4, 5] float32, and ids [2] int64
STEPS, BATCH = 300, 32
MOST_CALLS = 340  # for launch and finish of a step: 318 were counted, and one more for each sequence is too many


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = open_driver()
    yield driver
    driver.forbids = False


@pytest.fixture
def device(driver: Driver) -> StandInDevice:
    return StandInDevice()


def assign(x: Tensor, index: object, value: object) -> Tensor:
    x[index] = value  # type: ignore[index, assignment]
    return x


# ------------------------------------------------------------------------------------------------ what the device does


@pytest.mark.parametrize(
    ("compute", "operator"),
    [
        (lambda x, ids: assign(x, (1, 2), 5), "_copy_from"),
        (lambda x, ids: assign(ids, 1, 5), "_copy_from"),
        (lambda x, ids: assign(x, ids, 5.0), "_index_put_impl_"),
        (lambda x, ids: assign(x, x > 0, x[0, 0]), "_index_put_impl_"),
        (lambda x, ids: assign(x, [0, 1], x[2:].clone()), "_copy_from"),
        (lambda x, ids: x[[0, 1]], "_copy_from"),
        (lambda x, ids: x[x > 0], "nonzero"),
        (lambda x, ids: x[ids[0]], "_local_scalar_dense"),
        (lambda x, ids: x.sum().item(), "_local_scalar_dense"),
        (lambda x, ids: bool((x > 0).all()), "_local_scalar_dense"),
        (lambda x, ids: float(x[0, 0]), "_local_scalar_dense"),
        (lambda x, ids: x.tolist(), "_copy_from"),
        (lambda x, ids: x.cpu(), "_copy_from"),
        (lambda x, ids: x.copy_(torch.ones(4, 5)), "_copy_from"),
        (lambda x, ids: torch.tensor([1.0, 2.0], device=x.device), "_copy_from"),
        (lambda x, ids: x.nonzero(), "nonzero"),
        (lambda x, ids: x.masked_select(x > 0), "masked_select"),
        (lambda x, ids: ids.unique(), "unique"),
        (lambda x, ids: x[:2].repeat_interleave(ids, dim=0), "repeat_interleave"),
        (lambda x, ids: ids.bincount(), "bincount"),
        (lambda x, ids: x.equal(x), "equal"),
        (lambda x, ids: x.index_put_((torch.tensor([0, 1]),), x[2:].clone()), "tensor of the host"),
    ],
)
def test_what_waits_is_refused(device: StandInDevice, compute: Compute, operator: str) -> None:
    x, ids = device.upload([[1.0] * 5] * 4, torch.float32), device.upload([1, 2])
    with torch.inference_mode():
        compute(x, ids)  # while a model is loaded, nothing is
        with device.forbidding(), pytest.raises(Refused, match=operator):
            compute(x, ids)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, ids: assign(x, slice(1, 3), 5),
        lambda x, ids: assign(x, 1, 5),
        lambda x, ids: assign(x, x > 3, 5),
        lambda x, ids: assign(x, ids, x[2:].clone()),
        lambda x, ids: x.index_fill_(0, ids, 5.0),
        lambda x, ids: x[ids] * 2.5 + ids.unsqueeze(1) // 2 % 2,
        lambda x, ids: torch.where(x > 3, x, -1),
        lambda x, ids: x.masked_fill(x % 5 == 3, float("-inf")).softmax(dim=-1),
        lambda x, ids: x.logsumexp(dim=-1, keepdim=True) - x.t()[1:3].contiguous().view(4, 2),
        lambda x, ids: torch.cat([part.sort(dim=-1, descending=True).values for part in x.split(2)])[:, :5],
        lambda x, ids: F.linear(x, x) + torch.arange(4, device=x.device).cumsum(0),
        lambda x, ids: x.new_zeros(4, 5).scatter_(1, ids.expand(4, 2), 1.0).add_(torch.full_like(x, 2)),
        lambda x, ids: torch.stack(x.max(dim=1), dim=1).flatten(0).to(torch.int32),
        lambda x, ids: x.fill_(torch.tensor(3.0)),
    ],
)
def test_what_does_not_wait_is_computed(device: StandInDevice, compute: Compute) -> None:
    values, ids = torch.arange(20.0).view(4, 5), torch.tensor([1, 2])
    x, device_ids = device.upload(values.tolist(), torch.float32), device.upload(ids.tolist())
    with torch.inference_mode(), device.forbidding():
        found = device.download(compute(x, device_ids))
    device.event().synchronize()
    with torch.inference_mode():
        expected = compute(values, ids)
    assert expected.dtype == found.dtype and torch.equal(expected, found)


def test_a_download_is_read_after_an_event_that_was_made_after_it(device: StandInDevice) -> None:
    x = device.upload([1, 2])
    early, first, late, second = device.download(x), device.event(), device.download(x.add_(1)), device.event()
    assert not first.query()
    first.synchronize()
    assert first.query() and [1, 2] == early.tolist()
    with pytest.raises(Refused, match="before the device was waited for"):
        late.tolist()
    second.synchronize()
    assert [2, 3] == late.tolist()


def test_a_captured_step_reads_its_inputs_anew(driver: Driver, device: StandInDevice) -> None:
    with torch.inference_mode():
        x, scale = device.upload([1.0, 4.0], torch.float32), [2.0]
        replay = StandInCapture(driver)(lambda: (x.add_(1).sqrt() * scale[0], x.abs()))
        x.copy_(device.upload([8.0, 3.0], torch.float32))
        scale[0] = 99.0  # Python does not run again
        driver.launches.clear()
        results = [device.download(result) for result in replay()]
        device.event().synchronize()
    assert [[6.0, 4.0], [9.0, 4.0]] == [result.tolist() for result in results]
    assert {"replay": 1} == driver.launches


@pytest.mark.parametrize(
    "act",
    [
        lambda device, x: x.sum().item(),
        lambda device, x: device.upload([1]),
        lambda device, x: device.download(x),
        lambda device, x: device.event(),
    ],
)
def test_a_step_that_is_being_captured_may_not_wait(
    driver: Driver, device: StandInDevice, act: Callable[[StandInDevice, Tensor], object]
) -> None:
    x = device.upload([1.0, 4.0], torch.float32)
    with torch.inference_mode(), pytest.raises(Refused):
        StandInCapture(driver)(lambda: (act(device, x), (x,))[1])
    assert driver.recording is None


# --------------------------------------------------------------------------------------------------- a server upon it


def results(prompts: Sequence[Prompt]) -> list[tuple[list[int], list[list[int]]]]:
    return [(p.tokens, p.top_ids) for p in prompts]


def again(prompts: Sequence[Prompt]) -> list[Prompt]:
    return [replace(p, tokens=[], logprobs=[], top_ids=[], prompt_values=[]) for p in prompts]


PLAIN = [Prompt([5, 6, 7], max_new_tokens=6), Prompt([8, 9, 10, 11], max_new_tokens=6, joins_at=2, chunk=2)]
WARPED = [
    replace(PLAIN[0], sampling=sampled(3, temperature=0.8, top_p=0.9)),
    replace(PLAIN[1], sampling=sampled(4, top_k=10, typical_p=0.8)),
]
EVERYTHING = [
    replace(PLAIN[0], sampling=worst_sampling(), top_n_tokens=3, prompt_logprobs=True),
    replace(PLAIN[1], sampling=sampled(5, repetition_penalty=1.3, frequency_penalty=0.2)),
    replace(PLAIN[0], sampling=sampled(6, is_constrained=True), rule=tensor_parallel.rule, holds=True),
    replace(PLAIN[1], sampling=worst_sampling(is_constrained=True), rule=tensor_parallel.rule, top_n_tokens=2),
    *PLAIN,
]
CROWD = [Prompt([i + 2], max_new_tokens=2) for i in range(300)]  # more than are captured together


@pytest.mark.parametrize("case", ["bloom", "llama", "gemma2", "mixtral", "t5"])
def test_a_model_on_the_stand_in_gives_the_tokens_of_the_reference(checkpoints: Checkpoints, case: str) -> None:
    folder, _ = checkpoints(case)
    engine = load_engine(folder, backend=StandInBackend(), warms_up=case == "bloom")
    assert engine.graphs
    expected = generate(load_engine(folder, warms_up=False), again(EVERYTHING))
    assert results(expected) == results(generate(engine, again(EVERYTHING)))


@pytest.mark.parametrize("case", ["bloom", "t5", "qwen3_5"])
def test_drafts_do_not_wait_for_the_device(checkpoints: Checkpoints, case: str) -> None:
    folder, _ = checkpoints(case)
    engine = load_engine(folder, backend=StandInBackend(), warms_up=case == "bloom")
    expected = generate(load_engine(folder, warms_up=False), again(EVERYTHING))
    drafter = Drafter([prompt.tokens for prompt in expected])
    assert isinstance(engine.device, StandInDevice)
    with engine.device.forbidding():
        found = generate(engine, again(EVERYTHING), drafter)
    assert results(expected) == results(found) and drafter.accepted and drafter.refused


@pytest.mark.parametrize(
    ("case", "prompts"),
    [
        pytest.param("demo", PLAIN, id="plain"),
        pytest.param("demo", WARPED, id="warped"),
        pytest.param("demo", EVERYTHING, id="everything"),
        pytest.param("demo", CROWD, id="many"),
        pytest.param("t5", EVERYTHING, id="encoder-decoder"),
        pytest.param("mixtral", PLAIN, id="experts"),
        pytest.param("gemma2", PLAIN, id="windows and caps"),
    ],
)
def test_no_step_waits(checkpoints: Checkpoints, case: str, prompts: Sequence[Prompt]) -> None:
    folder = DEMO if case == "demo" else checkpoints(case)[0]
    engine = load_engine(folder, backend=StandInBackend(), tokens=8192, warms_up=False)
    engine.allocate(8192, total_tokens=512, sequences=len(CROWD))
    assert isinstance(engine.device, StandInDevice)
    with engine.device.forbidding():
        generate(engine, again(prompts))


@pytest.mark.parametrize("case", ["bloom", "gemma2", "t5"])
def test_neither_placing_adapters_nor_their_steps_wait(checkpoints: Checkpoints, tmp_path: Path, case: str) -> None:
    folder, _ = checkpoints(case)
    folders = [one.folder for one in made.make_several(folder, tmp_path)]
    prompts = [replace(prompt, adapter=row) for prompt, row in zip(again(PLAIN), (1, 2), strict=True)]
    engines = [load_engine(folder, backend=backend, adapters=2, warms_up=False) for backend in (None, StandInBackend())]
    for engine in engines:
        assert engine.adapters is not None
        keys = [content_key(one) for one in folders]
        for key, one in zip(keys, folders, strict=True):
            engine.adapters.prepare(key, one)
        forbidding = engine.device.forbidding if isinstance(engine.device, StandInDevice) else nullcontext
        with forbidding():
            engine.adapters.place([(1, keys[0]), (2, keys[1])])
            engine.adapters.place([(1, keys[1]), (2, keys[0])])
    expected = generate(engines[0], again(prompts))
    device = engines[1].device
    assert isinstance(device, StandInDevice)
    with device.forbidding():
        found = generate(engines[1], again(prompts))
    assert results(expected) == results(found)


@pytest.mark.parametrize("case", ["bloom", "llama", "gpt_neox"])
def test_changes_that_are_computed_from_the_model_are_those_of_the_reference(
    checkpoints: Checkpoints, tmp_path: Path, case: str
) -> None:
    """Adapters are read on the host, which shares no operator with a device."""
    folder, _ = checkpoints(case)
    key = made.make_of_all_kinds(folder, tmp_path / "adapter")
    engines = [load_engine(folder, backend=backend, adapters=1, warms_up=False) for backend in (None, StandInBackend())]
    for engine in engines:
        assert engine.adapters is not None
        engine.adapters.prepare(key, tmp_path / "adapter")
        engine.adapters.place([(1, key)])
    expected, found = (generate(engine, [replace(p, adapter=1) for p in again(PLAIN)]) for engine in engines)
    assert results(expected) == results(found)
    assert results(expected) != results(generate(engines[0], again(PLAIN)))


def test_no_step_waits_but_for_what_is_proposed(checkpoints: Checkpoints) -> None:
    """A draft model's passes wait for nothing either; what they chose is read, as a step's tokens are."""
    settings = {"speculative_model": str(DEMO)}
    engine = load_engine(DEMO, backend=StandInBackend(), tokens=8192, warms_up=False, speculative=settings)
    engine.allocate(8192, total_tokens=512, sequences=len(CROWD))
    assert isinstance(engine.device, StandInDevice)
    for prompts in (PLAIN, EVERYTHING):
        drafter = Asking([p.tokens for p in generate(engine, again(prompts))])
        with engine.device.forbidding():
            generate(engine, again(prompts), drafter)
        assert drafter.accepted > 3


def decoding(backend: Backend, folder: Path, sampling: pb.SamplingParameters) -> Engine:
    """An engine with `BATCH` sequences whose prompts and first two tokens are computed."""
    engine = load_engine(folder, backend=backend, tokens=32 * BATCH, warms_up=False)
    request = pb.StepRequest(chunk_ids=range(BATCH), chunk_tokens=[3] * BATCH)
    for id in range(BATCH):
        request.add.add(id=id, token_ids=[5, 6, 7 + id], blocks=[2 * id, 2 * id + 1], sampling=sampling)
    for step in (request, DECODE, DECODE):
        launched = engine.launch(step)
        assert launched is not None
        launched.finish()
    return engine


DECODE = pb.StepRequest(decode=True)
SAMPLED = sampled(3, temperature=0.8, top_p=0.9)
PENALISED = sampled(3, repetition_penalty=1.3, frequency_penalty=0.2)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["plain", "sampled", "penalised"])
def test_a_step_that_does_the_same_uploads_nothing_and_waits_for_nothing(sampling: pb.SamplingParameters) -> None:
    engine = decoding(StandInBackend(), DEMO, sampling)
    device = engine.device
    assert isinstance(device, StandInDevice)
    before = device.uploads
    with device.forbidding():
        steps = [engine.launch(DECODE) for _ in range(3)]  # ahead of the device
    assert [BATCH] * 3 == [len(step.finish().token_ids) for step in steps if step is not None]
    assert before == device.uploads


@pytest.mark.parametrize(("sampling", "most"), [(GREEDY, 1), (SAMPLED, 1)], ids=["plain", "sampled"])
def test_a_step_launches_little_beside_its_graph(driver: Driver, sampling: pb.SamplingParameters, most: int) -> None:
    engine = decoding(StandInBackend(), DEMO, sampling)
    driver.launches.clear()
    step = engine.launch(DECODE)
    assert step is not None
    step.finish()
    print(f"\n{driver.launches.total()} launches for a step of {BATCH}: {dict(driver.launches)}")
    assert driver.launches.total() <= most


def test_a_step_with_guesses_is_one_graph_and_waits_for_nothing(driver: Driver) -> None:
    engine = decoding(StandInBackend(), DEMO, GREEDY)
    device, num_guesses = engine.device, 4
    assert isinstance(device, StandInDevice)
    drafts = [pb.Extension(id=id, position=5, token_ids=[9] * (1 + num_guesses), came=[]) for id in range(BATCH)]
    for part in (drafts[:8], drafts[8:16]):  # captures the step, and replays it
        driver.launches.clear()
        with device.forbidding():
            step = engine.launch(pb.StepRequest(drafts=part))
        assert step is not None
        assert len(part) <= len(step.finish().token_ids)
    print(f"\n{driver.launches.total()} launches for {len(part)} drafts of {num_guesses}: {dict(driver.launches)}")
    assert 1 == driver.launches["replay"] and driver.launches.total() <= 20


def one_step(engine: Engine) -> None:
    step = engine.launch(DECODE)
    assert step is not None
    step.finish()


def microseconds_of_step(engine: Engine) -> float:
    began = time.thread_time_ns()
    one_step(engine)
    return (time.thread_time_ns() - began) / 1000


def calls_of_step(engine: Engine) -> int:
    """How many functions are called, of Python and of C."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        one_step(engine)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["plain", "sampled"])
def test_what_a_step_takes_of_python(tiny_bloom: Path, sampling: pb.SamplingParameters) -> None:
    """The times are for a reader: they are the machine's. The least of some counts is without garbage collection."""
    engine = decoding(FreeBackend(), tiny_bloom, sampling)
    assert engine.graphs
    taken = [microseconds_of_step(engine) for _ in range(STEPS)]
    calls = [calls_of_step(engine) for _ in range(5)]
    print(f"\n{statistics.median(taken):.0f} us, at best {min(taken):.0f}, for launch and finish of a step of {BATCH}")
    print(f"{min(calls)} calls")
    assert min(calls) <= MOST_CALLS
