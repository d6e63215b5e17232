"""The launch budget: how many kernels a captured decode step launches at real sizes, pinned to what it is now.

At small batches a decode waits for launches more than for memory: each costs a GPU a microsecond or two, even in a
graph. A change that saves one, or adds one, edits the tables below; what fails prints them as they are now. How it is
counted, `launches.py` says.
"""

from __future__ import annotations

from collections import Counter
from pprint import pformat
from typing import TYPE_CHECKING

import pytest

from tests.server.test_triton import needs_triton

if TYPE_CHECKING:
    from tests.server.launches import Launches

pytestmark = needs_triton
RANKS, BATCH_SIZES = (1, 2), (1, 32)
Counted = dict[tuple[str, int, int], "Launches"]  # by model, ranks and batch size

# One rank's launches: in each layer, beside all layers, and all together, which leaves out the collectives.
BUDGET = """
model           ranks batch  layer beside    all  collectives
bloomz-7b1-mt       1     1     10     34    334            0
bloomz-7b1-mt       1    32      9     34    304            0
bloomz-7b1-mt       2     1     10     60    360           62
bloomz-7b1-mt       2    32      9     60    330           62
llama-3-8b          1     1     10     40    360            0
llama-3-8b          1    32     10     40    360            0
llama-3-8b          2     1     10     66    386           66
llama-3-8b          2    32     10     66    386           66
mixtral-8x7b        1     1     17     40    584            0
mixtral-8x7b        1    32     17     40    584            0
mixtral-8x7b        2     1     17     66    610           66
mixtral-8x7b        2    32     17     66    610           66
chatglm3-6b         1     1     10     40    320            0
chatglm3-6b         1    32     10     40    320            0
chatglm3-6b         2     1     10     66    346           58
chatglm3-6b         2    32     10     66    346           58
flan-t5-xl          1     1     15     36    396            0
flan-t5-xl          1    32     13     36    348            0
flan-t5-xl          2     1     15     62    422           74
flan-t5-xl          2    32     13     62    374           74
qwen3-8b            1     1     11     40    436            0
qwen3-8b            1    32     11     40    436            0
qwen3-8b            2     1     11     66    462           74
qwen3-8b            2    32     11     66    462           74
gemma-2-9b          1     1     10     44    464            0
gemma-2-9b          1    32     10     44    464            0
gemma-2-9b          2     1     10     70    490           86
gemma-2-9b          2    32     10     70    490           86
pythia-6.9b         1     1     10     40    360            0
pythia-6.9b         1    32      9     40    328            0
pythia-6.9b         2     1     11     66    418           34
pythia-6.9b         2    32     10     66    386           34
"""

# What one layer launches where one rank decodes one sequence.
LAYER = {
    "bloomz-7b1-mt": "2 _add_norm, 2 addmm, 2 mm, _store, _decode_head, _combine, gelu",
    "llama-3-8b": "4 mm, 2 _add_norm, _rotate_and_store, _decode_group, _combine, _gate",
    "mixtral-8x7b": "3 mm, 2 _add_norm, 2 offsets, 2 _grouped_mm, _rotate_and_store, _decode_group, _combine, _choose, "
    "_group, index_select, _gate, _weigh",
    "chatglm3-6b": "3 mm, 2 _add_norm, addmm, _rotate_and_store, _decode_group, _combine, _gate",
    "flan-t5-xl": "6 mm, 3 _add_norm, 2 _decode_head, 2 _combine, _store, _gate",
    "qwen3-8b": "4 mm, 2 _add_norm, _norm_heads, _rotate_and_store, _decode_group, _combine, _gate",
    "gemma-2-9b": "4 mm, 2 _add_norm, _rotate_and_store, _decode_group, _combine, _gate",
    "pythia-6.9b": "2 _add_norm, 2 addmm, 2 mm, _rotate_and_store, _decode_head, _combine, gelu",
}

# What stands before and behind the layers, likewise.
BESIDE = {
    "bloomz-7b1-mt": "4 add, 3 index, 2 gt, 2 mul, 2 _add_norm, 2 sub, 2 cat, floor_divide, gather, remainder, "
    "scalar_tensor, where, embedding, mm, _to_copy, max, amax, abs, eq, masked_fill, exp, sum, log, "
    "index_put",
    "llama-3-8b": "5 mul, 5 add, 3 index, 2 gt, 2 sub, 2 cat, floor_divide, gather, remainder, scalar_tensor, where, "
    "embedding, maximum, cos, sin, _add_norm, mm, _to_copy, max, amax, abs, eq, masked_fill, exp, sum, "
    "log, index_put",
    "flan-t5-xl": "6 index, 4 add, 2 gt, 2 mul, 2 sub, 2 cat, floor_divide, gather, remainder, scalar_tensor, where, "
    "embedding, _add_norm, mm, _to_copy, max, amax, abs, eq, masked_fill, exp, sum, log, index_put",
}

MODELS = tuple(dict.fromkeys(line.split()[0] for line in BUDGET.splitlines()[2:]))


@pytest.fixture(scope="module")
def counted() -> Counted:
    # Imported here, because Triton is not everywhere that tests are collected.
    from tests.server.launches import decode_launches

    return {
        (name, ranks, batch_size): launches
        for name in MODELS
        for ranks in RANKS
        for batch_size, launches in zip(BATCH_SIZES, decode_launches(name, ranks, BATCH_SIZES), strict=True)
    }


def row(name: str, ranks: int, batch_size: int, found: Launches) -> str:
    layer, beside = sum(found.layer.values()), found.beside.total()
    return f"{name:15} {ranks:5} {batch_size:5} {layer:6} {beside:6} {found.total:6} {found.collectives:12}"


def listed(launches: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in launches.most_common())


def test_launches_of_a_decode_step(counted: Counted) -> None:
    table = "\n".join([BUDGET.split("\n")[1], *(row(*key, launches) for key, launches in counted.items())])
    assert BUDGET.strip() == table, f"now it is\n{table}"


def test_launches_of_a_layer_and_beside_layers(counted: Counted) -> None:
    layer = {name: listed(counted[name, 1, 1].layer) for name in MODELS}
    beside = {name: listed(counted[name, 1, 1].beside) for name in BESIDE}
    assert LAYER == layer, f"now it is\n{pformat(layer, width=118, sort_dicts=False)}"
    assert BESIDE == beside, f"now it is\n{pformat(beside, width=118, sort_dicts=False)}"


def test_layers_are_all_alike(counted: Counted) -> None:
    from tests.server.launches import decode_launches

    name, traced = "bloomz-7b1-mt", 30
    (whole,) = decode_launches(name, 2, [32], traced)
    assert whole.layers.total() == traced * counted[name, 2, 32].layer.total()
    assert (whole.total, whole.collectives) == (counted[name, 2, 32].total, counted[name, 2, 32].collectives)
