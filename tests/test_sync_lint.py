"""No line of a step makes a host wait for a GPU, as far as its form shows; `test_stand_in.py` runs all of them.

CUDA waits where a number is stored at an index (`t[3] = 5`, `t[ids] = True`; a slice is filled by a kernel), where an
index is a list, where a tensor is made on the device from values of the host, and where the host asks for a value
(`item`, `tolist`, `bool(t.all())` and the like). Types are not known here: what is stored by an index into a dict, or
read from the host's memory, is named below with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_architecture import sources

# What runs between the arrival of a step and its results, on a GPU. A CPU's backend waits for nothing, and loading may.
WATCHED = (
    "server.stepping.", "server.layers.", "server.model.", "server.backends.cuda.", "server.backends.reference.",
    "server.ranks.collectives", "server.fallback.serial", "server.fallback.batched", "server.fallback.attention",
)  # fmt: skip
BY_VALUE = {"item", "tolist", "nonzero", "cpu", "numpy", "unique", "masked_select", "bincount", "is_nonzero"}
REDUCTIONS = {"all", "any", "max", "min", "sum", "amax", "amin", "argmax", "equal", "allclose"}

# Module and line -> why it does not wait, or may.
ALLOWED = {
    ("server.stepping.sequences", "self.sequences[new.id] = …"): "a dict",
    ("server.stepping.logit_rules", "tokens[forbidden[forbidden < size]] = …"): "of the host, as the request came",
    ("server.stepping.graphs", "self._graphs[size, form, adapts] = …"): "a dict",
    ("server.stepping.graphs", "self._graphs[size] = …"): "a dict",
    ("server.stepping.graphs", "self._seen[size] = …"): "a dict",
    ("server.stepping.engine", "part.token_ids.tolist()"): "of the host, in `finish`",
    ("server.stepping.engine", "part.logprobs.tolist()"): "of the host, in `finish`",
    ("server.stepping.engine", "candidates.tolist()"): "of the host, in `finish`",
    ("server.stepping.pipeline", "message.tolist()"): "of the host, in the warm-up",
    ("server.stepping.pipeline", "tensor.contiguous().view(torch.uint8).flatten().numpy()"): "of the host",
    ("server.stepping.next_tokens", "found[run.sequence.id] = …"): "a dict",
    ("server.stepping.next_tokens", "self.logprobs.tolist()"): "of the host, in `finish`",
    ("server.stepping.next_tokens", "self.top_ids.flatten().tolist()"): "of the host, in `finish`",
    ("server.stepping.next_tokens", "self.top_logprobs.flatten().tolist()"): "of the host, in `finish`",
    ("server.backends.reference.logits", "bool((probabilities.cumsum(dim=-1)[:, -1:] >= p).all())"): "ranks on CPUs",
    ("server.backends.cuda.logits", "constants['PARTS'] = …"): "a dict",
    ("server.backends.reference.quantised", "pairs.unique()"): "while loading",
    ("server.backends.reference.quantised", "(pairs == pair).nonzero()"): "while loading",
    ("server.backends.cuda.backend", "self._left[why] = …"): "a dict",
    ("server.backends.cuda.choice", "self._chosen[key] = …"): "a dict",
    ("server.backends.cuda.device", "self._numbers[function] = …"): "a dict",
    ("server.model.load", "parts['v'] = …"): "a dict",
    ("server.backends.reference.convolution", "out[tokens] = …"): "a slice",
    ("server.model.offloaded_kv", "self._reads[window] = …"): "a dict",
    ("server.fallback.serial", "wanted['logits_to_keep'] = …"): "a dict",
    ("server.fallback.serial", "torch.tensor([prompt], device=self._model.device)"): "a model that is not captured",
    ("server.fallback.attention", "layer.module.__dict__[LAYER] = …"): "a dict",
    ("server.backends.reference.adapters", "self._rows[row] = …"): "a dict",
    ("server.backends.reference.adapters", "self._changes[row] = …"): "a dict",
    ("server.backends.reference.adapters", "self._adapted[expert] = …"): "a dict",
    ("server.backends.reference.adapters", "ends.tolist()"): "experts in a format that is not captured",
    ("server.backends.cuda.adapters", "self._kept[row] = …"): "a dict",
    ("server.backends.cuda.adapters", "made[Groups] = …"): "a dict",
    ("server.backends.reference.linear", "ends.tolist()"): "experts in a format that is not captured",
    ("server.backends.reference.attention", "torch.tensor(scores.slopes, device=distance.device)"): "is not captured",
    ("server.backends.cuda.kernels.common", "torch.tensor(scores.slopes, device=device)"): "once, before any capture",
    ("server.layers.position", "torch.tensor([scaling.short, scaling.long], device=exponents.device)"): "while loading",
    ("server.ranks.collectives", "torch.tensor([value], dtype=torch.int64, device=device)"): "while warming up",
    ("server.ranks.collectives", "torch.tensor(list(text), dtype=torch.uint8, device=device)"): "while warming up",
    ("server.ranks.collectives", "texts[first].tolist()"): "while warming up",
    ("server.ranks.collectives", "int(tensor.item())"): "while warming up",
    ("server.ranks.collectives", "tensor.item()"): "while warming up",
}  # fmt: skip
ALLOWED |= {
    ("server.backends.cuda.packing", line): "while loading"
    for line in (
        "weight.groups.cpu()", "bool((groups != groups[0]).any())", "int(counts.max())", "bool((inner == size).all())",
        "torch.bincount(groups)", "int(padded.sum())",
    )
}  # fmt: skip
# Stored values that are tensors: a store by an index of the device is a kernel.
TENSORS = {"torch.cat", "torch.stack", "self._warp", "keep", "self._tensor", "self.device.upload"}


def waits(tree: ast.Module) -> Iterator[str]:
    """The forms in a module that make the host wait, shortened."""
    lists = set(names_of_lists(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from stored(node)
        if isinstance(node, ast.Subscript) and is_list(node.slice, lists) and not is_type(node):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and asks(node):
            yield ast.unparse(node)


def stored(node: ast.Assign) -> Iterator[str]:
    """Stores by an index that is no slice, of what is not known to be a tensor."""
    for target in node.targets:
        if not isinstance(target, ast.Subscript) or any(isinstance(n, ast.Slice) for n in ast.walk(target.slice)):
            continue
        if not (is_tensor(node.value) or "slice(" in ast.unparse(target.slice)):
            yield f"{ast.unparse(target)} = …"


def is_tensor(value: ast.expr) -> bool:
    """Whether what is stored is a tensor, by its form."""
    if isinstance(value, ast.BinOp):
        return is_tensor(value.left) or is_tensor(value.right)
    if isinstance(value, ast.Subscript):
        return "results" in ast.unparse(value.value)  # of a graph
    return isinstance(value, ast.Call) and ast.unparse(value.func) in TENSORS


def is_list(index: ast.expr, lists: set[str]) -> bool:
    """Whether an index is a list, or has one among its dimensions."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(isinstance(p, ast.List | ast.ListComp) or ast.unparse(p) in lists for p in parts)


