"""The launch budget: how many kernels a captured decode step launches at real sizes, pinned to what it is now.

At small batches a decode waits for launches more than for memory: each costs a GPU a microsecond or two, even in a
graph. A change that saves one, or adds one, edits the tables below; what fails prints them as they are now. How it is
counted, `launches.py` says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pprint import pformat
from typing import TYPE_CHECKING

import pytest

from tests.server.backends.cuda.test_triton import needs_triton

if TYPE_CHECKING:
    from tests.server.backends.cuda.launches import Launches

pytestmark = needs_triton
RANKS, BATCH_SIZES = (1, 2), (1, 32)
Counted = dict[tuple[str, int, int], "Launches"]  # by model, ranks and batch size

# One rank's launches: in each layer, beside all layers, and all together, which leaves out the collectives.
BUDGET = """
model           ranks batch  layer beside    all  collectives
bloomz-7b1-mt       1     1      7     12    222            0
bloomz-7b1-mt       1    32      7     13    223            0
bloomz-7b1-mt       2     1      7     38    248           62
bloomz-7b1-mt       2    32      7     39    249           62
llama-3-8b          1     1      7     18    242            0
llama-3-8b          1    32      8     19    275            0
llama-3-8b          2     1      7     44    268           66
llama-3-8b          2    32      8     45    301           66
mixtral-8x7b        1     1     12     18    402            0
mixtral-8x7b        1    32     12     19    403            0
mixtral-8x7b        2     1     12     44    428           66
mixtral-8x7b        2    32     12     45    429           66
chatglm3-6b         1     1      7     18    214            0
chatglm3-6b         1    32      8     18    242            0
chatglm3-6b         2     1      7     44    240           58
chatglm3-6b         2    32      8     44    268           58
flan-t5-xl          1     1     11     12    276            0
flan-t5-xl          1    32     12     15    303            0
flan-t5-xl          2     1     11     38    302           74
flan-t5-xl          2    32     12     41    329           74
qwen3-8b            1     1      8     18    306            0
qwen3-8b            1    32      9     19    343            0
qwen3-8b            2     1      8     44    332           74
qwen3-8b            2    32      9     45    369           74
gemma-2-9b          1     1      7     22    316            0
gemma-2-9b          1    32      8     24    360            0
gemma-2-9b          2     1      7     48    342           86
gemma-2-9b          2    32      8     50    386           86
pythia-6.9b         1     1      7     18    242            0
pythia-6.9b         1    32      8     19    275            0
pythia-6.9b         2     1      7     44    268           34
pythia-6.9b         2    32      9     45    333           34
"""

# What one layer launches where one rank decodes one sequence.
LAYER = {
    "bloomz-7b1-mt": "4 _multiply_rows, 2 _add_norm, decode_head",
    "llama-3-8b": "4 _multiply_rows, 2 _add_norm, decode_group",
    "mixtral-8x7b": "5 _multiply_rows, 2 _add_norm, decode_group, _choose, _group, index_select, _weigh",
    "chatglm3-6b": "4 _multiply_rows, 2 _add_norm, decode_group",
    "flan-t5-xl": "6 _multiply_rows, 3 _add_norm, 2 decode_head",
    "qwen3-8b": "4 _multiply_rows, 2 _add_norm, _norm_heads, decode_group",
    "gemma-2-9b": "4 _multiply_rows, 2 _add_norm, decode_group",
    "pythia-6.9b": "4 _multiply_rows, 2 _add_norm, decode_head",
}

# What stands before and behind the layers, likewise.
BESIDE = {
    "bloomz-7b1-mt": "2 index_select, 2 add, 2 _add_norm, embedding, _multiply_rows, summarise_parts, "
    "summarise_rows, sub, index_copy",
    "llama-3-8b": "3 add, 3 mul, 2 index_select, embedding, maximum, cos, sin, _add_norm, _multiply_rows, "
    "summarise_parts, summarise_rows, sub, index_copy",
    "flan-t5-xl": "3 index_select, 2 add, embedding, _add_norm, _multiply_rows, summarise_parts, "
    "summarise_rows, sub, index_copy",
}

MODELS = tuple(dict.fromkeys(line.split()[0] for line in BUDGET.splitlines()[2:]))


@pytest.fixture(scope="module")
def counted() -> Counted:
    # Imported here, because Triton is not everywhere that tests are collected.
    from tests.server.backends.cuda.launches import decode_launches

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


# What one layer launches where its sequences have adapters: two more for each product, the second a gate's, too.
ADAPTED = {
    ("llama-3-8b", 1): "4 _shrink, 4 _multiply_rows, 4 _finish, 2 _add_norm, decode_group",
    ("llama-3-8b", 32): "4 _shrink, 4 mm, 4 _finish, 2 _add_norm, decode_group",
    ("bloomz-7b1-mt", 1): "4 _shrink, 4 _multiply_rows, 4 _finish, 2 _add_norm, decode_head",
}
# And beside all layers, where it is not what stands there without: the head, and the tokens by their adapters.
BESIDE_ADAPTED = "_shrink, _finish"


def test_launches_of_layers_with_adapters(counted: Counted) -> None:
    from tests.server.backends.cuda.launches import decode_launches

    found = {(name, size): decode_launches(name, 1, [size], adapters=64)[0] for name, size in ADAPTED}
    once = Counter("_group _lay_tiles".split())  # by the first layer of a pass, for all
    layers = {key: listed(replace(one, layers=one.layers - once).layer) for key, one in found.items()}
    assert ADAPTED == layers, f"now it is\n{pformat(layers, width=118, sort_dicts=False)}"
    name, size = next(iter(ADAPTED))
    more = listed(found[name, size].beside - counted[name, 1, size].beside)
    assert BESIDE_ADAPTED == more, f"now it is {more}"


def test_layers_are_all_alike(counted: Counted) -> None:
    from tests.server.backends.cuda.launches import decode_launches

    name, traced = "bloomz-7b1-mt", 30
    (whole,) = decode_launches(name, 2, [32], traced)
    assert whole.layers.total() == traced * counted[name, 2, 32].layer.total()
    assert (whole.total, whole.collectives) == (counted[name, 2, 32].total, counted[name, 2, 32].collectives)
