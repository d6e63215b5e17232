"""The shape of the project, held by tests: who imports whom, what stays out of the router, what no module does.

`docs/design.md` draws the table that `MAY_IMPORT` spells out. A new arrow is a decision: change both together.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("router", "server", "benchmark")

# Module or package -> the first-party modules and packages that it may import. The longest matching name counts.
MAY_IMPORT: dict[str, set[str]] = {
    "launcher": {"router.config", "server.config", "server.hub"},
    "benchmark": {
        "benchmark", "router.client", "router.entry", "router.queue", "server.model.families", "server.model.spec",
        "server.pb",
    },
    "benchmark.prediction": {"benchmark", "router.limits"},
    "benchmark.probes": {"benchmark", "server.attention"},
    "benchmark.fleet": {
        "benchmark", "router.batcher", "router.entry", "router.limits", "router.scheduler",
    },
    "benchmark.simulate": {"benchmark", "router.config", "router.limits", "router.queue"},
    "benchmark.subject": {"benchmark", "router.config", "router.limits"},
    "benchmark.offline": {
        "benchmark", "router.batcher", "router.client", "router.entry", "router.limits", "router.metrics",
        "router.text",
    },
    "router": {"router", "server.pb"},
    "router.queue": set(),
    "router.prefix": set(),
    "router.scheduler": {"router.blocks", "router.entry", "router.limits", "router.prefix", "router.queue"},
    "router.blocks": set(),
    "router.config": set(),
    "router.errors": set(),
    "router.model_files": set(),
    "router.text": {"router", "router.model_files"},
    "server.__main__": {"server.config", "server.distributed", "server.loading", "server.null", "server.service"},
    "server.attention": {"server.attention", "server.layers.position", "server.native"},
    "server.attention.kernels": {
        "server.attention.interface", "server.attention.kernels", "server.layers.position",
    },
    "server.batch": {
        "server.attention", "server.cache", "server.capture", "server.pb", "server.sampling", "server.upload",
    },
    "server.cache": set(),
    "server.capture": set(),
    "server.config": set(),
    "server.convert": {"server.hub", "server.spm"},
    "server.distributed": set(),
    "server.engine": {
        "server.batch", "server.cache", "server.capture", "server.distributed", "server.graphs", "server.pb",
        "server.rehearsal", "server.sampling", "server.upload",
    },
    "server.fallback": {"server.batch", "server.cache"},
    "server.graphs": {"server.batch", "server.capture", "server.upload"},
    "server.hub": set(),
    "server.layers": {
        "server.layers", "server.distributed", "server.model.spec", "server.native", "server.weights",
    },
    "server.layers.fused": {"server.layers.norm", "server.model.spec"},
    "server.loading": {
        "server.attention", "server.cache", "server.capture", "server.config", "server.distributed", "server.engine",
        "server.fallback", "server.layers", "server.model", "server.native", "server.pb", "server.quant",
        "server.sampling", "server.weights",
    },
    "server.model.families": {"server.model.families", "server.model.names", "server.model.spec"},
    "server.model.names": set(),
    "server.model.spec": set(),
    "server.model.transformer": {
        "server.attention", "server.batch", "server.cache", "server.distributed", "server.layers",
        "server.model.spec", "server.weights",
    },
    "server.null": {"server.config", "server.pb"},
    "server.native": {"server.native"},
    "server.native.logits": {"server.native", "server.sampling"},
    "server.native.recording": {"server.capture", "server.native"},
    "server.pb": {"server.pb"},
    "server.quant": {"server.layers.activation", "server.layers.linear"},
    "server.rehearsal": {"server.cache", "server.pb"},
    "server.sampling": {"server.upload"},
    "server.upload": set(),
    "server.profiling": set(),
    "server.service": {"server.cache", "server.distributed", "server.engine", "server.pb", "server.profiling"},
    "server.spm": set(),
    "server.weights": {"server.distributed", "server.hub", "server.model.names"},
}  # fmt: skip

# The two loops that must outlive a request may catch everything; `tokenizers` raises nothing finer than Exception.
MAY_CATCH_EVERYTHING = {"router.batcher", "server.service", "router.text"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Every first-party module with its parsed source, generated stubs left out."""
    paths = [ROOT / "launcher.py", *(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))]
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith("server.pb."):
            yield name, ast.parse(path.read_text())


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


@pytest.mark.parametrize(("module", "tree"), list(sources()), ids=[name for name, _ in sources()])
def test_arrows_only_point_where_the_design_says(module: str, tree: ast.Module) -> None:
    rule = longest_match(module, MAY_IMPORT)
    assert rule is not None or module in ("server", "server.model"), f"{module} has no place in the design yet"
    allowed = MAY_IMPORT.get(rule or "", set())
    assert [] == [name for name in imports(module, tree) if not longest_match(name, allowed)]


def test_only_the_config_files_and_the_launcher_read_the_environment() -> None:
    readers = {
        module
        for module, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers <= {"launcher", "router.config", "server.config"}


def test_only_the_two_lasting_loops_catch_everything() -> None:
    broad = {
        module
        for module, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "Exception"))
    }
    assert broad <= MAY_CATCH_EVERYTHING


def test_only_distributed_talks_to_torch_distributed() -> None:
    users = {module for module, tree in sources() if "torch.distributed" in ast.unparse(tree)}
    assert {"server.distributed"} == users


def test_only_the_kernels_import_triton() -> None:
    users = {module for module, tree in sources() if "import triton" in ast.unparse(tree)}
    assert [] == [m for m in users if not longest_match(m, {"server.attention.kernels", "server.layers.fused"})]


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
    code = "import sys, router.app, router.__main__; print({'torch', 'transformers'} & set(sys.modules))"
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
