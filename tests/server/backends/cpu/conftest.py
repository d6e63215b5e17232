"""The kernels of these tests: this processor's, and in some modules those of others too, which an emulator runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from host.cpu_kinds import AVX2, DOTPROD, I8MM, NEON, Kind
from server.backends.cpu.kernels import Kernels
from tests.cpu_kernels import load_or_skip
from tests.server.backends.cpu.runner import Runner, command_for

# Modules of which every kind computes every test. AVX2 runs on this processor as others do elsewhere, which tries that.
MODULES = {"test_adapters", "test_attention", "test_codes", "test_kernels", "test_levels"}
KINDS = (I8MM, DOTPROD, NEON, AVX2)
SHARE = 6  # one in so many of the tests with the first kind is in the suite, all others are in the rest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test of kernels with those of this processor and with every kind."""
    if "kernels" in metafunc.fixturenames and metafunc.module.__name__.rpartition(".")[2] in MODULES:
        kinds = [pytest.param(kind, id=kind.name) for kind in KINDS]
        metafunc.parametrize("kernels", [pytest.param(None, id="here"), *kinds], indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put most tests with kinds into the rest."""
    of_kind = {kind: [item for item in items if _kind_of(item) == kind] for kind in KINDS}
    for kind, some in of_kind.items():
        for number, item in enumerate(some):
            if kind != KINDS[0] or number % SHARE:
                item.add_marker(pytest.mark.rest)


def _kind_of(item: pytest.Item) -> Kind | None:
    return item.callspec.params.get("kernels") if hasattr(item, "callspec") else None


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    """The compiled CPU kernels, where there are any, or those of a kind in a process of their own."""
    kind: Kind | None = getattr(request, "param", None)
    if kind is None:
        yield load_or_skip()
        return
    with closing(Runner(*command_for(kind, tmp_path_factory.mktemp(kind.name)))) as runner:
        yield Kernels(runner)
