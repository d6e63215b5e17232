"""A draft model proposes what it would generate itself, and changes nothing of what the served one generates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from server.backends.cpu import Kernels
from server.drafting.alignment import AlignedLogits
from server.drafting.draft_model import DraftPasses, Followed
from server.drafting.load import refuse_other_vocabulary
from server.pb import generate_pb2 as pb
from server.ranks.collectives import Shard
from server.stepping.engine import Engine
from tests.server.checkpoints import Checkpoints
from tests.server.conftest import DEMO
from tests.server.driver import GREEDY, Asking, Prompt, Repeating, generate, load_engine
from tests.server.model.test_pipeline import pipeline
from tests.server.ranks import tensor_parallel
from tests.server.ranks.test_tensor_parallel import run_ranks
from tests.server.stepping.test_drafts import SIZES, long_prompts, prompts, results

# Files that are JSON, and no tokenizer.
SPOILT = (
    "{}",
    '{"model": null}',
    '{"model": {"vocab": 3}}',
    '{"model": {"vocab": "abc"}}',
    '{"model": {"vocab": [1]}}',
    '{"model": {"vocab": [[["a"], 1]]}}',
    '{"model": {}, "added_tokens": 3}',
    '{"model": {}, "added_tokens": [{}]}',
)
DRAFT: dict[str, Any] = {"speculate": 5, "speculative_method": "draft"}


def beside(folder: Path, **settings: Any) -> dict[str, Any]:
    return DRAFT | {"speculative_model": str(folder)} | settings


def free_prompts() -> list[Prompt]:
    """Those without a grammar, of which a draft model knows nothing."""
    return [p for p in prompts() if p.rule is None]


def check_same(engine: Engine, asked: float = 0.7) -> None:
    """What an engine whose draft model is the served one proposes is always right."""
    expected = generate(engine, free_prompts())
    drafter = Asking([p.tokens for p in expected], asked=asked)
    assert results(expected) == results(generate(engine, free_prompts(), drafter))
    assert drafter.accepted > 10 and drafter.refused == 0


@pytest.mark.parametrize("case", ["embedded", "llama", "bloom", "gemma2", "mistral", "opt"])
def test_the_same_model_proposes_what_comes(checkpoints: Checkpoints, kernels: Kernels, case: str) -> None:
    folder = DEMO if case == "embedded" else checkpoints(case)[0]
    check_same(load_engine(folder, kernels=kernels, speculative=beside(folder), **SIZES))


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_another_model_changes_nothing(checkpoints: Checkpoints, kernels: Kernels, case: str) -> None:
    folder, draft = checkpoints(case)[0], checkpoints("bloom")[0]
    plain = load_engine(folder, kernels=kernels, **SIZES)
    engine = load_engine(folder, kernels=kernels, speculative=beside(draft), **SIZES)
    expected = generate(plain, prompts())
    drafter = Asking([p.tokens for p in expected])
    assert results(expected) == results(generate(engine, prompts(), drafter))
    assert drafter.refused > 10


@pytest.mark.parametrize("kind", ["draft", "extend"])
def test_tokens_that_come_back_before_their_step_was_read_are_noted_once(kernels: Kernels, kind: str) -> None:
    """Ranks but the first may read a step after the router has sent what follows from it."""

    def noted(*, is_late: bool) -> tuple[int, list[int], list[Any]]:
        engine = load_engine(DEMO, kernels=kernels, speculative=beside(DEMO), **SIZES)
        request = pb.StepRequest(chunk_ids=[1], chunk_tokens=[3])
        request.add.add(id=1, token_ids=[7, 8, 9], blocks=[1, 2], sampling=GREEDY)
        first = engine.launch(request)
        assert first is not None
        known = [first._chosen[0].token_ids.tolist()[0], 50]  # as rank 0 tells the router
        if not is_late:
            first.finish()
        if kind == "draft":
            request = pb.StepRequest(proposals=2, proposed_ids=[1])
            request.drafts.add(id=1, position=3, token_ids=known)
        else:
            request = pb.StepRequest(proposals=2, proposed_ids=[1], chunk_ids=[1], chunk_tokens=[2])
            request.extend.add(id=1, position=3, token_ids=known)
        second = engine.launch(request)
        assert second is not None
        proposals = second.finish().proposals
        assert engine._sequences is not None
        followed = engine._sequences.sequences[1].followed
        return followed.computed, followed.pending, list(proposals)

    assert noted(is_late=False) == noted(is_late=True)


def test_captured_passes(kernels: Kernels) -> None:
    engine = load_engine(DEMO, kernels=kernels, speculative=beside(DEMO), **SIZES)
    capture = Repeating()
    engine.backend.graph_capture = lambda sizes: capture  # type: ignore[method-assign]
    engine.allocate(SIZES["tokens"], SIZES["total_tokens"], sequences=8)
    assert engine.graphs is not None
    *_, passes = engine.graphs.kinds
    for prepare in passes:
        prepare()
    assert capture.captured == 3 * len(capture.sizes)
    check_same(engine)
    assert capture.replayed.keys() & set(range(capture.captured))


@pytest.mark.parametrize("settings", [{"kv_cache": "int8"}, {"dtype": torch.bfloat16}, {"quantise": "int8"}], ids=str)
def test_formats_and_dtypes(checkpoints: Checkpoints, kernels: Kernels, settings: dict[str, Any]) -> None:
    folder = checkpoints("llama")[0]
    engine = load_engine(folder, kernels=kernels, speculative=beside(folder), **settings, **SIZES)
    expected = generate(engine, prompts())
    drafter = Asking([p.tokens for p in expected])
    assert results(expected) == results(generate(engine, prompts(), drafter))
    assert drafter.accepted > 50


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_stages(checkpoints: Checkpoints, kernels: Kernels, case: str) -> None:
    folder = checkpoints(case)[0]
    with pipeline(folder, 2, kernels=kernels, speculative=beside(folder), **SIZES) as stages:
        check_same(stages)  # type: ignore[arg-type]


def test_rings_leave_its_blocks_alone(checkpoints: Checkpoints, kernels: Kernels) -> None:
    folder = checkpoints("gemma3_text")[0]
    engine = load_engine(folder, kernels=kernels, speculative=beside(folder), tokens=4096, rings=True)
    assert engine.kv_shape.ring is not None
    expected = generate(engine, long_prompts())
    drafter = Asking([p.tokens for p in expected])
    assert results(expected) == results(generate(engine, long_prompts(), drafter))
    assert drafter.accepted > 50 and drafter.refused == 0


@pytest.mark.rest
def test_ranks(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """They propose the same, and that is what comes."""
    folders = [checkpoints(case)[0] for case in ("llama", "bloom")]
    expected = {f"{folder}?{folder}": tensor_parallel.tokens(f"{folder}?{folder}", Shard()) for folder in folders}
    for folder in folders:
        answers = tensor_parallel.tokens(folder, Shard())
        *came, proposed = expected[f"{folder}?{folder}"][: len(answers) + 1]
        assert answers == came and answers[proposed[0]][proposed[1] :][: len(proposed) - 2] == proposed[2:]
    assert [expected] * 2 == run_ranks([*expected], 2, tmp_path / "rendezvous")


def test_what_was_proposed_is_forgotten_once_others_stand_in_its_places() -> None:
    followed = Followed(4, proposed=[5, 6])  # at positions 4 and 5
    followed.know(4, [9])
    followed.compute(1)
    followed.know(5, [5, 8])
    followed.confirm()
    assert (5, [5, 8]) == (followed.computed, followed.pending)


def test_steps_that_fail_beside_the_model_leave_nothing(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(DEMO, kernels=kernels, speculative=beside(DEMO), **SIZES)
    assert engine.proposer is not None

    def step(id: int, **asked: Any) -> pb.StepRequest:
        request = pb.StepRequest(chunk_ids=[id], chunk_tokens=[3], **asked)
        request.add.add(id=id, token_ids=[7, 8, 9], blocks=[id], sampling=GREEDY)
        return request

    def fail(*_: Any) -> None:
        raise MemoryError("too little is free")

    for name, asked in (("propose", {"proposals": 2, "proposed_ids": [1]}), ("follow", {})):
        with monkeypatch.context() as patched:
            patched.setattr(engine.proposer, name, fail)
            with pytest.raises(MemoryError, match="too little is free"):
                engine.launch(step(1, **asked))
    steps = [engine.launch(step(id)) for id in (1, 2)]
    assert steps == [*engine._unread]
    last = engine.launch(pb.StepRequest(decode=True, proposals=2, proposed_ids=[1, 2]))
    assert last is not None and all(launched.is_read for launched in engine._unread)
    assert [2, 2] == [len(proposal.token_ids) for proposal in last.finish().proposals]


def test_it_catches_up_a_part_at_a_time(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.drafting.draft_model.MOST_BEHIND", 5)
    engine = load_engine(DEMO, kernels=kernels, speculative=beside(DEMO), **SIZES)
    check_same(engine, asked=0.5)


def test_sequences_together_catch_up_a_part_at_a_time(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps that asked for nothing, the first that does is no longer than others, and soon all get proposals."""
    monkeypatch.setattr("server.drafting.draft_model.MOST_BEHIND", 20)
    engine = load_engine(DEMO, kernels=kernels, speculative=beside(DEMO), **SIZES)
    computed: list[int] = []
    compute = DraftPasses.compute

    def counted(self: DraftPasses, behind: Any) -> Any:
        computed.append(sum(count for _, count in behind))
        return compute(self, behind)

    monkeypatch.setattr(DraftPasses, "compute", counted)
    request = pb.StepRequest(chunk_ids=range(4), chunk_tokens=[3] * 4)
    for id in range(4):
        request.add.add(id=id, token_ids=[7, 8, 9 + id], blocks=[1 + 3 * id, 2 + 3 * id, 3 + 3 * id], sampling=GREEDY)
    asked = pb.StepRequest(decode=True, proposals=2, proposed_ids=range(4))
    proposed = []
    for step in (request, *[pb.StepRequest(decode=True)] * 24, *[asked] * 8):
        computed.clear()
        launched = engine.launch(step)
        assert launched is not None
        proposed.append(len(launched.finish().proposals))
        assert sum(computed) <= 20 + 4 * (1 + engine.proposer.most)
    assert 0 < proposed[25] < 4 == proposed[-1]


