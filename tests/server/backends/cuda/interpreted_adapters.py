"""Adapted layers of the backend for GPUs on a CPU, in Triton's interpreter: run by `test_triton.py`.

bfloat16 is left out: the interpreter computes on its bit patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from server.arch.spec import Activation
from server.backends.cpu.device import CpuDevice
from server.backends.cuda import adapters as layers
from server.backends.cuda.kernels import adapters
from server.backends.protocol import LinearChange, LowRank, TokenAdapters
from tests.server.adapters import made
from tests.server.backends.cuda.adapter_cases import (
    CASES,
    KINDS,
    LONG,
    MANY,
    NUM_ROWS,
    AdaptedCase,
    Both,
    check_adapted,
    check_neighbours,
    check_replays,
    check_unused_layers_cost_nothing,
)
from tests.server.backends.cuda.interpreted_cases import interpreted_backend, quick_calls
from tests.server.backends.cuda.kernel_cases import MANY_SPLITS, in_suite
from tests.server.driver import Prompt, generate, load_engine, place_adapters
from tests.server.tiny import save_tiny

__all__ = ["quick_calls"]

# numpy, which interprets, says what a GPU leaves unsaid.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
CPU = CpuDevice()


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Programs that find nothing to do take time here, of which a GPU needs none."""
    with patch.object(adapters, "RANK_PROGRAMS", 2), patch.object(adapters, "MAX_SPLITS", 2):
        yield


EXACT = [case for case in CASES if case.kind != "w8a8"]  # whose inputs are not rounded, which depends on their bits


@pytest.mark.parametrize("case", in_suite([CASES[2], CASES[5], CASES[6]], CASES), ids=str)
def test_adapted_layers_equal_the_reference(case: AdaptedCase) -> None:
    check_adapted(case, torch.float32, CPU)


@pytest.mark.parametrize("case", in_suite([CASES[0], CASES[3]], EXACT), ids=str)
def test_adapted_layers_in_16_bits_are_close_to_the_reference(case: AdaptedCase) -> None:
    check_adapted(case, torch.float16, CPU)


@pytest.mark.parametrize("case", in_suite([LONG], [MANY]), ids=["divided inputs", "many tokens"])
def test_few_tokens_and_many(case: AdaptedCase) -> None:
    check_adapted(case, torch.float16, CPU, processors=MANY_SPLITS)


def test_neighbours_change_nothing() -> None:
    check_neighbours(torch.float16, CPU)


def test_layers_that_no_adapter_of_the_step_changes_are_computed_as_ever() -> None:
    check_unused_layers_cost_nothing(torch.float16, CPU)


def capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Note the kernels that `function` launches, and their arguments: a replay launches the same once more."""
    launched: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    run = InterpretedFunction.run

    def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append((kernel, args, kwargs))
        return run(kernel, *args, **kwargs)

    with patch.object(InterpretedFunction, "run", noted):
        result = function()

    def replay() -> Tensor:
        result.fill_(float("nan"))
        for kernel, args, kwargs in launched:
            run(kernel, *args, **kwargs)
        return result

    return replay


@pytest.mark.parametrize(
    "case",
    in_suite(
        [AdaptedCase([1, 0, 2, 3], is_gated=True, activation=Activation.SILU)],
        [AdaptedCase([1, 0, 2, 3], kind, outputs=80) for kind in KINDS],
    ),
    ids=str,
)
def test_a_captured_layer_computes_with_what_is_in_the_rows_when_it_is_replayed(case: AdaptedCase) -> None:
    """No more than 8 tokens, of which the whole product is a kernel."""
    check_replays(case, torch.float32, CPU, capture)


def test_ranks_for_which_a_captured_step_has_no_room_are_not_captured() -> None:
    case = AdaptedCase([1, 2], outputs=8, inputs=64)
    both = Both(case, torch.float32, CPU)
    part = LowRank(0, torch.randn(1030, 64) / 8, torch.randn(8, 1030) / 36, 1.0)
    both.put({1: LinearChange((part,)), 2: LinearChange((replace(part, down=part.down[:4], up=part.up[:, :4]),))})
    assert not both.made.is_capturable
    both.check(both.found(torch.tensor(case.rows), case.rows), case.rows)
    both.put({1: None})
    assert both.made.is_capturable


def test_what_was_staged_needs_no_more_of_the_host_than_its_bytes() -> None:
    both = Both(AdaptedCase([1], outputs=32, inputs=64), torch.float16, CPU)
    down, up = torch.randn(4, 64).half(), torch.randn(32, 4).half()
    staged = both.made.stage(LinearChange((LowRank(0, down, up, 2.0),), torch.zeros(32)))
    header, filled_down, filled_up, bias = 128, 8 * 64 * 2, 32 * 8 * 2, 128
    assert staged.nbytes == staged.memory.nbytes == header + filled_down + filled_up + bias
    assert not staged.parts and staged.bias is None


@pytest.mark.parametrize(("tokens", "num_rows"), [(1, NUM_ROWS), (40, NUM_ROWS), (300, NUM_ROWS), (20, 40)])
def test_tokens_are_grouped_by_row_in_their_order(tokens: int, num_rows: int) -> None:
    rows = torch.randint(0, num_rows + 1, (tokens,), generator=torch.Generator().manual_seed(tokens))
    rows[tokens // 2 :] = 2
    groups = adapters.group(rows, num_rows)
    assert torch.equal(groups.order.long(), rows.sort(stable=True).indices)
    places = []
    for row, first, stop in groups.tiles.tolist():
        assert stop - first <= adapters.ROWS
        assert (rows[groups.order[first:stop].long()] == row).all()
        places += range(first, stop)
    assert sorted(places) == list(range(tokens))


def test_a_pass_is_grouped_once_for_all_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    monkeypatch.setattr(layers, "group", lambda *args: counted.append(args) or adapters.group(*args))
    both = Both(AdaptedCase([1, 0], outputs=16, inputs=32), torch.float32, CPU)
    x, bias, residual = both.asked
    own = TokenAdapters(torch.tensor([1, 0]))
    for _ in range(2):  # hidden states, and then their logits
        with both.tokens.of(own):
            both.made(x, bias, None, residual)
            both.made.finest(x, bias)
    assert 1 == len(counted)
    both.found(torch.tensor([0, 1]), [])
    assert 2 == len(counted)


@pytest.mark.parametrize("quantise", in_suite([None], ["int8"]))
def test_a_model_with_adapters_gives_the_tokens_of_the_reference(quantise: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny("llama", folder, num_hidden_layers=1)
    folders = [one.folder for one in made.make_several(folder, tmp_path)]
    sizes: dict[str, Any] = {"warms_up": False, "adapters": 2, "quantise": quantise}
    with interpreted_backend() as backend:
        engines = load_engine(folder, **sizes), load_engine(folder, backend=backend, captured=False, **sizes)
        runs = []
        for engine in engines:
            place_adapters(engine, folders)
            prompts = [Prompt(list(range(4, 8)), 2, adapter=1), Prompt([7, 8], 2), Prompt([40], 1, adapter=2)]
            runs.append(generate(engine, prompts))
    for reference, own in zip(*runs, strict=True):
        assert reference.tokens == own.tokens
        torch.testing.assert_close(torch.tensor(reference.logprobs), torch.tensor(own.logprobs), atol=1e-4, rtol=0)
