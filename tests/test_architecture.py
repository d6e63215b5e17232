"""The shape of the project, held by tests: who imports whom, what stays out of the router, what no module does.

`ROOMS` is the order of the whole, which `docs/design.md` explains.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("host", "server", "router", "launch", "benchmark", "lockstep_ray")
PATHS = (ROOT, ROOT / "deploy" / "ray")

# From the ground up: a room may import itself and those before it. The longest matching name counts.
ROOMS = (
    "host",
    *("server.blocks", "server.pb", "server.arch", "server.quantisation", "server.ranks", "server.backends"),
    *("server.checkpoint", "server.adapters", "server.offload", "server.prefix", "server.config", "server.link"),
    "server.stepping",
    *("server.layers", "server.model", "server.drafting", "server.fallback", "server.quantize", "server.merge"),
    "server",
    *("router.errors", "router.config", "router.text", "router.sandbox", "router.drafting", "router.scheduling"),
    *("router.grammars", "router.shards", "router.accounts", "router.telemetry", "router.batching", "router.requests"),
    *("router.http", "router.chat", "router.apis", "router.jobs", "router"),
    *("benchmark.options", "benchmark.result", "benchmark.cost"),
    *("launch", "launcher", "benchmark", "lockstep_ray"),
)
# Beside itself and `host`, what of the houses before it a house may know; the others may know all.
KNOWN = {
    "router": {"server.pb", "server.adapters.identity"},
    "launch": {
        *("router.accounts", "router.config", "router.text", "router.jobs", "server.config", "server.link.config"),
        *("server.checkpoint.files", "server.checkpoint.hub", "server.quantize.recipe", "server.merge.job"),
        *("server.arch", "server.quantisation.sizes", "router.scheduling.limits", "benchmark.cost"),  # to plan a launch
        *("server.checkpoint.formats", "server.adapters.config", "server.fallback"),  # to refuse what they do not serve
        "router.requests.adapter_files",  # likewise
        *("router.chat.template", "router.sandbox.pool", "router.errors"),  # to try the chat template
    },
    "launcher": {"launch", "router.config", "server.config"},
}
APIS = {"router.apis", "router.http"}  # what clients speak, and how

# The two loops that must outlive a request may catch everything; `tokenizers` raises nothing finer than Exception.
MAY_CATCH_EVERYTHING = {
    "router.batching.batcher",
    "router.grammars.follower",
    "router.jobs.runner",
    "router.text.tokenizer",
    "server.ranks.host_sums",  # on a thread of CUDA's: whoever waits for the step raises it
    "server.service",
}


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    """Every first-party module with its parsed source, generated stubs left out. Nobody changes them."""
    paths = {p: top for top in PATHS for package in PACKAGES for p in (top / package).rglob("*.py")}
    paths[ROOT / "launcher.py"] = ROOT
    by_name = {
        ".".join(p.relative_to(top).with_suffix("").parts).removesuffix(".__init__"): p for p, top in paths.items()
    }
    return tuple((n, ast.parse(p.read_text())) for n, p in by_name.items() if not n.startswith("server.pb."))


def imports(module: str, tree: ast.Module) -> Iterator[str]:
    """First-party modules that `module` imports, at its top or inside functions; `from package import module` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in (*PACKAGES, "launcher"))


def longest_match(name: str, table: set[str] | dict[str, set[str]]) -> str | None:
    """The entry of `table` that is `name` or the longest package around it."""
    parts = name.split(".")
    return next((p for i in range(len(parts), 0, -1) if (p := ".".join(parts[:i])) in table), None)


@pytest.mark.parametrize(("module", "tree"), sources(), ids=[name for name, _ in sources()])
def test_imports_point_down(module: str, tree: ast.Module) -> None:
    height = {room: place for place, room in enumerate(ROOMS)}
    house = module.split(".")[0]
    here = longest_match(module, height)
    assert here is not None or module == "benchmark", f"{module} is in no room of the design yet"
    for name in imports(module, tree):
        there = longest_match(name, height)
        assert there is None or height[there] <= height[str(here)], name
        known = KNOWN.get(house)
        assert known is None or name.split(".")[0] in ("host", house) or longest_match(name, known), name


def test_nobody_but_the_launcher_needs_its_rooms() -> None:
    users = {module for module, tree in sources() for name in imports(module, tree) if longest_match(name, {"launch"})}
    outside = {module.split(".")[0] for module in users if not longest_match(module, {"launch"})}
    assert {"launcher", "lockstep_ray"} == outside