def is_type(node: ast.Subscript) -> bool:
    """Whether it is an annotation, such as Callable[[int], str]."""
    return ast.unparse(node.value).endswith("Callable")


def names_of_lists(tree: ast.Module) -> Iterator[str]:
    """Names and attributes that are assigned lists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.ListComp):
            yield from map(ast.unparse, node.targets)


def asks(call: ast.Call) -> bool:
    """Whether the host asks for a value, or makes a tensor on the device from its own."""
    name = ast.unparse(call.func)
    if name in ("bool", "int", "float"):
        inner = [n for n in ast.walk(call) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        return any(n.func.attr in REDUCTIONS | BY_VALUE for n in inner if isinstance(n.func, ast.Attribute))
    if name in ("torch.tensor", "torch.as_tensor"):
        return any(keyword.arg == "device" for keyword in call.keywords)
    return isinstance(call.func, ast.Attribute) and call.func.attr in BY_VALUE


WATCHED_SOURCES = [(name, tree) for name, tree in sources() if name.startswith(WATCHED)]


@pytest.mark.parametrize(("module", "tree"), [pytest.param(m, t, id=m) for m, t in WATCHED_SOURCES])
def test_no_line_waits_for_the_device(module: str, tree: ast.Module) -> None:
    assert [] == [line for line in waits(tree) if (module, line) not in ALLOWED]


def test_what_is_allowed_is_still_there() -> None:
    found = {(module, line) for module, tree in WATCHED_SOURCES for line in waits(tree)}
    assert set() == ALLOWED.keys() - found


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("t[3] = 5", True),
        ("t[row] = len(ids) - n", True),
        ("t[ids] = True", True),
        ("rows = [1, 2]\nt[rows]", True),
        ("rows = [i for i in x]\ny = t[rows, 0]", True),
        ("t[[1, 2]]", True),
        ("t.sum().item()", True),
        ("bool((t > 0).all())", True),
        ("torch.tensor([1], device=d)", True),
        ("t[:3] = 5", False),
        ("t[:, n:] = 0.0", False),
        ("t[ids] = torch.cat(parts)", False),
        ("t[ids] = rows - torch.stack(parts)", False),
        ("t[ids]", False),
        ("bool(ids)", False),
        ("torch.tensor(2.0)", False),
        ("f: Callable[[int], str]", False),
    ],
)
def test_what_waits_is_recognised(line: str, is_found: bool) -> None:
    assert is_found == bool(list(waits(ast.parse(line))))