def test_a_prompt_that_is_computed_in_one_step_is_followed_a_part_at_a_time(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.drafting.draft_model.MOST_BEHIND", 5)
    engine = load_engine(DEMO, kernels=kernels, speculative=beside(DEMO), **SIZES)
    request = pb.StepRequest(chunk_ids=[1], chunk_tokens=[12], proposals=2, proposed_ids=[1])
    request.add.add(id=1, token_ids=range(7, 19), blocks=[1, 2], sampling=GREEDY)
    first = engine.launch(request)
    assert first is not None and engine._sequences is not None
    assert [] == first.finish().proposals
    assert 5 == engine._sequences.sequences[1].followed.computed
    for _ in range(2):
        second = engine.launch(pb.StepRequest(decode=True, proposals=2, proposed_ids=[1]))
        assert second is not None
    assert [2] == [len(proposal.token_ids) for proposal in second.finish().proposals]


def test_a_shorter_model_stops_at_its_end(checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path) -> None:
    folder = checkpoints("opt")[0]
    shutil.copytree(folder, tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    path = tmp_path / "draft" / "config.json"
    positions = config["max_position_embeddings"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    name = next(name for name in tensors if "embed_positions" in name)
    tensors[name] = tensors[name][: 20 + len(tensors[name]) - positions].clone()
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    path.write_text(json.dumps(config | {"max_position_embeddings": 20}))
    engine = load_engine(folder, kernels=kernels, speculative=beside(tmp_path / "draft"), **SIZES)
    expected = generate(engine, prompts())
    drafter = Asking([p.tokens for p in expected])
    assert results(expected) == results(generate(engine, prompts(), drafter))
    assert drafter.accepted > 5


@pytest.mark.parametrize(
    ("served", "draft", "told"),
    [
        ("t5", "llama", "the model is an encoder-decoder: leave it out"),
        ("mamba2", "llama", "the model has no attention: leave it out"),
        ("llama", "t5", "--speculative-model is an encoder-decoder"),
        ("llama", "qwen3_next", "--speculative-model has recurrent layers"),
        ("embedded", "llama", "--speculative-model has 103 tokens and the model"),
    ],
)
def test_what_cannot_draft_is_refused(checkpoints: Checkpoints, served: str, draft: str, told: str) -> None:
    folder = DEMO if served == "embedded" else checkpoints(served)[0]
    with pytest.raises(ValueError, match=told):
        load_engine(folder, speculative=beside(checkpoints(draft)[0]), **SIZES)


def test_tokenizers_are_compared(tmp_path: Path) -> None:
    known = {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": [{"content": "<s>", "id": 3}]}
    pieces = {"model": {"vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}, "added_tokens": known["added_tokens"]}
    other = known | {"added_tokens": [{"content": "<s>", "id": 4}]}
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder, tokenizer in zip(folders, (known, pieces, other), strict=True):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    refuse_other_vocabulary(folders[0], folders[1], 4, 64)
    with pytest.raises(ValueError, match="1 tokens differ, of which the first is '<s>'"):
        refuse_other_vocabulary(folders[2], folders[0], 4, 4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        *((text, "does not list tokens as the library tokenizers does: download it again") for text in SPOILT),
        ('{"model": {"vocab": {"' + "x" * 10_000 + '": 0}}}', "1 tokens differ, of which the first is 'x{79}: use"),
    ],
    ids=str,
)
def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "tokenizer.json").write_text('{"model": {}, "added_tokens": null}')
    (tmp_path / "draft" / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=told) as refusal:
        refuse_other_vocabulary(tmp_path / "draft", tmp_path, 4, 4)
    assert len(str(refusal.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("size", [90, 103, 120])
def test_a_table_of_another_size(checkpoints: Checkpoints, kernels: Kernels, size: int) -> None:
    """Of a head whose columns are those of the model, but fewer, or with others behind them."""
    folder = checkpoints("llama")[0]
    engine = load_engine(folder, kernels=kernels, **SIZES)
    logits = torch.randn(3, size)
    places = torch.arange(size)
    found = AlignedLogits(lambda hidden: hidden, engine.model.vocab_range, Shard(), places)(logits)
    assert found.shape == (3, 103)
    assert torch.equal(found[:, :size], logits[:, :103]) and bool((found[:, size:] == float("-inf")).all())


def damaged(folder: Path, to: Path) -> Path:
    """The same model, whose head gives no numbers."""
    shutil.copytree(folder, to)
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    tensors["lm_head.weight"].fill_(float("nan"))
    save_file(tensors, to / "model.safetensors")
    return to


def test_a_model_that_gives_no_numbers_proposes_nothing(
    checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path
) -> None:
    folder = checkpoints("llama")[0]
    settings = beside(damaged(folder, tmp_path / "draft"))
    engine = load_engine(folder, kernels=kernels, speculative=settings, **SIZES)
    expected = generate(engine, free_prompts())
    drafter = Asking([p.tokens for p in expected])
    assert results(expected) == results(generate(engine, free_prompts(), drafter))
    assert 0 == drafter.accepted
    with pytest.raises(ValueError, match="the speculative model proposes nothing"):
        load_engine(folder, kernels=kernels, speculative=settings, **SIZES | {"warms_up": True})