def test_a_request_knows_no_api() -> None:
    """Whatever the API, what is checked and generated is one kind of request."""
    users = {module for module, tree in sources() for name in imports(module, tree) if longest_match(name, APIS)}
    assert {module for module in users if not longest_match(module, APIS)} == {
        "router.__main__",
        "lockstep_ray.errors",
    }


def test_only_the_config_files_and_the_launcher_read_the_environment() -> None:
    readers = {
        module
        for module, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers <= {"launcher", "router.config", "server.config", "lockstep_ray.app", "lockstep_ray.child"}


def test_only_lasting_loops_catch_everything() -> None:
    broad = {module for module, tree in sources() for node in ast.walk(tree) if swallows_everything(node)}
    assert broad <= MAY_CATCH_EVERYTHING


def swallows_everything(node: ast.AST) -> bool:
    """Whether this is an `except` for any exception at all that does not end by raising it again."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    is_broad = any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)
    last = node.body[-1]
    return is_broad and not (isinstance(last, ast.Raise) and last.exc is None)


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        ("except:", True),
        ("except Exception:", True),
        ("except BaseException as error:", True),
        ("except (OSError, BaseException):", True),
        ("except (OSError, ValueError):", False),
        ("except asyncio.CancelledError:", False),
    ],
)
def test_a_broad_except_is_recognised(handler: str, expected: bool) -> None:
    tree = ast.parse(f"try:\n    pass\n{handler}\n    print()\n")
    assert expected == any(map(swallows_everything, ast.walk(tree)))
    raising = ast.parse(f"try:\n    pass\n{handler}\n    print()\n    raise\n")
    assert not any(map(swallows_everything, ast.walk(raising)))


def test_only_collectives_talk_to_torch_distributed() -> None:
    users = {module for module, tree in sources() if "torch.distributed" in ast.unparse(tree)}
    assert {"server.ranks.collectives", "server.ranks.rendezvous"} == users


def test_only_the_kernels_import_triton() -> None:
    users = {module for module, tree in sources() if "import triton" in ast.unparse(tree)}
    assert [] == [m for m in users if not longest_match(m, {"server.backends.cuda"})]


def test_only_the_backends_loading_and_collectives_name_a_device() -> None:
    names = {"cpu", "cuda"}
    told_apart = {
        module
        for module, tree in sources()
        if module.startswith("server.")
        for node in ast.walk(tree)
        if (isinstance(node, ast.Constant) and node.value in names)
        or (isinstance(node, ast.Attribute) and node.attr in {*names, "is_cuda", "is_cpu", "mkldnn"})
    }
    # Beside them: the choices of --device, the null model, which says that it has a CPU, and a child of the launcher
    # that reads pickled files and computes nothing.
    beside = {"server.config", "server.null", "server.checkpoint.convert"}
    beside |= {"server.quantize.recipe"}  # likewise the choices of its --device
    allowed = {"server.backends", "server.loading", "server.ranks.collectives", *beside}
    assert [] == [module for module in sorted(told_apart) if not longest_match(module, allowed)]


def test_nothing_unpickles_or_evaluates() -> None:
    unsafe = {"eval", "exec", "pickle.load", "pickle.loads", "marshal.loads", "torch.jit.load", "yaml.load"}
    for module, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in unsafe, module
                assert called != "torch.load" or "weights_only=True" in ast.unparse(node), module


def test_every_module_says_why_it_exists() -> None:
    silent = [module for module, tree in sources() if tree.body and not ast.get_docstring(tree)]
    assert [] == silent


def test_the_router_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, router.apis.app, router.__main__; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "set()" == result.stdout.strip()


def test_the_launcher_imports_nothing_heavy() -> None:
    code = "import sys, launcher; print({'torch', 'transformers', 'grpc', 'fastapi'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "set()" == result.stdout.strip()


def test_proto_is_no_python_package() -> None:
    assert ["generate.proto"] == [p.name for p in (ROOT / "proto").iterdir()]


def test_the_stubs_are_those_of_the_proto(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iserver/pb=proto", "proto/generate.proto"]
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([*command, *outputs], cwd=ROOT, check=True, capture_output=True)
    for name in ("generate_pb2.py", "generate_pb2.pyi", "generate_pb2_grpc.py"):
        fresh = (tmp_path / "server" / "pb" / name).read_text()
        assert fresh == (ROOT / "server" / "pb" / name).read_text(), f"run `make proto`: {name} is stale"
